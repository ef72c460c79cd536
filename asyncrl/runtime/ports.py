"""Chooses free ports for programs that need a port number at their start, if possible outside the range used for outgoing
connections.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_LOWEST_PORT = 10_000
_TRIES = 1000


def free_ports(host: str, count: int) -> list[int]:
    """Return `count` free TCP ports, if possible below the range of outgoing connections, so that they stay free for some
    time. Raises OSError if there are not enough.
    """
    try:
        highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - 1
    except (OSError, ValueError):
        highest = 32_767
    if highest < _LOWEST_PORT + 1000:
        highest = 65_535
    ports: list[int] = []
    for _ in range(_TRIES):
        port = _LOWEST_PORT + secrets.randbelow(highest - _LOWEST_PORT + 1)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind
            try:
                probe.bind((host, port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"no free port between {_LOWEST_PORT} and {highest} on {host}")
