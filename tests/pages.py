"""The code blocks of README.md and of the pages in docs/, for tests that do what they say."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import yaml
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines, comments too, of a page that shows one block of commands."""
    (block,) = blocks(page, "bash")
    return block.splitlines()


def line_of(page: Path, start: str) -> str:
    """Return the only line of the commands that begins with the words of `start`. The amount of whitespace does not matter."""
    (line,) = (line for line in commands(page) if line.split()[: len(start.split())] == start.split())
    return line


def as_written(line: str, folder: Path) -> list[str]:
    """Return the command that runs the line as if typed in the folder, with the environment activated."""
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
