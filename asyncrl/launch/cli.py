"""asyncrl-launch: one command line for a run's whole life. Each command is a module of `commands`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from asyncrl.config import ConfigError
from asyncrl.launch.commands import check, prepare, run, status, stop
from asyncrl.launch.progress import make_console
from asyncrl.launch.rundir import LaunchError

_INTERRUPTED = 130
_COMMANDS = (run, check, prepare, status, stop)

_DESCRIPTION = """Asynchronous reinforcement learning of language models, without Ray.

A run is a config (YAML) and overrides; `run` starts its processes on this machine, prints a line per train
step, and ends them all when it ends. Everything it makes is in <fileroot>/<experiment>/<trial>/."""

_EPILOG = """examples:
  asyncrl-launch check  configs/quickstart_cpu.yaml                 what would run, and whether it can
  asyncrl-launch run    configs/quickstart_cpu.yaml trial=second train.optimizer.lr=1e-4
  asyncrl-launch status runs/sloppy-sorter/second                   from another terminal: who waits for whom
  asyncrl-launch stop   runs/sloppy-sorter/second                   as Ctrl-C would

`asyncrl-launch COMMAND --help` says more of each."""


def main(argv: Sequence[str] | None = None) -> int:
    """argv: instead of the command line's."""
    arguments = _parser().parse_args(argv)
    console = make_console()
    try:
        return int(arguments.command(arguments, console))
    except ConfigError as error:
        console.print("[bold red]config:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    except LaunchError as error:
        console.print("[bold red]failed:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:  # before there was a run to stop
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
