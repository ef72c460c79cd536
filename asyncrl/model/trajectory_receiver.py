"""Receives trajectories at a head: pull, check, store, get the master's verdict, acknowledge. No torch.

    rollout workers -- trajectory --> TrajectoryReceiver -> store
                                        | metadata --> master, whose verdict goes back the same way

The model worker and the recorder (model/recorder.py) both use it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Self

import numpy as np

from asyncrl.config.processes import WorkerInfo
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.routes import ROUTES, Routes
from asyncrl.data.sequence import SequenceSample, decode_sample
from asyncrl.data.words import words_error
from asyncrl.dataflow.graph import DENSE_REWARDS, TRAJECTORY_KEYS
from asyncrl.model.store import DUPLICATE, FULL, DataStore
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.trajectories import StoreVerdict, TrajectoryMeta
from asyncrl.rewards.trajectory import MAX_LOGPROB, total_rewards
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.services import Services
from asyncrl.runtime.system import System
from asyncrl.streams.push_pull import DecodeSample, MetaPusher, NameResolvingZmqPuller, Pulled

_FINITE = ("packed_logprobs", "rewards", DENSE_REWARDS)  # keys whose values must be finite
_ROOM_LIMIT_S = (
    30.0  # a trajectory waits at most this long for room in a full store: the master clears data at the end of a step
)


class TrajectoryReceiver:
    """Receives trajectories into one head's store.

    consumes: trajectories.  produces: metadata (to the master), verdicts (to the rollout worker).
    waits for: a trajectory; or, while runtime.push_credit_items trajectories have no verdict of the master, one of these verdicts.
    unblocked by: rollout workers; the master. Backpressure: unanswered trajectories use up the pushers' credit.
    """

    def __init__(
        self,
        info: WorkerInfo,
        puller: NameResolvingZmqPuller,
        meta_pusher: MetaPusher,
        store: DataStore,
        *,
        head: int,
        check: Callable[[TrajectoryMeta, SequenceSample], str],
        verdict_limit_s: float,
        room_limit_s: float,
        services: Services,
    ) -> None:
        """Call `open` instead, which also opens the sockets. check: returns the error of a trajectory, or ""."""
        self.store = store
        self.metas: dict[str, TrajectoryMeta] = {}  # ticket -> metadata, of the groups in the store
        self._info, self._puller, self._meta_pusher, self._head = info, puller, meta_pusher, head
        self._check, self._verdict_limit_s, self._room_limit_s = check, verdict_limit_s, room_limit_s
        self._tasks, self._board, self._logger, self._clock = (
            services.tasks,
            services.board,
            services.logger,
            services.clock,
        )
        self._attempts = Fence(info.attempt)
        self._room = asyncio.Event()  # set when ids are discarded from the store

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        info: WorkerInfo,
        directory: Directory,
        system: System,
        incarnation: str,
        store: DataStore,
        *,
        head: int,
        check: Callable[[TrajectoryMeta, SequenceSample], str],
        verdict_limit_s: float,
        services: Services,
        decode: DecodeSample = decode_sample,
        room_limit_s: float = _ROOM_LIMIT_S,
    ) -> AsyncIterator[Self]:
        """Bind and publish. Trajectories queue until `run`."""
        meta_pusher = MetaPusher(
            directory.resolver,
            directory.names,
            head=head,
            runtime=info.runtime,
            transport=system.transport,
            incarnation=incarnation,
        )
        puller = NameResolvingZmqPuller(
            directory.resolver,
            directory.names,
            puller_index=head,
            runtime=info.runtime,
            transport=system.transport,
            lease=directory.lease,
            attempt=info.attempt,
            decode=decode,
        )
        made = cls(
            info,
            puller,
            meta_pusher,
            store,
            head=head,
            check=check,
            verdict_limit_s=verdict_limit_s,
            room_limit_s=room_limit_s,
            services=services,
        )
        try:
            await meta_pusher.start()
            await puller.start()
            yield made
        finally:
            await puller.close()
            await meta_pusher.close()

    async def run(self) -> None:
        """Receive trajectories forever."""
        places = asyncio.Semaphore(self._info.runtime.push_credit_items)
        while True:
            await places.acquire()
            pulled = await self._puller.pull()
            task = self._tasks.spawn(self._judge(pulled), f"trajectory {pulled.meta.ticket_id}")
            task.add_done_callback(lambda _: places.release())

    def discard(self, ids: Iterable[str]) -> None:
        """Remove these ids, which makes room."""
        ids = list(ids)
        self.store.discard(ids)
        for ticket in ids:
            self.metas.pop(ticket, None)
        self._room.set()
        self._board.set_queue("store", len(self.store))

    async def _judge(self, pulled: Pulled) -> None:
        """Handle one trajectory: check, store, ask the master, answer. If the master does not accept it, remove it again."""
        meta, logger = pulled.meta, self._logger
        reason = self._objection(meta, pulled.sample)
        if reason:
            logger.warning("refused trajectory %s: %s", meta.ticket_id, reason)
            pulled.ack(StoreVerdict(verdict="refused", reason=reason))
            return
        reason = await self._put(pulled.sample)
        if reason == DUPLICATE:
            pulled.ack(StoreVerdict(verdict="duplicate", reason="the head holds this ticket"))
            return
        if reason:
            logger.warning("refused trajectory %s: %s", meta.ticket_id, reason)
            pulled.ack(StoreVerdict(verdict="refused", reason=reason))
            return
        self.metas[meta.ticket_id] = meta
        limit_s = self._verdict_limit_s
        async with self._board.waiting("a verdict on a trajectory", on="master", limit_s=limit_s):
            verdict = await self._meta_pusher.push_meta(meta, timeout_s=limit_s)
        if verdict.verdict != "stored":
            self.discard([meta.ticket_id])
        pulled.ack(verdict)
        self._board.set_queue("store", len(self.store))

    async def _put(self, sample: SequenceSample) -> str:
        """Store the sample. If the store is full, wait for room, at most room_limit_s. Returns "" or the obstacle."""
        deadline = self._clock.monotonic() + self._room_limit_s
        while (reason := self.store.put(sample)) == FULL and (left := deadline - self._clock.monotonic()) > 0:
            self._room.clear()
            with self._board.showing("room in the store", on="master", limit_s=self._room_limit_s):
                try:
                    async with asyncio.timeout(left):
                        await self._room.wait()
                except TimeoutError:
                    break
        return reason

    def _objection(self, meta: TrajectoryMeta, sample: SequenceSample) -> str:
        """Return the reason to refuse a trajectory, or "". It is refused if it is for another head or attempt, or if `check` finds
        an error."""
        if not self._attempts.is_current(meta.attempt):
            return f"wrong_attempt: it is of attempt {meta.attempt}, this is attempt {self._attempts.newest}"
        if meta.head != self._head:
            return f"wrong_head: it is for head {meta.head}, this is head {self._head}"
        return self._check(meta, sample)


def trajectory_error(
    meta: TrajectoryMeta,
    sample: SequenceSample,
    *,
    limits: ModelLimits,
    keys: Sequence[str] = TRAJECTORY_KEYS,
    max_words_bytes: int = 0,
) -> str:
    """Return the error of a trajectory: its metadata contradict its tensors, or its content would break training. "": no error.

    keys: the keys that it must have.  max_words_bytes: train.max_words_bytes.
    """
    missing = [key for key in keys if key not in sample.keys]
    if missing:
        return f"missing_keys: {missing}"
    if sample.ids != (meta.ticket_id,) or set(meta.keys) != set(sample.keys):
        return (
            f"bad_meta: ticket {meta.ticket_id} with keys {sorted(meta.keys)}, "
            f"tensors of {list(sample.ids)} with {sorted(sample.keys)}"
        )
    lengths = sample.seqlens["packed_input_ids"][0]
    if meta.seqlens != lengths:
        return f"bad_meta: lengths {meta.seqlens}, tensors {lengths}"
    if not lengths or min(lengths) < 2:
        return f"bad_lengths: {lengths}; each sequence has a prompt and a response, so at least 2 tokens"
    if max(lengths) > limits.max_length:
        return f"bad_lengths: {lengths}; the model has {limits.max_length} positions for prompt and response"
    ids = sample.data["packed_input_ids"]
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        return f"bad_tokens: ids from {ids.min()} to {ids.max()}, the vocabulary has {limits.vocab_size}"
    response_lengths = np.add.reduceat(sample.data["loss_mask"].astype(np.int64), sample.cu_seqlens()[:-1])
    for name, claimed, found in (
        ("rewards", meta.rewards, total_rewards(sample)),
        ("version_start", meta.version_start, sample.data["version_start"]),
        ("version_end", meta.version_end, sample.data["version_end"]),
        ("response_lengths", meta.response_lengths, response_lengths),
    ):
        if not np.array_equal(np.asarray(claimed, found.dtype), found, equal_nan=found.dtype.kind == "f"):
            return f"bad_meta: {name} {claimed}, tensors {found.tolist()}"
    if not all(np.isfinite(sample.data[key]).all() for key in _FINITE if key in sample.data):
        return "not_finite: logprobs or rewards"
    if (highest := sample.data["packed_logprobs"].max()) > MAX_LOGPROB:
        return f"bad_logprobs: up to {highest:g}; a logprob is never above 0"
    if error := words_error(sample, max_words_bytes):
        return f"bad_words: {error}"
    if ROUTES in sample.data:
        try:
            counts = [len(Routes.decode(run)) for run in sample.slices(ROUTES)[0]]
        except ValueError as error:
            return f"bad_routes: {error}"
        if counts != lengths:
            return f"bad_routes: of {counts} tokens; the sequences have {lengths}"
    return ""
