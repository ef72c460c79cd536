"""Shared parts of the benchmarks: alternating rounds, medians, processes with limits, and the format of a result.

A benchmark measures `sides`: asyncrl and the peers that it is compared with. A side is a function that measures once and returns
one number per case. It starts fresh processes where processes matter. `alternate` runs the sides in turn, round after round, so
that disturbances of the machine affect all sides. `finish` prints the last line of stdout, one JSON object: name, value, unit,
ratio (ours over the peer's, of medians), and further fields of the benchmark. Tables for people go to stderr.

Peers are optional. A peer that is not installed is left out and named in `peers_missing`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import platform
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.processes import GserverManagerConfig
    from asyncrl.manager.worker import ManagerFiles

sys.path.append(str(Path(__file__).parents[1]))  # benchmarks import tests.support

BASELINES = Path(__file__).parent / "baselines"
PART = "--part"  # first argument of a process that the benchmark itself started
_PR_SET_PDEATHSIG = 1

Numbers = Mapping[str, float]  # case -> measured value


# ------------------------------------------------------------------------------------------------------------ the command


class BenchmarkParser(argparse.ArgumentParser):
    """Adds `--quick`, which replaces the defaults of other options. Explicit options override it."""

    def __init__(self, description: str, quick: Mapping[str, Any]) -> None:
        super().__init__(description=description)
        self._quick = {"rounds": 1, **quick}
        values = ", ".join(f"{name}={value}" for name, value in self._quick.items())
        self.add_argument("--quick", action="store_true", help=f"check that the benchmark works: no warm-up, {values}")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        words = sys.argv[1:] if args is None else args
        if "--quick" in words:
            self.set_defaults(**self._quick)
        return super().parse_known_args(words, namespace)


def parser(description: str, *, rounds: int = 5, quick: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """The options that all benchmarks have. `quick`: the defaults under --quick, by option name.

    From this call on SIGTERM acts like Ctrl-C, so that the processes that a benchmark has started end with it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = BenchmarkParser(description, quick or {})
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measured rounds, after a warm-up (default {rounds})"
    )
    parser.add_argument("--json-only", action="store_true", help="no table on stderr, only the JSON line on stdout")
    parser.add_argument("--write-baseline", action="store_true", help="also write the result to benchmarks/baselines/")
    return parser


def say(args: argparse.Namespace, text: str) -> None:
    """Print progress for people to stderr, unless --json-only is given."""
    if not args.json_only:
        print(text, file=sys.stderr, flush=True)


def missing_peers(modules: Mapping[str, str]) -> list[str]:
    """The peers that are not installed. modules: peer -> the module that it needs."""
    return sorted(peer for peer, module in modules.items() if importlib.util.find_spec(module) is None)


def worker_info(kind: str, folder: str) -> Any:
    """Identity of an asyncrl worker that a benchmark runs without a launcher, with name resolve in memory."""
    from asyncrl.config.processes import WorkerInfo
    from asyncrl.config.schema import NameResolveConfig, RuntimeConfig

    return WorkerInfo(
        kind=kind,
        index=0,
        count=1,
        experiment="benchmark",
        trial="t0",
        attempt=1,
        run_dir=folder,
        seed=1,
        name_resolve=NameResolveConfig(endpoints=["memory://"]),
        runtime=RuntimeConfig(),
    )


def seen_manager(config: GserverManagerConfig, files: ManagerFiles | None = None) -> Any:
    """A gserver manager whose future `seen` resolves to its Management once all its parts are open."""
    from asyncrl.manager.worker import GserverManager, Management
    from tests.support.memory_names import memory_system

    class SeenManager(GserverManager):
        def __init__(self) -> None:
            super().__init__(config, memory_system(), files)
            self.seen: Future[Management] = Future()

        async def manage(self, management: Management) -> None:
            self.seen.set_result(management)
            await super().manage(management)

    return SeenManager()


def make_manager(
    folder: str, servers: Sequence[str], *, eta: int, batch_size: int, num_clients: int
) -> tuple[Any, Any]:
    """Return (manager, name resolver): configured as by the launcher, but with name resolve in memory, which holds the servers'
    URLs."""
    from asyncrl.config.processes import GserverManagerConfig
    from asyncrl.config.schema import ManagerConfig
    from tests.support.memory_names import open_names

    info = worker_info("gserver_manager", folder)
    config = GserverManagerConfig(
        worker=info,
        manager=ManagerConfig(max_head_offpolicyness=eta),
        role="actor",
        num_heads=2,
        batch_size=batch_size,
        num_rollout_workers=num_clients,
    )
    manager = seen_manager(config)
    resolver = open_names(info.name_resolve)
    for number, url in enumerate(servers):
        resolver.add(manager.names.generation_server(number), url)
    return manager, resolver


# ------------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Rounds:
    """Measured values: by side, by case, one number per round."""

    values: dict[str, dict[str, list[float]]]

    def median(self, side: str, case: str) -> float:
        return statistics.median(self.values[side][case])

    def spread(self, side: str, case: str) -> float:
        """Interquartile range."""
        values = self.values[side][case]
        if len(values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return high - low

    def cases(self, side: str) -> list[str]:
        return list(self.values[side])

    def ratio(self, ours: str, peer: str, case: str) -> float:
        """Median of ours over median of the peer's."""
        return round(self.median(ours, case) / self.median(peer, case), 4)

    def ratios(self, ours: str, peers: Sequence[str], cases: Sequence[str]) -> dict[str, dict[str, float]]:
        """peer -> case -> ratio, for the cases that both have."""
        both = {peer: [c for c in cases if c in self.values[peer] and c in self.values[ours]] for peer in peers}
        return {peer: {case: self.ratio(ours, peer, case) for case in found} for peer, found in both.items()}

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """side -> case -> median and spread."""
        return {
            side: {c: {"median": _digits(self.median(side, c)), "iqr": _digits(self.spread(side, c))} for c in cases}
            for side, cases in self.values.items()
        }


def alternate(args: argparse.Namespace, sides: Mapping[str, Callable[[], Numbers]], *, warm_up: int = 1) -> Rounds:
    """Run each side once per round, in the given order, for warm_up + args.rounds rounds.

    Warm-up rounds do not count. --quick has none.
    """
    if args.quick:
        warm_up = 0
    if args.rounds < 1:
        raise SystemExit(f"--rounds is {args.rounds}; use at least 1 (5 for a figure to quote)")
    values: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for number in range(-warm_up, args.rounds):
        for side, measure in sides.items():
            start = time.monotonic()
            numbers = measure()
            took_s = time.monotonic() - start
            label = "warm-up" if number < 0 else f"round {number + 1}/{args.rounds}"
            found = "  ".join(f"{case} {_digits(value):g}" for case, value in numbers.items())
            say(args, f"{label:>12}  {side:<22} {took_s:5.1f} s   {found}")
            if number >= 0:
                for case, value in numbers.items():
                    values[side].setdefault(case, []).append(value)
    return Rounds(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def _digits(value: float) -> float:
    """Four significant digits: no measurement here has more."""
    return float(f"{value:.4g}")


# -------------------------------------------------------------------------------------------------------------- the result


def machine() -> dict[str, Any]:
    """The machine, the versions of its software, the date and the commit, which a result records."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "pyzmq": _version("pyzmq"),
        "system": f"{platform.system()} {platform.release()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_MEASURED = (":/", ":(top,exclude)*.md", ":(top,exclude)benchmarks/baselines")


def _commit() -> str:
    """The measured commit, with "+" if the working tree differs from it in more than pages and results."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
        status = [*git, "status", "--porcelain", "-uno", "--", *_MEASURED]
        changed = subprocess.run(status, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def finish(
    args: argparse.Namespace,
    *,
    name: str,
    value: float | None,
    unit: str,
    ratio: Mapping[str, float | Mapping[str, float]],
    variant: str = "",
    **more: Any,
) -> None:
    """Print the result as the last line of stdout. With --write-baseline also write it as the baseline.

    The baseline of a variant is named name_variant. `more` are further fields.
    """
    figure = None if value is None else _digits(value)  # None: no figure; the other fields of the result say why
    result = {"name": name, "value": figure, "unit": unit, "ratio": ratio, "rounds": args.rounds, **more}
    result["machine"] = machine()
    if args.write_baseline and args.quick:
        raise SystemExit(
            "--write-baseline cannot be combined with --quick, whose figures mean nothing; remove one of the two"
        )
    if args.write_baseline:
        kept = f"{name}_{variant}" if variant else name
        BASELINES.mkdir(exist_ok=True)
        (BASELINES / f"{kept}.json").write_text(json.dumps({**result, "name": kept}, indent=1) + "\n")
        say(args, f"written: {BASELINES / kept}.json")
    print(json.dumps(result), flush=True)


def table(args: argparse.Namespace, title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on stderr. The first column is text, the others are numbers or text."""
    cells = [[f"{_digits(cell):g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    say(args, f"\n{title}")
    for row in [list(header), ["-" * width for width in widths], *cells]:
        first, *others = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        say(args, "  " + "  ".join([first, *others]))
    say(args, "")


# ------------------------------------------------------------------------------------------------------- processes of a side


class ChildFailed(Exception):
    """A process of a benchmark ended, did not answer within its time limit, or computed another result than expected."""


class Child:
    """One process of a side: the same script, started with PART. `close` ends it and kills its session.

    Both processes exchange lines of JSON: `send` and `receive` here, `Parent` in the child.
    """

    def __init__(self, script: str, part: str, **settings: Any) -> None:
        self._part = part
        command = [sys.executable, script, PART, part, json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises ChildFailed after timeout_s, or if the process has ended."""
        assert self._process.stdout is not None
        limit = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, limit - time.monotonic())):
                    raise ChildFailed(f"{self._part} sent no message within {timeout_s:g} s")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise ChildFailed(f"{self._part} ended with exit status {self._process.wait(10)}")
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self, grace_s: float = 5.0) -> None:
        """Close the child's standard input, so that the child ends. After grace_s at most, kill the child's session."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._process.stdout.close()


@contextlib.contextmanager
def children(script: str, *parts: str, grace_s: float = 5.0, **settings: Any) -> Iterator[list[Child]]:
    """One child per part, all with the same settings. All are closed at exit."""
    started: list[Child] = []
    try:
        for part in parts:
            started.append(Child(script, part, **settings))
        yield started
    finally:
        for child in reversed(started):
            child.close(grace_s)


class Parent:
    """Connection of a child process to the benchmark."""

    def __init__(self) -> None:
        # Libraries print to stdout too. Redirect them to stderr, so that only messages go through the pipe.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def send(self, **message: Any) -> None:
        self._out.write(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None when the benchmark has closed the pipe. The wait has no limit except this closing."""
        line = sys.stdin.buffer.readline()
        return json.loads(line) if line else None


def run_part(parts: Mapping[str, Callable[..., None]]) -> bool:
    """Call in a script's main: run the part that this process was started for. Returns False if it was not started as a part.

    A part is called with a Parent and its settings.
    """
    if len(sys.argv) != 4 or sys.argv[1] != PART:
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # end with the benchmark
    parts[sys.argv[2]](Parent(), **json.loads(sys.argv[3]))
    return True


def network_of(way: str, other: dict[str, str] | None = None) -> dict[str, str]:
    """Call in a part: select Unix sockets (way="unix"), unauthenticated TCP ("plain") or encrypted TCP ("curve") for its streams.

    Returns the value that the part at the other end has to pass as `other`.
    """
    import msgspec

    from asyncrl.runtime import security, unix_sockets

    found: dict[str, str] = {}
    if way == "unix":
        found = other or {"folder": tempfile.mkdtemp(prefix="asyncrl-")}
        atexit.register(shutil.rmtree, found["folder"], ignore_errors=True)
        unix_sockets.use(found["folder"])
    elif way == "curve":
        secrets = msgspec.convert(other, security.Secrets) if other else security.Secrets.make()
        security.secure(security.Security(secrets))
        found = msgspec.to_builtins(secrets)
    return found


def cpu_seconds() -> float:
    """CPU time of this process, of all its threads."""
    return time.process_time()


def reset_peak_memory() -> int:
    """Resident bytes of this process. Resets its peak to this value. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_memory() -> int:
    """Highest resident bytes since reset_peak_memory."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
