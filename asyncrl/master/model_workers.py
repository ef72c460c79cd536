"""The models of a run, the workers that hold them, and the master's calls to them outside the dataflow of a step."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.config.schema import EMA, REF, ConfigError
from asyncrl.config.validation import problems_of_generating_step
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.graph import without_generation
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import WorkerGroups
from asyncrl.master.balance import Balance
from asyncrl.master.buffer import AsyncIOSequenceBuffer, StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.master.detached import DetachedGroups
from asyncrl.master.executor import FunctionExecutor
from asyncrl.master.homes import homes_of
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.refresh import Refresher
from asyncrl.master.step_function import StepFunction
from asyncrl.protocol.calls import (
    CallBody,
    CallResult,
    ClearData,
    CommitWeights,
    LoadCheckpoint,
    Ping,
    SaveModel,
    WriteWeights,
)
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import name_of
from asyncrl.streams.request_reply import NameResolvingRequestClient
from asyncrl.weights.checkpoints import CheckpointError, newest_step

_RECORDER = ModelPlacement(ACTOR, ParallelGrid(), (0,))  # stands for the recorder in rollout_only, which has no model


def placements_of(config: MasterWorkerConfig) -> dict[str, ModelPlacement]:
    """Return the placement of each model, by name. The heads of the first model receive trajectories."""
    models = [ModelPlacement.of(model) for model in config.models]
    return {model.name: model for model in models or [_RECORDER]}


class ModelWorkers:
    """The placements of the models, and the master's calls to model workers. `executor` makes the calls of a step.

    waits for: replies, each at most train.call_timeout_s.  unblocked by: the workers.
    """

    def __init__(
        self,
        config: MasterWorkerConfig,
        client: NameResolvingRequestClient,
        caller: WorkerCaller,
        buffer: AsyncIOSequenceBuffer,
        tracker: StorageTracker,
        *,
        logger: logging.Logger,
    ) -> None:
        self.models = placements_of(config)
        self.worker_groups = WorkerGroups.of_config(config.worker_groups, config.num_model_workers)
        self.heads = next(iter(self.models.values())).heads  # by head, the worker that receives trajectories
        self._saved = [model.name for model in config.models if model.trainable or model.name == EMA] or [ACTOR]
        self.caller, self.tracker = caller, tracker
        mfcs = [MFCDef.of(mfc) for mfc in config.mfcs]
        self.hooks = ParameterHooks(mfcs, config.train)
        self.generating = [mfc.model for mfc in mfcs if mfc.kind == "generate"]
        self._run_dir = Path(config.worker.run_dir)
        self._logger = logger
        self._detached = DetachedGroups(
            self.worker_groups,
            client,
            caller,
            config.train.call_timeout_s,
            missing_after_s=config.train.missing_after_s,
        )
        self.refresher = Refresher(self.models, self._detached, caller, config.worker.attempt, config.train)
        function = StepFunction(config.train.step, config.train.call_timeout_s, remedy=self._remedy)
        if function.generates:
            problems = problems_of_generating_step(
                config.mode, config.train, config.max_head_offpolicyness, config.overdue
            )
            if wrong := [f"{name}={value!r}: {remedy}" for name, value, remedy in problems]:
                raise ConfigError("\n".join(wrong))
        self.balance = Balance(mfcs, config.train, config.worker.seed)
        graph = without_generation([mfc if mfc.model else replace(mfc, model=ACTOR) for mfc in mfcs])
        self.executor = FunctionExecutor(
            homes_of(
                graph, self.models, caller, self.hooks, self._detached, self.refresher, tracker, buffer, self.balance
            ),
            self.refresher,
            buffer,
            tracker,
            caller,
            self.hooks,
            function,
            self.heads,
            self.balance,
            records=config.records,
        )

    def _remedy(self) -> str:
        """What to do after train.step has failed."""
        try:
            step = newest_step(self._run_dir)
        except CheckpointError as error:
            return f"correct the function; the run cannot be resumed: {error}"
        if step is None:
            return "correct the function, then start the run again: it has no checkpoint yet"
        return f"correct the function, then `asyncrl-launch resume {self._run_dir}` continues after step {step}"

    async def load(self) -> None:
        """Wait until all workers have loaded their models."""
        replies = await asyncio.gather(
            self.caller.call("models to be loaded", list(self.worker_groups.trainer), Ping()),
            *(self._load_detached(group) for group in self.worker_groups.detached),
        )
        for reply in itertools.chain(*replies):
            self.balance.flops.update(reply.model_flops)

    async def load_checkpoint(self, path: Path, version: int) -> None:
        """Load a checkpoint at every worker of the trainer group. If the run refreshes the reference models
        (train.ref.update_interval), give them the weights that they had at the checkpoint. The checkpoint may have been saved with
        another layout. version: of the actor in the checkpoint."""
        load = LoadCheckpoint(folder=name_of(self._run_dir, path))
        await self.caller.call(f"{path.name} to be loaded", list(self.worker_groups.trainer), load)
        if self.hooks.train.ref.update_interval:
            refreshed = [name for name, model in self.models.items() if model.role == REF]
            await self.refresher.restore(load.folder, version, next(iter(self.models)), refreshed)
        self.refresher.begin(self.hooks.loaded(), version)

    def forget(self, tickets: Sequence[str]) -> asyncio.Task[list[CallResult]]:
        """Have all workers that hold data of these groups discard it. The returned task waits for the workers of the trainer
        group."""
        workers, body, what = self.tracker.drop(tickets), ClearData(ids=list(tickets)), "forgetting groups"
        self._detached.tell_nowait(
            what, [worker for worker in workers if not self.worker_groups.is_local(worker)], body
        )
        return self.caller.call(what, [worker for worker in workers if self.worker_groups.is_local(worker)], body)

    def start(self, model: str, what: str, body: CallBody) -> asyncio.Task[list[CallResult]]:
        """Call all workers of a model."""
        return self.caller.call(what, self.models[model].workers, body)

    async def save(self, name: str) -> None:
        """Save the models for the user: the actor's under this name, the critic's under `{name}-critic`, the moving average's
        under `{name}-ema`."""
        for model in self._saved:
            path = self._run_dir / "checkpoints" / (name if model == ACTOR else f"{name}-{model}")
            await self.save_in(path, model, f"{model} to be saved as {path.name}")
            self._logger.info("model saved in %s", path)

    async def save_in(self, path: Path, model: str, what: str) -> None:
        """Save a model in a folder of the run, in Hugging Face format."""
        save = SaveModel(role=model, folder=name_of(self._run_dir, path))
        await self.commit(save, await self.start(model, what, save))

    async def commit(self, body: WriteWeights | SaveModel, written: Sequence[CallResult]) -> None:
        """Call after all workers of the model have written their files. Lets the model's first worker commit them: that worker
        checks the files and gives the folder its final name."""
        commit = CommitWeights(
            role=body.role,
            weight_version=body.weight_version if isinstance(body, WriteWeights) else "",
            folder=body.folder,
            files=[file for reply in written for file in reply.files],
            rewrite=isinstance(body, WriteWeights) and body.rewrite,
        )
        await self.caller.call(f"{body.folder} to be complete", self.models[body.role].workers[:1], commit)

    async def _load_detached(self, group: Sequence[int]) -> list[CallResult]:
        what = "models to be loaded"
        return await self._detached.repeated(
            what, group, lambda incarnation: self._detached.call(incarnation, what, group, Ping())
        )
