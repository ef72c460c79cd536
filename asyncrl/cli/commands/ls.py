"""`asyncrl-launch ls`."""

from __future__ import annotations

import argparse
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape

from asyncrl.cli.commands.common import Commands, add_command, print_json, say
from asyncrl.cli.curves import number, read_records
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.config.schema import ConfigError
from asyncrl.launch.rundir import LOCK_FILE, RUN_FILE, SUMMARY_FILE, LaunchError, is_running, read_record
from asyncrl.runtime.metrics import METRICS_FILE

_DEPTH = 2  # levels from fileroot to a run: <experiment>/<trial>
_TAIL_BYTES = 100_000  # bytes read from the end of metrics.jsonl; they hold more than _REWARD_STEPS records
_REWARD_STEPS = 5  # the reward shown is the mean of this many newest train steps

_DESCRIPTION = """List all runs under a folder: state, step, reward and start. It only reads files.

FOLDER is a fileroot, the folder of an experiment or of a run; default: ./runs. States: running; complete; interrupted
(stopped or failed; `run` and `resume` continue from the newest checkpoint); on HOST (started on another host; see
`status RUN`); damaged (a file cannot be read; the error is shown). The reward is the mean of the last 5 train steps."""

_EPILOG = """examples:
  asyncrl-launch ls
  asyncrl-launch ls runs/sloppy-sorter                                 the runs of one experiment
  asyncrl-launch ls /data/runs --json | jq -r '.runs[] | select(.state == "interrupted") | .run_dir'

exit codes: 0 the runs are listed, even if there are none; 2 FOLDER does not exist."""


@dataclass(frozen=True)
class RunEntry:
    """A run as described by its files. 0 and None: unknown."""

    run_dir: str
    name: str  # <experiment>/<trial>
    state: str
    step: int = 0
    total_steps: int = 0
    reward: float | None = None
    started: float = 0.0
    problem: str = ""  # of a damaged run


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


def find_runs(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Folders of runs: `folder` itself and folders at most `depth` levels below it, if a launcher has written its files there."""
    if (folder / RUN_FILE).exists() or (folder / LOCK_FILE).exists():
        yield folder
    elif depth:
        try:
            below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
        except OSError:  # for example another user's folder
            return
        for path in below:
            yield from find_runs(Path(path), depth - 1)


def read_entry(run_dir: Path) -> RunEntry:
    """Read a run's files. A broken run raises nothing: it gets the state `damaged`."""
    name = f"{run_dir.parent.name}/{run_dir.name}"
    try:
        record, is_complete = read_record(run_dir), (run_dir / SUMMARY_FILE).exists()
        step, reward = newest_step(run_dir / METRICS_FILE)
        if record is not None and record.host not in ("", socket.gethostname()):
            state = "complete" if is_complete else f"on {record.host}"
        elif is_running(run_dir):
            state = "running"
        else:
            state = "complete" if is_complete else "interrupted"
    except (LaunchError, OSError) as error:
        return RunEntry(str(run_dir), name, "damaged", problem=str(error))
    if record is None:
        return RunEntry(str(run_dir), name, state, step, reward=reward)
    return RunEntry(str(run_dir), name, state, step, record.total_steps, reward, record.started)


def newest_step(metrics: Path) -> tuple[int, float | None]:
    """The highest step (0: none), and the mean reward of the last _REWARD_STEPS train steps (None: none). Lines that are not
    records are skipped."""
    records, _ = read_records(metrics, _TAIL_BYTES)
    rewards = [reward for record in records if math.isfinite(reward := number(record, "reward/mean"))]
    step = max((int(number(record, "step")) for record in records), default=0)
    return step, fmean(rewards[-_REWARD_STEPS:]) if rewards else None


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
    reward = f"reward, mean of {_REWARD_STEPS} steps"
    columns = ("run", Column("state", "text"), "step", reward, Column("started", "text"))
    return FittedTable(escape(str(folder)), columns, rows)


def _age_text(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
