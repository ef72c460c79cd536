"""`asyncrl-launch scale`."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from asyncrl.cli.commands.common import (
    NOT_RUNNING,
    Commands,
    add_command,
    names_of,
    print_json,
    record_of_running,
    say,
)
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.dataflow.phases import phase_after
from asyncrl.dataflow.topology import Allocation, allocation_of
from asyncrl.protocol.names import Names
from asyncrl.runtime.desired_servers import MOST_SERVERS, set_desired_servers
from asyncrl.runtime.devices import usable_cores, visible_devices
from asyncrl.weights.checkpoints import list_checkpoints

_WHAT = "generation="

_DESCRIPTION = """Change the number of generation servers of a run while it runs.

New servers join: each loads the newest verified weights before it gets its first prompt. The servers with the highest
numbers leave: they get no new prompts, finish their responses and stop. A response that takes longer than
manager.drain_timeout_s moves to another server with its tokens. No sample is lost. The command sets the desired number
and returns; the launcher of the run starts and stops the servers, and `status` shows the progress. A later number replaces
an earlier one."""

_EPILOG = """examples:
  asyncrl-launch scale runs/sloppy-sorter/t0 generation=3
  asyncrl-launch scale configs/quickstart_cpu.yaml trial=second generation=1    a run named by its config
  asyncrl-launch scale generation=4 --json                                      the only running run under runs/

exit codes: 0 the number is set; 1 name resolve does not answer; 2 the run cannot have this number; 3 the run is not running."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "scale", scale, description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = "asyncrl-launch scale [-h] [--json] [RUN [key=value ...]] generation=N"
    parser.add_argument(
        "words",
        metavar="RUN generation=N",
        nargs="+",
        help="folder of the run, or the CONFIG (and overrides) that it was started from; and the desired number of servers",
    )


def scale(arguments: argparse.Namespace, console: Console) -> int:
    """Change the number of generation servers of a run while it runs."""
    count, target, overrides = _read_words(arguments.words)
    run_dir = run_dir_of(target, overrides, running=True)
    record = record_of_running(run_dir, console, as_json=arguments.json)
    if record is None:
        return NOT_RUNNING
    allocation = _allocation_of(run_dir, count)
    warnings = [] if record.host else crowding(allocation, count, len(visible_devices()), len(usable_cores()))
    with names_of(record) as resolver:
        before, there = set_desired_servers(
            resolver,
            Names(record.experiment, record.trial),
            count,
            allocated=allocation.num_servers,
            request_id=uuid.uuid4().hex,
        )
    change = f"{before} -> {count}" if before != count else f"{count}, as before"
    say(
        console,
        *(f"warning: {warning}" for warning in warnings),
        f"{run_dir}: generation servers: {change} ({there} running now); `asyncrl-launch status {run_dir}` shows the progress",
    )
    if arguments.json:
        generation = {"before": before, "wanted": count, "there": there}
        print_json({"run_dir": str(run_dir), "running": True, "generation": generation, "warnings": warnings})
    return 0


def crowding(allocation: Allocation, count: int, num_devices: int, num_cores: int) -> list[str]:
    """One warning if the servers and the trainer need more GPUs than this machine has (on a machine without GPUs: more cores); else
    an empty list."""
    each = allocation.generation.replica_size
    needed = count * each + allocation.num_training_devices
    if num_devices and needed > num_devices:
        return [f"{count} servers and the trainer need {needed} GPUs, there are {num_devices}: some will be shared"]
    if not num_devices and needed > num_cores:
        return [f"{count} servers and the trainer need {needed} cores, there are {num_cores}: each will be slower"]
    return []


def _read_words(words: Sequence[str]) -> tuple[int, str, list[str]]:
    """The number of servers; the run's folder or config ("" if not given); overrides of that config."""
    counts = [word for word in words if word.startswith(_WHAT)]
    targets = [word for word in words if "=" not in word or Path(word).exists()]
    others = [word for word in words if word not in counts and word not in targets]
    if len(counts) != 1:
        raise ConfigError("give the number of servers once: asyncrl-launch scale RUN generation=N")
    if len(targets) > 1:
        raise ConfigError(f"{' and '.join(targets)}: scale one run at a time")
    if others and not targets:
        raise ConfigError(
            f"{' '.join(others)}: overrides need the config that the run was started from: name that config, then the "
            "overrides"
        )
    text = counts[0].removeprefix(_WHAT)
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= MOST_SERVERS:
        raise ConfigError(f"{counts[0]}: use a number from 1 to {MOST_SERVERS}; `asyncrl-launch stop` ends a run")
    return count, targets[0] if targets else "", others


def _allocation_of(run_dir: Path, count: int) -> Allocation:
    """The run's allocation. Raises ConfigError if the run cannot have that many servers."""
    config = OmegaConf.load(run_dir / "config.yaml")
    mode = mode_of(config.mode)
    if mode.replays:
        raise ConfigError(f"mode={config.mode}: {run_dir} trains on recorded trajectories and has no servers to scale")
    if mode.workers_generate:
        raise ConfigError(
            f"mode={config.mode}: in this run the model workers generate, so there are no servers to scale ({run_dir})"
        )
    allocations = replace(ExperimentConfig(), allocation=str(config.allocation))
    # Each phase but the first begins from a checkpoint
    allocation = allocation_of(
        phase_after(allocations, max((step for _, step in list_checkpoints(run_dir)), default=0))
    )
    if not allocation.traits.starts_servers:
        raise ConfigError(
            f"allocation={config.allocation}: asyncrl does not start the servers of this run; start or stop them yourself"
        )
    if allocation.shared_workers:
        raise ConfigError(
            f"allocation={config.allocation}: the servers share devices with training, so their number is fixed; leave the devices "
            "out, or give generation devices of its own"
        )
    for name in config.debug.leave_out:
        kind, _, index = str(name).partition("/")
        if kind == "generation_server" and int(index) >= count:
            raise ConfigError(
                f"{_WHAT}{count}: you start {name} yourself (debug.leave_out), so it stays; use at least {int(index) + 1}"
            )
    return allocation
