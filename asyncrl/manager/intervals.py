"""Intervals between heartbeats of a rollout worker and between health probes of a generation server (pure).

The manager handles all of them on one core (about 8,000 requests a second), so the intervals grow with the number of peers. They
grow to at most a third of the lease, so that one lost message never ends a lease. The time to detect a dead peer does not change:
it is the lease.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_MOST_HEARTBEATS_A_SECOND = 1000.0  # from all rollout workers together: an eighth of what the core can handle
_MOST_PROBES_A_SECOND = 200.0  # to all servers together; a probe costs more than a heartbeat


def heartbeat_s(least_s: float, num_workers: int, lease_s: float) -> float:
    """Seconds between two heartbeats of a rollout worker."""
    return _stretched_s(least_s, num_workers / _MOST_HEARTBEATS_A_SECOND, lease_s)


def probe_s(least_s: float, num_servers: int, lease_s: float) -> float:
    """Seconds between two health probes of a healthy server. Other servers are probed every least_s, so that a server's death is
    not detected later."""
    return _stretched_s(least_s, num_servers / _MOST_PROBES_A_SECOND, lease_s)


def in_turn(names: Sequence[str], asked: Mapping[str, float], share: float) -> list[str]:
    """Return this share of the names, rounded up: those probed longest ago. asked: name -> time of its last probe."""
    return sorted(names, key=lambda name: asked.get(name, -math.inf))[: math.ceil(len(names) * share)]


def _stretched_s(least_s: float, wanted_s: float, lease_s: float) -> float:
    return max(least_s, min(wanted_s, lease_s / 3))
