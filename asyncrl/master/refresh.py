"""Copies weights between models: within the trainer group, and to detached models (dataflow/worker_groups.py).

Within the trainer group, collectives copy weights (model/reallocate.py). A detached model gets them from the trainer's memory:

    after a step:   the actor's workers keep a copy (KeepWeights), in the master's order of calls: before they train again
    beside the next step:  the model's workers fetch it (FetchWeights, model/kept_weights.py)
    before the next call of the model:  the call waits until they have it

Both ways give the same numbers. With a share below 1 the actor's workers keep the mean, so a detached group holds nothing that the
trainer lacks: each further incarnation fetches the kept weights again, also one that missed a refresh. A checkpoint contains the
kept weights of reference models, as if the model were in the trainer group; the layout may change at a resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import on_missing
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.detached import DetachedGroups, GroupMissingError, Incarnation
from asyncrl.protocol.calls import CallResult, FetchWeights, KeepWeights, Reallocate
from asyncrl.protocol.versions import WeightVersion

logger = logging.getLogger(__name__)


class Refresher:
    """Copies weights between models.

    consumes: copies to make.  produces: models that have the weights.
    waits for: replies, each at most the limit of a call.  unblocked by: the workers of both models.
    """

    def __init__(
        self,
        placements: Mapping[str, ModelPlacement],
        detached: DetachedGroups,
        caller: WorkerCaller,
        attempt: int,
        train: TrainConfig,
    ) -> None:
        self._train = train
        self._placements, self._detached, self._caller = placements, detached, caller
        self._attempt = attempt
        self._refreshing: dict[str, asyncio.Task[None]] = {}  # by detached model: its newest refresh

    def copy(self, copies: Iterable[Reallocate]) -> list[asyncio.Task[list[CallResult]]]:
        """Start the copies within the trainer group. Each is one call to all workers of its source model and its target model."""
        tasks = []
        for body in copies:
            if self._is_local(body.target):
                workers = {*self._placements[body.source].workers, *self._placements[body.target].workers}
                what = f"weights of {body.source} to be copied to {body.target}"
                tasks.append(self._caller.call(what, sorted(workers), body))
        return tasks

    def begin(
        self, copies: Iterable[Reallocate], version: int, excluded: Mapping[str, Sequence[_Excluded]] | None = None
    ) -> None:
        """Begin the refreshes of detached models: target <- share * source + (1 - share) * target, after the step that produced
        this version of the actor. The workers of the source are called now, so they keep these weights before a later call changes
        them. The rest runs beside the next step; `refreshed` waits for it.

        excluded: by target, context managers that are open while the target's weights change.
        """
        for body in copies:
            if not self._is_local(body.target):
                keep = KeepWeights(
                    source=body.source, target=body.target, weight_version=self._version(version), share=body.share
                )
                kept = self._keep(keep)
                before = self._refreshing.get(body.target)
                work = self._refresh(keep, kept, before, (excluded or {}).get(body.target, ()))
                task = self._refreshing[body.target] = asyncio.create_task(work)
                task.add_done_callback(_note_error)

    async def refreshed(self, model: str) -> None:
        """Wait until the newest refresh of a model is over. Raises its error."""
        if (task := self._refreshing.get(model)) is not None:
            await asyncio.wait({task})  # its waits are bounded
            task.result()

    async def restore(self, checkpoint: str, version: int, source: str, refreshed: Sequence[str]) -> None:
        """Continue from a checkpoint, whose layout may differ: detached models get the weights that it has for them. Without any
        they have those at their paths.

        checkpoint: name of its folder in the run. version: of the actor in it. refreshed: the models that the run refreshes from
        the source. The trainer group has loaded its own models from the checkpoint already.
        """
        for model in refreshed:
            if not self._is_local(model):
                body = KeepWeights(
                    source=source, target=model, weight_version=self._version(version), checkpoint=checkpoint
                )
                if any(reply.num_bytes for reply in await self._keep(body)):
                    self._fetch_from_now_on(body)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _version(self, version: int) -> str:
        return str(WeightVersion(self._attempt, version))

    def _is_local(self, model: str) -> bool:
        return self._detached.worker_groups.is_local(self._placements[model].workers[0])

    def _keep(self, body: KeepWeights) -> asyncio.Task[list[CallResult]]:
        what = f"weights of {body.source} to be kept for {body.target}"
        return self._caller.call(what, self._placements[body.source].workers, body)

    def _fetch_from_now_on(self, body: KeepWeights) -> None:
        """Have every incarnation of the target's group fetch these weights, once, before its next work."""
        fetch = FetchWeights(
            model=body.target,
            weight_version=body.weight_version,
            sources=list(self._placements[body.source].workers),
        )
        self._detached.weights[body.target] = self._placements[body.target].workers, fetch

    async def _refresh(
        self,
        body: KeepWeights,
        kept: asyncio.Task[list[CallResult]],
        before: asyncio.Task[None] | None,
        excluded: Sequence[_Excluded],
    ) -> None:
        await kept
        # At once: the weights before them are gone, and work under way may wait for weights while it holds the locks below
        self._fetch_from_now_on(body)
        if before is not None:
            await asyncio.wait({before})
        target = self._placements[body.target]
        group = self._detached.worker_groups.of(target.workers[0])
        async with contextlib.AsyncExitStack() as stack:
            for exclusion in excluded:
                await stack.enter_async_context(exclusion)
            try:
                what = f"{body.target} to have weights {body.weight_version}"
                await self._detached.repeated(what, group, _nothing, on_missing=on_missing(self._train, target.role))
            except GroupMissingError as error:  # the next incarnation fetches them
                logger.warning("version %s: %s", body.weight_version, error)


_Excluded = AbstractAsyncContextManager[None]


async def _nothing(_: Incarnation) -> None:
    """The work of a group that only has to be prepared for its next work."""


def _note_error(task: asyncio.Task[None]) -> None:
    """`refreshed` raises the error. Without a further use of the model it only is in the log."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a refresh has failed: %s", error)
