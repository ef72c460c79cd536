"""`asyncrl-launch rejudge`: the recorded responses of a run, judged again by its reward functions. Nothing is generated."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.markup import escape

from asyncrl.cli.commands.common import FAILED, Commands, add_command, print_json, say
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.cli.run_files import RunFiles
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.config.modes import mode_of
from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import (
    ConfigError,
    ExperimentConfig,
    NameResolveConfig,
    RuntimeConfig,
    TaskConfig,
    rollout_of_task,
)
from asyncrl.data.prompts import Prompt, PromptError, PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample
from asyncrl.data.trajectories import TrajectoryError, read_trajectory
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.rundir import LaunchError, newest_experiment
from asyncrl.rewards.outcome import RolloutEnded
from asyncrl.rewards.reward import Completion, Reward
from asyncrl.runtime.background import BackgroundTasks
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.disk import write_file
from asyncrl.runtime.services import Services
from asyncrl.runtime.trace import OFF

RESULT_FILE = "rejudged.jsonl"
_STDERR = 2  # for what the functions print, because stdout may carry JSON
_AT_ONCE = 8  # groups that are judged at the same time
_SHOWN = 10  # responses whose rewards differ most
_EQUAL = 1e-6  # rewards travel as float32

_DESCRIPTION = """Judge the recorded responses of a run again, by the reward functions of its config, and compare the rewards.
Nothing is generated or trained. Recorded are runs with record.trajectories=true, and those with mode=rollout_only.

Overrides name another reward function, or change its limits. Each response is judged as in a run: in processes of its
own, with rollout.reward_timeout_s. A reward that fails has no value: it is counted, and is not in the means."""

_EPILOG = f"""examples:
  asyncrl-launch rejudge runs/mine/t0                                              is the reward still the same?
  asyncrl-launch rejudge runs/mine/t0 rollout.tasks.default.reward=stricter.py:reward
  asyncrl-launch rejudge runs/mine/t0 --out new.jsonl --json | jq .tasks

Each line of the file (default: RUN/{RESULT_FILE}) has one response: file, step, prompt, task, sequence, old, new, error.

exit codes: 0 every response was judged; 1 a reward failed; 2 the run or config cannot be judged."""


class Judged(Struct, frozen=True, kw_only=True):
    """A line of the file: one response. new: None if the reward failed, with the reason in `error`."""

    file: str
    step: int
    prompt: str
    task: str
    sequence: int
    old: float
    new: float | None
    error: str = ""

    @property
    def differs(self) -> bool:
        return self.new is not None and abs(self.new - self.old) > _EQUAL * max(1.0, abs(self.old))


class TaskMeans(Struct, frozen=True, kw_only=True):
    """The responses of a task. Means are over those that were judged; None: there is none."""

    task: str
    responses: int
    differ: int
    failed: int
    old: float | None
    new: float | None


@dataclass(frozen=True)
class _Group:
    """A recorded group, with its prompt and its responses as reward functions receive them."""

    file: Path
    step: int
    prompt: Prompt
    rewards: Sequence[float]
    completions: Sequence[Completion]


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "rejudge", rejudge, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override those of its config")
    parser.add_argument("--out", metavar="FILE", help=f"where the rewards go (default: RUN/{RESULT_FILE})")


def rejudge(arguments: argparse.Namespace, console: Console) -> int:
    """Judge the recorded responses of a run again, without generating."""
    run_dir = run_dir_of(arguments.run)
    kept = newest_experiment(run_dir)
    if kept is None:
        raise ConfigError(f"{run_dir} has no config of a run; name the folder of a run")
    config = load_experiment(kept, arguments.overrides)
    if mode_of(config.mode).replays:
        raise ConfigError(f"mode={config.mode!r} trains on the responses of another run; rejudge {config.replay.path}")
    try:
        files = RunFiles(run_dir).read().recorded()
    except TrajectoryError as error:
        raise ConfigError(f"{error}; record.trajectories=true records the groups of a run") from error
    out = Path(arguments.out).expanduser() if arguments.out else run_dir / RESULT_FILE
    judged = asyncio.run(_judge(config, files))
    write_file(out, b"".join(msgspec.json.encode(one) + b"\n" for one in judged))
    tasks = means_of(judged)
    if arguments.json:
        print_json({"run_dir": str(run_dir), "file": str(out), "tasks": tasks})
    else:
        console.print(_table(tasks))
        changed = sorted(filter(lambda one: one.differs, judged), key=lambda one: -abs((one.new or 0.0) - one.old))
        if changed:
            console.print(_table_of_changes(changed))
        say(console, *_failures(judged), f"every response: {out}")
    return FAILED if any(task.failed for task in tasks) else 0


def means_of(judged: Sequence[Judged]) -> list[TaskMeans]:
    """By task, in the order of the names."""
    found = []
    for task in sorted({one.task for one in judged}):
        own = [one for one in judged if one.task == task]
        both = [(one.old, one.new) for one in own if one.new is not None]
        found.append(
            TaskMeans(
                task=task,
                responses=len(own),
                differ=sum(one.differs for one in own),
                failed=len(own) - len(both),
                old=fmean(old for old, _ in both) if both else None,
                new=fmean(new for _, new in both) if both else None,
            )
        )
    return found


# ------------------------------------------------------------------------------------------------------------- judging


async def _judge(config: ExperimentConfig, files: Sequence[Path]) -> list[Judged]:
    """Judge all groups, a few at a time. Raises ConfigError, LaunchError."""
    rewards: dict[str, Reward] = {}
    try:
        groups, judged = _groups(config, files), list[Judged]()
        while chunk := [group for _, group in zip(range(_AT_ONCE), groups, strict=False)]:
            for group in chunk:
                task = group.prompt.task
                if task not in rewards:
                    rollout = rollout_of_task(config.rollout, task)
                    rewards[task] = Reward.of(rollout.tasks[task].reward, rollout, _services(), output=_STDERR)
                    await rewards[task].start()
            for found in await asyncio.gather(*(_judge_group(rewards[group.prompt.task], group) for group in chunk)):
                judged += found
        return judged
    finally:
        for reward in rewards.values():
            reward.close()


async def _judge_group(reward: Reward, group: _Group) -> list[Judged]:
    """Judge a group's responses together, as a rollout does; if that fails, each by itself, so that the others keep theirs."""
    try:
        found: list[float | RolloutEnded] = [*await reward.score(group.prompt, group.completions)]
    except RolloutEnded:
        found = [await _score(reward, group.prompt, completion) for completion in group.completions]
    return [
        Judged(
            file=group.file.name,
            step=group.step,
            prompt=group.prompt.prompt_id,
            task=group.prompt.task,
            sequence=at,
            old=old,
            new=None if isinstance(new, RolloutEnded) else float(new),
            error=str(new) if isinstance(new, RolloutEnded) else "",
        )
        for at, (old, new) in enumerate(zip(group.rewards, found, strict=True))
    ]


async def _score(reward: Reward, prompt: Prompt, completion: Completion) -> float | RolloutEnded:
    try:
        (value,) = await reward.score(prompt, [completion])
    except RolloutEnded as error:
        return error
    return value


def _groups(config: ExperimentConfig, files: Sequence[Path]) -> Iterator[_Group]:
    """Read the recorded groups, one at a time. Raises ConfigError if rewards of a task cannot be computed from its records."""
    path = config.tokenizer_path or config.model_path
    try:
        tokenizer = load_tokenizer(Path(path).expanduser())
        source = PromptSource(config.prompts, tokenizer, config.seed)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    for file in files:
        try:
            trajectory = read_trajectory(file)
            header, sample = trajectory.header, trajectory.sample
            prompt = source.get(header.meta.locator)
        except TrajectoryError as error:
            raise LaunchError(str(error)) from error
        except (PromptError, ValueError) as error:
            raise ConfigError(f"{file.name}: its prompt cannot be found: {error}") from error
        if sample.data["packed_prompts"].tolist() != prompt.input_ids:
            raise ConfigError(
                f"{file.name} was made from another prompt than {prompt.prompt_id} of prompts.path={config.prompts.path!r}; use "
                "the file, the seed and the template of the run"
            )
        if refused := _refusal(config.rollout.tasks, prompt.task, sample):
            raise ConfigError(f"{file.name}: {refused}")
        ids_T, prompt_T = sample.slices("packed_input_ids")[0], sample.slices("prompt_mask")[0]
        responses = [ids[~of_prompt].tolist() for ids, of_prompt in zip(ids_T, prompt_T, strict=True)]
        cut = sample.data["seq_no_eos_mask"].tolist()
        completions = [
            Completion(str(tokenizer.decode(ids, skip_special_tokens=True)), not is_cut, tuple(ids))
            for ids, is_cut in zip(responses, cut, strict=True)
        ]
        yield _Group(file, header.step, prompt, header.meta.rewards, completions)


def _refusal(tasks: Mapping[str, TaskConfig], name: str, sample: SequenceSample) -> str:
    """Why a group's rewards are more than a function of prompt and response; "": they are not."""
    task, field = tasks.get(name), f"rollout.tasks.{name}"
    if task is None:
        return f"{field} is not in the config; it has {sorted(tasks)}"
    if not task.reward:
        return f"{field}.reward='': the task has no reward function; name one"
    if task.env or task.agent:
        part, value = ("env", task.env) if task.env else ("agent", task.agent)
        return (
            f"{field}.{part}={value!r} takes part in the judging, and is not played again; set {field}.{part}='' if the reward "
            "function alone judges the response"
        )
    if not (sample.data["loss_mask"] == ~sample.data["prompt_mask"]).all():
        return f"its responses of task {name!r} have several turns; only single responses are judged again"
    return ""


def _services() -> Services:
    logger = logging.getLogger(__name__)
    info = WorkerInfo("rejudge", 0, 1, "", "", 1, "", 1, NameResolveConfig(), RuntimeConfig())
    return Services(StatusBoard(info, logger), OFF, logger, SYSTEM_CLOCK, BackgroundTasks("rejudge", logger))


# -------------------------------------------------------------------------------------------------------------- output


def _table(tasks: Sequence[TaskMeans]) -> FittedTable:
    columns = [
        Column("task", "text"),
        *(Column(name, justify="right") for name in ("responses", "old", "new", "differ", "failed")),
    ]
    rows = [
        (escape(task.task), str(task.responses), _mean(task.old), _mean(task.new), str(task.differ), str(task.failed))
        for task in tasks
    ]
    return FittedTable("mean rewards", columns, rows)


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _table_of_changes(changed: Sequence[Judged]) -> FittedTable:
    columns = [Column("file", "text"), *(Column(name, justify="right") for name in ("response", "old", "new"))]
    rows = [(one.file, str(one.sequence), f"{one.old:g}", f"{one.new:g}") for one in changed[:_SHOWN]]
    return FittedTable(f"the largest of {len(changed)} differences", columns, rows)


def _failures(judged: Sequence[Judged]) -> list[str]:
    failed = [one for one in judged if one.new is None]
    about = [f"{one.file}, response {one.sequence}: {one.error}" for one in failed[:1]]
    return [f"{len(failed)} rewards failed, for example {text}" for text in about]
