"""SGLang's own environment: which SGLang an interpreter has, found in its files. Nothing of it is imported or run for that."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TESTED_VERSION = "0.5.23"  # launcher/setup_sglang.sh installs it
SETUP_HINT = (
    "make SGLang's environment with `bash launcher/setup_sglang.sh` (--cpu without a GPU), and set generation.python to "
    "the interpreter that it prints"
)
_LIMIT_S = 10.0
_ASK = """
import importlib.metadata as metadata
for package in ("sglang", "torch"):
    try:
        print(metadata.version(package))
    except metadata.PackageNotFoundError:
        print("")
"""


@dataclass(frozen=True)
class SGLangEnvironment:
    """What is installed beside an interpreter."""

    version: str  # of SGLang
    torch: str  # "" where it has none


def find_sglang(python: str) -> SGLangEnvironment | None:
    """None where the interpreter (this one, if empty) has no SGLang, or is none."""
    folder = _site_packages(python)
    if folder is not None:
        version = _version_in(folder, "sglang")
        return SGLangEnvironment(version, _version_in(folder, "torch")) if version else None
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version, torch, *_ = [*done.stdout.splitlines(), "", ""]
    return SGLangEnvironment(version, torch) if version else None


def _site_packages(python: str) -> Path | None:
    """Of a virtual environment, as its layout has it; None for other interpreters, which must be asked."""
    prefix = Path(python or sys.executable).expanduser().parent.parent
    if not (prefix / "pyvenv.cfg").is_file():
        return None
    return next(iter(sorted((prefix / "lib").glob("python3*/site-packages"))), None)


def _version_in(folder: Path, package: str) -> str:
    """`sglang-0.5.23.dist-info` -> 0.5.23; "" where it is not installed."""
    found = next(iter(folder.glob(f"{package}-*.dist-info")), None)
    return found.name.removeprefix(f"{package}-").removesuffix(".dist-info") if found is not None else ""
