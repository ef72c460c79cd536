"""Evaluations beside training: bounds how many scheduled ones run at a time, and writes results in the order of steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from asyncrl.config.schema import EvalConfig, eval_place, evaluation_sets
from asyncrl.data.evaluation_files import PromptResult
from asyncrl.dataflow.evaluation import EvaluationResult, summarize
from asyncrl.master.books import Books
from asyncrl.master.rollouts import CALL_LIMIT_S, LONG_POLL_S
from asyncrl.protocol.manager import EvalPart, EvaluatedPrompt, EvaluateReply, EvaluateRequest
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.service_client import ServiceClient
from asyncrl.runtime.services import Services

_MAX_EVALUATIONS = 4  # a scheduled evaluation is skipped while this many are running

Results = Callable[[], Awaitable[Sequence[EvaluatedPrompt]]]  # empty: abandoned


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt of an evaluation set."""

    line: int  # of its file; Parquet and Hub: the row
    task: str


class Evaluator(Protocol):
    """Evaluates the current weights."""

    def begin(self, eval_id: str, step: int, parts: Sequence[EvalPart]) -> Results:
        """Begin an evaluation, at the latest when the returned function is called. That function waits for the evaluation's end and
        returns the results."""


class ServerEvaluator:
    """Evaluates with generation servers and rollout workers, through eval tickets of the gserver manager."""

    def __init__(self, timeout_s: float, manager: ServiceClient, services: Services) -> None:
        """timeout_s: limit of one evaluation."""
        self._timeout_s, self._manager = timeout_s, manager
        self._logger, self._clock = services.logger, services.clock

    def begin(self, eval_id: str, step: int, parts: Sequence[EvalPart]) -> Results:
        return partial(self._run, eval_id, step, parts)

    async def _run(self, eval_id: str, step: int, parts: Sequence[EvalPart]) -> Sequence[EvaluatedPrompt]:
        """Wait for the evaluation and return its results. After timeout_s, log a warning and return no results."""
        found: list[EvaluatedPrompt] = []
        deadline = self._clock.monotonic() + self._timeout_s
        while self._clock.monotonic() < deadline:
            reply = await self._manager.post(
                "/evaluate",
                EvaluateRequest(eval_id=eval_id, parts=list(parts), after=len(found), wait_s=LONG_POLL_S),
                EvaluateReply,
                limit_s=CALL_LIMIT_S,
                wait_s=LONG_POLL_S,
            )
            found += reply.results
            if reply.done and len(found) >= reply.num_total:
                return found
        self._logger.warning("abandoned the evaluation at step %d after %g s (eval.timeout_s)", step, self._timeout_s)
        return ()


class Evaluations:
    """Starts evaluations and writes their results.

    consumes: the results of the evaluator.  produces: records in the books.
    waits for: the evaluator, at most eval.timeout_s.  unblocked by: the evaluator.
    """

    def __init__(
        self,
        config: EvalConfig,
        prompts: Mapping[str, Sequence[EvalPrompt]],
        books: Books,
        evaluator: Evaluator,
        services: Services,
        *,
        write: Callable[[str, Sequence[PromptResult]], None],
    ) -> None:
        """prompts: by evaluation set, those of each evaluation. write: MasterFiles.write_results."""
        self.sets = evaluation_sets(config)
        self._prompts, self._timeout_s = prompts, config.timeout_s
        self._told: set[str] = set()  # why a set has no majority@k; said once
        self._books, self._evaluator, self._write = books, evaluator, write
        self._tasks, self._board, self._logger = services.tasks, services.board, services.logger
        self._begun: list[asyncio.Task[None]] = []
        self._baseline: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return sum(not task.done() for task in self._begun)

    @property
    def baseline_runs(self) -> bool:
        """Whether the initial weights are being evaluated."""
        return self._baseline is not None and not self._baseline.done()

    async def baseline_over(self) -> None:
        """Wait until the initial weights have been evaluated."""
        if self._baseline is not None:
            await self._wait(self._baseline, "the evaluation of the initial weights")

    def begin_if_room(self, sets: Sequence[str]) -> None:
        """Evaluate the current weights on these sets, unless _MAX_EVALUATIONS are running."""
        if self.num_running < _MAX_EVALUATIONS:
            self.begin(sets)
        elif sets:
            version = self._books.version.version
            self._logger.warning("no evaluation at step %d: %d are still running", version, _MAX_EVALUATIONS)

    def begin(self, sets: Sequence[str], name: str = "", *, baseline: bool = False, prefix: str = "") -> None:
        """Evaluate the current weights on these sets; without sets, do nothing. name: suffix of the evaluation's id; by default the
        step. baseline: the current weights are the initial ones. prefix: of the modes in the metrics."""
        parts = [
            EvalPart(eval_set=one, mode=mode, num_prompts=len(self._prompts[one]))  # type: ignore[arg-type]  # checked at load
            for one in sets
            for mode in self.sets[one].modes
        ]
        if not parts:
            return
        step, before = self._books.step, self._begun[-1] if self._begun else None
        eval_id = f"a{self._books.attempt}-{name or f's{step}'}"
        results = self._evaluator.begin(eval_id, step, parts)
        task = self._tasks.spawn(self._evaluate(eval_id, parts, results, step, before, prefix), "evaluate")
        self._begun.append(task)
        self._count()
        task.add_done_callback(lambda _: self._count())
        if baseline:
            self._baseline = task

    async def all_over(self) -> None:
        await asyncio.gather(*self._begun)

    async def ended(self) -> None:
        """Wait until no evaluation runs. A caller that stops waiting ends none."""
        if self._begun:
            await asyncio.wait(self._begun)

    async def _evaluate(
        self,
        eval_id: str,
        parts: Sequence[EvalPart],
        results: Results,
        step: int,
        before: asyncio.Task[None] | None,
        prefix: str,
    ) -> None:
        """before: the previous evaluation. Its results are written first, so that the records are in the order of steps."""
        if found := await results():
            judged = await asyncio.to_thread(self._summarize, parts, found)  # votes may take seconds
            by_prompt = [self._of_prompt(parts[result.part], result, prefix) for result in found]
            await asyncio.to_thread(self._write, eval_id, by_prompt)
            self._tell(judged)
            if before is not None:  # the previous evaluation ends within its own time limit
                await self._wait(asyncio.wait({before}), "the previous evaluation")
            self._books.write_evaluation(step, judged, prefix)

    def _summarize(self, parts: Sequence[EvalPart], found: Sequence[EvaluatedPrompt]) -> list[EvaluationResult]:
        of_part: list[list[EvaluatedPrompt]] = [[] for _ in parts]
        for result in found:
            of_part[result.part].append(result)
        return [
            judged
            for part, results in zip(parts, of_part, strict=True)
            for judged in summarize(
                part,
                results,
                [prompt.task for prompt in self._prompts[part.eval_set]],
                self.sets[part.eval_set].correct_reward,
            )
        ]

    def _of_prompt(self, part: EvalPart, result: EvaluatedPrompt, prefix: str) -> PromptResult:
        group, prompt = result.group, self._prompts[part.eval_set][result.position]
        about = PromptResult(
            eval_set=part.eval_set,
            mode=f"{prefix}{part.mode}",
            position=result.position,
            line=prompt.line,
            task=prompt.task,
            reason=result.reason,
        )
        if group is None:
            return about
        return msgspec.structs.replace(
            about,
            rewards=group.rewards,
            response_lengths=group.response_lengths,
            answers=group.answers,
            versions=[
                (WeightVersion.unpack(first).version, WeightVersion.unpack(last).version)
                for first, last in zip(group.version_start, group.version_end, strict=True)
            ],
        )

    def _tell(self, judged: Sequence[EvaluationResult]) -> None:
        for result in judged:
            place = f"{eval_place(result.eval_set)}{f', task {result.task}' if result.task else ''}"
            if result.no_majority and place not in self._told:
                self._told.add(place)
                text = f"{place}: no majority@k (said once): {result.no_majority}"
                self._logger.warning("%s", text)
                self._board.notes = [*self._board.notes, text]  # `status` and the launcher show it

    async def _wait(self, awaitable: Awaitable[object], what: str) -> None:
        limit_s = self._timeout_s + CALL_LIMIT_S + LONG_POLL_S
        async with self._board.waiting(what, on="gserver manager", limit_s=limit_s):
            await awaitable

    def _count(self) -> None:
        self._board.set_queue("evaluations", self.num_running)
