"""A worker's public state: its phase, progress, queues, and every wait with its name and limit."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Literal, TypeVar

from asyncrl.config.processes import WorkerInfo
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.devices import peak_memory_bytes
from asyncrl.runtime.trace import OFF, Tracer

T = TypeVar("T")
State = Literal["starting", "running", "stopping", "stopped", "done", "error"]

LONG_WAIT_S = 20.0  # a longer wait is logged once, with its name and source
_OWN_LIMIT_SLACK_S = 5.0  # time after the limit in which an awaited object with the same limit can raise its own error


class WaitTimeoutError(TimeoutError):
    """A named wait reached its limit."""

    def __init__(self, what: str, on: str, limit_s: float) -> None:
        super().__init__(f"waited {limit_s:g} s for {what} from {on}; giving up")
        self.what, self.on, self.limit_s = what, on, limit_s


class StatusBoard:
    """A worker's public state: phase, progress, named waits, queue depths."""

    def __init__(self, info: WorkerInfo, logger: logging.Logger, trace: Tracer = OFF) -> None:
        self._info = info
        self._logger = logger
        self._trace = trace
        self._waits: dict[int, tuple[str, str, float, float | None, Callable[[], str]]] = {}
        self._reported: set[int] = set()
        self._next_wait = 0
        self._progress = 0
        self._queues: dict[str, int] = {}
        self.state: State = "starting"
        self.entered = asyncio.Event()  # set at each change of state
        self.collectives: Callable[[], dict[str, int]] = dict  # of a model worker: as in WorkerStatus
        self.version = ""
        self.error = ""
        self.fatal = False
        self.recurs_as = ""
        self.notes: list[str] = []  # as in WorkerStatus

    def enter(self, state: State) -> None:
        """Enter this state. The worker reports the change at once."""
        self.state = state
        self.entered.set()

    def progress(self) -> None:
        """Count a sign of life: a unit of work, or a turn of the event loop (at each report of the status)."""
        self._progress += 1

    def set_queue(self, name: str, depth: int) -> None:
        self._queues[name] = depth
        self._trace.count(name, depth)

    def waiting(
        self, what: str, *, on: str, limit_s: float, waited_s: float = 0.0, detail: Callable[[], str] = str
    ) -> _BoundedWait:
        """Show the wait of the `async with` block and its limit in the status, and bound the wait.

        The awaited object may have the same limit itself, and then ends with its own error. If the block has not ended
        _OWN_LIMIT_SLACK_S after the limit, it is cancelled and WaitTimeoutError is raised.
        waited_s: time already waited, if this continues an earlier wait.
        detail: returns the progress of the wait; called for every status and shown after `what`.
        """
        return _BoundedWait(_NamedWait(self, what, on, limit_s, waited_s, detail), _OWN_LIMIT_SLACK_S)

    def showing(
        self, what: str, *, on: str, limit_s: float | None = None, detail: Callable[[], str] = str
    ) -> _NamedWait:
        """Show a wait in the status without bounding it. limit_s: only if the awaited object ends itself at this limit."""
        return _NamedWait(self, what, on, limit_s, 0.0, detail)

    async def bounded(
        self, awaitable: Awaitable[T], *, what: str, on: str, limit_s: float, detail: Callable[[], str] = str
    ) -> T:
        """Await something for at most limit_s and show the wait. Raises WaitTimeoutError with `what` and `on`."""
        async with _BoundedWait(_NamedWait(self, what, on, limit_s, 0.0, detail), 0.0):
            return await awaitable

    def snapshot(self) -> WorkerStatus:
        now = time.monotonic()
        for key, (what, on, since, limit_s, _) in self._waits.items():
            if now - since > LONG_WAIT_S and key not in self._reported:
                self._reported.add(key)
                limit = "no limit" if limit_s is None else f"limit {limit_s:g} s"
                self._logger.warning("waiting for %s from %s for %.0f s (%s)", what, on, now - since, limit)
        return WorkerStatus(
            worker=self._info.name,
            pid=os.getpid(),
            attempt=self._info.attempt,
            state=self.state,
            time=time.time(),
            progress=self._progress,
            waits=[
                Wait(what=what + detail(), on=on, since_s=now - since, limit_s=limit_s)
                for what, on, since, limit_s, detail in self._waits.values()
            ],
            queues=dict(self._queues),
            version=self.version,
            error=self.error,
            fatal=self.fatal,
            recurs_as=self.recurs_as,
            notes=self.notes,
            memory_bytes=peak_memory_bytes(),
            collectives=self.collectives(),
        )


class _NamedWait:
    """The result of StatusBoard.showing; used once. It is a class because workers enter one for every wait, and a
    generator-based context manager takes several times as long.
    """

    __slots__ = ("_began_us", "_board", "_key", "wait")

    def __init__(
        self,
        board: StatusBoard,
        what: str,
        on: str,
        limit_s: float | None,
        waited_s: float,
        detail: Callable[[], str],
    ) -> None:
        self._board = board
        self.wait = (what, on, time.monotonic() - waited_s, limit_s, detail)

    def __enter__(self) -> None:
        board = self._board
        self._key = board._next_wait
        board._next_wait += 1
        board._waits[self._key] = self.wait
        self._began_us = board._trace.now_us()

    def __exit__(self, *error: object) -> None:
        board = self._board
        board._trace.wait(self.wait[0], self.wait[1], self._began_us)
        del board._waits[self._key]
        board._reported.discard(self._key)


class _BoundedWait:
    """The result of StatusBoard.waiting; used once."""

    __slots__ = ("_shown", "_slack_s", "_timeout")

    def __init__(self, shown: _NamedWait, slack_s: float) -> None:
        self._shown, self._slack_s = shown, slack_s

    async def __aenter__(self) -> None:
        _, _, since, limit_s, _ = self._shown.wait
        assert limit_s is not None
        self._timeout = asyncio.timeout(since + limit_s + self._slack_s - time.monotonic())
        await self._timeout.__aenter__()
        self._shown.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:  # this limit has passed; a TimeoutError from inside the block would be `error`
            what, on, _, limit_s, detail = self._shown.wait
            assert limit_s is not None
            raise WaitTimeoutError(what + detail(), on, limit_s) from None
