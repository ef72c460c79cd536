"""`asyncrl-launch prepare`."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from asyncrl.config import ConfigError, load_experiment
from asyncrl.launch.commands.common import Commands, add_config_command


def add_to(commands: Commands) -> None:
    add_config_command(commands, "prepare", prepare)


def prepare(arguments: argparse.Namespace, console: Console) -> int:
    """Where the model is missing, run the config's own `prepare` command."""
    config = load_experiment(arguments.config, arguments.overrides)
    if (Path(config.model_path).expanduser() / "config.json").is_file():
        return 0
    if not config.prepare:
        raise ConfigError(
            f"model_path={config.model_path!r}: there is no model, and the config has no `prepare` command to make it"
        )
    console.print(f"no model in {config.model_path}: running `{config.prepare}`", highlight=False)
    command = shlex.split(config.prepare)
    if command[0] in {"python", "python3"}:
        command[0] = sys.executable
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise ConfigError(f"prepare={config.prepare!r}: {error}") from error
