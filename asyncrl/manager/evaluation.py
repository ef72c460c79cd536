"""Evaluations beside training: which prompts are still to be rolled out, and what came back (pure).

An evaluation is num_prompts prompts in each of its modes. Its tickets pass beside the gate of training, with a share of
capacity of their own; a lost one is handed out again, and one that is lost too often counts as failed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from asyncrl.protocol.messages import EvaluateReply, EvaluateRequest, EvaluationResult, RolloutResult

MAX_EVALUATIONS = 64  # results of older ones are forgotten


@dataclass(frozen=True, order=True)
class EvalItem:
    """One prompt in one mode of one evaluation."""

    eval_id: str
    mode: int  # index in the request's modes
    position: int  # of the prompt among the evaluation prompts


@dataclass
class Evaluation:
    request: EvaluateRequest
    waiting: list[tuple[EvalItem, int]]  # heap of (item, which issue the next one is)
    results: dict[EvalItem, RolloutResult | None] = field(default_factory=dict)  # None: failed

    @property
    def num_total(self) -> int:
        return len(self.request.modes) * self.request.num_prompts

    @property
    def done(self) -> bool:
        return len(self.results) == self.num_total


class EvaluationBook:
    """All evaluations, the oldest unfinished one first."""

    def __init__(self, max_issues: int) -> None:
        self._max_issues = max_issues
        self._evaluations: OrderedDict[str, Evaluation] = OrderedDict()
        self.num_waiting = 0  # items still to be handed out; asked for with every ticket

    def begin(self, request: EvaluateRequest) -> bool:
        """Start an evaluation. False (and no effect) if one of this id was started before."""
        if request.eval_id in self._evaluations:
            return False
        if not request.eval_id or request.num_prompts < 1 or not request.modes:
            raise ValueError("an evaluation needs an eval_id, at least one mode and num_prompts >= 1")
        if len(set(request.modes)) != len(request.modes):
            raise ValueError(f"modes {request.modes} of evaluation {request.eval_id!r} name one twice")
        waiting = [
            (EvalItem(request.eval_id, mode, position), 1)
            for mode in range(len(request.modes))
            for position in range(request.num_prompts)
        ]
        self._evaluations[request.eval_id] = Evaluation(request, waiting)
        self.num_waiting += len(waiting)
        while len(self._evaluations) > MAX_EVALUATIONS:
            _, forgotten = self._evaluations.popitem(last=False)
            self.num_waiting -= len(forgotten.waiting)
        return True

    @property
    def unfinished(self) -> bool:
        return any(not evaluation.done for evaluation in self._evaluations.values())

    def take(self) -> tuple[EvalItem, int]:
        """The next item and which issue of it this is. There must be one."""
        evaluation = next(evaluation for evaluation in self._evaluations.values() if evaluation.waiting)
        self.num_waiting -= 1
        return heapq.heappop(evaluation.waiting)

    def mode(self, item: EvalItem) -> str:
        return self._evaluations[item.eval_id].request.modes[item.mode]

    def finish(self, item: EvalItem, result: RolloutResult) -> None:
        """Its result; the first counts. An outcome other than `evaluated` counts as failed."""
        evaluation = self._evaluations.get(item.eval_id)
        if evaluation is not None and item not in evaluation.results:
            evaluation.results[item] = result if result.outcome == "evaluated" and result.rewards else None

    def put_back(self, item: EvalItem, issue: int) -> None:
        """Its ticket is lost: again, as issue number `issue`, or failed if that is once too often."""
        evaluation = self._evaluations.get(item.eval_id)
        if evaluation is None or item in evaluation.results:
            return
        if issue > self._max_issues:
            evaluation.results[item] = None
        else:
            heapq.heappush(evaluation.waiting, (item, issue))
            self.num_waiting += 1

    def reply(self, eval_id: str) -> EvaluateReply:
        evaluation = self._evaluations[eval_id]
        results = []
        if evaluation.done:
            results = [self._summary(evaluation, mode) for mode in range(len(evaluation.request.modes))]
        return EvaluateReply(
            done=evaluation.done,
            num_finished=len(evaluation.results),
            num_total=evaluation.num_total,
            results=results,
        )

    def clear(self) -> None:
        """The attempt that asked is over."""
        self._evaluations.clear()
        self.num_waiting = 0

    @staticmethod
    def _summary(evaluation: Evaluation, mode: int) -> EvaluationResult:
        request = evaluation.request
        mine = [result for item, result in evaluation.results.items() if item.mode == mode]
        good = [result for result in mine if result is not None]
        rewards = [reward for result in good for reward in result.rewards]
        lengths = [length for result in good for length in result.lengths]
        return EvaluationResult(
            mode=request.modes[mode],
            num_prompts=request.num_prompts,
            num_failed=len(mine) - len(good),
            mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
            mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
            version_min=min((result.version_start for result in good), default=-1),
            version_max=max((result.version_end for result in good), default=-1),
        )
