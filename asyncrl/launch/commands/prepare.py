"""`asyncrl-launch prepare`."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from asyncrl.config import ConfigError, load_experiment
from asyncrl.launch.commands.common import Commands, add_config_command, print_json
from asyncrl.launch.redact import redact_text

_STDERR = 2  # what the command prints is for people

_DESCRIPTION = """Make the model and data of an example: run the config's own `prepare` command where model_path has no model.

Does nothing where the model is there, or where the config names one that you have made or downloaded yourself."""

_EPILOG = """

examples:
  asyncrl-launch prepare configs/quickstart_cpu.yaml           a small model, warm-started; some 20 s
  asyncrl-launch prepare my_run.yaml --json

exit codes: 0 the model is there; 2 there is none and the config has no `prepare`; otherwise those of the command."""


def add_to(commands: Commands) -> None:
    add_config_command(commands, "prepare", prepare, description=_DESCRIPTION, epilog=_EPILOG)


def prepare(arguments: argparse.Namespace, console: Console) -> int:
    """Where the model is missing, run the config's own `prepare` command."""
    config = load_experiment(arguments.config, arguments.overrides)
    if (Path(config.model_path).expanduser() / "config.json").is_file():
        if arguments.json:
            print_json({"model_path": config.model_path, "made": False, "exit_code": 0})
        return 0
    if not config.prepare:
        raise ConfigError(
            f"model_path={config.model_path!r}: there is no model, and the config has no `prepare` command to make it"
        )
    shown = redact_text(config.prepare)
    console.print(f"no model in {config.model_path}: running `{shown}`", markup=False, highlight=False)
    command = shlex.split(config.prepare)
    if command[0] in {"python", "python3"}:
        command[0] = sys.executable
    try:
        code = subprocess.run(command, check=False, stdout=_STDERR if arguments.json else None).returncode
    except OSError as error:
        raise ConfigError(f"prepare={config.prepare!r}: {error}") from error
    if arguments.json:
        print_json({"model_path": config.model_path, "made": code == 0, "exit_code": code})
    return code
