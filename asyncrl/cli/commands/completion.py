"""`asyncrl-launch completion`: the completion script of a shell, made from the parser of the commands."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_command, print_json
from asyncrl.config.schema import ConfigError

_SHELLS = ("bash", "zsh", "fish")
_FILES = {"CONFIG", "FILE"}  # names of arguments
_FOLDERS = {"RUN", "DIR", "CONFIG_OR_CHECKPOINT"}

_EPILOG = """examples:
  asyncrl-launch completion bash >~/.local/share/bash-completion/completions/asyncrl-launch
  asyncrl-launch completion zsh  >~/.zfunc/_asyncrl-launch          with fpath=(~/.zfunc $fpath) before compinit
  asyncrl-launch completion fish >~/.config/fish/completions/asyncrl-launch.fish

It completes commands, options, files and folders. A new shell reads it."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "completion", complete, epilog=_EPILOG)
    parser.add_argument("shell", choices=_SHELLS, help="the shell that completes")


def complete(arguments: argparse.Namespace, console: Console) -> int:
    """Print the script that completes asyncrl-launch in a shell."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError("completion needs the package shtab: pip install 'asyncrl[completion]'") from error
    for action in _actions(arguments.parser):
        names = {action.metavar} if isinstance(action.metavar, str) else set()
        if names & (_FILES | _FOLDERS):
            action.complete = shtab.FILE if names & _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    script = shtab.complete(arguments.parser, arguments.shell)
    if arguments.json:
        print_json({"shell": arguments.shell, "script": script})
    else:
        sys.stdout.write(script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of the parser and of its commands."""
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for command in action.choices.values() for inner in _actions(command)]
    return found
