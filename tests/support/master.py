"""The parts of a master, between test doubles of the gserver manager and the model workers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncrl.config.processes import MasterWorkerConfig, ModelConfig, WorkerInfo
from asyncrl.config.schema import (
    EvalConfig,
    NameResolveConfig,
    PromptSourceConfig,
    RuntimeConfig,
    TrainConfig,
    WeightsConfig,
    evaluation_sets,
)
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.master.books import Books
from asyncrl.master.buffer import AsyncIOSequenceBuffer, StorageTracker
from asyncrl.master.checkpointing import Checkpointer
from asyncrl.master.device_turns import DeviceTurns, Turns
from asyncrl.master.evaluations import EvalPrompt, Evaluations, ServerEvaluator
from asyncrl.master.files import MasterFiles
from asyncrl.master.model_workers import ModelWorkers
from asyncrl.master.profiling import Profiles
from asyncrl.master.publishing import REWRITE_PAUSE_S, WeightPublisher
from asyncrl.master.rollouts import ManagerReports, Rollouts
from asyncrl.master.trainer import Trainer
from asyncrl.protocol.calls import CallResult, ExecuteMFC
from asyncrl.protocol.manager import EvaluatedPrompt, EvaluateReply, EvaluateRequest, LedgerView, RejectedPrompt
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import GroupSummary, Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.directory import Directory
from asyncrl.weights.checkpoints import MasterState
from tests.support.memory_names import open_names
from tests.support.services import make_services

LIMIT_S = 60.0


def master_config(
    run_dir: Path,
    *,
    train: dict[str, Any] | None = None,
    num_model_workers: int = 1,
    num_prompts: int = 8,
    **fields: Any,
) -> MasterWorkerConfig:
    """A config with batches of 2 and the actor on the first model worker. Writes the prompt file."""
    prompts = run_dir / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(i), "answer": ""}) + "\n" for i in range(num_prompts)))
    name_resolve = NameResolveConfig(endpoints=[f"memory://{run_dir}"])
    train_config = TrainConfig(**{"batch_size": 2, **(train or {})})
    given: dict[str, Any] = {
        "worker": WorkerInfo("master", 0, 1, "e", "t", 1, str(run_dir), 1, name_resolve, RuntimeConfig()),
        "num_model_workers": num_model_workers,
        "models": [ModelConfig("actor", "m", "d1p1m1", [0], trainable=True)],
        "mfcs": [mfc.placed("actor") for mfc in build_dataflow(train_config).mfcs.values()],
        "prompts": PromptSourceConfig(path=str(prompts)),
        "train": train_config,
        "eval": EvalConfig(),
        "weights": WeightsConfig(),
        "max_head_offpolicyness": 1,
        "overdue": "wait",
        "overdue_wait_s": 1000.0,
        "max_rejected_share": 0.5,
        "tensorboard": False,
    }
    return MasterWorkerConfig(**(given | fields))


def make_meta(position: int, ticket: str = "", **fields: Any) -> TrajectoryMeta:
    """Metadata of a group with one response, sampled from version 0."""
    given: dict[str, Any] = {
        "ticket_id": ticket or f"a1-e0-p{position}-i1-v0",
        "locator": Locator(0, position),
        "attempt": 1,
        "head": 0,
        "keys": ["packed_input_ids"],
        "seqlens": [5],
        "response_lengths": [3],
        "rewards": [1.0],
        "version_start": [0],
        "version_end": [0],
        "birth_time": 0.0,
    }
    return TrajectoryMeta(**(given | fields))


def make_books(
    config: MasterWorkerConfig, opened: AsyncExitStack, *, clock: Any = SYSTEM_CLOCK, state: MasterState | None = None
) -> Books:
    """Books that write to the run's folder."""
    files = MasterFiles(config)
    metrics, journal = files.metrics({}), files.journal()
    opened.callback(metrics.close)
    opened.callback(journal.close)
    services = make_services(config.worker, logger="asyncrl.master", clock=clock)
    return Books(config, files.data(), services, journal=journal, metrics=metrics, state=state)


def ledger(*, rejected: list[RejectedPrompt] | None = None, exhausted: bool = False, served: int = 0) -> LedgerView:
    return LedgerView(
        known=True,
        revision=1,
        served_version=served,
        exhausted=exhausted,
        live=[],
        rejected=rejected or [],
        servers=[],
        devices_free=True,
    )


class PlayedManager:
    """Answers reports with `view`. Begins evaluations, which end when the test sets `may_end`."""

    def __init__(self) -> None:
        self.view = ledger()
        self.later: dict[int, LedgerView] = {}  # number of a report -> its answer
        self.reports = 0
        self.turns: list[str] = []  # of shared devices, each once
        self.evaluating = asyncio.Event()
        self.evaluations: list[str] = []
        self.may_end = asyncio.Event()
        self.fails = False

    async def post(self, path: str, body: Any, _: type, **_limits: Any) -> Any:
        if isinstance(body, EvaluateRequest):
            if body.eval_id not in self.evaluations:
                self.evaluations.append(body.eval_id)
            self.evaluating.set()
            if self.fails:
                raise ConnectionError("the gserver manager is gone")
            await self.may_end.wait()
            group = GroupSummary(
                seqlens=[5],
                response_lengths=[3],
                rewards=[0.5],
                version_start=[WeightVersion(1, 0).pack()],
                version_end=[WeightVersion(1, 2).pack()],
            )
            results = [
                EvaluatedPrompt(part=part, position=position, group=group)
                for part, about in enumerate(body.parts)
                for position in range(about.num_prompts)
            ]
            return EvaluateReply(
                done=True, num_finished=len(results), num_total=len(results), results=results[body.after :]
            )
        self.reports += 1
        if self.turns[-1:] != [body.turn]:
            self.turns.append(body.turn)
        if self.reports in self.later:
            return self.later[self.reports]
        view, self.view = self.view, ledger(exhausted=self.view.exhausted, served=self.view.served_version)
        return view


class PlayedWorkers:
    """Model workers that record all calls and answer them with success."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.model_flops: dict[str, ModelFlops] = {}  # that they report

    def call(self, what: str, handlers: Sequence[Any], body: Any) -> asyncio.Task[list[CallResult]]:
        return asyncio.create_task(self._call(what, handlers, body))

    async def _call(self, what: str, handlers: Sequence[Any], body: Any) -> list[CallResult]:
        self.calls.append(body)
        if isinstance(body, ExecuteMFC):
            made = list(build_dataflow(TrainConfig()).mfcs[body.mfc].output_keys)
            return [CallResult(ids=body.parts[0], keys=made) for _ in handlers]
        return [CallResult(model_flops=self.model_flops) for _ in handlers]

    async def bounded(self, awaitable: Awaitable[Any], what: str, on: str) -> Any:
        return await asyncio.wait_for(awaitable, LIMIT_S)


class MasterParts:
    """The parts of a master, wired as in MasterWorker.run."""

    def __init__(
        self,
        config: MasterWorkerConfig,
        opened: AsyncExitStack,
        *,
        manager: Any,
        caller: Any,
        clock: Any = SYSTEM_CLOCK,
        rewrite_pause_s: float = REWRITE_PAUSE_S,
        state: MasterState | None = None,
        source: Callable[[MasterParts], Any] | None = None,
        shares_devices: bool = False,
    ) -> None:
        """manager: has `post`, like a ServiceClient. caller: has `call`, like a WorkerCaller.
        source: makes a replacement for the rollouts. shares_devices: the first model worker shares its device."""
        logger = logging.getLogger("asyncrl.master")
        self.manager, self.caller, self.files = manager, caller, MasterFiles(config)
        services = make_services(config.worker, logger=logger, clock=clock)
        self.tasks = services.tasks
        self.names = Names(config.worker.experiment, config.worker.trial)
        self.resolver = open_names(config.worker.name_resolve)
        opened.callback(self.resolver.close)
        opened.push_async_callback(self._end_tasks)
        lease = self.resolver.grant_lease(LIMIT_S).id
        directory = Directory(self.resolver, self.names, lease=lease, board=services.board, limit_s=LIMIT_S)
        self.books = make_books(config, opened, clock=clock, state=state)
        capacity = (1 + config.max_head_offpolicyness) * config.train.batch_size
        self.buffer = AsyncIOSequenceBuffer(self.books.progress, capacity=capacity, attempt=config.worker.attempt)
        client: Any = SimpleNamespace()
        self.workers = ModelWorkers(config, client, caller, self.buffer, StorageTracker(), logger=logger)
        self.reports = ManagerReports(self.books, self.buffer, manager, orders=self.workers.executor.generates)
        prompts = {
            name: [EvalPrompt(at + 1, "default") for at in range(chosen.num_prompts)]
            for name, chosen in evaluation_sets(config.eval).items()
        }
        evaluator = ServerEvaluator(config.eval.timeout_s, manager, services)
        self.evaluations = Evaluations(
            config.eval, prompts, self.books, evaluator, services, write=self.files.write_results
        )
        turns = Turns()
        if shares_devices:
            attempt, board = config.worker.attempt, services.board
            turns = DeviceTurns(self.reports, caller, [0], directory, attempt=attempt, board=board, limit_s=LIMIT_S)
        self.publisher = WeightPublisher(
            config,
            self.books,
            self.workers,
            self.reports,
            self.evaluations,
            directory,
            self.files,
            services,
            turns=turns,
            rewrite_pause_s=rewrite_pause_s,
        )
        self.leaving = asyncio.Event()
        self.rollouts = Rollouts(
            config,
            self.books,
            self.buffer,
            self.workers,
            self.reports,
            self.publisher.replace_damaged,
            self.publisher.let_generate,
            services,
            leaving=self.leaving,
        )
        checkpointer = Checkpointer(config, self.books, caller, self.files, services)
        self.trainer = Trainer(
            config,
            self.books,
            self.buffer,
            self.workers,
            source(self) if source is not None else self.rollouts,
            self.publisher,
            self.evaluations,
            checkpointer,
            services,
            turns=turns,
            profiles=Profiles(directory, caller, [0], Path(config.worker.run_dir), config.worker.attempt),
            leaving=self.leaving,
        )

    async def _end_tasks(self) -> None:
        for task in self.tasks.running:
            task.cancel()
        await asyncio.gather(*self.tasks.running, return_exceptions=True)
