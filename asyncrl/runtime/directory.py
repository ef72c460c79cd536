"""A process's access to name resolve from its event loop: publishing, waiting for and watching keys.

Every call has the run's limit and is shown on the status board. A process's keys disappear with its lease.
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

_MAX_WATCH_EVENTS = 10_000  # changes queued for the event loop; above this, only the newest change of each key is kept


class Directory:
    """consumes: keys and values.  produces: entries, and changes of other processes' entries.

    waits for: name resolve, through its outages, for at most limit_s.  unblocked by: its reply.
    """

    def __init__(self, resolver: NameResolver, names: Names, *, lease: int, board: StatusBoard, limit_s: float) -> None:
        """lease: of this process. limit_s: for each call and each wait for a key (runtime.start_timeout_s)."""
        self.resolver, self.names, self.lease, self.limit_s = resolver, names, lease, limit_s
        self._board = board

    async def publish(self, key: str, value: str) -> None:
        """Write a key of this process, replacing an older value."""
        async with self._board.waiting(f"publishing {key}", on="name resolve", limit_s=self.limit_s):
            await asyncio.to_thread(self.resolver.publish, key, value, lease=self.lease, limit_s=self.limit_s)

    async def wait_for_key(self, key: str, what: str) -> str:
        """Return the value of a key as soon as another process publishes it. Raises WaitTimeoutError."""
        async with self._board.waiting(what, on=key, limit_s=self.limit_s):
            try:
                return await asyncio.to_thread(self.resolver.wait, key, self.limit_s)
            except TimeoutError as error:
                raise WaitTimeoutError(what, key, self.limit_s) from error

    async def watch(self, key: str, *, subtree: bool = False) -> AsyncGenerator[WatchEvent, None]:
        """Yield the current state of a key (or subtree), then every change. Ends only when closed."""
        events = _Changes(asyncio.get_running_loop())
        async with self._board.waiting(f"reading {key}", on="name resolve", limit_s=self.limit_s):
            watch = await asyncio.to_thread(self.resolver.watch, key, events.put, subtree=subtree, limit_s=self.limit_s)
        try:
            while True:
                yield await events.get()
        finally:
            await asyncio.to_thread(watch.cancel)


class _Changes:
    """A queue of changes from a name-resolve thread to the event loop. If the loop is blocked and more than
    _MAX_WATCH_EVENTS changes wait, the queue drops all but the newest change of each key. The reader still learns the
    current state. The queue drops changes again only when its length has doubled, so dropping costs little per change.
    """

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
        if is_first:  # wake the reader; it also takes the events that arrive before it runs
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._news.set)

    async def get(self) -> WatchEvent:
        """Return the oldest change. A cancelled wait changes nothing."""
        while True:
            self._news.clear()
            with self._lock:
                if self._waiting:
                    return self._waiting.popleft()
            await self._news.wait()
