"""The manager's side of `POST /scale` and `GET /servers`: reads and sets the desired number of generation servers.

The manager starts and stops no process. It writes the same key in name resolve as `asyncrl-launch scale`, and the launcher acts on
the key (asyncrl/launch/scaling.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncrl.protocol.manager import ServerView
from asyncrl.protocol.names import Names
from asyncrl.protocol.scaling import ServersReply
from asyncrl.runtime.desired_servers import MOST_SERVERS, desired_servers, set_desired_servers
from asyncrl.runtime.names.interface import NameResolver


class ServerTarget:
    """consumes: requests of users.  produces: the desired number of generation servers, in name resolve.

    waits for: name resolve, for at most the resolver's timeout.  unblocked by: its reply.
    """

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        *,
        allocated: int,
        new_id: Callable[[], str],
        least: int = 1,
        is_external: bool = False,
    ) -> None:
        """allocated: number of servers of the allocation. least: smallest number that includes every server that the user starts
        (debug.leave_out). is_external: asyncrl does not start the servers of this run, or they share devices with training."""
        self._resolver, self._names, self._new_id = resolver, names, new_id
        self._allocated, self._least, self._is_external = allocated, least, is_external

    async def get(self) -> int:
        """Return the desired number of generation servers. Raises NameResolveError."""
        desired = await asyncio.to_thread(desired_servers, self._resolver, self._names)
        return desired or self._allocated

    async def set(self, count: int) -> None:
        """Set the desired number of generation servers. Raises ValueError if the run cannot have this number, and
        NameResolveError."""
        self._check(count)
        await asyncio.to_thread(
            set_desired_servers,
            self._resolver,
            self._names,
            count,
            allocated=self._allocated,
            request_id=self._new_id(),
        )

    def _check(self, count: int) -> None:
        if self._is_external:
            raise ValueError(
                "generation: asyncrl does not start the servers of this run, or they share devices with training: their number "
                "is fixed"
            )
        if not 1 <= count <= MOST_SERVERS:
            raise ValueError(
                f"generation is {count}; use a number from 1 to {MOST_SERVERS}; `asyncrl-launch stop` ends a run"
            )
        if count < self._least:
            last = f"generation_server/{self._least - 1}"
            raise ValueError(
                f"generation is {count}: you start {last} yourself (debug.leave_out), so it stays; use at least "
                f"{self._least}"
            )


def servers_reply(target: int, views: Sequence[ServerView]) -> ServersReply:
    """Return the target with the states of all servers (pure). views: from ServerTable."""
    seen = {view.server for view in views}
    names = [f"generation_server/{index}" for index in range(target)]
    return ServersReply(target=target, servers=list(views), missing=[name for name in names if name not in seen])
