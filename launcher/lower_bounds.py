"""Print the lowest version of each requirement of the installed asyncrl, as constraints for pip: lower_bounds.py [EXTRA ...]"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement


def lower_bounds(requirements: list[str], extras: list[str]) -> list[str]:
    """Return a constraint for each requirement with a lower bound, without the requirements of extras that are not in `extras`."""
    found = []
    for requirement in map(Requirement, requirements):
        bounds = [clause.version for clause in requirement.specifier if clause.operator in (">=", "==")]
        is_asked_for = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": name}) for name in extras
        )
        if is_asked_for and bounds:
            found.append(f"{requirement.name}=={bounds[0]}")
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(lower_bounds(requires("asyncrl") or [], sys.argv[1:])))
