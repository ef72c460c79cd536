"""Servers that get a version together, by one broadcast: each is paused by itself, then the trainer is asked for all at once.

A member that fails before it is ready is left behind at once; one that is slow (its pause waits for long requests) is waited for
a little, counted from the first that is ready. It then asks for a broadcast of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncrl.manager.update_plan import Update
from asyncrl.protocol.messages import BroadcastReply, BroadcastRequest, BroadcastTarget

Send = Callable[[Sequence[Update]], Coroutine[Any, Any, BroadcastReply]]


class Wave:
    """One broadcast to be. `send` asks the trainer for it, and returns within a limit of its own.

    consumes: members that are ready, or leave.  produces: one call of `send` for all that are ready.
    waits for: the other members, wait_s at most after the first.  unblocked by: the last of them.
    """

    def __init__(self, members: Sequence[Update], send: Send, *, wait_s: float) -> None:
        self._awaited = {update.server for update in members}
        self._ready: list[Update] = []
        self._send, self._wait_s = send, wait_s
        self._departed = asyncio.Event()
        self._sending: asyncio.Task[BroadcastReply] | None = None

    async def ready(self, update: Update) -> BroadcastReply:
        """The server is paused: what became of the broadcast."""
        if self._departed.is_set():
            return await self._send([update])
        self._ready.append(update)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_together(), name=f"broadcast {update.version}")
        self.leave(update)
        return await asyncio.shield(self._sending)  # it is the others', too

    def leave(self, update: Update) -> None:
        """Nobody needs to wait for this server any more: it is ready, or never will be."""
        self._awaited.discard(update.server)
        if not self._awaited:
            self._departed.set()

    async def _send_together(self) -> BroadcastReply:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._departed.wait()
        except asyncio.TimeoutError:
            self._departed.set()
        return await self._send(self._ready)


def broadcast_request(updates: Sequence[Update], limit_s: float) -> BroadcastRequest:
    """What the trainer is asked for. The updates are of one version."""
    return BroadcastRequest(
        weight_version=str(updates[0].version),
        targets=[BroadcastTarget(server=update.server, url=update.url) for update in updates],
        limit_s=limit_s,
    )
