"""A process's side of name resolve: what it publishes, waits for and watches, on its event loop.

Every call has the run's limit and is shown on the status board. Keys go when the process's lease goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator

from asyncrl.protocol.names import Names
from asyncrl.runtime.board import StatusBoard, WaitTimeoutError
from asyncrl.runtime.names.interface import NameResolver, WatchEvent

_MAX_WATCH_EVENTS = 10_000  # that wait for the event loop; past it the newest of each key


class Directory:
    """consumes: keys and values.  produces: entries, and changes of others' entries.

    waits for: name resolve, through its outages, for at most limit_s.  unblocked by: its answer.
    """

    def __init__(self, resolver: NameResolver, names: Names, *, lease: int, board: StatusBoard, limit_s: float) -> None:
        """lease: of this process. limit_s: of each call and each wait for a key (runtime.start_timeout_s)."""
        self.resolver, self.names, self.lease, self.limit_s = resolver, names, lease, limit_s
        self._board = board

    async def publish(self, key: str, value: str) -> None:
        """Put a key of this process, replacing an older one."""
        async with self._board.waiting(f"publishing {key}", on="name resolve", limit_s=self.limit_s):
            await asyncio.to_thread(self.resolver.publish, key, value, lease=self.lease, limit_s=self.limit_s)

    async def wait_for_key(self, key: str, what: str) -> str:
        """Value of a key, as soon as another process publishes it. Raises WaitTimeoutError."""
        async with self._board.waiting(what, on=key, limit_s=self.limit_s):
            try:
                return await asyncio.to_thread(self.resolver.wait, key, self.limit_s)
            except TimeoutError as error:
                raise WaitTimeoutError(what, key, self.limit_s) from error

    async def watch(self, key: str, *, subtree: bool = False) -> AsyncGenerator[WatchEvent, None]:
        """Current state of a key (or subtree), then every change. Ends only by being closed."""
        events = _Changes(asyncio.get_running_loop())
        async with self._board.waiting(f"reading {key}", on="name resolve", limit_s=self.limit_s):
            watch = await asyncio.to_thread(self.resolver.watch, key, events.put, subtree=subtree, limit_s=self.limit_s)
        try:
            while True:
                yield await events.get()
        finally:
            await asyncio.to_thread(watch.cancel)


class _Changes:
    """Changes that a thread of name resolve sees, for the event loop. Past _MAX_WATCH_EVENTS, where the loop stands still, only the
    newest change of each key is kept, as in the watch itself: nothing that is still true is lost. (With that many keys, at most
    two changes of each: sorting out costs little a change.)"""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: deque[WatchEvent] = deque()
        self._sort_out_at = _MAX_WATCH_EVENTS
        self._news = asyncio.Event()

    def put(self, event: WatchEvent) -> None:
        with self._lock:
            self._waiting.append(event)
            if len(self._waiting) > self._sort_out_at:
                self._waiting = deque({event.key: event for event in self._waiting}.values())
                self._sort_out_at = max(_MAX_WATCH_EVENTS, 2 * len(self._waiting))
            is_first = len(self._waiting) == 1
        if is_first:  # taking it takes what comes meanwhile
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._news.set)

    async def get(self) -> WatchEvent:
        """The oldest one. A cancelled wait changes nothing."""
        while True:
            self._news.clear()
            with self._lock:
                if self._waiting:
                    return self._waiting.popleft()
            await self._news.wait()
