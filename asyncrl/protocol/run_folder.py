"""Folders of a run by name: what messages carry.

A message names a folder of the run, never a path: each process looks for it in the run's folder that its own config names. So a
message cannot lead a process to other files, be they the user's or another run's.
"""

from __future__ import annotations

from pathlib import Path


class OutsideRunError(ValueError):
    """A name that leads out of the run's folder."""


def name_of(run_dir: str | Path, path: Path) -> str:
    """The name of a folder of the run, with "/" between its parts. Raises OutsideRunError for another one."""
    try:
        name = path.absolute().relative_to(Path(run_dir).absolute()).as_posix()
    except ValueError as error:
        raise OutsideRunError(f"{path} is not in the run's folder {run_dir}") from error
    path_of(run_dir, name)
    return name


def path_of(run_dir: str | Path, name: str) -> Path:
    """Where the folder of this name is, or will be.

    Raises OutsideRunError for the run's folder itself, an absolute path, "..", and a name whose path, with symbolic links
    followed, is elsewhere.
    """
    top = Path(run_dir)
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute() or "\0" in name:
        raise OutsideRunError(f"{name!r} is no folder of the run in {run_dir}")
    path = top.joinpath(*parts)
    if path.is_symlink() or not path.resolve().is_relative_to(top.resolve()):
        raise OutsideRunError(f"{name!r} leads out of the run's folder {run_dir} by a symbolic link")
    return path
