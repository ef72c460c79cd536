"""LoopWatch: notices that a worker's event loop stands still, and says where.

Blocking code in a coroutine stops the whole worker: an `async def chat` with a blocking client waits for an answer that the same
event loop gives. A thread still turns, and reports it.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from asyncrl.runtime.stacks import stack_of

_MAX_FRAMES = 12  # of the stack that is shown
_AWAKE_S = 1.0  # for the loop to turn after the process was stopped and goes on


class LoopWatch:
    """A daemon thread that has the loop set an event again and again."""

    def __init__(self, logger: logging.Logger, *, limit_s: float = 15.0) -> None:
        self._logger = logger
        self._limit_s = limit_s
        self._end = threading.Event()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch a loop that runs, or will run, on the thread that calls this."""
        arguments = (loop, threading.get_ident())
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
            if turned.wait(self._limit_s) or turned.wait(min(_AWAKE_S, self._limit_s)):
                continue
            stack = "\n".join(stack_of(thread_id).splitlines()[: 1 + _MAX_FRAMES])
            self._logger.warning(
                "the event loop has stood still for %g s: a coroutine blocks it. (A blocking client belongs into a plain `def "
                "chat`, which runs in a thread.) It is at\n%s",
                self._limit_s,
                stack,
            )
            while not (turned.wait(self._limit_s) or self._end.is_set()):
                pass
