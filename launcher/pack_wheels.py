"""Pack wheels for a machine without a network; launcher/pack_wheels.sh, which runs this in asyncrl's environment, describes it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from lock_versions import needed
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LIMIT_BYTES = 60_000_000
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
# Wheels for this glibc or an older one. torch's own wheels need 2.28.
PLATFORMS = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)]
PLATFORMS += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]


def frozen(lines: str) -> dict[str, str]:
    """Return the version of each package in lines of NAME==VERSION, such as those of `pip list --format=freeze`."""
    pins = (line.split("==") for line in lines.splitlines() if line.count("==") == 1 and not line.startswith("#"))
    return {canonicalize_name(name): pin.strip() for name, pin in pins}


def to_pack(extra: Sequence[str], has: Mapping[str, str], python: str) -> list[str]:
    """Return the names of the packages that a machine with this Python and the packages `has` lacks for asyncrl and for `extra`.

    has: name -> version. Raises ValueError if its torch is not one that asyncrl allows.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": "x86_64"}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython", "extra": ""}
    of_torch: dict[str, frozenset[str]] = {}
    needed("torch", frozenset(), of_torch, environment)
    (torch,) = [entry for entry in map(Requirement, distribution("asyncrl").requires or []) if entry.name == "torch"]
    if "torch" in has and not torch.specifier.contains(has["torch"], prereleases=True):
        raise ValueError(f"the machine has torch {has['torch']}; asyncrl needs {torch}")

    def is_there(requirement: Requirement) -> bool:
        name = canonicalize_name(requirement.name)
        return name in of_torch or (name in has and requirement.specifier.contains(has[name], prereleases=True))

    found: dict[str, frozenset[str]] = {}
    for name in ("asyncrl", *extra):
        needed(name, frozenset(), found, environment, is_there)
    return sorted(found)


def pack(pinned: str, python: str, folder: Path) -> None:
    """Put one package's wheel into the folder. Builds it here if the index has none; such a wheel must run everywhere."""
    wheels = (*PIP, "download", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *PLATFORMS)
    done = subprocess.run([*wheels, "--no-deps", f"--dest={folder}", pinned], stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return
    with tempfile.TemporaryDirectory() as built:
        made = subprocess.run([*PIP, "wheel", "--no-deps", f"--wheel-dir={built}", pinned])
        wheel = next(Path(built).glob("*-none-any.whl"), None) if made.returncode == 0 else None
        if wheel is None:
            raise SystemExit(f"{done.stderr}{pinned}: there is no wheel for Python {python}, and none can be made")
        shutil.move(wheel, folder)


def pack_asyncrl(folder: Path) -> None:
    """Build from a copy, because builds leave files behind, which a later one would pack."""
    with tempfile.TemporaryDirectory() as copy:
        for path in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / path, copy)
        shutil.copytree(ROOT / "asyncrl", Path(copy, "asyncrl"), ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run([*PIP, "wheel", "--no-deps", f"--wheel-dir={folder}", copy], check=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="pack_wheels.sh")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--has", type=Path)
    parser.add_argument("--with", action="append", default=[], dest="extra")
    options = parser.parse_args(arguments)
    has = frozen(options.has.read_text()) if options.has else {}
    locked = frozen((ROOT / "launcher" / "requirements.lock").read_text())
    try:
        names = to_pack(options.extra, has, options.python)
        pins = [f"{name}=={locked[name]}" for name in names if name != "asyncrl"]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    except (PackageNotFoundError, KeyError) as error:
        raise SystemExit(f"{error.args[0]} is not in launcher/requirements.lock, or not installed here") from None
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in options.folder.glob("*.whl"):  # the command below would install it too
        old.unlink()
    pack_asyncrl(options.folder)
    with ThreadPoolExecutor(4) as pool:  # pip mostly waits for the index
        one = partial(pack, python=options.python, folder=options.folder)
        list(pool.map(one, pins))
    wheels = sorted(options.folder.glob("*.whl"), key=lambda path: -path.stat().st_size)
    size = sum(path.stat().st_size for path in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB: {options.folder}")
    if size > LIMIT_BYTES:
        largest = ", ".join(f"{path.name.partition('-')[0]} {path.stat().st_size / 1e6:.0f}" for path in wheels[:5])
        raise SystemExit(
            f"more than {LIMIT_BYTES / 1e6:.0f} MB (largest: {largest}); name what the machine has by --has"
        )
    print("on the machine, where DIR is a new folder and the second line goes before each command of asyncrl:")
    print(f"  python3 -m pip install --no-index --no-deps --no-compile --target DIR {options.folder}/*.whl")
    print("  PYTHONPATH=DIR python3 -m asyncrl.cli.main run CONFIG")


if __name__ == "__main__":
    main(sys.argv[1:])
