"""`asyncrl-launch replay`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from rich.text import Text
from yaml import YAMLError

from asyncrl.config import ConfigError, MasterWorkerConfig
from asyncrl.data.bad_batches import WEIGHTS, BadBatch, list_bad_batches
from asyncrl.data.trajectories import (
    FOLDER,
    Trajectory,
    TrajectoryError,
    find_recording,
    list_recording,
    read_header,
    read_trajectory,
)
from asyncrl.launch.commands.common import Commands, add_command, print_json, run_dir_of
from asyncrl.launch.program import load_process_config
from asyncrl.launch.rundir import LaunchError, configs_dir
from asyncrl.messages import WeightVersion
from asyncrl.names import ACTOR
from asyncrl.weights import WeightsError, role_dir, verify_version, version_dir

if TYPE_CHECKING:
    from asyncrl.model.diagnosis import BadSequence, BadValues, Diagnosis

_SHOWN = 20  # sequences, where --limit says nothing

_DESCRIPTION = """Run a train step's batch through the actor once more, on the CPU and in this one process, and say which
sequences make its loss or gradient not finite, and with what: a logprob, an advantage, a ratio.

A step whose loss or gradient is not finite is skipped by all ranks, and its batch is kept in <run>/bad_batches/ with all
that the MFCs made of it, the newest train.keep_bad_batches of them, and the weights that the step began from. Steps that were
recorded with record.trajectories=true can be looked at too, as long as their weights are on disk (weights.keep).

In this order: what was saved, the weights, the logprobs (actor_inf), then loss and gradient of each minibatch, and of each
sequence of those minibatches that are not finite. Nothing is trained. A batch that is finite here and was not in the run:
the device, or train.dtype, makes the difference."""

_EPILOG = """examples:
  asyncrl-launch replay runs/mine/t0             the newest bad batch (or else the newest recorded step)
  asyncrl-launch replay runs/mine/t0 120         that of train step 120, as the run's lines and metrics.jsonl number it
  asyncrl-launch replay runs/mine/t0 120 --weights runs/mine/t0/checkpoints/final    with other weights
  asyncrl-launch replay runs/mine/t0 --json | jq '.bad[] | select(.spread | not)'

Sequences are named by ticket, prompt (epoch and position) and member of the group; `asyncrl-launch inspect FILE` shows one
token by token. "spread" are those that are bad only because of others of their batch or group (through normalised advantages).

exit codes: 0 replayed, whatever was found; 1 there is no such batch, or its weights are gone; 2 wrong arguments."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "replay", replay, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN", help="folder of the run, or the CONFIG it was started from")
    parser.add_argument("step", metavar="STEP", nargs="?", default="", help="train step, counted from 1")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides it was started with")
    parser.add_argument("--weights", metavar="DIR", help="other weights than those the step began from")
    parser.add_argument("--limit", metavar="N", type=int, default=_SHOWN, help=f"sequences shown (default {_SHOWN})")


@dataclass(frozen=True)
class Chosen:
    """A step's batch on disk, and what it began from."""

    folder: Path
    files: list[Path]
    attempt: int
    step: int
    stats: dict[str, float | None]  # what the step said about itself, where that was saved
    bad: bool  # one of bad_batches

    @property
    def weights(self) -> WeightVersion:
        return WeightVersion(self.attempt, self.step - 1)

    @property
    def left_weights(self) -> Path:
        """What the step left: where weights are not written for others (mode=sync)."""
        return self.folder / WEIGHTS

    @property
    def steps_made(self) -> int:
        """Optimizer steps of it that were made."""
        tried, skipped = (self.stats.get(f"actor/{name}") or 0 for name in ("optimizer_steps", "skipped_steps"))
        return int(tried - skipped)


def replay(arguments: argparse.Namespace, console: Console) -> int:
    """Say which sequences made a train step's loss or gradient not finite, by computing it once more."""
    run_dir, step = _target(arguments)
    try:
        chosen = _choose(run_dir, step)
        batch = [read_trajectory(file) for file in chosen.files]
    except TrajectoryError as error:
        raise LaunchError(str(error)) from error
    config = _master_config(run_dir, chosen.attempt)
    _check_keys(batch, chosen)
    weights = Path(arguments.weights) if arguments.weights else _weights(run_dir, chosen)
    if not weights.is_dir():
        raise ConfigError(f"--weights {weights}: there is no such folder")
    from asyncrl.model.diagnosis import diagnose  # imports torch

    def says(text: str) -> None:
        if not arguments.json:
            console.print(Text(f"{text} ...", "dim"), highlight=False, soft_wrap=True)

    found = diagnose(batch, config.train, weights, seed=config.worker.seed, says=says)
    if weights == chosen.left_weights and chosen.steps_made:
        moved = f"the weights are those after the {chosen.steps_made} optimizer steps that were made of this train step"
        found = msgspec.structs.replace(found, notes=[*found.notes, moved])
    if arguments.json:
        about = {"folder": str(chosen.folder), "attempt": chosen.attempt, "step": chosen.step, "stats": chosen.stats}
        print_json({**about, **msgspec.to_builtins(found), "finite": found.finite})
    else:
        _print(chosen, found, arguments.limit, console)
    return 0


def _target(arguments: argparse.Namespace) -> tuple[Path, int | None]:
    overrides = list(arguments.overrides)
    if "=" in arguments.step:
        overrides.insert(0, arguments.step)
        arguments.step = ""
    if not arguments.step:
        return run_dir_of(arguments.run, overrides), None
    try:
        step = int(arguments.step)
    except ValueError:
        step = 0
    if step < 1:
        raise ConfigError(f"STEP {arguments.step!r}: write the number of a train step, from 1, such as 12")
    return run_dir_of(arguments.run, overrides), step


# ------------------------------------------------------------------------------------------------------ what is there


def _choose(run_dir: Path, step: int | None) -> Chosen:
    """The newest bad batch of that step (or of any), else the newest recording of it. Raises LaunchError, TrajectoryError."""
    kept = list_bad_batches(run_dir)
    matching = [batch for batch in kept if step in (None, batch.step)]
    if matching:
        return _of_bad_batch(matching[-1])
    recorded = _recorded(run_dir, step)
    if recorded is not None:
        return recorded
    there = ", ".join(f"{batch.step} (attempt {batch.attempt})" for batch in kept) or "none"
    wanted = f"step {step}" if step is not None else "any step"
    raise LaunchError(
        f"{run_dir}: there is no batch of {wanted}. Bad batches are kept of the steps: {there}; others are there where the run "
        "was started with record.trajectories=true (record.max_bytes, record.every)"
    )


def _of_bad_batch(batch: BadBatch) -> Chosen:
    files = list_recording(batch.path)
    if not files:
        raise LaunchError(
            f"{batch.path} holds no trajectories: the disk refused them when they were saved, or they are gone"
        )
    why = batch.why()
    return Chosen(batch.path, files, batch.attempt, batch.step, why.stats if why is not None else {}, True)


def _recorded(run_dir: Path, step: int | None) -> Chosen | None:
    """Of what record.trajectories has kept: the newest step, or that one."""
    if not (run_dir / FOLDER).is_dir():
        return None
    folder = find_recording(run_dir)
    headers = [(file, read_header(file)) for file in list_recording(folder)[::-1][:1]] if step is None else []
    wanted = headers[0][1].step if headers else (step or 0) - 1
    files = [file for file in list_recording(folder) if file.name.startswith(f"step_{wanted:08d}-")]
    if not files:
        return None
    header = read_header(files[0])
    if not header.trained:
        raise LaunchError(f"{folder}: what is recorded there was rolled out only, and no train step has used it")
    return Chosen(folder, files, header.meta.attempt, wanted + 1, {}, False)


def _master_config(run_dir: Path, attempt: int) -> MasterWorkerConfig:
    path = configs_dir(run_dir, attempt) / "master_0.yaml"
    try:
        config = load_process_config(path)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise LaunchError(f"{path}, which says how the step was trained, cannot be read: {error}") from error
    assert isinstance(config, MasterWorkerConfig)
    return config


def _check_keys(batch: Sequence[Trajectory], chosen: Chosen) -> None:
    for trajectory in batch:
        lacking = [key for key in ("advantages", "trained_mask") if key not in trajectory.sample.keys]
        if lacking:
            raise LaunchError(
                f"{chosen.folder}: the group {trajectory.header.meta.ticket_id} lacks {lacking}, which are made in a train step"
            )


def _weights(run_dir: Path, chosen: Chosen) -> Path:
    if chosen.left_weights.is_dir():
        return chosen.left_weights
    version = chosen.weights
    path = version_dir(run_dir, ACTOR, version)
    try:
        verify_version(path)
    except WeightsError as error:
        raise LaunchError(
            f"{error}\nThe step began from {version}, of which {role_dir(run_dir, ACTOR)} must have the files. They are kept with "
            "each bad batch (train.keep_bad_batches), and else as long as weights.keep says; --weights DIR takes others"
        ) from error
    return path


# ------------------------------------------------------------------------------------------------------------ printing


def _print(chosen: Chosen, found: Diagnosis, limit: int, console: Console) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style), highlight=False, soft_wrap=True)

    said = {
        name: value for name, value in chosen.stats.items() if name.endswith(("/loss", "/grad_norm", "/skipped_steps"))
    }
    line(
        f"train step {chosen.step} of attempt {chosen.attempt}, from weights {chosen.weights}: {chosen.folder}", "bold"
    )
    if said:
        line("in the run: " + ", ".join(f"{name} {_number(value)}" for name, value in sorted(said.items())))
    line(f"{found.sequences} sequences of {found.groups} groups; weights {found.weights}")
    for note in found.notes:
        line(f"note: {note}", "yellow")
    if found.bad_weights:
        names = ", ".join(found.bad_weights[:5]) + (" ..." if len(found.bad_weights) > 5 else "")
        line(f"The weights themselves are not finite, in {len(found.bad_weights)} tensors: {names}", "bold red")
        line(
            "So no sequence is at fault: an earlier step broke them. Go on from an older checkpoint, with a lower learning rate"
        )
    if found.minibatches:
        table = Table(title="computed here", title_justify="left")
        for column in ("minibatch", "groups", "trained tokens", "loss", "gradient norm"):
            table.add_column(column, justify="right")
        for part in found.minibatches:
            cells = [
                str(part.index + 1),
                str(part.groups),
                str(part.tokens),
                _number(part.loss),
                _number(part.grad_norm),
            ]
            table.add_row(*cells, style="red" if part.grad_norm is None or part.loss is None else None)
        console.print(table)
    if found.max_logprob_difference is not None:
        line(
            f"logprobs computed here differ from those of the run's actor_inf by {found.max_logprob_difference:.2g} at most"
        )
    if found.bad:
        own = sum(not sequence.spread for sequence in found.bad)
        line(f"{len(found.bad)} sequences with values that are not finite, {own} of them by themselves", "bold red")
        console.print(_sequence_table(found.bad[:limit]))
        if len(found.bad) > limit:
            line(f"{len(found.bad) - limit} more are not shown (--limit)")
    elif found.finite:
        what = (
            "device or dtype of the trainer, or an earlier minibatch's step,"
            if chosen.bad
            else "It was so in the run, then:"
        )
        tail = "must have made the difference" if chosen.bad else "nothing to be found"
        line(f"Everything is finite here: {what} {tail}", "bold green")


def _sequence_table(sequences: Sequence[BadSequence]) -> Table:
    table = Table()
    for column in ("ticket", "prompt", "member", "tokens", "", "not finite"):
        table.add_column(column)
    for sequence in sequences:
        values = "; ".join(map(_values_text, sequence.bad))
        whose = "spread" if sequence.spread else "itself"
        row = [sequence.ticket, sequence.prompt, str(sequence.member), str(sequence.tokens), whose, values]
        table.add_row(*(Text(cell) for cell in row), style=None if sequence.spread else "bold")
    return table


def _values_text(values: BadValues) -> str:
    if values.first < 0:
        return f"{values.what} {values.value}"
    return f"{values.what} {values.value} at token {values.first} ({values.count} of {values.of})"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
