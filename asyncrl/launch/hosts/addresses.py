"""Which of a run's hosts this machine is, and under which address the others reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from asyncrl.config.schema import ConfigError, is_loopback

_SLURM_NODE_ENV = "SLURMD_NODENAME"
_ANY_PORT = 9  # of a UDP socket that sends nothing: only the route is asked for


def own_host(hosts: Sequence[str]) -> str:
    """Of the config's hosts the one that this is. Raises ConfigError where none is, or several are."""
    node = os.environ.get(_SLURM_NODE_ENV, "")
    if node in hosts:
        return node
    mine = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    named = [host for host in hosts if host in mine]
    if len(named) == 1:
        return named[0]
    addresses = local_addresses()
    found = [host for host in hosts if _resolve(host) in addresses]
    if len(found) == 1:
        return found[0]
    what = (
        f"{', '.join(found)} all are this machine"
        if found
        else f"none of them is this machine ({', '.join(sorted(mine))})"
    )
    raise ConfigError(f"hosts={list(hosts)}: {what}; name each by its host name or an address of its own")


def address_of(host: str, *, towards: Sequence[str] = ()) -> str:
    """The address under which this machine, which the config calls `host`, is reached by the others.

    towards: addresses or names of others, for a name that stands for loopback here (/etc/hosts of Debian has 127.0.1.1).
    """
    address = _resolve(host)
    if not address:
        raise ConfigError(f"hosts: {host!r} cannot be resolved; use its address, or put it into /etc/hosts")
    if not is_loopback(address):
        return address
    for other in towards:
        target = _resolve(other)
        if target and not is_loopback(target):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((target, _ANY_PORT))
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return address


def refuses(endpoint: str, limit_s: float = 1.0) -> bool:
    """Whether the host of host:port answers that nothing listens there. False where it does not answer at all."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), limit_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def local_addresses() -> set[str]:
    """IPv4 addresses of this machine's interfaces."""
    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    }


def _resolve(host: str) -> str:
    """ "" where that is not possible."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(found[0][4][0]) if found else ""
