"""What the commands share: how they are declared, how they name a run or a config, how they answer machines."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from rich.console import Console

from asyncrl.config import ConfigError, load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.launch.rundir import RunRecord

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command: TypeAlias = Callable[[argparse.Namespace, Console], int]

NOT_RUNNING = 3  # exit code of commands about a run that goes on, where none does

_CONFIG_EPILOG = """overrides are dotted fields of the config, for instance:
  trial=second                        another folder: <fileroot>/<experiment>/second
  allocation=transformers.d2+d2       generation servers + data-parallel model workers
  train.batch_size=32 train.max_steps=100 train.optimizer.lr=1e-4
  manager.max_head_offpolicyness=0    how many versions generation may lag behind; 0: synchronous
  rollout.group_size=8 rollout.sampling.max_new_tokens=256
  name_resolve.endpoints=[host:2379]  your etcd instead of a private one
All fields, their meaning and defaults: asyncrl/config.py. A wrong name is answered with the nearest right one."""


def add_command(
    commands: Commands, name: str, function: Command, *, description: str = "", epilog: str = ""
) -> argparse.ArgumentParser:
    """Declare a command. Its one-line help is the function's docstring. Every command takes --json."""
    parser = commands.add_parser(
        name,
        help=function.__doc__,
        description=description or function.__doc__,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="answer with JSON on stdout, for machines")
    parser.set_defaults(command=function)
    return parser


def add_config_command(
    commands: Commands, name: str, function: Command, *, description: str = "", epilog: str = ""
) -> argparse.ArgumentParser:
    """A command that takes CONFIG [key=value ...]."""
    parser = add_command(commands, name, function, description=description, epilog=_CONFIG_EPILOG + epilog)
    parser.add_argument("config", metavar="CONFIG", help="YAML file; configs/ has examples")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the file's fields")
    return parser


def run_dir_of(target: str, overrides: list[str]) -> Path:
    """A run's folder, given as such or by the config (and overrides) it was started from."""
    path = Path(target)
    if path.is_dir():
        return path.absolute()
    if not path.is_file():
        raise ConfigError(f"{target!r} is neither the folder of a run nor a config")
    return run_directory(load_experiment(path, overrides))


def not_running(run_dir: Path, record: RunRecord | None) -> str:
    if record is None:
        return f"{run_dir}: no run is going on here, and none has been"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))
    return f"{run_dir}: no run is going on here; the last one was attempt {record.attempt}, begun {began}"


def print_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()
