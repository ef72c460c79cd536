"""Shared by the commands: how a command and its arguments for a run or a config are declared, and JSON output."""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from rich.console import Console
from rich.markup import escape

from asyncrl.cli.tables import Column, FittedTable, HelpFormatter
from asyncrl.config.modes import mode_of
from asyncrl.config.processes import ModelWorkerConfig
from asyncrl.config.resolve import total_steps
from asyncrl.config.schema import ExperimentConfig, max_head_offpolicyness
from asyncrl.launch.hosts.addresses import refuses
from asyncrl.launch.program import ProcessSpec
from asyncrl.launch.redact import redact
from asyncrl.launch.rundir import LaunchError, RunRecord, is_folder, is_running, read_record
from asyncrl.launch.slurm import job_state, read_job
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.hosts import LauncherRecord
from asyncrl.protocol.names import Names
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolveError, NameResolver

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command: TypeAlias = Callable[[argparse.Namespace, Console], int]

RUN_HELP = "folder of the run, or the CONFIG that it was started from (default: the only run under ./runs)"
FAILED = 1  # exit codes
CONFIG_ERROR = 2
NOT_RUNNING = 3  # the command needs a run that is running, and this one is not

_CONFIG_EPILOG = """overrides are dotted fields of the config, for instance:
  trial=second                        another folder: <fileroot>/<experiment>/second
  allocation=transformers.d2+d2       generation servers + data-parallel model workers
  allocation=sglang.d4+d2p2m1+ref_inf:d1    pipeline stages (p), tensor ranks (m); separate workers for an MFC or role
  train.batch_size=32 train.max_steps=100 train.optimizer.lr=1e-4
  manager.max_head_offpolicyness=0    largest age of the data, in weight versions; 0: synchronous
  rollout.group_size=8 rollout.sampling.max_new_tokens=256
  name_resolve.endpoints=[host:2379]  your etcd instead of a private one
asyncrl/config/schema.py lists all fields with meaning and default. The error for a wrong name suggests the nearest field."""


def add_command(
    commands: Commands, name: str, function: Command, *, description: str = "", epilog: str = ""
) -> argparse.ArgumentParser:
    """Declare a command. The function's docstring is its one-line help. Every command takes --json."""
    parser = commands.add_parser(
        name,
        help=function.__doc__,
        description=description or function.__doc__,
        epilog=epilog,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, for programs")
    parser.set_defaults(command=function, clock=SYSTEM_CLOCK, ends_with_reader=False)
    return parser


def add_config_command(
    commands: Commands,
    name: str,
    function: Command,
    *,
    description: str = "",
    epilog: str = "",
    optional: bool = False,
) -> argparse.ArgumentParser:
    """Declare a command that takes CONFIG [key=value ...]. optional: CONFIG may be missing (config is then None)."""
    parser = add_command(commands, name, function, description=description, epilog=_CONFIG_EPILOG + epilog)
    nargs = "?" if optional else None
    parser.add_argument("config", metavar="CONFIG", nargs=nargs, help="YAML file; `asyncrl-launch init` writes one")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override those of the file")
    return parser


def supervises(parser: argparse.ArgumentParser) -> None:
    """Declare that a command supervises processes of a run, so it must not wait for its output (cli/output.py)."""
    parser.set_defaults(supervises=True)


def add_run_command(
    commands: Commands, name: str, function: Command, *, description: str = "", epilog: str = ""
) -> argparse.ArgumentParser:
    """Declare a command about a run: [RUN] [key=value ...]."""
    parser = add_command(commands, name, function, description=description, epilog=epilog)
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides that it was started with")
    return parser


def process_objects(specs: Sequence[ProcessSpec]) -> list[dict[str, Any]]:
    """The processes of a run, for JSON."""
    return [
        {"name": spec.name, "kind": spec.kind, "computes": spec.computes, "env": redact(spec.env), "holds": holds(spec)}
        for spec in specs
    ]


def process_table(title: str, specs: Sequence[ProcessSpec]) -> FittedTable:
    """The processes of a run, as a table."""
    rows: dict[tuple[str, str, str], list[str]] = {}  # processes of a kind that differ only in their number share a row
    for spec in specs:
        env = " ".join(f"{key}={value}" for key, value in sorted(redact(spec.env).items()))
        uses = ", ".join(["a core or device" if spec.computes else "little", *holds(spec)])
        rows.setdefault((spec.kind, uses, env), []).append(spec.name)
    previous, cells = "", []
    for (_, uses, env), names in rows.items():
        named = ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]} ({len(names)})"
        cells.append((named, uses, escape("the same" if env and env == previous else env)))
        previous = env
    return FittedTable(title, [Column(name, "text") for name in ("process", "uses", "environment")], cells)


def holds(spec: ProcessSpec) -> list[str]:
    """The models of which this process runs a rank, each with its grid, such as `actor d2p1m1`. Empty unless it is a model
    worker."""
    if not isinstance(spec.config, ModelWorkerConfig):
        return []
    index = spec.config.worker.index
    return [f"{model.name} {model.grid}" for model in spec.config.models if index in model.workers]


def sizes(config: ExperimentConfig, num_prompts: int) -> dict[str, int]:
    """The size of a run, for JSON."""
    eta, batch_size = max_head_offpolicyness(config), config.train.batch_size
    return {
        "num_prompts": num_prompts,
        "num_epochs": config.train.num_epochs,
        "total_steps": total_steps(config, num_prompts),
        "batch_size": batch_size,
        "group_size": config.rollout.group_size,
        "max_head_offpolicyness": eta,
        "max_live_prompts": (1 + eta) * batch_size,
    }


def sizes_text(config: ExperimentConfig, num_prompts: int) -> str:
    """The size of a run, as text."""
    size = sizes(config, num_prompts)
    steps = (
        f"{num_prompts} prompts x {size['num_epochs']} epochs, {size['total_steps']} steps of {size['batch_size']} "
        f"prompts x {size['group_size']} responses"
    )
    if not mode_of(config.mode).workers_generate:
        return f"{steps}; eta = {size['max_head_offpolicyness']}: at most {size['max_live_prompts']} prompts live"
    servers = config.allocation.partition("+")[0] if "." in config.allocation else ""
    unused = f"; {servers} of the allocation stays unused" if servers else ""
    return f"{steps}; mode={config.mode}: each step generates its batch on the model workers{unused}"


def goes_on(run_dir: Path, record: RunRecord | None) -> bool:
    """Whether the run is running; its launcher may be on another host. For a run on another host: False also if every endpoint of
    its name resolve refuses the connection. Raises LaunchError if that name resolve does not answer at all."""
    if record is None:
        return False
    if record.host in ("", socket.gethostname()):
        return is_running(run_dir)
    at = record.names_at
    # A private etcd ends with its run, and then its host refuses the connection
    if at.endpoints and all(refuses(endpoint) for endpoint in at.endpoints):
        return False
    key = Names(record.experiment, record.trial).launcher()
    try:
        with open_name_resolver(at) as resolver:
            leader = msgspec.json.decode(resolver.get(key), type=LauncherRecord)
            return is_folder(leader.run_dir, run_dir)  # in the copy of a run the record leads to the original
    except NameEntryNotFound:
        return False
    except DECODE_ERRORS:  # of another release
        return True
    except NameResolveError as error:
        raise LaunchError(
            f"the run was started on {record.host}, and its state is unknown here: its name resolve at "
            f"{at.where} does not answer: {error}"
        ) from error


@contextlib.contextmanager
def names_of(record: RunRecord) -> Iterator[NameResolver]:
    """The name resolve of a run that is running. Raises LaunchError if it does not answer."""
    try:
        with open_name_resolver(record.names_at) as resolver:
            yield resolver
    except NameResolveError as error:
        place = f"on {record.host}" if record.host else f"(process {record.pid})"
        raise LaunchError(
            f"the run is running {place}, but its name resolve at {record.names_at.where} does not answer: {error}"
        ) from error


def not_running(run_dir: Path, record: RunRecord | None) -> str:
    job = read_job(run_dir)
    if job is not None and not (state := job_state(job.job_id)).ended:
        return f"{run_dir}: no run is running here yet; job {job.job_id} is {state.state} ({state.reason})"
    if record is None:
        return f"{run_dir}: no run is running here, and none was started before"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.attempt_began))
    return f"{run_dir}: no run is running here; the last one was attempt {record.attempt}, begun {began}"


def record_of_running(run_dir: Path, console: Console, *, as_json: bool) -> RunRecord | None:
    """Return the record of a run that is running. None, after a message: it is not running."""
    record = read_record(run_dir)
    if record is not None and goes_on(run_dir, record):
        return record
    say(console, not_running(run_dir, record))
    if as_json:
        print_json({"run_dir": str(run_dir), "running": False})
    return None


def say(console: Console, *texts: str) -> None:
    """Print texts as they are, each on a line of its own."""
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def error_object(kind: str, message: str) -> dict[str, dict[str, str]]:
    """An error, for JSON. kind: `usage`, `config` or `failed`."""
    return {"error": {"kind": kind, "message": message}}


def print_json(value: Any) -> None:
    """Print a value as JSON, on one line of stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()
