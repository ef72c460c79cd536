"""The desired number of generation servers of a run: a key in name resolve.

`asyncrl-launch scale` and `POST /scale` of the gserver manager write the key. The launcher and the gserver manager watch it: the
launcher starts and stops servers, and the manager drains those that leave.
"""

from __future__ import annotations

import msgspec

from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.names import Names
from asyncrl.protocol.scaling import DesiredServers
from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolver

MOST_SERVERS = 256  # a larger number is a typing error


def desired_servers(resolver: NameResolver, names: Names) -> int | None:
    """Return the desired number of generation servers. None: it was never set, so the allocation's number applies. Blocks; raises
    NameResolveError if name resolve does not answer."""
    try:
        return msgspec.json.decode(resolver.get(names.desired_generation_servers()), type=DesiredServers).count
    except (NameEntryNotFound, *DECODE_ERRORS):
        return None


def set_desired_servers(
    resolver: NameResolver, names: Names, count: int, *, allocated: int, request_id: str
) -> tuple[int, int]:
    """Set the desired number of generation servers, unless it is already set and as many servers run. Setting the same number again
    while fewer run makes the launcher retry servers that could not join.

    allocated: number of servers of the allocation. request_id: a new, unique id. Returns the previous number, and the number of
    servers that name resolve lists. Blocks; raises NameResolveError if name resolve does not answer.
    """
    before = desired_servers(resolver, names) or allocated
    there = len(resolver.get_subtree(names.generation_servers()))
    if not before == count == there:
        desired = DesiredServers(count=count, id=request_id)
        resolver.add(names.desired_generation_servers(), msgspec.json.encode(desired).decode(), replace=True)
    return before, there
