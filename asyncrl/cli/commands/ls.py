"""`asyncrl-launch ls`."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from asyncrl.cli.commands.common import Commands, add_command, print_json, say
from asyncrl.cli.run_files import REWARD_STEPS, RunEntry, find_runs, read_entry
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.config.schema import ConfigError

_DESCRIPTION = """List all runs under a folder: state, step, reward and start. It only reads files.

FOLDER is a fileroot, the folder of an experiment or of a run; default: ./runs. States: running; complete; interrupted
(stopped or failed; `run` and `resume` continue from the newest checkpoint); on HOST (started on another host; see
`status RUN`); damaged (a file cannot be read; the error is shown). The reward is the mean of the last 5 train steps."""

_EPILOG = """examples:
  asyncrl-launch ls
  asyncrl-launch ls runs/sloppy-sorter                                 the runs of one experiment
  asyncrl-launch ls /data/runs --json | jq -r '.runs[] | select(.state == "interrupted") | .run_dir'

exit codes: 0 the runs are listed, even if there are none; 2 FOLDER does not exist."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "ls", ls, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path("runs"), help="default: ./runs")


def ls(arguments: argparse.Namespace, console: Console) -> int:
    """List all runs under a folder: state, step, reward, start."""
    folder = arguments.folder.expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"FOLDER={str(arguments.folder)!r} is not a folder; name the fileroot of your runs")
    entries = sorted(map(read_entry, find_runs(folder)), key=lambda entry: (entry.started, entry.name))
    if arguments.json:
        print_json({"folder": str(folder), "runs": [asdict(entry) for entry in entries]})
    elif entries:
        console.print(_table(folder, entries, arguments.clock.time()))
    else:
        say(console, f"{folder}: there are no runs here; name the fileroot of your runs")
    return 0


def _table(folder: Path, entries: list[RunEntry], now: float) -> FittedTable:
    rows = []
    for entry in entries:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.started)) if entry.started else ""
        rows.append(
            (
                escape(entry.name),
                escape(f"{entry.state}: {entry.problem}" if entry.problem else entry.state),
                f"{entry.step}/{entry.total_steps or '?'}",
                "" if entry.reward is None else f"{entry.reward:.3f}",
                f"{began} ({_age_text(now - entry.started)} ago)" if began else "",
            )
        )
    reward = f"reward, mean of {REWARD_STEPS} steps"
    columns = ("run", Column("state", "text"), "step", reward, Column("started", "text"))
    return FittedTable(escape(str(folder)), columns, rows)


def _age_text(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
