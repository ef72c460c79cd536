"""`asyncrl-launch init`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_command, print_json, say
from asyncrl.config.nearest import did_you_mean
from asyncrl.config.reference import schema_text
from asyncrl.config.schema import ConfigError

_DEFAULT = "sloppy_sorter"
_CONFIG = "config.yaml"
_SCHEMA = "schema.json"

_DESCRIPTION = """Write a folder with a task that trains: config, prompts, reward function and a README.

The folder is a copy of an example that comes with asyncrl, by default the sloppy sorter, which learns within
minutes on two cores. Nothing in it refers to other folders, so you can change it into your own task. With
schema.json, which the first line of the config names, an editor completes and checks the config."""

_EPILOG = """examples:
  asyncrl-launch init my_task                          a task that learns within minutes
  asyncrl-launch init my_task --example word_problems  a chat model, a slow judge, two tries
  asyncrl-launch init --list                           list all examples

exit codes: 0 the folder is written; 2 the name, the example or the folder cannot be used."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "init", init, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="the folder to write; its last part names the experiment"
    )
    parser.add_argument("--example", default=_DEFAULT, help=f"the example to copy (default: {_DEFAULT})")
    parser.add_argument("--list", action="store_true", help="list the examples instead")


def init(arguments: argparse.Namespace, console: Console) -> int:
    """Write a folder with a task that trains, as a start for your own."""
    examples = shipped_examples()
    if arguments.list:
        titles = {name: _title(folder) for name, folder in examples.items()}
        if arguments.json:
            print_json({"examples": titles})
        else:
            say(console, *(f"  {name:15s} {title}" for name, title in titles.items()))
        return 0
    if arguments.name is None:
        raise ConfigError("NAME is missing; name the folder to write, such as `asyncrl-launch init my_task`")
    if arguments.example not in examples:
        hint = did_you_mean(arguments.example, examples)
        raise ConfigError(f"--example {arguments.example}: no such example; {hint}choose one of {', '.join(examples)}")
    target = Path(arguments.name).expanduser()
    written = write_task(examples[arguments.example], target)
    commands = [f"cd {shlex.quote(str(target))}"]
    if _CONFIG in written:
        commands += [f"asyncrl-launch prepare {_CONFIG}", f"asyncrl-launch run {_CONFIG}"]
    if arguments.json:
        folder = str(target.absolute())
        print_json({"folder": folder, "example": arguments.example, "files": written, "next": commands})
    else:
        copied = f"{target} is a copy of the example {arguments.example}: {', '.join(written)}"
        say(console, copied, f"README.md explains the files. Next:\n\n  {' && '.join(commands)}\n")
    return 0


def shipped_examples() -> dict[str, Path]:
    """The folders of the examples, by name. In a checkout asyncrl/examples is a link to examples/; a wheel contains the files."""
    root = Path(str(files("asyncrl"))) / "examples"
    return {file.parent.name: file.parent for file in sorted(root.glob("*/README.md"))}


def write_task(example: Path, target: Path) -> list[str]:
    """Copy an example's files into a new or empty folder, and name the experiment after the folder. Return the files' names.

    If there are configs, write this version's JSON schema beside them, and name it in their first lines. Folders in the example are
    not copied, because a run or `prepare` has made them.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"NAME {str(target)!r}: it exists and is not an empty folder; choose another name")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"NAME {str(target)!r} cannot be created: {error.strerror}; choose another folder") from error
    written = sorted(file.name for file in example.iterdir() if file.is_file())
    for name in written:
        shutil.copyfile(example / name, target / name)
    configs = [target / name for name in written if name.endswith(".yaml")]
    for config in configs:
        text = config.read_text(encoding="utf-8")
        config.write_text(re.sub(r"(?<=\$schema=)\S+", _SCHEMA, text, count=1), encoding="utf-8")
    if configs:
        (target / _SCHEMA).write_text(schema_text(), encoding="utf-8")
        written = sorted([*written, _SCHEMA])
    if _CONFIG in written:
        config = target / _CONFIG
        line = (
            f"experiment: {json.dumps(target.absolute().name)}"  # quoted: YAML reads some names as numbers or booleans
        )
        text = re.sub(r"(?m)^experiment: .*$", lambda _: line, config.read_text(encoding="utf-8"))
        config.write_text(text, encoding="utf-8")
    return written


def _title(example: Path) -> str:
    """The first line of the example's README."""
    with (example / "README.md").open(encoding="utf-8") as readme:
        return readme.readline().lstrip("# ").strip()
