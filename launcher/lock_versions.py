"""Print the installed versions of asyncrl[dev] and all its dependencies, for requirements.lock."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

_HEADER = """\
# The versions of asyncrl[dev] that the tests have passed with, on Python {python} and Linux. launcher/setup.sh takes them as
# constraints; `pip install -r launcher/requirements.lock` installs them all. Made in the environment of run_tests.sh with
# `python launcher/lock_versions.py >launcher/requirements.lock`; a local build's suffix is left out."""


def needed(name: str, extras: frozenset[str], found: dict[str, frozenset[str]]) -> None:
    """Add a package and all its dependencies to `found`, each with the requested extras."""
    key = canonicalize_name(name)
    if key in found and extras <= found[key]:
        return
    found[key] = extras | found.get(key, frozenset())
    for requirement in map(Requirement, distribution(name).requires or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in found[key] | {""}):
            needed(requirement.name, frozenset(requirement.extras), found)


if __name__ == "__main__":
    packages: dict[str, frozenset[str]] = {}
    try:
        needed("asyncrl", frozenset({"dev"}), packages)
    except PackageNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed; make the environment with launcher/run_tests.sh") from None
    print(_HEADER.format(python=f"{sys.version_info.major}.{sys.version_info.minor}"))
    print("\n".join(f"{name}=={Version(version(name)).public}" for name in sorted(packages.keys() - {"asyncrl"})))
