"""Names of folders in a run, as messages carry them.

A message names a folder of the run, never a path. Each process resolves the name in the run's folder given by its own
config. So a message cannot direct a process to files outside the run, whether the user's or another run's.

The weight versions of a run with shared devices are in shared memory. The launcher then makes `weights` a link into the folder of
the run's sockets, which only the run's user can enter and which does not outlive the launcher.
"""

from __future__ import annotations

from pathlib import Path

SOCKETS, WEIGHTS = "sockets", "weights"  # names of links in the run's folder


class OutsideRunError(ValueError):
    """The name or path leads outside the run's folder."""


def name_of(run_dir: str | Path, path: Path) -> str:
    """Return the name of a folder of the run, with "/" between its parts. Raises OutsideRunError for a folder outside the run."""
    try:
        name = path.absolute().relative_to(Path(run_dir).absolute()).as_posix()
    except ValueError as error:
        raise OutsideRunError(f"{path} is not in the run's folder {run_dir}") from error
    path_of(run_dir, name)
    return name


def path_of(run_dir: str | Path, name: str) -> Path:
    """Return the path of the folder with this name. The folder need not exist yet.

    Raises OutsideRunError for the run's folder itself, an absolute path, "..", and a name that leads elsewhere through
    symbolic links.
    """
    top = Path(run_dir)
    parts = Path(name).parts
    if not parts or ".." in parts or Path(name).is_absolute() or "\0" in name:
        raise OutsideRunError(f"{name!r} is no folder of the run in {run_dir}")
    path = top.joinpath(*parts)
    inside = top.resolve()
    if parts[0] == WEIGHTS and len(parts) > 1 and (top / WEIGHTS).resolve() == (top / SOCKETS).resolve() / WEIGHTS:
        inside = (top / WEIGHTS).resolve()
    if path.is_symlink() or not path.resolve().is_relative_to(inside):
        raise OutsideRunError(
            f"{name!r} is a symbolic link, or a symbolic link in it leads out of the run's folder {run_dir}"
        )
    return path
