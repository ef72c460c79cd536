"""Print the installed versions of asyncrl[dev] and all its dependencies, for requirements.lock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

_HEADER = """\
# The versions of asyncrl[dev] that the tests have passed with, on Python {python} and Linux. launcher/setup.sh takes them as
# constraints; `pip install -r launcher/requirements.lock` installs them all. Made in the environment of run_tests.sh with
# `python launcher/lock_versions.py >launcher/requirements.lock`; a local build's suffix is left out."""


def needed(
    name: str,
    extras: frozenset[str],
    found: dict[str, frozenset[str]],
    environment: Mapping[str, str] = MappingProxyType({}),
    is_left_out: Callable[[Requirement], bool] = lambda requirement: False,
) -> None:
    """Add a package and all its dependencies to `found`, each with the requested extras.

    environment: variables of markers that are not those of this interpreter. is_left_out: True for a requirement that is not
    followed.
    """
    key = canonicalize_name(name)
    if key in found and extras <= found[key]:
        return
    found[key] = extras | found.get(key, frozenset())
    for requirement in map(Requirement, distribution(name).requires or []):
        marker = requirement.marker
        applies = marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in found[key] | {""})
        if applies and not is_left_out(requirement):
            needed(requirement.name, frozenset(requirement.extras), found, environment, is_left_out)


if __name__ == "__main__":
    packages: dict[str, frozenset[str]] = {}
    try:
        needed("asyncrl", frozenset({"dev"}), packages)
    except PackageNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed; make the environment with launcher/run_tests.sh") from None
    print(_HEADER.format(python=f"{sys.version_info.major}.{sys.version_info.minor}"))
    print("\n".join(f"{name}=={Version(version(name)).public}" for name in sorted(packages.keys() - {"asyncrl"})))
