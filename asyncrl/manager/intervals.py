"""How often the manager hears of each rollout worker and each generation server (pure).

One core answers for all of them (about 8,000 requests a second), so intervals grow with their number; but never so far that one
lost message would end a lease. How long it takes to find the dead does not change: that is the lease.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_MOST_HEARTBEATS_A_SECOND = 1000.0  # of all rollout workers: an eighth of the core
_MOST_PROBES_A_SECOND = 200.0  # of all servers: each costs more than a heartbeat


def heartbeat_s(least_s: float, num_workers: int, lease_s: float) -> float:
    """Between two heartbeats of a rollout worker."""
    return _stretched_s(least_s, num_workers / _MOST_HEARTBEATS_A_SECOND, lease_s)


def probe_s(least_s: float, num_servers: int, lease_s: float) -> float:
    """Between two health probes of a server that is well; others are asked every least_s, so that their end is not seen later."""
    return _stretched_s(least_s, num_servers / _MOST_PROBES_A_SECOND, lease_s)


def in_turn(names: Sequence[str], asked: Mapping[str, float], share: float) -> list[str]:
    """A share of them, rounded up: those that were asked the longest ago. asked: when."""
    return sorted(names, key=lambda name: asked.get(name, -math.inf))[: math.ceil(len(names) * share)]


def _stretched_s(least_s: float, wanted_s: float, lease_s: float) -> float:
    return max(least_s, min(wanted_s, lease_s / 3))
