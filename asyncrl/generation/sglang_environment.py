"""SGLang's own environment: finds the versions of SGLang, torch and NCCL that an interpreter has, without importing them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTED_VERSION = "0.5.23"  # launcher/setup_sglang.sh installs it
SETUP_HINT = (
    "create SGLang's environment with `bash launcher/setup_sglang.sh` (--cpu without a GPU), and set generation.python to "
    "the interpreter that it prints"
)
_LIMIT_S = 10.0
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # dependencies of torch's CUDA builds
_PACKAGES = ("sglang", "torch", *_NCCL)
_ASK = """
import importlib.metadata as metadata, sys
for package in sys.argv[1:]:
    try:
        print(metadata.version(package))
    except metadata.PackageNotFoundError:
        print("")
"""


def nccl_settings(server_args: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of NCCL that SGLang makes at its start (_set_envs_and_config), for the other members of its groups: with other
    ones NCCL refuses the group or hangs. Those that the environment sets stay, because both sides inherit them."""
    given = {name.removeprefix("--"): value.lower() for name, value in server_args.items()}

    def is_on(flag: str) -> bool:
        return given.get(flag, "false") in ("", "true")

    symmetric = is_on("enable-symm-mem")
    found = {"NCCL_CUMEM_ENABLE": symmetric, "NCCL_NVLS_ENABLE": symmetric or is_on("enable-nccl-nvls")}
    # SGLang overrides the environment only for a flag
    return {name: str(int(on)) for name, on in found.items() if on or name not in environment}


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
class SGLangEnvironment(TorchVersions):
    """The packages of an interpreter's environment."""

    version: str = ""  # of SGLang


def own_torch() -> TorchVersions:
    """The torch of this environment, which is the trainer's. Does not import torch."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return TorchVersions(found.get("torch", ""), _nccl_of(found))


def find_sglang(python: str) -> SGLangEnvironment | None:
    """Find SGLang in an interpreter's environment ("": this one's). None: it has no SGLang, or is not an interpreter."""
    folder = _site_packages(python)
    if folder is not None:
        found = {package: _version_in(folder, package) for package in _PACKAGES}
    else:
        try:
            done = subprocess.run(
                [Path(python or sys.executable).expanduser().absolute(), "-c", _ASK, *_PACKAGES],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=True,
                cwd="/",  # `-c` looks for modules in the current folder first
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found = dict(zip(_PACKAGES, done.stdout.splitlines(), strict=False))
    version = found.get("sglang")
    return SGLangEnvironment(found.get("torch", ""), _nccl_of(found), version) if version else None


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
