"""A program's own environment: the versions of the program, torch and NCCL that an interpreter has. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.engines import ServerProgram

_LIMIT_S = 10.0
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # dependencies of torch's CUDA builds
_PACKAGES = ("torch", *_NCCL)
_ASK = """
import importlib.metadata as metadata, sys
for package in sys.argv[1:]:
    try:
        print(metadata.version(package))
    except metadata.PackageNotFoundError:
        print("")
"""


@dataclass(frozen=True)
class TorchVersions:
    """The torch of an environment, and its NCCL."""

    torch: str  # "": not installed
    nccl: str = ""  # "": no package has it (a CPU build, or one with NCCL inside)

    def __str__(self) -> str:
        return f"torch {self.torch or '?'}{f' with NCCL {self.nccl}' if self.nccl else ''}"

    def joins(self, other: TorchVersions) -> bool:
        """Whether processes of both can form one NCCL group. NCCL refuses every version but its own.

        If either NCCL version is unknown, the torch versions are compared. An unknown torch version counts as equal.
        """
        if self.nccl and other.nccl:
            return self.nccl == other.nccl
        ours, theirs = self.torch.partition("+")[0], other.torch.partition("+")[0]
        return not (ours and theirs) or ours == theirs


@dataclass(frozen=True)
class ProgramEnvironment(TorchVersions):
    """The packages of an interpreter's environment."""

    version: str = ""  # of the program


def own_torch() -> TorchVersions:
    """The torch of this environment, which is the trainer's. Does not import torch."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return TorchVersions(found.get("torch", ""), _nccl_of(found))


def find_program(program: ServerProgram, python: str) -> ProgramEnvironment | None:
    """Find a program in an interpreter's environment ("": this one's). None: it is not there, or that is no interpreter."""
    packages = (program.package, *_PACKAGES)
    folder = _site_packages(python)
    if folder is not None:
        found = {package: _version_in(folder, package) for package in packages}
    else:
        try:
            done = subprocess.run(
                [Path(python or sys.executable).expanduser().absolute(), "-c", _ASK, *packages],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=True,
                cwd="/",  # `-c` looks for modules in the current folder first
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found = dict(zip(packages, done.stdout.splitlines(), strict=False))
    version = found.get(program.package)
    return ProgramEnvironment(found.get("torch", ""), _nccl_of(found), version) if version else None


def _nccl_of(found: Mapping[str, str]) -> str:
    return next((version for package in _NCCL if (version := found.get(package))), "")


def _site_packages(python: str) -> Path | None:
    """site-packages of a virtual environment, from its layout. None for other interpreters, which must be run to find out."""
    prefix = Path(python or sys.executable).expanduser().parent.parent
    if not (prefix / "pyvenv.cfg").is_file():
        return None
    return next(iter(sorted((prefix / "lib").glob("python3*/site-packages"))), None)


def _version_in(folder: Path, package: str) -> str:
    """`sglang-0.5.23.dist-info` -> 0.5.23; "" if the package is not installed."""
    prefix = f"{package.replace('-', '_')}-"
    found = next(iter(folder.glob(f"{prefix}*.dist-info")), None)
    return found.name.removeprefix(prefix).removesuffix(".dist-info") if found is not None else ""
