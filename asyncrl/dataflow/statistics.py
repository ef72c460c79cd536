"""How statistics of several calls, or of several MFCs with the same names, become those of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Ends of the names of counts: of optimizer steps, of minibatches without a token
_COUNTS = ("_steps", "empty_minibatches")


def merge_stats(reports: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Merge statistics. Each report: statistics by name, and their weight, which is the number of groups.

    `*_max` is a maximum. `*_steps` and names of which the last part begins with `num_` are counts, which add up. All others are
    means over the groups of the reports that have them. Without any group that is the last report's value.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for stats, _ in reports for name in stats):
        found = [(stats[name], weight) for stats, weight in reports if name in stats]
        total = sum(weight for _, weight in found)
        if name.endswith("_max"):
            merged[name] = max(value for value, _ in found)
        elif name.endswith(_COUNTS) or name.rpartition("/")[2].startswith("num_"):
            merged[name] = math.fsum(value for value, _ in found)
        elif len(found) > 1 and total:
            merged[name] = math.fsum(value * weight for value, weight in found) / total
        else:
            merged[name] = found[-1][0]
    return merged
