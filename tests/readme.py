"""The README's code blocks, for tests that do what it says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import yaml
from omegaconf import OmegaConf

README = Path(__file__).parents[1] / "README.md"


def blocks(heading: str, language: str) -> list[str]:
    """Those of a section in this language."""
    _, found, rest = README.read_text(encoding="utf-8").partition(f"{heading}\n")
    assert found, f"{README} has no section {heading!r}"
    section = re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def commands(heading: str) -> list[str]:
    """The lines, comments too, of a section that shows one block of commands."""
    (block,) = blocks(heading, "bash")
    return block.splitlines()


def line_of(heading: str, start: str) -> str:
    """The one line that begins so, blanks apart."""
    (line,) = (line for line in commands(heading) if line.split()[: len(start.split())] == start.split())
    return line


def as_written(line: str, folder: Path) -> list[str]:
    """What to start to have the line run as by a user who has activated the environment and gone to the folder."""
    return [
        "bash",
        "-c",
        f"cd {shlex.quote(str(folder))}; PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; {line}",
    ]


def write_config(path: Path, base: Path, *overrides: str, leave_out: tuple[str, ...] = ()) -> Path:
    """A config with overrides in it, for a line that names only its file."""
    config = OmegaConf.merge(OmegaConf.load(base), OmegaConf.from_dotlist(list(overrides)))
    told = OmegaConf.to_container(config)
    assert isinstance(told, dict)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({key: value for key, value in told.items() if key not in leave_out}))
    return path
