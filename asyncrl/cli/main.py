"""asyncrl-launch: the command line. Each command is a module of `commands`."""

from __future__ import annotations

import argparse
import contextlib
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from asyncrl import __version__
from asyncrl.cli.commands import (
    audit,
    chaos,
    check,
    completion,
    config,
    debug,
    eval,
    host,
    init,
    inspect,
    logs,
    ls,
    plan,
    plot,
    prepare,
    profile,
    rejudge,
    resume,
    run,
    scale,
    status,
    stop,
    trace,
    ui,
)
from asyncrl.cli.commands.common import CONFIG_ERROR, FAILED, error_object, print_json, say
from asyncrl.cli.doctor import installed_version
from asyncrl.cli.output import never_waiting, use_any_streams
from asyncrl.cli.progress import make_console
from asyncrl.cli.tables import HelpFormatter
from asyncrl.config.fields import find_field
from asyncrl.config.nearest import nearest
from asyncrl.config.schema import ConfigError
from asyncrl.launch.redact import redact_text, redact_urls
from asyncrl.launch.rundir import LaunchError

_INTERRUPTED = 130
_BROKEN_PIPE = 128 + signal.SIGPIPE
_COMMANDS = (
    init,
    run,
    resume,
    host,
    check,
    plan,
    config,
    prepare,
    ls,
    status,
    scale,
    logs,
    plot,
    ui,
    inspect,
    audit,
    eval,
    rejudge,
    chaos,
    trace,
    profile,
    debug,
    stop,
    completion,
)

_MEANT = {  # words of other programs
    "start": "run",
    "train": "run",
    "launch": "run",
    "submit": "run",
    "continue": "resume",
    "restart": "resume",
    "list": "ls",
    "ps": "ls",
    "show": "status",
    "top": "status",
    "watch": "status",
    "validate": "check",
    "doctor": "check",
    "kill": "stop",
    "cancel": "stop",
    "tail": "logs",
    "curves": "plot",
    "new": "init",
    "create": "init",
    "download": "prepare",
    "help": "--help",
}
_LISTS = ("words", "overrides", "runs")  # names of the positional arguments that take any number of words

_DESCRIPTION = """Asynchronous reinforcement learning of language models, without Ray.

A run is a config (YAML) and overrides. `run` starts its processes on this machine, prints a line per train
step, and stops all processes at the end. All its files are in <fileroot>/<experiment>/<trial>/."""

_EPILOG = """examples, in the order of first use:
  asyncrl-launch check                                              can this machine run asyncrl? starts nothing
  asyncrl-launch init   my_task                                     write a small task that learns within minutes
  asyncrl-launch check  configs/quickstart_cpu.yaml                 validate a config and list its processes
  asyncrl-launch plan   configs/quickstart_cpu.yaml --gpu h100-80g  memory of each process on a kind of GPU; starts nothing
  asyncrl-launch run    configs/quickstart_cpu.yaml trial=second train.optimizer.lr=1e-4
  asyncrl-launch ls                                                 all runs under ./runs: state, step, reward
  asyncrl-launch status runs/sloppy-sorter/second                   in another terminal: what each process waits for
  asyncrl-launch logs   runs/sloppy-sorter/second -f                the logs of all its processes in one stream
  asyncrl-launch plot   runs/sloppy-sorter/second                   its curves, as a picture file
  asyncrl-launch ui     runs/sloppy-sorter/second                   its page: curves, time, processes, tokens, advice
  asyncrl-launch scale  runs/sloppy-sorter/second generation=3      change the number of generation servers while it runs
  asyncrl-launch stop   runs/sloppy-sorter/second                   stop it, like Ctrl-C
  asyncrl-launch resume runs/sloppy-sorter/second                   continue from its newest checkpoint

for a closer look:
  asyncrl-launch run    CONFIG record.trajectories=true trace=true  record trajectories and a timeline
  asyncrl-launch inspect RUN                                        show a trajectory, token by token
  asyncrl-launch audit   RUN                                        check that every prompt was trained exactly once
  asyncrl-launch rejudge RUN                                        judge its recorded responses again
  asyncrl-launch trace   RUN                                        make a timeline for ui.perfetto.dev
  asyncrl-launch profile RUN                                        record the next train steps with torch's profiler
  asyncrl-launch debug   CONFIG_OF_PROCESS --pdb                    run one process by itself

to test fault tolerance:
  asyncrl-launch chaos   CONFIG --seed 7                            kill and freeze its processes, then audit the result

exit codes of all commands: 0 done; 1 failed, the cause is printed; 2 the config or the command line cannot
work, the remedy is printed; 3 (status, scale, profile) the run is not running; 128 + N stopped by signal N (130: Ctrl-C).
With --json every command prints JSON on stdout, errors as {"error": {"kind": ..., "message": ...}}.

`asyncrl-launch COMMAND --help` explains each command."""


class UsageError(Exception):
    """argparse rejects the command line."""


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting, so that the error can be printed as JSON."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: {message}\nsee `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """argv: replaces the arguments of the command line."""
    files = use_any_streams() if argv is None else []
    words = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in words
    console = make_console(stderr=as_json)  # with --json, stdout is for JSON alone
    try:
        arguments = parse(words)
        for file in files:
            file.ends_with_reader = arguments.ends_with_reader or getattr(arguments, "watch", False)
        supervises = getattr(arguments, "supervises", False) and not getattr(arguments, "dry_run", False)
        with never_waiting(as_json=as_json) if supervises else contextlib.nullcontext():
            return _execute(arguments, console, as_json)
    except UsageError as error:
        return _refuse(str(error), "usage", CONFIG_ERROR, console, as_json)
    except BrokenPipeError:  # the reader of stdout has ended, as in `asyncrl-launch logs RUN -f | head`
        return _BROKEN_PIPE
    except KeyboardInterrupt:  # a launcher handles Ctrl-C itself while its run exists
        return _INTERRUPTED


def _execute(arguments: argparse.Namespace, console: Console, as_json: bool) -> int:
    try:
        return int(arguments.command(arguments, console))
    except ConfigError as error:
        return _refuse(redact_text(str(error)), "config", CONFIG_ERROR, console, as_json)
    except LaunchError as error:
        return _refuse(redact_urls(str(error)), "failed", FAILED, console, as_json)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse with argparse, but let a command's list (workers, overrides, runs) continue after an option: `logs RUN -f master`."""
    if words and not words[0].startswith("-"):
        _check_command(words[0])
    parser = _parser()
    arguments, behind = parser.parse_known_args(words)
    arguments.command_line, arguments.parser = words, parser
    more = next((found for name in _LISTS if isinstance(found := getattr(arguments, name, None), list)), None)
    if behind and (more is None or any(word.startswith("-") for word in behind)):
        unknown = f"asyncrl-launch: unrecognized arguments: {' '.join(behind)}"
        hint = _as_override(words, behind) if hasattr(arguments, "overrides") else ""
        raise UsageError(f"{unknown}\n{hint}see `asyncrl-launch --help`")
    if more is not None:
        more.extend(behind)
    return arguments


def _check_command(word: str) -> None:
    names = [command.__name__.rpartition(".")[2] for command in _COMMANDS]
    if word in names:
        return
    meant = _MEANT.get(word.lower()) or nearest(word, names)
    hint = f"did you mean {meant!r}? " if meant else ""
    if Path(word).suffix in (".yaml", ".yml"):
        hint = f"did you mean `asyncrl-launch run {word}`? "
    raise UsageError(
        f"asyncrl-launch: unknown command {word!r}: {hint}commands: {', '.join(names)}\nsee `asyncrl-launch --help`"
    )


def _as_override(words: Sequence[str], behind: Sequence[str]) -> str:
    """If the key in `--key=value` or `--key value` is a field of the config, or close to one: a hint how to write it as an
    override. Otherwise ""."""
    written = next(word for word in behind if word.startswith("-"))
    key, equals, value = written.lstrip("-").partition("=")
    follower = next(iter(words[words.index(written) + 1 :]), "-")
    if not equals and not follower.startswith("-"):
        value = follower
    name = find_field(key)
    return f"fields of the config are written key=value, without dashes: {name}={value or '...'}\n" if name else ""


def _refuse(message: str, kind: str, code: int, console: Console, as_json: bool) -> int:
    if as_json:
        print_json(error_object(kind, message))
    elif kind == "usage":
        sys.stderr.write(f"{message}\n")
    else:
        console.print(f"[bold red]{kind}:[/]", end=" ")
        say(console, message)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="asyncrl-launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=_version(), help="show the versions of asyncrl, Python and torch"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _version() -> str:
    """The text of --version. The version of torch is read from torch's metadata, because importing torch takes seconds."""
    torch = installed_version("torch") or "not installed"
    return f"asyncrl {__version__}, Python {platform.python_version()}, torch {torch}"


if __name__ == "__main__":
    sys.exit(main())
