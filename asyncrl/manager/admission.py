"""Which rollout may start next (pure): the admission rule, which bounds staleness; the order of prompts; evaluations.

The gate admits a train ticket while

    live + B * (trained_version - served_version) < (1 + eta) * B        (else refused: `staleness`)
    running < max_concurrent                                             (else refused: `capacity`)

B is the train batch in prompts. live counts tickets that are running, in transit, stored, or in the current train step. The other
half of the staleness bound is the rule for when a step may start: asyncrl/master/batch.py.

A prompt is a Locator (epoch, position). The rollout workers' prompt source maps it to a line of the data set. Prompts are issued
in order of their locators. Prompts to be reissued, because their ticket was lost, come first.

An evaluation has parts: the first prompts of a set in a mode. Its tickets bypass the train gate and have their own share of
capacity. If a ticket is lost, its prompt is issued again; a prompt whose tickets are lost max_issues times counts as failed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.protocol.manager import EvalPart, EvaluatedPrompt, EvaluateReply, EvaluateRequest, RolloutResult
from asyncrl.protocol.trajectories import GroupSummary, Locator

_FIRST = Locator(0, 0)
MAX_EVALUATIONS = 64  # at most this many evaluations are kept; the oldest are discarded, with their results
_MAX_RESPONSES = 20_000  # of the results in one reply, which has one result at least: some megabytes


@dataclass(frozen=True)
class Gate:
    """The admission rule in the module docstring."""

    batch_size: int
    eta: int
    max_concurrent: int

    def room(self, *, live: int, running: int, trained: int, served: int) -> tuple[int, str]:
        """How many more tickets are admitted, and the refusal's reason if that is 0."""
        behind = max(0, trained - served)
        fresh = (1 + self.eta - behind) * self.batch_size - live
        if fresh <= 0:
            return 0, "staleness"
        idle = self.max_concurrent - running
        if idle <= 0:
            return 0, "capacity"
        return min(fresh, idle), ""


class PromptCursor:
    """Issues every prompt of every epoch once, in order. Prompts that were put back come first.

    A prompt before the cursor is issued (live), put back (in `_again`) or finished. Therefore finished prompts need no record.
    `_skipped` holds prompts at or after the cursor that must not be issued: they finished before this manager began, or a ticket
    of the previous manager holds them.
    """

    def __init__(
        self, num_prompts: int, num_epochs: int, *, start: Locator = _FIRST, done: Iterable[Locator] = ()
    ) -> None:
        if num_prompts < 1 or num_epochs < 1:
            raise ValueError(f"num_prompts is {num_prompts} and num_epochs is {num_epochs}; both must be at least 1")
        self.num_prompts = num_prompts
        self.num_epochs = num_epochs
        self.before = Locator(num_epochs, 0)  # only prompts before this one are issued
        # A start cursor may point one past an epoch's last prompt: it means the first prompt of the next epoch.
        self._next = start if start.position < num_prompts else Locator(start.epoch + 1, 0)
        self._skipped = {locator for locator in done if locator >= self._next}
        self._again: list[tuple[Locator, int]] = []  # heap of (prompt, number of its next issue)
        self._advance()

    @property
    def exhausted(self) -> bool:
        """Whether no prompt is left to issue. A lost ticket puts its prompt back, and then one is left again."""
        return not self._again and self._next >= min(self.before, Locator(self.num_epochs, 0))

    @property
    def num_again(self) -> int:
        return len(self._again)

    def take(self) -> tuple[Locator, int]:
        """Issue the next prompt. Returns it with its issue number, which starts at 1. A prompt must be left."""
        assert not self.exhausted
        if self._again:
            return heapq.heappop(self._again)
        taken = self._next
        self._next = self._successor(taken)
        self._advance()
        return taken, 1

    def put_back(self, locator: Locator, issue: int) -> None:
        """The prompt's ticket is lost: issue the prompt again, before new ones, as issue number `issue`."""
        assert not self.is_waiting(locator), locator
        heapq.heappush(self._again, (locator, issue))

    def is_waiting(self, locator: Locator) -> bool:
        """The prompt is still to be issued, for the first time or again."""
        if locator >= self._next:
            return self._in_range(locator) and locator not in self._skipped
        return any(waiting == locator for waiting, _ in self._again)

    def withdraw(self, locator: Locator) -> bool:
        """Do not issue this prompt: a ticket holds it, or it was trained. Returns False if it was not waiting."""
        if not self.is_waiting(locator):
            return False
        if locator >= self._next:
            self._skipped.add(locator)
            self._advance()
        else:
            self._again = [entry for entry in self._again if entry[0] != locator]
            heapq.heapify(self._again)
        return True

    def _in_range(self, locator: Locator) -> bool:
        return locator.epoch < self.num_epochs and 0 <= locator.position < self.num_prompts

    def _successor(self, locator: Locator) -> Locator:
        if locator.position + 1 < self.num_prompts:
            return Locator(locator.epoch, locator.position + 1)
        return Locator(locator.epoch + 1, 0)

    def _advance(self) -> None:
        while self._next in self._skipped:
            self._skipped.discard(self._next)
            self._next = self._successor(self._next)


@dataclass(frozen=True, order=True)
class EvalItem:
    """One prompt of one part of one evaluation."""

    eval_id: str
    part: int  # index in the request's parts
    position: int  # index of the prompt in the order of the set's prompts


@dataclass
class Evaluation:
    request: EvaluateRequest
    waiting: list[tuple[EvalItem, int]]  # heap of (item, number of its next issue)
    results: dict[EvalItem, EvaluatedPrompt] = field(default_factory=dict)

    @property
    def num_total(self) -> int:
        return sum(part.num_prompts for part in self.request.parts)

    @property
    def done(self) -> bool:
        return len(self.results) == self.num_total


class EvaluationBook:
    """All evaluations. Items of the oldest unfinished evaluation are issued first."""

    def __init__(self, max_issues: int) -> None:
        self._max_issues = max_issues
        self._evaluations: OrderedDict[str, Evaluation] = OrderedDict()
        self.num_waiting = 0  # items still to be issued; a counter, because it is read for every ticket

    def begin(self, request: EvaluateRequest) -> bool:
        """Start an evaluation. Returns False, without effect, if one with this id was started before."""
        if request.eval_id in self._evaluations:
            return False
        parts = request.parts
        if not request.eval_id or not parts or min(part.num_prompts for part in parts) < 1:
            raise ValueError("an evaluation needs an eval_id, at least one part, and num_prompts >= 1 in each part")
        if len({(part.eval_set, part.mode) for part in parts}) != len(parts):
            raise ValueError(f"the parts of evaluation {request.eval_id!r} name a mode of a set twice; name each once")
        waiting = [
            (EvalItem(request.eval_id, number, position), 1)
            for number, part in enumerate(parts)
            for position in range(part.num_prompts)
        ]
        self._evaluations[request.eval_id] = Evaluation(request, waiting)
        self.num_waiting += len(waiting)
        while len(self._evaluations) > MAX_EVALUATIONS:
            _, forgotten = self._evaluations.popitem(last=False)
            self.num_waiting -= len(forgotten.waiting)
        return True

    def take(self) -> tuple[EvalItem, int]:
        """Issue the next item. Returns it with its issue number. An item must be left."""
        evaluation = next(evaluation for evaluation in self._evaluations.values() if evaluation.waiting)
        self.num_waiting -= 1
        return heapq.heappop(evaluation.waiting)

    def part(self, item: EvalItem) -> EvalPart:
        return self._evaluations[item.eval_id].request.parts[item.part]

    def finish(self, item: EvalItem, result: RolloutResult) -> None:
        """Record the item's result. Only the first result counts. An outcome other than `evaluated` counts as failed."""
        evaluation = self._evaluations.get(item.eval_id)
        if evaluation is not None and item not in evaluation.results:
            group = result.group if result.outcome == "evaluated" else None
            reason = "" if group is not None else result.reason or result.outcome
            evaluation.results[item] = _result(item, group, reason)

    def put_back(self, item: EvalItem, issue: int) -> None:
        """The item's ticket is lost: issue the item again, as issue number `issue`. It fails if `issue` exceeds max_issues."""
        evaluation = self._evaluations.get(item.eval_id)
        if evaluation is None or item in evaluation.results:
            return
        if issue > self._max_issues:
            evaluation.results[item] = _result(item, None, "ticket_lost")
        else:
            heapq.heappush(evaluation.waiting, (item, issue))
            self.num_waiting += 1

    def reply(self, eval_id: str, after: int = 0) -> EvaluateReply:
        """after: number of results that the sender has."""
        evaluation = self._evaluations[eval_id]
        results: list[EvaluatedPrompt] = []
        room = _MAX_RESPONSES
        for item in sorted(evaluation.results)[after:] if evaluation.done else ():
            if results and room <= 0:
                break
            results.append(evaluation.results[item])
            group = results[-1].group
            room -= len(group.rewards) if group is not None else 1
        return EvaluateReply(
            done=evaluation.done,
            num_finished=len(evaluation.results),
            num_total=evaluation.num_total,
            results=results,
        )

    def clear(self) -> None:
        """Discard all evaluations: the attempt that requested them is over."""
        self._evaluations.clear()
        self.num_waiting = 0


def _result(item: EvalItem, group: GroupSummary | None, reason: str) -> EvaluatedPrompt:
    return EvaluatedPrompt(part=item.part, position=item.position, group=group, reason=reason)
