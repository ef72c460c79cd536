"""Tasks and threads that run beside a process's main task."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundTasks:
    """consumes: coroutines.  produces: the first failure of any of them, which ends the process."""

    def __init__(self, name: str, logger: logging.Logger) -> None:
        """name: of the process; it prefixes the names of its tasks."""
        self.running: set[asyncio.Task[Any]] = set()
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None  # the first one
        self._name, self._logger = name, logger

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine beside the main task."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._name}:{name}")
        self.running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self.failure is None:
            self.failure = error
            self.failed.set()
        else:
            self._logger.error("%s failed too", task.get_name(), exc_info=error)


def on_thread(function: Callable[[], T], name: str = "helper") -> Future[T]:
    """Run a function on a daemon thread of its own, because it may take long and the caller's loop must not wait for it."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Like gather, but the first failure, or a cancellation of the caller, cancels the others and waits for their end."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        late = [task for task in tasks if not task.done()]
        if late:
            for task in late:
                task.cancel()
            await asyncio.wait(late)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # mark it as retrieved; gather raises the first one
