"""`asyncrl-launch prepare`."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_config_command, print_json, say
from asyncrl.cli.hub import is_hub_name, with_local_models
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig, generating_sources
from asyncrl.data.prompts import is_file_name
from asyncrl.launch.experiment import Draft, load_experiment
from asyncrl.launch.redact import redact_text

_STDERR = 2  # stdout is for JSON alone

_DESCRIPTION = """Make or download the model and data of a config that this machine does not have.

If model_path is a folder without a model, or a prompt file is missing, it runs the config's `prepare` command. If
model_path is the name of a model on the Hugging Face Hub, it downloads the files that the Hub's cache does not have. If
nothing is missing, it does nothing."""

_EPILOG = """

examples:
  asyncrl-launch prepare configs/quickstart_cpu.yaml           a small model, warm-started; about 20 s
  asyncrl-launch prepare configs/async_ppo_math.yaml           GSM8K, and a Qwen2.5 from the Hub; 3 GB
  asyncrl-launch prepare my_run.yaml --json

exit codes: 0 nothing is missing (any more); 2 something is missing, and the config has no `prepare` command or the Hub
has no such model; otherwise the exit code of the command."""


def add_to(commands: Commands) -> None:
    add_config_command(commands, "prepare", prepare, description=_DESCRIPTION, epilog=_EPILOG)


def prepare(arguments: argparse.Namespace, console: Console) -> int:
    """Make or download the model and data that a config names."""
    config = load_experiment(arguments.config, arguments.overrides)
    lacking = _lacking(config)
    code = 0
    if lacking and config.prepare:
        say(console, f"missing: {' and '.join(lacking)}; running `{redact_text(config.prepare)}`")
        code = _run(config.prepare, quiet=arguments.json)
    elif lacking:
        raise ConfigError(
            f"model_path={config.model_path!r}: there is no model, and the config has no `prepare` command to make it; "
            "set model_path to the folder of a model"
        )
    if code == 0:
        config = with_local_models(Draft(config, []), download=True, say=partial(say, console)).checked()
    if arguments.json:
        made = bool(lacking and config.prepare) and code == 0
        print_json({"model_path": config.model_path, "made": made, "exit_code": code})
    return code


def _lacking(config: ExperimentConfig) -> list[str]:
    """Descriptions of the missing model and prompt files, which the `prepare` command must make. Prompt files are not looked for if
    the config has no such command (`check` then reports missing ones), or with mode=train_only, which reads none."""
    lacking = []
    if not is_hub_name(config.model_path) and not (Path(config.model_path).expanduser() / "config.json").is_file():
        lacking.append(f"model in {config.model_path}")
    read = config.prepare and not mode_of(config.mode).replays
    for _, prompts, _, _ in generating_sources(config) if read else ():
        if is_file_name(prompts.path) and not Path(prompts.path).expanduser().is_file():
            lacking.append(prompts.path)
    return lacking


def _run(text: str, *, quiet: bool) -> int:
    """Run the command and return its exit code. quiet: redirect its stdout to stderr."""
    command = shlex.split(text)
    if command[0] in {"python", "python3"}:
        command[0] = sys.executable
    try:
        return subprocess.run(command, check=False, stdout=_STDERR if quiet else None).returncode
    except OSError as error:
        raise ConfigError(f"prepare={text!r}: {error}") from error
