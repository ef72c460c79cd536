"""The transport `broadcast`, in the manager: one request to the trainer (model/broadcast.py) for all servers that load together.

POST /broadcast_weights: version, paused servers --> the trainer sends the tensors to all of them
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from asyncrl.manager.manager_side import FAILURES, ManagerSide, Means, MismatchError, OfferError
from asyncrl.manager.update_plan import Update
from asyncrl.protocol.weight_updates import BroadcastReply, BroadcastRequest, BroadcastTarget

_SENDER_SLACK_S = 2.0  # the trainer answers within the limit in the request; the call waits this much longer

Send = Callable[[Sequence[Update]], Coroutine[Any, Any, BroadcastReply]]


class Wave:
    """Servers that get a version by one broadcast. Each is paused independently, then one request to the trainer covers them all.

    The wave does not wait for a member that fails before it is ready. It waits for slow members (a pause waits for long requests)
    for at most wait_s after the first member is ready. A member that becomes ready later requests a broadcast of its own. `send`
    sends the request to the trainer and returns within its own limit.

    consumes: members that are ready, or leave.  produces: one call of `send` for all members that are ready.
    waits for: the other members, at most wait_s after the first.  unblocked by: the last of them.
    """

    def __init__(self, members: Sequence[Update], send: Send, *, wait_s: float) -> None:
        self._awaited = {update.server for update in members}
        self._ready: list[Update] = []
        self._send, self._wait_s = send, wait_s
        self._departed = asyncio.Event()
        self._sending: asyncio.Task[BroadcastReply] | None = None

    async def ready(self, update: Update) -> BroadcastReply:
        """The server is paused. Returns the reply to its broadcast."""
        if self._departed.is_set():
            return await self._send([update])
        self._ready.append(update)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_together(), name=f"broadcast {update.version}")
        self.leave(update)
        return await asyncio.shield(self._sending)  # shielded: the other members await it too

    def leave(self, update: Update) -> None:
        """Stop waiting for this server: it is ready, or never will be."""
        self._awaited.discard(update.server)
        if not self._awaited:
            self._departed.set()

    async def _send_together(self) -> BroadcastReply:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._departed.wait()
        except TimeoutError:
            self._departed.set()
        return await self._send(self._ready)


class BroadcastInManager(ManagerSide):
    """Servers that are paused at the same time get a version together."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._waves: dict[tuple[str, int], Wave] = {}  # by server and incarnation
        # Servers whose broadcast failed, and that were named in a warning; none of their broadcasts has succeeded since
        self._failing: set[str] = set()

    def begin(self, updates: Sequence[Update]) -> None:
        wave = Wave(updates, self._send, wait_s=self._means.limit_s / 4)
        self._waves.update(((update.server, update.incarnation), wave) for update in updates)

    async def load(self, update: Update) -> None:
        reply = await self._waves[update.server, update.incarnation].ready(update)
        if update.server in reply.errors:
            mismatch = update.server in reply.mismatched
            raise (MismatchError if mismatch else OfferError)(f"broadcast: {reply.errors[update.server]}")
        self._means.counters["broadcast", update.server] += 1
        self._failing.discard(update.server)

    def end(self, update: Update) -> None:
        self._waves.pop((update.server, update.incarnation)).leave(update)

    async def _send(self, updates: Sequence[Update]) -> BroadcastReply:
        """Request that the trainer sends a version to servers that are paused for it."""
        version, limit_s = str(updates[0].version), self._means.limit_s + updates[0].bytes_s
        targets = [BroadcastTarget(server=update.server, url=update.url) for update in updates]
        request = BroadcastRequest(weight_version=version, targets=targets, limit_s=limit_s)
        try:
            call = self._means.calls.post(f"{self._trainer_url}/broadcast_weights", msgspec.json.encode(request))
            async with asyncio.timeout(limit_s + _SENDER_SLACK_S):
                reply = msgspec.json.decode(await call, type=BroadcastReply)
        except FAILURES as error:
            reply = BroadcastReply(
                errors={update.server: f"the trainer did not broadcast: {error!r}" for update in updates}
            )
        self._warn(version, reply)
        return reply

    def _warn(self, version: str, reply: BroadcastReply) -> None:
        """Warn that servers load from disk because a broadcast failed: once for each, until a broadcast to it has succeeded."""
        warned = self._failing.union(reply.mismatched)
        new = {server: why for server, why in reply.errors.items() if server not in warned}
        if new:
            self._failing.update(new)
            causes = "; ".join(sorted(set(new.values())))
            self._means.logger.warning(
                "broadcast of weights %s to %s failed: %s. They load this version and the next ones from disk. This warning "
                "appears once until a broadcast to them succeeds",
                version,
                ", ".join(sorted(new)),
                causes,
            )
