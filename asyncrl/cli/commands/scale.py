"""`asyncrl-launch scale`."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
from omegaconf import OmegaConf
from rich.console import Console

from asyncrl.cli.commands.common import (
    NOT_RUNNING,
    Commands,
    add_command,
    desired_servers,
    goes_on,
    not_running,
    print_json,
    run_dir_of,
)
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.topology import Allocation
from asyncrl.launch.rundir import LaunchError, RunRecord, is_running, read_record
from asyncrl.protocol.messages import DesiredServers
from asyncrl.protocol.names import Names
from asyncrl.runtime.devices import usable_cores, visible_devices
from asyncrl.runtime.names.interface import NameResolveError, NameResolver
from asyncrl.runtime.names.open import open_name_resolver

_WHAT = "generation="
_MOST = 256  # more is a slip of the finger: this launcher starts processes on one machine

_DESCRIPTION = """Change how many generation servers a run has while it goes on.

New servers join: each loads the newest verified weights before it gets its first prompt. The last ones leave: they get no new
prompts, and stop when what they generate is done; what takes longer than manager.drain_timeout_s goes on at another server with the
tokens it has. No sample is lost. The command says what is wanted and returns; the launcher of the run sees to it, and `status`
shows how far it is. The newest number counts."""

_EPILOG = """examples:
  asyncrl-launch scale runs/sloppy-sorter/t0 generation=3
  asyncrl-launch scale configs/quickstart_cpu.yaml trial=second generation=1    by the config it was started from
  asyncrl-launch scale generation=4 --json                                      the only run that goes on under runs/

exit codes: 0 the run knows; 1 its name resolve does not answer; 2 the run cannot have that; 3 no run goes on there."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "scale", scale, description=_DESCRIPTION, epilog=_EPILOG)
    parser.usage = "asyncrl-launch scale [-h] [--json] [RUN [key=value ...]] generation=N"
    parser.add_argument(
        "words",
        metavar="RUN generation=N",
        nargs="+",
        help="folder of the run, or the CONFIG (and overrides) it was started from; and how many servers it is to have",
    )


def scale(arguments: argparse.Namespace, console: Console) -> int:
    """Change the number of generation servers of a run that goes on."""
    count, target, overrides = _read_words(arguments.words)
    run_dir = run_dir_of(target, overrides) if target else _only_run(Path("runs"))
    record = read_record(run_dir)
    if record is None or not goes_on(run_dir, record):
        console.print(not_running(run_dir, record), highlight=False, soft_wrap=True)
        if arguments.json:
            print_json({"run_dir": str(run_dir), "running": False})
        return NOT_RUNNING
    allocation = _allocation_of(run_dir, count)
    warnings = [] if record.host else crowding(allocation, count, len(visible_devices()), len(usable_cores()))
    try:
        with open_name_resolver(record.names_at) as resolver:
            before, there = _set_desired(resolver, record, count, allocation.num_servers)
    except NameResolveError as error:
        raise LaunchError(
            f"the run goes on (process {record.pid}), but its name resolve at {record.names_at.where} does not answer: "
            f"{error}"
        ) from error
    for warning in warnings:
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)
    change = f"{before} -> {count}" if before != count else f"{count}, as before"
    console.print(
        f"{run_dir}: generation servers: {change} ({there} there now); `asyncrl-launch status {run_dir}` shows who comes and "
        "who goes",
        highlight=False,
        soft_wrap=True,
    )
    if arguments.json:
        generation = {"before": before, "wanted": count, "there": there}
        print_json({"run_dir": str(run_dir), "running": True, "generation": generation, "warnings": warnings})
    return 0


def crowding(allocation: Allocation, count: int, num_devices: int, num_cores: int) -> list[str]:
    """Whether so many servers, beside the trainer, are more than this machine has GPUs or cores for."""
    each = allocation.generation.tensor * allocation.generation.pipe
    needed = count * each + allocation.num_model_workers
    if num_devices and needed > num_devices:
        return [f"{count} servers and the trainer want {needed} GPUs, there are {num_devices}: some will be shared"]
    if not num_devices and needed > num_cores:
        return [f"{count} servers and the trainer want {needed} cores, there are {num_cores}: each will be slower"]
    return []


def _read_words(words: Sequence[str]) -> tuple[int, str, list[str]]:
    """How many servers; which run ("": not said); overrides of its config."""
    counts = [word for word in words if word.startswith(_WHAT)]
    targets = [word for word in words if "=" not in word or Path(word).exists()]
    others = [word for word in words if word not in counts and word not in targets]
    if len(counts) != 1:
        raise ConfigError("say once how many servers: asyncrl-launch scale RUN generation=N")
    if len(targets) > 1:
        raise ConfigError(f"{' and '.join(targets)}: one run at a time")
    if others and not targets:
        raise ConfigError(f"{' '.join(others)}: overrides come behind the config that the run was started from")
    text = counts[0].removeprefix(_WHAT)
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= _MOST:
        raise ConfigError(f"{counts[0]}: use a number from 1 to {_MOST}; `asyncrl-launch stop` ends a run")
    return count, targets[0] if targets else "", others


def _only_run(fileroot: Path) -> Path:
    """The folder of the one run that goes on there."""
    found = [lock.parent.absolute() for lock in sorted(fileroot.glob("*/*/launcher.lock")) if is_running(lock.parent)]
    if len(found) == 1:
        return found[0]
    which = f"several go on: {', '.join(map(str, found))}" if found else f"none goes on under {fileroot.absolute()}"
    raise ConfigError(f"which run? {which}; say asyncrl-launch scale RUN generation=N")


def _allocation_of(run_dir: Path, count: int) -> Allocation:
    """The run's allocation. Raises ConfigError where it cannot have that many servers."""
    config = OmegaConf.load(run_dir / "config.yaml")
    if config.mode == "train_only":
        raise ConfigError(f"mode=train_only: nothing generates in {run_dir}, it trains on what was recorded")
    if config.mode == "sync":
        raise ConfigError(f"mode=sync: the model workers generate in {run_dir}, there are no servers to scale")
    allocation = Allocation.parse(str(config.allocation))
    if allocation.engine == "external":
        raise ConfigError(
            f"allocation={config.allocation}: the servers of this run are somebody else's; start or stop them there"
        )
    for name in config.debug.leave_out:
        kind, _, index = str(name).partition("/")
        if kind == "generation_server" and int(index) >= count:
            raise ConfigError(
                f"{_WHAT}{count}: {name} was left to you (debug.leave_out), and stays; use at least {int(index) + 1}"
            )
    return allocation


def _set_desired(resolver: NameResolver, record: RunRecord, count: int, allocated: int) -> tuple[int, int]:
    """Set the desired number, unless that is how it is. Returns the one before, and how many servers are there."""
    names = Names(record.experiment, record.trial)
    before = desired_servers(resolver, names) or allocated
    there = len(resolver.get_subtree(names.generation_servers()))
    if not before == count == there:  # the same number again: another try for one that could not join
        desired = DesiredServers(count=count, id=uuid.uuid4().hex)
        resolver.add(names.desired_generation_servers(), msgspec.json.encode(desired).decode(), replace=True)
    return before, there
