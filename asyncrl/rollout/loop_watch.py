"""LoopWatch: notices that a worker's event loop stands still, and says where.

An `async def chat` with a blocking client waits for an answer that the same event loop is to give: nothing moves until that client
gives up. A thread is the one that can still tell.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from asyncrl.runtime.stacks import stack_of

_MAX_FRAMES = 12  # of the stack that is shown


class LoopWatch:
    """A daemon thread that has the loop set an event again and again."""

    def __init__(self, logger: logging.Logger, *, limit_s: float = 15.0, hint: str = "") -> None:
        self._logger = logger
        self._limit_s = limit_s
        self._hint = hint
        self._end = threading.Event()

    def start(self) -> None:
        """Watch the running loop, on whose thread this is called."""
        arguments = (asyncio.get_running_loop(), threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="loop watch", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        """waits for: the loop, at most limit_s before it is told, once for each time that it stands still."""
        while not self._end.wait(self._limit_s / 4):
            turned = threading.Event()
            try:
                loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # closed
                return
            if turned.wait(self._limit_s):
                continue
            stack = "\n".join(stack_of(thread_id).splitlines()[: 1 + _MAX_FRAMES])
            self._logger.error(
                "the event loop has stood still for %g s%s; it is at\n%s", self._limit_s, self._hint, stack
            )
            while not (turned.wait(self._limit_s) or self._end.is_set()):
                pass
