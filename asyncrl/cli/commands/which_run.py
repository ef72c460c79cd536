"""The run that a command is about: the one that its RUN names or, without RUN, the only one there is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.cli.run_files import RunEntry, find_runs, read_entry
from asyncrl.config.schema import ConfigError
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory

FILEROOT = Path("runs")  # the default of the field fileroot
_MOST_LISTED = 10


def run_dir_of(target: str | None, overrides: Sequence[str] = (), *, running: bool = False) -> Path:
    """A run's folder. target: the folder itself, or the config that the run was started from (with its overrides); None or "": the
    only run under ./runs that is running or, unless `running` is set, the only run there. Raises ConfigError."""
    if not target:
        return only_run(FILEROOT, running=running)
    path = Path(target).expanduser()
    if path.is_dir():
        return path.absolute()
    if not path.is_file():
        raise ConfigError(f"{target!r} is neither the folder of a run nor a config{_there(FILEROOT)}")
    return run_directory(load_experiment(path, overrides))


def only_run(fileroot: Path, *, running: bool = False) -> Path:
    """See run_dir_of."""
    entries = list(map(read_entry, find_runs(fileroot.absolute())))
    on = [entry for entry in entries if entry.state == "running" or entry.state.startswith("on ")]
    chosen = on if on or running else entries
    if len(chosen) == 1:
        return Path(chosen[0].run_dir)
    where = f"under {fileroot.absolute()}"
    if chosen:
        which = f"there are several {'that run ' if on else ''}{where}:{_listed(chosen)}"
    else:
        which = f"none is running {where}" if running else f"there is none {where}"
    raise ConfigError(f"RUN is missing, and {which}")


def _there(fileroot: Path) -> str:
    entries = list(map(read_entry, find_runs(fileroot.absolute())))
    return f"; runs under {fileroot.absolute()}:{_listed(entries)}" if entries else ""


def _listed(entries: Sequence[RunEntry]) -> str:
    """The newest runs, each on a line of its own."""
    newest = sorted(entries, key=lambda entry: -entry.started)
    lines = [f"\n  {entry.run_dir}  {entry.state}, step {entry.step}" for entry in newest[:_MOST_LISTED]]
    more = len(newest) - _MOST_LISTED
    return "".join([*lines, *([f"\n  and {more} more: `asyncrl-launch ls`"] if more > 0 else [])])
