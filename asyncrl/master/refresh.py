"""Copies weights between models: within the trainer group, and to detached models (dataflow/worker_groups.py).

A detached model gets the actor's weights through the run's folder:

    the actor's workers write their weights -> commit -> the model takes them -> share < 1: its new weights are written, committed
                                                         \\_ one unit of work: the next incarnation repeats it on the old weights _/

Within the trainer group, collectives copy weights instead (model/reallocate.py). Both ways give the same float32 numbers. The
weights that a model has taken stay on disk until it has taken others, and as long as a checkpoint refers to them. A new incarnation
begins with them, and so does a run that continues from a checkpoint. The files have the format of a checkpoint
(model/checkpoint.py): they are complete or absent, and verified when they are read.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import on_missing
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.detached import DetachedGroups, GroupMissingError, Incarnation
from asyncrl.protocol.calls import (
    CallBody,
    CallResult,
    CommitCheckpoint,
    LoadCheckpoint,
    Reallocate,
    ShareWeights,
    TakeWeights,
)
from asyncrl.protocol.run_folder import name_of
from asyncrl.weights.checkpoints import checkpoint_dir, list_checkpoints, read_state, shared_dir
from asyncrl.weights.form import WeightsError

logger = logging.getLogger(__name__)

_CallWorkers = Callable[[str, Sequence[int], CallBody], Awaitable[list[CallResult]]]


class Refresher:
    """Copies weights between models.

    consumes: copies to make.  produces: models that have the weights; for detached models also folders with weights.
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
        self._named: frozenset[str] = frozenset()  # folders of the newest checkpoint, which may not be complete yet

    @property
    def _taken(self) -> dict[str, str]:
        """Detached model -> folder with its weights; without an entry: those of its path."""
        return {model: PurePosixPath(body.folder).name for model, (_, body) in self._detached.weights.items()}

    def state(self) -> dict[str, str]:
        """Return the state for a checkpoint: detached model -> folder with its weights. A run that continues from this checkpoint
        needs these folders."""
        self._named = frozenset(self._taken.values())
        return self._taken

    def copy(self, copies: Iterable[Reallocate]) -> list[asyncio.Task[list[CallResult]]]:
        """Start the copies within the trainer group. Each is one call to all workers of its source model and its target model."""
        tasks = []
        for body in copies:
            if self._is_local(body.target):
                workers = {*self._placements[body.source].workers, *self._placements[body.target].workers}
                what = f"weights of {body.source} to be copied to {body.target}"
                tasks.append(self._caller.call(what, sorted(workers), body))
        return tasks

    async def refresh(self, body: Reallocate, version: int) -> None:
        """target <- share * source + (1 - share) * target, after the step that produced this version of the actor. No effect
        within the trainer group.

        If the target's group is missing and on_missing=continue: with share 1 the next incarnation takes these weights, with a
        smaller share the refresh is left out, because the weights of all missed refreshes would have to be kept.
        """
        if self._is_local(body.target):
            return
        target = self._placements[body.target]
        source = f"{body.target}-a{self._attempt:04d}-v{version:08d}"
        await self._write(self._caller.call, self._placements[body.source], source)

        async def take(incarnation: Incarnation) -> str:
            await self._take(incarnation, target, source, body.share)
            if body.share == 1.0:
                return source
            kept = f"{source}-taken-{incarnation.number}"  # its own name: an earlier incarnation may have left a part
            await self._write(partial(self._detached.call, incarnation), target, kept)
            return kept

        what = f"{body.target} to take weights of {body.source}"
        group = self._worker_group(target)
        try:
            kept = await self._detached.repeated(what, group, take, on_missing=on_missing(self._train, target.role))
            self._begin_with(target, kept)
        except GroupMissingError as error:
            logger.warning("version %d: %s", version, error)
            if body.share == 1.0:
                self._begin_with(target, source)
        await asyncio.to_thread(self._prune)

    async def restore(self, state: Mapping[str, str], checkpoint: str, refreshed: Sequence[str]) -> None:
        """Continue from a checkpoint, whose layout may differ. state: the result of `state` at that checkpoint. refreshed: the
        models that the run refreshes; their weights may therefore differ from those at their paths. The trainer group has loaded
        its own models from the checkpoint already."""
        for model in refreshed:
            placement, folder = self._placements[model], state.get(model) or state.get(self._placements[model].role, "")
            if self._is_local(model):
                if folder:
                    body = TakeWeights(model=model, folder=self._name(folder))
                    await self._caller.call(f"{model} to take its weights", placement.workers, body)
                continue
            take = partial(self._begin, placement, folder, checkpoint)
            kept = await self._detached.repeated(f"{model} to restore its weights", self._worker_group(placement), take)
            self._begin_with(placement, kept)

    # ------------------------------------------------------------------------------------------------------------- inside

    def _name(self, folder: str) -> str:
        return name_of(self._run_dir, self._folder / folder)

    def _is_local(self, model: str) -> bool:
        return self._detached.worker_groups.is_local(self._placements[model].workers[0])

    def _begin_with(self, model: ModelPlacement, folder: str) -> None:
        """Have each further incarnation take these weights. At its start it has loaded the model from its path, and those weights
        are older."""
        body = TakeWeights(model=model.name, folder=self._name(folder))
        self._detached.weights[model.name] = model.workers, body

    def _worker_group(self, placement: ModelPlacement) -> tuple[int, ...]:
        return self._detached.worker_groups.of(placement.workers[0])

    async def _begin(self, model: ModelPlacement, folder: str, checkpoint: str, incarnation: Incarnation) -> str:
        """Give a model the weights that it had at the checkpoint. Returns the folder that keeps them."""
        if folder:
            await self._take(incarnation, model, folder, 1.0)
            return folder
        # No folder: at the checkpoint the model was in the trainer group, or had not been refreshed yet
        load = LoadCheckpoint(folder=name_of(self._run_dir, Path(checkpoint)))
        await self._detached.call(incarnation, f"{model.name} of a checkpoint to be loaded", incarnation.group, load)
        kept = f"{model.name}-a{self._attempt:04d}-begun-{incarnation.number}"  # the checkpoint will be pruned
        await self._write(partial(self._detached.call, incarnation), model, kept)
        return kept

    async def _take(self, incarnation: Incarnation, target: ModelPlacement, folder: str, share: float) -> None:
        body = TakeWeights(model=target.name, folder=self._name(folder), share=share)
        await self._detached.call(incarnation, f"{target.name} to take weights", target.workers, body)

    async def _write(self, call: _CallWorkers, model: ModelPlacement, folder: str) -> None:
        """Write the weights of a model to this folder, and commit the folder. call: calls workers of the model's worker group."""
        name, workers = self._name(folder), model.workers
        replies = await call(
            f"weights of {model.name} to be written", workers, ShareWeights(model=model.name, folder=name)
        )
        files = [file for reply in replies for file in reply.files]
        await call(f"{folder} to be complete", workers[:1], CommitCheckpoint(folder=name, files=files))

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
