"""Refreshes the weights of detached models (dataflow/worker_groups.py) from the actor, through the run's folder.

    the actor's workers write their weights -> commit -> the model takes them -> share < 1: its new weights are written, committed
                                                         \\_ one unit of work: the next incarnation repeats it on the old weights _/

Within a worker group, collectives copy weights instead (model/reallocate.py). Both ways give the same float32 numbers. The weights
that a model has taken stay on disk until it has taken others, and as long as a checkpoint refers to them. A new incarnation begins
with them, and so does a run that continues from a checkpoint. The files have the format of a checkpoint (model/checkpoint.py): they
are complete or absent, and verified when they are read.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import on_missing
from asyncrl.master.calls import DetachedGroups, GroupMissingError, Incarnation, WorkerCaller
from asyncrl.protocol.calls import CallResult, CommitCheckpoint, LoadCheckpoint, Reallocate, ShareWeights, TakeWeights
from asyncrl.protocol.run_folder import name_of
from asyncrl.weights.checkpoints import checkpoint_dir, list_checkpoints, read_state, shared_dir
from asyncrl.weights.form import WeightsError

logger = logging.getLogger(__name__)


class Refresher:
    """Refreshes detached models.

    consumes: requests for a refresh.  produces: folders with weights, and models that have taken them.
    waits for: replies, each at most the limit of a call.  unblocked by: the workers of both models.
    """

    def __init__(
        self,
        placements: Mapping[str, ModelPlacement],
        detached: DetachedGroups,
        caller: WorkerCaller,
        run_dir: Path,
        attempt: int,
        train: TrainConfig,
    ) -> None:
        self._train = train
        self._placements, self._detached, self._caller = placements, detached, caller
        self._run_dir, self._folder, self._attempt = run_dir, shared_dir(run_dir), attempt
        self._taken: dict[str, str] = {}  # model -> folder with its weights; without an entry: those of its path
        self._named: frozenset[str] = frozenset()  # folders of the newest checkpoint, which may not be complete yet

    def state(self) -> dict[str, str]:
        """Return the state for a checkpoint: model -> folder with its weights. A run that continues from this checkpoint
        needs these folders."""
        self._named = frozenset(self._taken.values())
        return dict(self._taken)

    async def refresh(self, body: Reallocate, version: int) -> None:
        """target <- share * source + (1 - share) * target, after the step that produced this version of the actor.

        If the target's group is missing and on_missing=continue: with share 1 the next incarnation takes these weights, with a
        smaller share the refresh is left out, because the weights of all missed refreshes would have to be kept.
        """
        target = self._placements[body.target]
        source = f"{body.target}-a{self._attempt:04d}-v{version:08d}"
        await self._share(body.source, source)

        async def take(incarnation: Incarnation) -> str:
            await self._take(incarnation, target, source, body.share)
            if body.share == 1.0:
                return source
            kept = f"{source}-taken-{incarnation.number}"  # its own name: an earlier incarnation may have left a part
            await self._keep(incarnation, target, kept)
            return kept

        what = f"{body.target} to take weights of {body.source}"
        group = self._worker_group(target)
        try:
            self._taken[body.target] = await self._detached.repeated(
                what, group, take, on_missing=on_missing(self._train, target.role)
            )
        except GroupMissingError as error:
            logger.warning("version %d: %s", version, error)
            if body.share == 1.0:
                self._taken[body.target] = source  # `prepare` gives it to the next incarnation
        await asyncio.to_thread(self._prune)

    async def restore(self, state: Mapping[str, str], checkpoint: str, refreshed: Sequence[str]) -> None:
        """Continue from a checkpoint, whose layout may differ. state: the result of `state` at that checkpoint. refreshed: the
        models that the run refreshes; their weights may therefore differ from those at their paths. The trainer group has loaded
        its own models from the checkpoint already."""
        for model in refreshed:
            placement, folder = self._placements[model], state.get(model) or state.get(self._placements[model].role, "")
            if self._detached.worker_groups.is_local(self._placements[model].workers[0]):
                if folder:
                    body = TakeWeights(model=model, folder=self._name(folder))
                    await self._caller.call(f"{model} to take its weights", placement.workers, body)
                continue
            take = partial(self._begin, placement, folder, checkpoint)
            self._taken[model] = await self._detached.repeated(
                f"{model} to restore its weights", self._worker_group(placement), take
            )

    async def prepare(self, incarnation: Incarnation) -> None:
        """Make a new incarnation of a detached group take the weights with which its models were last refreshed.

        At its start the incarnation has loaded the models from their paths, and those weights are older.
        """
        for model, folder in list(self._taken.items()):
            if self._placements[model].workers[0] in incarnation.group:
                await self._take(incarnation, self._placements[model], folder, 1.0)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _name(self, folder: str) -> str:
        return name_of(self._run_dir, self._folder / folder)

    def _worker_group(self, placement: ModelPlacement) -> tuple[int, ...]:
        return self._detached.worker_groups.of(placement.workers[0])

    async def _begin(self, model: ModelPlacement, folder: str, checkpoint: str, incarnation: Incarnation) -> str:
        """Give a model the weights that it had at the checkpoint. Returns the folder that keeps them."""
        if folder:
            await self._take(incarnation, model, folder, 1.0)
            return folder
        # No folder: at the checkpoint the model was in the trainer group, or had not been refreshed yet
        load = [LoadCheckpoint(folder=name_of(self._run_dir, Path(checkpoint)))] * len(incarnation.group)
        await self._detached.call(f"{model.name} of a checkpoint to be loaded", incarnation, incarnation.group, load)
        kept = f"{model.name}-a{self._attempt:04d}-begun-{incarnation.number}"  # the checkpoint will be pruned
        await self._keep(incarnation, model, kept)
        return kept

    async def _take(self, incarnation: Incarnation, target: ModelPlacement, folder: str, share: float) -> None:
        bodies = [TakeWeights(model=target.name, folder=self._name(folder), share=share)] * len(target.workers)
        await self._detached.call(f"{target.name} to take weights", incarnation, target.workers, bodies)

    async def _share(self, model: str, folder: str) -> None:
        """Write the weights of a model of the trainer group to this folder, and commit the folder."""
        workers, name = self._placements[model].workers, self._name(folder)
        body = ShareWeights(model=model, folder=name)
        replies = await self._caller.call(f"weights of {model} to be written", workers, body)
        await self._caller.call(f"{folder} to be complete", workers[:1], _commit_of(name, replies))

    async def _keep(self, incarnation: Incarnation, model: ModelPlacement, folder: str) -> None:
        """Write the weights of a detached model to this folder, and commit the folder."""
        name, workers = self._name(folder), model.workers
        bodies = [ShareWeights(model=model.name, folder=name)] * len(workers)
        replies = await self._detached.call(f"weights of {model.name} to be written", incarnation, workers, bodies)
        await self._detached.call(f"{folder} to be complete", incarnation, workers[:1], [_commit_of(name, replies)])

    def _prune(self) -> None:
        """Remove folders that no model uses and no checkpoint refers to. Runs on a thread."""
        needed = {*self._taken.values(), *self._named}
        for attempt, step in list_checkpoints(self._run_dir):
            try:
                needed |= set(read_state(checkpoint_dir(self._run_dir, attempt, step)).shared.values())
            except (WeightsError, OSError):
                continue  # pruned meanwhile, or torn: no run can continue from it
        for folder in self._folder.iterdir():
            if folder.name not in needed:
                shutil.rmtree(folder, ignore_errors=True)


def _commit_of(folder: str, replies: Sequence[CallResult]) -> CommitCheckpoint:
    return CommitCheckpoint(folder=folder, files=[file for reply in replies for file in reply.files])
