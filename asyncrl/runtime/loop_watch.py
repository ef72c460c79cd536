"""Detects that a worker's event loop is blocked, and logs where.

Blocking code in a coroutine stops the whole worker. Example: an `async def chat` with a blocking client waits for a
reply that the same event loop must produce. A separate thread still runs and reports the block.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.stacks import stack_of

_MAX_FRAMES = 12  # most stack frames that the warning shows
_AWAKE_S = 1.0  # grace for the loop to turn after a stopped process resumes


def watch_loop(loop: asyncio.AbstractEventLoop, logger: logging.Logger, *, limit_s: float = 15.0) -> None:
    """Watch a loop that runs, or will run, on the calling thread, until it is closed."""
    arguments = (loop, threading.get_ident(), logger, limit_s)
    threading.Thread(target=_watch, args=arguments, name="loop watch", daemon=True).start()


def _watch(loop: asyncio.AbstractEventLoop, thread_id: int, logger: logging.Logger, limit_s: float) -> None:
    """waits for: the loop, at most limit_s before it logs a warning; one warning for each time that the loop is blocked."""
    while True:
        SYSTEM_CLOCK.sleep(limit_s / 4)
        turned = threading.Event()
        try:
            loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # closed
            return
        if turned.wait(limit_s) or turned.wait(min(_AWAKE_S, limit_s)):
            continue
        stack = "\n".join(stack_of(thread_id).splitlines()[: 1 + _MAX_FRAMES])
        logger.warning(
            "the event loop has been blocked for %g s by a coroutine. Put a blocking client into a plain `def "
            "chat`, which runs in a thread. The loop is at\n%s",
            limit_s,
            stack,
        )
        while not (turned.wait(limit_s) or loop.is_closed()):
            pass
