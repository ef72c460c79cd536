"""Calls to detached groups (dataflow/worker_groups.py).

Work that one incarnation of a detached group does not finish is repeated in the next:

    an MFC there: fetch its inputs from the trainer group -> execute -> the trainer group fetches its outputs
                  \\_______________ one unit of work: if any part fails, all of it is repeated _______________/

So a detached group holds the only copy of data at most during a unit of work, or with train.arriving_inference until the step that
needs it. When one of its workers dies, the trainer group has all data that the worker held, or the next incarnation computes it
again. Models in a detached group are not trained, so the same inputs give the same outputs in every incarnation. The trainer group
waits for the outputs and then continues.

The launcher decides how often a group restarts (launch/supervisor/policy.py). In this file the limit of a call bounds every wait.
With on_missing=continue or stop (train.ref, train.reward_model), a group that does not work for train.missing_after_s is missing:
the step goes on without its work, or the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.dataflow.redistribution import Transfer
from asyncrl.dataflow.topology import Handler
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.master.buffer import StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.protocol.calls import CallBody, CallResult, FetchData, FetchPart, FetchWeights
from asyncrl.protocol.errors import ErrorClass, Failures, RunEndedError
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.channel_protocol import ChannelError, ReceiverRestarted
from asyncrl.streams.request_reply import NameResolvingRequestClient, RemoteCallError

T = TypeVar("T")


logger = logging.getLogger(__name__)

_MAX_SAME = 3
_PAUSE_S = 0.5  # before data is fetched again in the same incarnation


class GroupEndedError(RuntimeError):
    """An incarnation of a detached group is over, or about to end. Its calls must be repeated in the next incarnation. The cause
    is a RemoteCallError if a call failed at a worker."""


class UnfetchedError(RuntimeError):
    """A fetch of data between worker groups failed. Both groups may be healthy, or the death of one is not detected yet."""


class GroupMissingError(RuntimeError):
    """A detached group is missing, and on_missing=continue: go on without its work."""


class GroupMissingEndsRunError(RunEndedError):
    """A detached group is missing, and on_missing=stop."""


class GroupFailsError(RunEndedError):
    """A call fails in each incarnation of a detached group, with the same error."""


@dataclass(frozen=True)
class Incarnation:
    """One incarnation of a detached group."""

    group: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"incarnation {self.number} of {', '.join(f'model_worker/{worker}' for worker in self.group)}"


class Repeats:
    """Retry policy for a failed unit of work. Pure.

    After an incarnation has ended, the next one retries, unless a call has failed at _MAX_SAME incarnations in a row with the same
    error. After a failed fetch the same incarnation retries, until limit_s has passed since the first failed fetch in this
    incarnation.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._calls = Failures(math.inf, max_unknown=_MAX_SAME)
        self._number = -1
        self._since = 0.0

    def first_incarnation(self, error: Exception, number: int, now: float) -> int:
        """Return the number of the first incarnation that may retry after this failure in incarnation `number`: the next one after
        GroupEndedError, the same one after a failed fetch. Raises the error if failed fetches have lasted longer than the limit,
        and GroupFailsError if the next incarnation would fail in the same way."""
        if isinstance(error, GroupEndedError):
            if not isinstance(error.__cause__, RemoteCallError):
                self._calls.worked()  # it was lost: the calls before may have failed because it was about to end
            elif self._calls.failed(ErrorClass.UNKNOWN, error.__cause__.message, now):
                raise GroupFailsError(
                    f"a call has failed in {_MAX_SAME} incarnations of its worker group in a row, each time with the same error, "
                    f"so the run ends: {error}"
                ) from error
            return number + 1
        if self._number != number:
            self._number, self._since = number, now
        if now - self._since > self._limit_s:
            raise error
        return number


class Absence:
    """Whether a detached group is missing: no work of it has succeeded for limit_s since it was first down, or since work on it
    first failed. Pure. A group that starts and fails again and again is missing too."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None

    def failed(self, now: float) -> bool:
        """Record that the group is down, or that work on it has failed. Returns whether it is missing."""
        self._since = now if self._since is None else self._since
        return now - self._since >= self._limit_s

    def worked(self) -> None:
        """Record that work on the group has succeeded."""
        self._since = None


class DetachedGroups:
    """The master's calls to detached groups.

    consumes: units of work.  produces: the result of each, once.
    waits for: replies; the next incarnation of a group that has ended. The limit of a call bounds both.
    unblocked by: the group's workers; their next incarnation.
    """

    def __init__(
        self,
        worker_groups: WorkerGroups,
        client: NameResolvingRequestClient,
        caller: WorkerCaller,
        limit_s: float,
        *,
        missing_after_s: float = 60.0,
    ) -> None:
        """missing_after_s: train.missing_after_s."""
        self.worker_groups = worker_groups
        # By model: its workers, and the call that gives them its newest weights, once in each incarnation, before other work
        self.weights: dict[str, tuple[Sequence[int], FetchWeights]] = {}
        self._client, self._caller, self._limit_s = client, caller, limit_s
        self._telling: set[asyncio.Task[None]] = set()
        self._preparing = {group: asyncio.Lock() for group in worker_groups.detached}
        self._ready: dict[str, tuple[int, FetchWeights]] = {}  # model -> the incarnation that has made this call
        self._missing_after_s = missing_after_s
        self._absences = {group: Absence(missing_after_s) for group in worker_groups.detached}

    async def repeated(
        self,
        what: str,
        group: Sequence[int],
        work: Callable[[Incarnation], Awaitable[T]],
        *,
        on_missing: str = "wait",
    ) -> T:
        """Return the result of `work` in an incarnation of the group. Repeats it in the next incarnation after GroupEndedError, and
        in the same one, for up to the limit of a call, after UnfetchedError. If the group is missing, raises GroupMissingError with
        on_missing=continue, and GroupMissingEndsRunError with on_missing=stop."""

        async def prepared(incarnation: Incarnation) -> T:
            await self._prepared(incarnation)
            return await work(incarnation)

        if on_missing == "wait":
            return await self._repeated(what, group, prepared, on_missing)
        loop, absence = asyncio.get_running_loop(), self._absences[tuple(group)]

        async def watched(incarnation: Incarnation) -> T:
            try:
                return await prepared(incarnation)
            except (GroupEndedError, UnfetchedError) as error:
                if absence.failed(loop.time()):
                    raise self._missing(what, group, on_missing) from error
                raise

        working = asyncio.ensure_future(self._repeated(what, group, watched, on_missing))
        try:
            while not working.done():
                if self._client.is_down(group) and absence.failed(loop.time()):
                    raise self._missing(what, group, on_missing)
                await asyncio.wait({working}, timeout=_PAUSE_S)
            result = await working
        finally:
            working.cancel()
        absence.worked()
        return result

    def _missing(self, what: str, group: Sequence[int], on_missing: str) -> Exception:
        names = ", ".join(f"model_worker/{worker}" for worker in group)
        text = f"{what}: {names} has not worked for {self._missing_after_s:g} s (train.missing_after_s)"
        if on_missing == "continue":
            return GroupMissingError(text)
        return GroupMissingEndsRunError(
            f"{text}, and on_missing=stop ends the run. The logs of {names} have the reason. Resume the run when the group can "
            "work again, or set on_missing=continue to train without it"
        )

    async def _repeated(
        self, what: str, group: Sequence[int], work: Callable[[Incarnation], Awaitable[T]], on_missing: str
    ) -> T:
        loop, repeats = asyncio.get_running_loop(), Repeats(self._limit_s)
        number = -1
        while True:  # the launcher bounds the number of incarnations; each turn is bounded
            number = await self._in_incarnation(what, group, number)
            try:
                incarnation = Incarnation(tuple(group), number)
                return await work(incarnation)
            except (GroupEndedError, UnfetchedError) as error:
                if on_missing == "wait" or isinstance(error, UnfetchedError):
                    again = repeats.first_incarnation(error, number, loop.time())
                else:
                    again = number + 1  # until the group is missing
                logger.warning("%s failed and will be repeated: %s", what, error)
                if again == number:
                    await asyncio.sleep(_PAUSE_S)
                number = again

    async def call(
        self, incarnation: Incarnation, what: str, handlers: Sequence[Handler], body: CallBody | Sequence[CallBody]
    ) -> list[CallResult]:
        """Call workers of a group in this incarnation only. Raises GroupEndedError if the incarnation is over, or if the call fails
        at a worker: a failed call ends the worker, and the worker's end ends its group."""
        self._check(incarnation)
        try:
            replies = await self._caller.call(what, handlers, body)
        except (ReceiverRestarted, RemoteCallError) as error:
            raise GroupEndedError(str(error)) from error
        self._check(incarnation)  # if the incarnation has ended meanwhile, the data in the replies is gone
        return replies

    async def fetch(
        self, what: str, incarnation: Incarnation, transfers: Sequence[Transfer], tracker: StorageTracker
    ) -> float:
        """Have workers of a detached group fetch data from the trainer group, or the trainer group from them. Returns the number of
        fetched bytes. Raises UnfetchedError if any data could not be fetched, and GroupEndedError if workers of the detached group
        fetch and their incarnation ends."""
        parts: dict[int, list[FetchPart]] = {}
        for transfer in transfers:
            (target,) = transfer.targets
            number = incarnation.number if transfer.source in incarnation.group else 0
            part = FetchPart(transfer.source, number, list(transfer.ids), list(transfer.keys))
            parts.setdefault(target, []).append(part)
        if not parts:
            return 0.0
        workers, bodies = list(parts), [FetchData(parts=of) for of in parts.values()]
        if workers[0] in incarnation.group:
            replies = await self.call(incarnation, what, workers, bodies)
        else:
            replies = await self._caller.call(what, workers, bodies)
        if unfetched := next((reply.unfetched for reply in replies if reply.unfetched), ""):
            raise UnfetchedError(unfetched)
        for transfer in transfers:
            tracker.add(transfer.targets[0], transfer.ids, transfer.keys)
        return float(sum(reply.num_bytes for reply in replies))

    def tell_nowait(self, what: str, workers: Sequence[int], body: CallBody) -> None:
        """Send a message without waiting for replies. It is not sent to a group that has ended, and not repeated in its next
        incarnation."""
        for worker in workers:
            if self._client.group_incarnation_of(self.worker_groups.of(worker)) is not None:
                task = asyncio.create_task(self._tell(what, worker, body))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def _tell(self, what: str, worker: int, body: CallBody) -> None:
        try:
            await self._caller.call(what, [worker], body)
        except (ChannelError, RemoteCallError, WaitTimeoutError) as error:
            logger.info("%s: %s", what, error)

    async def _prepared(self, incarnation: Incarnation) -> None:
        async with self._preparing[incarnation.group]:
            for model, (workers, body) in list(self.weights.items()):
                if workers[0] in incarnation.group and self._ready.get(model) != (incarnation.number, body):
                    replies = await self.call(incarnation, f"{model} to fetch weights", workers, body)
                    if unfetched := next((reply.unfetched for reply in replies if reply.unfetched), ""):
                        raise UnfetchedError(unfetched)
                    self._ready[model] = incarnation.number, body

    def _check(self, incarnation: Incarnation) -> None:
        if self._client.group_incarnation_of(incarnation.group) != incarnation.number:
            raise GroupEndedError(f"{incarnation} is over")

    async def _in_incarnation(self, what: str, group: Sequence[int], first: int) -> int:
        names = ", ".join(f"model_worker/{worker}" for worker in group)
        back = self._client.wait_for_group_incarnation(group, after=first - 1)
        return await self._caller.bounded(back, f"incarnation {max(first, 0)}, for {what},", names)
