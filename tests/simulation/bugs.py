"""Known bugs that tests plant on purpose: the simulation must find each of them.

Each bug replaces methods by versions that make the mistake in its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from asyncrl.manager.admission import Gate
from asyncrl.manager.ledger import Ledger
from asyncrl.manager.routing import ServerState, ServerTable
from asyncrl.master.batch import BatchFormer, NotReady, Ready
from asyncrl.master.buffer import AsyncIOSequenceBuffer
from asyncrl.master.checkpointing import Checkpointer
from asyncrl.master.device_turns import DeviceTurns
from asyncrl.master.executor import FunctionExecutor
from asyncrl.master.homes import InDetachedGroup
from asyncrl.master.model_workers import ModelWorkers
from asyncrl.master.step_result import StepResult
from asyncrl.model.trajectory_receiver import TrajectoryReceiver
from asyncrl.protocol.calls import WriteWeights
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.trajectories import StoreVerdict, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.streams.push_pull import Pulled
from asyncrl.weights.checkpoints import MasterState
from tests.simulation.disk import Disk
from tests.simulation.world import here

Wrap = Callable[[Any], Any]  # takes the right method, and returns the wrong one
Patch = tuple[type, str, Wrap]


def _gate_forgets(real: Any) -> Any:
    def room(self: Gate, *, live: int, running: int, trained: int, served: int) -> Any:
        return real(self, live=running, running=running, trained=trained, served=served)

    return room


def _acknowledge_first(real: Any) -> Any:
    async def judge(self: TrajectoryReceiver, pulled: Pulled) -> None:
        pulled.ack(StoreVerdict(verdict="stored"))
        await real(self, Pulled(pulled.meta, pulled.sample, lambda verdict: None))

    return judge


def _take_everything(real: Any) -> Any:
    def put(self: AsyncIOSequenceBuffer, meta: TrajectoryMeta) -> StoreVerdict:
        verdict: StoreVerdict = real(self, meta)
        if verdict.verdict == "duplicate":
            self._enter(meta)
            return StoreVerdict(verdict="stored")
        return verdict

    return put


def _keep_leases(real: Any) -> Any:
    def lose(self: Ledger, live: Any, reason: str) -> None:
        if live.item is not None:
            real(self, live, reason)

    return lose


def _first_come_first_trained(real: Any) -> Any:
    def decide(self: BatchFormer, *, stored: Any, **others: Any) -> Ready | NotReady:
        metas = list(stored)
        if len(metas) < self._batch_size:
            decision: Ready | NotReady = real(self, stored=metas, **others)
            return decision
        batch = sorted(metas[: self._batch_size], key=lambda meta: meta.locator)
        self._gone.update(meta.ticket_id for meta in batch)
        return Ready(tuple(meta.ticket_id for meta in batch))

    return decide


def _publish_before_rename(real: Any) -> Any:
    async def commit(self: ModelWorkers, body: Any, written: Any) -> None:
        if isinstance(body, WriteWeights):
            process = here()
            assert process.worker is not None
            key = process.worker.names.model_version(ACTOR)
            await asyncio.to_thread(
                process.resolver.publish, key, body.weight_version, lease=process.lease, limit_s=60.0
            )
        await real(self, body, written)

    return commit


def _any_attempt_at_master(real: Any) -> Any:
    def put(self: AsyncIOSequenceBuffer, meta: TrajectoryMeta) -> StoreVerdict:
        verdict: StoreVerdict = real(self, replace(meta, attempt=self._attempts.newest))
        return verdict

    return put


def _any_attempt_at_head(real: Any) -> Any:
    def objection(self: TrajectoryReceiver, meta: TrajectoryMeta, sample: Any) -> str:
        text: str = real(self, replace(meta, attempt=self._attempts.newest), sample)
        return text

    return objection


def _readmit(real: Any) -> Any:
    def come_back(self: ServerTable, server: Any, reason: str, now: float) -> None:
        real(self, server, reason, now)
        if self.served >= 0 and not server.leaving:
            server.state, server.version = ServerState.HEALTHY, WeightVersion(self.attempt, self.served)

    return come_back


_takes: dict[int, Callable[[], MasterState]] = {}  # id of a Checkpointer -> its `take`


def _remember_take(real: Any) -> Any:
    def after_step(self: Checkpointer, *, take: Callable[[], MasterState], **when: Any) -> None:
        _takes[id(self)] = take
        real(self, take=take, **when)

    return after_step


def _done_at_the_end(real: Any) -> Any:
    async def commit(self: Checkpointer, path: Any, state: MasterState, saved: Any) -> None:
        await asyncio.wait({saved})
        late = _takes[id(self)]()
        await real(self, path, replace(state, done_cursor=late.done_cursor, done_beyond=late.done_beyond), saved)

    return commit


def _forget_answers(real: Any) -> Any:
    return staticmethod(lambda holder, request_id, tickets: None)


def _run_without_groups(real: Any) -> Any:
    async def run(self: InDetachedGroup, step: Any, call: Any, body: Any) -> None:
        if body.ids:
            await real(self, step, call, body)
            return
        await self._work(step, call, body)

    return run


def _share_of_nothing(real: Any) -> Any:
    def add_share(self: StepResult, name: str, part: int, whole: int) -> None:
        real(self, name, part, whole)
        self.stats[name] = part / whole

    return add_share


def _last_part_is_whole(real: Any) -> Any:
    async def run(
        self: FunctionExecutor, tickets: Any, version: int, batch: Any = (), *, ends_step: bool = True
    ) -> None:
        await real(self, tickets, version, ends_step=ends_step)

    return run


def _take_nothing(real: Any) -> Any:
    def take(self: BatchFormer, groups: Any) -> None:
        real(self, groups)
        self._taken.clear()

    return take


def _devices_stay_taken(real: Any) -> Any:
    async def generation(self: DeviceTurns) -> None:
        self._reports.turn = "generation"
        await self._reports.report()

    return generation


def _no_base(real: Any) -> Any:
    return lambda self, directory, versions: versions


BUGS: dict[str, tuple[Patch, ...]] = {
    "gate_forgets_transit": ((Gate, "room", _gate_forgets),),
    "acknowledge_before_storing": ((TrajectoryReceiver, "_judge", _acknowledge_first),),
    "no_dedupe": ((AsyncIOSequenceBuffer, "put", _take_everything),),
    "lease_never_returned": ((Ledger, "_lose", _keep_leases),),
    "first_finished_first_trained": ((BatchFormer, "decide", _first_come_first_trained),),
    "published_before_rename": ((ModelWorkers, "commit", _publish_before_rename),),
    "lower_attempt_accepted": (
        (AsyncIOSequenceBuffer, "put", _any_attempt_at_master),
        (TrajectoryReceiver, "_objection", _any_attempt_at_head),
    ),
    "readmitted_without_load": ((ServerTable, "_come_back", _readmit),),
    "done_after_checkpoint": (
        (Checkpointer, "after_step", _remember_take),
        (Checkpointer, "_commit", _done_at_the_end),
    ),
    "waiter_granted_twice": ((Ledger, "_remember", _forget_answers),),
    "empty_part_is_processed": (
        (InDetachedGroup, "run", _run_without_groups),
        (StepResult, "add_share", _share_of_nothing),
    ),
    "last_part_begins_anew": ((FunctionExecutor, "_run", _last_part_is_whole),),
    "taken_again": ((BatchFormer, "take", _take_nothing),),
    "devices_stay_taken": ((DeviceTurns, "generation", _devices_stay_taken),),
    "base_pruned": ((Disk, "with_bases", _no_base),),
}
