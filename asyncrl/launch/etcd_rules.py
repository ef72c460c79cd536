"""On which hosts the private etcd has servers (pure).

Beside the launcher's two, or none: a majority of two servers is both, so that a second one alone would only be one more to lose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from asyncrl.config import NetworkConfig
from asyncrl.launch.agent_rules import ABSENT_LIMIT_S

NUM_SERVERS = 3
_MARGIN_S = 2.0


def grows(cluster: str, hosts: Sequence[str]) -> bool:
    """Whether a run's private etcd is to have more than one server."""
    return cluster != "local" and len(hosts) >= NUM_SERVERS


def members(own_host: str, there: Sequence[str], before: Collection[str], unfit: Collection[str]) -> list[str]:
    """The hosts that are to have a server beside own_host's. there: those that have an agent. before: those that have one by
    now, who keep it. unfit: where one could not be started."""
    fit = [host for host in there if host != own_host and host not in unfit]
    chosen = [host for host in fit if host in before] + [host for host in fit if host not in before]
    others = NUM_SERVERS - 1
    return chosen[:others] if len(chosen) >= others else []


def alone_after_s(network: NetworkConfig) -> float:
    """After how long without a majority the launcher's server may go on by itself: if the other hosts do live and are only cut
    off, they have seen the launcher's key go by then, and have ended what they ran."""
    return network.host_lost_after_s + ABSENT_LIMIT_S + _MARGIN_S
