"""Launch the runs of the examples that several tests share, and read their results."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from asyncrl.data.prompts import PromptSource
from asyncrl.launch.experiment import load_experiment
from asyncrl.protocol.trajectories import Locator
from asyncrl.testing.runs import RunHandle, journal, launch
from asyncrl.weights.versions import tensor_files

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart_cpu.yaml"
Event = Mapping[str, Any]
Prompt = tuple[int, int]  # epoch, position

# The synchronous run, which test_synchronous.py repeats in a plain loop. With Adam's usual EPS of 1e-8, a gradient that consists of
# rounding errors moves its weight as far as any other gradient, and rounding differs between programs.
STEPS, BATCH, MAX_NEW_TOKENS, LR, EPS, WARMUP, CLIP, SEED = 5, 16, 10, 2e-4, 1e-6, 5, 0.2, 7


def launch_sorter(
    sorter: Path, fileroot: Path, *overrides: str, env: Mapping[str, str] | None = None, config: Path = QUICKSTART
) -> RunHandle:
    """Launch the quickstart, or another config of its task, with a model and data made for the tests."""
    return launch(
        config,
        f"fileroot={fileroot}",
        f"model_path={sorter / 'model'}",
        f"prompts.path={sorter / 'data' / 'train.jsonl'}",
        f"eval.prompts.path={sorter / 'data' / 'eval.jsonl'}",
        f"rollout.tasks.default.reward={ROOT / 'examples' / 'sloppy_sorter' / 'reward.py'}:reward",
        *overrides,
        env=env,
    )


def launch_synchronous(sorter: Path, fileroot: Path, *overrides: str) -> RunHandle:
    """Launch a run with eta = 0, greedy decoding and one response a prompt: it is deterministic. Advantages are normalized over
    the batch, because a group of equal responses has no gradient."""
    return launch_sorter(
        sorter,
        fileroot,
        f"seed={SEED}",
        "manager.max_head_offpolicyness=0",
        "rollout.group_size=1",
        "rollout.sampling.greedy=true",
        f"rollout.sampling.max_new_tokens={MAX_NEW_TOKENS}",
        f"train.batch_size={BATCH}",
        f"train.max_steps={STEPS}",
        f"train.optimizer.lr={LR}",
        f"train.optimizer.eps={EPS}",
        f"train.optimizer.warmup_steps={WARMUP}",
        f"train.ppo.eps_clip={CLIP}",
        "train.ppo.use_decoupled_loss=false",
        "train.ppo.recompute_logprob=true",
        "train.ppo.advantage_norm=batch",
        "train.ppo.minibatches=1",
        "eval.prompts=null",
        f"weights.keep={STEPS + 1}",
        *overrides,
    )


# Settings of a deterministic run of the tiny model. Behaviour logprobs are the trainer's (recompute_logprob), because the
# last bits of an engine's logprobs depend on the rest of its batch.
DETERMINISTIC = (
    "manager.max_head_offpolicyness=0",
    "rollout.group_size=1",
    "rollout.sampling.greedy=true",
    "train.optimizer.lr=1e-3",
    "train.ppo.use_decoupled_loss=false",
    "train.ppo.recompute_logprob=true",
    "checkpoint.every_s=0",
    "runtime.start_timeout_s=300",
)
# A reward from which the tiny model learns, as an expression of prompt and completion
LEARNABLE = "(7 * sum(map(ord, prompt)) + sum(map(ord, completion))) % 11 / 10"


@contextlib.contextmanager
def starting(config: Path, *settings: str) -> Iterator[Callable[..., RunHandle]]:
    """Yield a function that launches runs of this config with further overrides. They are closed at the end of the block."""
    with contextlib.ExitStack() as runs:

        def start(*overrides: str, env: Mapping[str, str] | None = None) -> RunHandle:
            return runs.enter_context(launch(config, *settings, *overrides, env=env))

        yield start


def resumed(run_dir: Path, *overrides: str) -> RunHandle:
    return RunHandle([sys.executable, "-m", "asyncrl.cli.main", "resume", str(run_dir), *overrides], run_dir)


_JUDGE = """\
import asyncio
from pathlib import Path

HELD = Path(__file__).with_name("held")


def held():
    try:
        return HELD.read_text().split()
    except FileNotFoundError:
        return []


async def reward(prompt, completion, answer):
    while prompt in held():
        await asyncio.sleep(0.05)
    return {reward}
"""


class Gate:
    """Holds a run at a given step, so that a test finds the run at work whatever the speed of run and test.

    The reward function closes the gate: it judges no response to the prompts behind the gate. Runs need `Gate.OVERRIDE`, and
    `reward` if the config has a reward of its own.
    """

    OVERRIDE = "rollout.reward_timeout_s=600"

    def __init__(self, config: Path, batch_size: int, reward: str) -> None:
        """reward: an expression of prompt and completion. The gate is open at first."""
        self._batch_size = batch_size
        self._held = config.with_name("held")
        options = load_experiment(config)
        source = PromptSource(options.prompts, None, options.seed)
        self._prompts = [source.get(Locator(0, position)).text for position in range(len(source))]
        config.with_name("reward.py").write_text(_JUDGE.format(reward=reward))
        self.reward = f"{config.with_name('reward.py')}:reward"

    def let(self, step: int) -> None:
        """Allow `step` steps in total: hold the prompts of all later ones."""
        temporary = self._held.with_name(".held")
        temporary.write_text("\n".join(self._prompts[step * self._batch_size :]))
        temporary.rename(self._held)

    def open(self) -> None:
        self._held.unlink(missing_ok=True)

    @contextlib.contextmanager
    def shut(self, step: int) -> Iterator[None]:
        """Close the gate behind this step for the duration of the block."""
        self.let(step)
        try:
            yield
        finally:
            self.open()


def weights_dir(run_dir: Path, version: int) -> Path:
    return run_dir / "weights" / "actor" / f"a0001-v{version:08d}"


def published_weights(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    """Tensors by name, read from all files of the version, one per writing rank."""
    files = tensor_files(weights_dir(run_dir, version))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def trained_events(run_dir: Path, attempt: int = 1) -> list[Event]:
    """Return the journal's "trained" event of each train step, in order."""
    events = [event for event in journal(run_dir) if event["event"] == "trained" and event["attempt"] == attempt]
    assert [event["step"] for event in events] == list(range(1, len(events) + 1))
    return events


def trained_prompts(run_dir: Path) -> list[Prompt]:
    """Prompts of all train steps, in order."""
    return [tuple(group["prompt"]) for event in trained_events(run_dir) for group in event["groups"]]


def assert_each_prompt_trained_once(run_dir: Path, num_steps: int, batch_size: int) -> None:
    """Batches are full, no prompt is trained twice, and no ticket was handed out a second time: none was lost or withdrawn."""
    events = trained_events(run_dir)
    assert [len(event["groups"]) for event in events] == [batch_size] * num_steps
    prompts = trained_prompts(run_dir)
    assert len(set(prompts)) == len(prompts)
    again = [group["ticket"] for event in events for group in event["groups"] if "-i1-" not in group["ticket"]]
    assert not again


def assert_nobody_left_behind(run_dir: Path, eta: int) -> None:
    """Assert that every handed-out prompt was trained, except those whose newest ticket allows a step beyond the last one.

    So no prompt is left behind because its response is long. The excepted prompts were still live when the run ended.

    The manager's journal says which prompts were handed out. The trained prompts alone do not say which tickets may wait: if a
    version was never served, the tickets of the next version are granted all at once, and a later ticket may finish first.
    """
    trained = set(trained_prompts(run_dir))
    num_steps = len(trained_events(run_dir))
    batch_size = len(trained) // num_steps
    admitted = [event for event in journal(run_dir, "gserver_manager") if event["event"] == "admitted"]
    tickets = {
        tuple(event["prompt"]): event["ticket"] for event in admitted if event["attempt"] == 1
    }  # the newest ticket of each prompt
    may_wait = {prompt for prompt, ticket in tickets.items() if min_version(ticket) + eta >= num_steps}
    assert sorted(tickets) == [(0, position) for position in range(len(tickets))]  # in order, without gaps
    assert tickets.keys() - may_wait <= trained <= tickets.keys()
    assert max(trained) < (0, len(trained) + eta * batch_size)
    first_that_may_wait = min(may_wait, default=(0, len(tickets)))
    # its ticket's min_version is at least num_steps - eta: that many steps were done by then, on the prompts before it
    assert first_that_may_wait >= (0, (num_steps - eta) * batch_size)


def min_version(ticket_id: str) -> int:
    """The version that was served when the ticket was granted. The ticket id contains it."""
    found = re.search(r"-v(\d+)-", ticket_id)
    assert found, ticket_id
    return int(found[1])


def busy_buckets(run_dir: Path) -> set[int]:
    """Tenths of a second (since the epoch) in which some generation server sampled a token."""
    records = [
        record
        for path in sorted((run_dir / "journal").glob("generation_server_*.jsonl"))
        for record in journal(run_dir, path.stem)
    ]
    return {round(record["time"] * 10) for record in records if record["tokens"] > 0}


def busy_share(buckets: set[int], spans: list[tuple[float, float]]) -> float:
    """Share of the spans' time that lies in these buckets."""
    total = sum(end - start for start, end in spans)
    busy = sum(
        max(0.0, min(end, (bucket + 1) / 10) - max(start, bucket / 10)) for start, end in spans for bucket in buckets
    )
    return busy / total
