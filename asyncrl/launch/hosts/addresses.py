"""Finds which of a run's hosts this machine is, and the address at which the other hosts reach this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from asyncrl.config.schema import ConfigError, is_loopback

_SLURM_NODE_ENV = "SLURMD_NODENAME"
_ANY_PORT = 9  # for a UDP socket that sends nothing: connecting it only finds the route


def own_host(hosts: Sequence[str]) -> str:
    """Return that one of the config's `hosts` that is this machine. Raises ConfigError if none or several of them are."""
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
        f"{', '.join(found)} are all this machine"
        if found
        else f"none of them is this machine ({', '.join(sorted(mine))})"
    )
    raise ConfigError(f"hosts={list(hosts)}: {what}; name each host by its host name or its own address")


def address_of(host: str, *, towards: Sequence[str] = ()) -> str:
    """Return the address at which other hosts reach this machine. Raises ConfigError. host: this machine's name in the config.

    towards: addresses or names of other hosts. They are needed if `host` resolves to loopback here (Debian's /etc/hosts has
    127.0.1.1). The result is then the address from which this machine would send to one of them; without such a route, loopback.
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
    """Whether the host of host:port refuses the connection, so nothing listens there. False if the host does not answer."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), limit_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def local_addresses() -> set[str]:
    """Return the IPv4 addresses of this machine's interfaces."""
    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    }


def _resolve(host: str) -> str:
    """Return the IPv4 address of a host; "": it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ""
    return str(found[0][4][0]) if found else ""
