"""Tokens per second of a generation server: with each engine, at several loads, and during repeated weight updates.

    python benchmarks/generation.py [--rounds 5] [--sglang-python .../bin/python] [--seconds 5] [--write-baseline]

The long-tail task (examples/long_tail): prompts of a few tokens; half of the responses have at most 10 tokens, a few over 100. The
server is a whole GenerationServer in its own process, reached over HTTP. The clients are those of rollout workers, which resume
responses that an update interrupts. An update does the same as the gserver manager's: pause, load a new version from disk
(verified, cache flushed), continue.

`value` is the tokens/s at the highest load of the engine in use (sglang, or transformers if there is no environment of SGLang).
`ratio.no_updates` is its throughput with an update every 1, 2, 5 s over that without updates. `ratio.transformers` is SGLang's
throughput over the transformers engine's at each load. `lost` is the share of the tokens that updates cost, for both engines.
`update_ms` is the duration of an update. Only tokens that reach the clients count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common import Child, Numbers, Parent, alternate, children, finish, parser, run_part, say, table, worker_info

ENGINES = ("transformers", "sglang")
LOADS = (1, 8, 64)  # concurrent requests
INTERVALS_S = (1.0, 2.0, 5.0)  # between updates
GOAL = "at most 5 % of the tokens lost to an update every 5 s"
LONG_TAIL = Path(__file__).parents[1] / "examples" / "long_tail"
PYTHON_ENV = "ASYNCRL_SGLANG_PYTHON"
MAX_NEW_TOKENS = 128
_START_LIMIT_S = 600.0  # SGLang needs 15 s on a quiet machine
_REQUEST_LIMIT_S = 120.0
_SETTLE_S = 0.5  # minimum time before counting starts
_LEAST_UPDATES = 3  # minimum number of updates per measurement


# ------------------------------------------------------------------------------------------------------------- the server


def part_server(
    parent: Parent, *, folder: str, model: str, engine: str, python: str, interrupt: str, load: int
) -> None:
    """A generation server, configured as by the launcher."""
    from asyncrl.config.processes import GenerationServerConfig
    from asyncrl.config.schema import GenerationConfig
    from asyncrl.generation.worker import GenerationServer
    from tests.support.memory_names import memory_system, open_names

    info = worker_info("generation_server", folder)
    generation = GenerationConfig(
        max_running_requests=max(16, load),
        num_blocks=1024,
        interrupt=interrupt,
        python=python,
        load_timeout_s=_START_LIMIT_S,
    )
    server = GenerationServer(
        GenerationServerConfig(
            worker=info, engine=engine, model_path=model, tokenizer_path=model, generation=generation, torch_threads=1
        ),
        memory_system(),
    )
    resolver = open_names(info.name_resolve)

    def obey() -> None:
        parent.send(url=resolver.wait(server.names.generation_server(0), _START_LIMIT_S))
        while parent.receive() is not None:
            pass
        loop.call_soon_threadsafe(server.stopping.set)

    loop = asyncio.new_event_loop()
    threading.Thread(target=obey, daemon=True).start()
    loop.run_until_complete(server.main())
    os._exit(0)


# ------------------------------------------------------------------------------------------------------------ the clients


class Versions:
    """Makes new versions of the same weights. They are links, so that writing them does not slow the server down."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._numbers = itertools.count()

    def next(self) -> tuple[Path, str]:
        from asyncrl.protocol.versions import WeightVersion
        from asyncrl.weights.versions import prune_versions, publish_folder, role_dir, version_dir

        version = WeightVersion(1, next(self._numbers))
        path = version_dir(self._folder, "actor", version)
        publish_folder(path, source_dir=self._model, version=version, fsync=False)
        prune_versions(role_dir(self._folder, "actor"), keep=2, in_use=[])
        return path, str(version)


class Served:
    """Measures a server that has weights."""

    def __init__(self, url: str, versions: Versions, prompts: list[list[int]], interrupt: str) -> None:
        self._url, self._versions, self._prompts, self._interrupt = url, versions, prompts, interrupt
        self.update_ms: list[float] = []
        self._num_responses = 0

    def measure(self, args: argparse.Namespace) -> Numbers:
        """Tokens per second: by load, then by the seconds between updates at the highest load."""
        found = {str(load): asyncio.run(self._tokens_per_s(load, args.seconds, None)) for load in args.loads}
        for every_s in args.intervals:
            seconds = max(args.seconds, _LEAST_UPDATES * every_s)
            found[f"every_{every_s:g}s"] = asyncio.run(self._tokens_per_s(max(args.loads), seconds, every_s))
        return found

    async def _tokens_per_s(self, load: int, seconds: float, update_every_s: float | None) -> float:
        from asyncrl.config.schema import SamplingConfig
        from asyncrl.rollout.client import PartialRolloutManager
        from tests.support.services import make_services

        client = PartialRolloutManager(
            _NoOtherServer(),
            make_services(logger="benchmark"),
            new_tokens_per_chunk=1024,
            request_timeout_s=_REQUEST_LIMIT_S,
            turn_limit_s=_REQUEST_LIMIT_S,
            max_requests=load,
        )
        sampling = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS)
        prompts = itertools.cycle(self._prompts)
        tasks = [asyncio.create_task(self._generate(client, prompts, sampling, number)) for number in range(load)]
        if update_every_s is not None:
            tasks.append(asyncio.create_task(self._update_again_and_again(update_every_s)))
        try:
            await self._settle(tasks, 2 * load)
            before, began = client.counts.tokens, time.monotonic()
            await _unless_failed(tasks, seconds)
            while client.counts.tokens == before:  # slow machine: a request's own limit ends this wait
                await _unless_failed(tasks, 0.1)
            return (client.counts.tokens - before) / (time.monotonic() - began)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await client.close()

    async def _generate(self, client: Any, prompts: Iterator[list[int]], sampling: Any, number: int) -> None:
        """Generate one response after another."""
        from asyncrl.protocol.manager import Ticket
        from asyncrl.protocol.trajectories import Locator
        from asyncrl.rollout.client import Route

        name = "generation_server/0"
        for turn in itertools.count():
            ticket = Ticket(
                ticket_id=f"{uuid.uuid4().hex}-{number}-{turn}",
                kind="train",
                locator=Locator(0, turn),
                attempt=1,
                min_version=0,
                deadline=0,
                server=name,
                server_url=self._url,
                head=0,
            )
            await client.generate(Route(ticket), [next(prompts)], sampling, [])
            self._num_responses += 1

    async def _settle(self, tasks: list[asyncio.Task[None]], num_responses: int) -> None:
        """Wait for num_responses responses. All clients begin at once, so at first too few responses end, and those are short."""
        enough, until = self._num_responses + num_responses, time.monotonic() + _REQUEST_LIMIT_S
        await _unless_failed(tasks, _SETTLE_S)
        while self._num_responses < enough:
            await _unless_failed(tasks, 0.05)
            if time.monotonic() > until:
                raise RuntimeError(f"{num_responses} responses took longer than {_REQUEST_LIMIT_S:g} s")

    async def _update_again_and_again(self, every_s: float) -> None:
        await asyncio.sleep(_SETTLE_S + every_s / 2)
        due = time.monotonic()
        while True:
            path, version = await asyncio.to_thread(self._versions.next)
            began = time.monotonic()
            await self.update(path, version)
            self.update_ms.append((time.monotonic() - began) * 1e3)
            due += every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def update(self, path: Path, version: str) -> None:
        """Update the server with the calls of the gserver manager."""
        import aiohttp

        body = {"model_path": str(path), "weight_version": version}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_REQUEST_LIMIT_S)) as session:
            for call, content in (
                ("/pause_generation", {"mode": self._interrupt}),
                ("/update_weights_from_disk", body),
                ("/continue_generation", {}),
            ):
                async with session.post(self._url + call, json=content) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{call} answered {answer.status}: {await answer.text()}")


class _NoOtherServer:
    async def schedule(self, ticket_id: str, lost_server: str, **_: Any) -> Any:
        raise RuntimeError(f"{lost_server} failed to answer a request correctly; see its log")


async def _unless_failed(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Wait `seconds`. Raises the error of a task that failed."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # a task ends only by failing


# ------------------------------------------------------------------------------------------------------------------- main


def sglang_python(given: str) -> str:
    """The interpreter of SGLang's environment, or "" without one. Default: the one that launcher/setup_sglang.sh makes."""
    from asyncrl.config.engines import SGLANG_PROGRAM
    from asyncrl.generation.server_environment import find_program

    python = given or os.environ.get(PYTHON_ENV) or str(Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python")
    return python if find_program(SGLANG_PROGRAM, python) is not None else ""


def example_model(folder: Path) -> Path:
    """The folder of the example's model and prompts. Makes them if they do not exist, which takes half a minute."""
    if (LONG_TAIL / "model" / "config.json").is_file() and (LONG_TAIL / "data" / "train.jsonl").is_file():
        return LONG_TAIL
    command = [sys.executable, str(LONG_TAIL / "make.py"), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=600)
    return folder


def read_prompts(example: Path, limit: int = 1024) -> list[list[int]]:
    import msgspec

    from asyncrl.data.chat import encode_prompt
    from asyncrl.data.prompts import load_tokenizer

    tokenizer = load_tokenizer(str(example / "model"))
    lines = (example / "data" / "train.jsonl").read_bytes().splitlines()[:limit]
    return [encode_prompt(tokenizer, msgspec.json.decode(line)["prompt"]) for line in lines]


@contextlib.contextmanager
def served(
    args: argparse.Namespace, folder: Path, model: Path, prompts: list[list[int]], engine: str, python: str
) -> Iterator[Served]:
    """A server of this engine, with weights."""
    folder.mkdir()
    settings = {
        "folder": str(folder),
        "model": str(model),
        "engine": engine,
        "python": python,
        "interrupt": args.interrupt,
        "load": max(args.loads),
    }
    with children(__file__, "server", grace_s=20.0, **settings) as (server,):
        url = _url_of(server)
        versions = Versions(folder, model)
        made = Served(url, versions, prompts, args.interrupt)
        asyncio.run(made.update(*versions.next()))
        yield made


def _url_of(server: Child) -> str:
    return str(server.receive(_START_LIMIT_S)["url"])


def main() -> None:
    options = parser(__doc__.split("\n")[0], quick={"seconds": 0.5, "loads": [1, 8], "intervals": [0.5, 1.0]})
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    options.add_argument("--loads", type=int, nargs="+", default=list(LOADS), help="numbers of concurrent requests")
    options.add_argument(
        "--intervals", type=float, nargs="+", default=list(INTERVALS_S), help="seconds between updates"
    )
    options.add_argument(
        "--seconds", type=float, default=5.0, help="duration of one measurement; longer if updates are rare"
    )
    options.add_argument(
        "--interrupt", default="abort", help="what an update does to running requests (a pause mode, default abort)"
    )
    options.add_argument(
        "--sglang-python",
        default="",
        help=f"interpreter of SGLang's environment (default: ${PYTHON_ENV}, else .venv-sglang)",
    )
    options.add_argument("--example", type=Path, default=None, help="folder with model/ and data/train.jsonl")
    args = options.parse_args()
    python = sglang_python(args.sglang_python) if "sglang" in args.engines else ""
    engines = [engine for engine in args.engines if engine != "sglang" or python]
    if not engines:
        raise SystemExit(
            "no environment of SGLang was found; create one with launcher/setup_sglang.sh, or set --sglang-python"
        )
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        example = args.example or example_model(folder / "example")
        prompts = read_prompts(example)
        sides: dict[str, Served] = {}
        for engine in engines:
            say(args, f"starting a server with the engine {engine}")
            side = served(args, folder / engine, example / "model", prompts, engine, python)
            sides[engine] = stack.enter_context(side)
        rounds = alternate(args, {engine: lambda side=side: side.measure(args) for engine, side in sides.items()})
        report(args, rounds, {engine: side.update_ms for engine, side in sides.items()})


def report(args: argparse.Namespace, rounds: Any, update_ms: Mapping[str, list[float]]) -> None:
    """Print the result. rounds: tokens/s by engine, and by load ("64") or interval ("every_5s")."""
    engines = list(update_ms)
    main_engine = "sglang" if "sglang" in engines else engines[0]
    top = str(max(args.loads))
    intervals = {f"{every_s:g}s": f"every_{every_s:g}s" for every_s in args.intervals}
    kept = {
        engine: {
            label: round(rounds.median(engine, case) / rounds.median(engine, top), 4)
            for label, case in intervals.items()
        }
        for engine in engines
    }
    ratio: dict[str, Mapping[str, float]] = {"no_updates": kept[main_engine]}
    if len(engines) == len(ENGINES):
        ratio |= rounds.ratios("sglang", ["transformers"], [str(load) for load in args.loads])
    lost = {engine: {label: round(1 - share, 4) for label, share in kept[engine].items()} for engine in engines}
    update = {engine: round(statistics.median(times), 1) if times else None for engine, times in update_ms.items()}
    cases = [*map(str, args.loads), *intervals.values()]
    rows = [[engine, *(rounds.median(engine, case) for case in cases), str(update[engine])] for engine in engines]
    table(args, "tokens/s", ["", *cases, "update ms"], rows)
    say(args, f"lost to updates: {lost}; goal: {GOAL}")
    finish(
        args,
        name="generation",
        value=rounds.median(main_engine, top),
        unit="tokens/s",
        ratio=ratio,
        spread=round(rounds.spread(main_engine, top), 1),
        engine=main_engine,
        interrupt=args.interrupt,
        tokens_per_s=rounds.summary(),
        lost=lost,
        update_ms=update,
        peers_missing=[engine for engine in args.engines if engine not in engines],
    )


if __name__ == "__main__":
    if not run_part({"server": part_server}):
        sys.exit(main())
