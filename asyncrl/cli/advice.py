"""Says why a run does not learn: the symptoms in the metrics of its train steps, each with a remedy (pure).

A run learns if its reward rises. Only if it does not are symptoms looked for, so a healthy run gets no advice: near the end of a
task that is solved, most groups have equal rewards, too. All thresholds are here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.cli.run_files import number
from asyncrl.master.report import REMEDIES

LEAST_STEPS = 12  # with fewer steps nothing is said
WINDOW = 10  # steps: the newest are compared with the first
RISE = 0.05  # of the spread of all rewards: with less, the reward does not rise
NEARLY_SOLVED = 0.8  # of that spread: above it, equal groups and low entropy are normal
EQUAL_GROUPS = 0.7  # share of groups with equal rewards
EQUAL_GROUPS_NEARLY_SOLVED = 0.9
TRUNCATED = 0.5  # share of responses
REJECTED = 0.3  # share of prompts
ENTROPY = 0.05  # nats a token


@dataclass(frozen=True)
class Symptom:
    """A reason why a run does not learn."""

    name: str
    brief: str  # for a step's line, such as `equal groups 94%`
    text: str  # with the remedy


class Advice:
    """The symptoms of a run, from the records of its train steps in metrics.jsonl."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._first: list[float] = []  # rewards of the first steps
        self._newest: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._lowest, self._highest = math.inf, -math.inf
        self.num_steps = 0
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of a train step."""
        self.num_steps += 1
        if len(self._first) < WINDOW:
            self._first.append(number(record, "reward/mean"))
        self._newest.append(record)
        for key in ("reward/min", "reward/max"):
            if math.isfinite(reward := number(record, key)):
                self._lowest, self._highest = min(self._lowest, reward), max(self._highest, reward)

    def symptoms(self) -> list[Symptom]:
        """The symptoms of the newest steps; none if the reward rises, or if there are too few steps to tell."""
        if self.num_steps < LEAST_STEPS:
            return []
        spread = self._highest - self._lowest
        if not spread > 0:  # also without any reward
            return [self._same_reward()] if spread == 0 else []
        window = min(WINDOW, self.num_steps // 2)
        first = _mean(self._first[:window])
        now = _mean([number(record, "reward/mean") for record in list(self._newest)[-window:]])
        if not now - first < RISE * spread:
            return []
        solved = (now - self._lowest) / spread >= NEARLY_SOLVED
        found = (self._equal_groups(solved), self._truncated(), self._rejected(), None if solved else self._entropy())
        return [symptom for symptom in found if symptom is not None]

    def lines(self) -> list[str]:
        return [f"the reward does not rise: {symptom.text}" for symptom in self.symptoms()]

    def _same_reward(self) -> Symptom:
        text = (
            f"every response so far has the reward {self._lowest:g}, so nothing can be learned. Compare responses and answers "
            "(record.trajectories=true, then `asyncrl-launch inspect RUN`), and correct the reward function or the prompts"
        )
        return Symptom("same_reward", f"all rewards {self._lowest:g}", text)

    def _equal_groups(self, solved: bool) -> Symptom | None:
        share = self._average("reward/equal_group_share")
        if not share >= (EQUAL_GROUPS_NEARLY_SOLVED if solved else EQUAL_GROUPS):
            return None
        remedy = (
            "The prompts are too easy: use harder ones"
            if solved
            else "Use easier prompts or a stronger model, a larger rollout.group_size, or a reward with partial credit"
        )
        what = f"in {share:.0%} of the groups all rewards are equal: their advantages are 0"
        text = f"{what}. {remedy}; rollout.reject_equal_rewards=true trains only on other groups"
        return Symptom("equal_groups", f"equal groups {share:.0%}", text)

    def _truncated(self) -> Symptom | None:
        share = self._average("length/truncated_share")
        if not share >= TRUNCATED:
            return None
        text = (
            f"{share:.0%} of the responses were cut off at rollout.sampling.max_new_tokens. Raise it, or let the model end its "
            "responses: check chat template and EOS token, or shorten them by train.ppo.overlong_penalty"
        )
        return Symptom("truncated", f"cut off {share:.0%}", text)

    def _rejected(self) -> Symptom | None:
        old, new = self._newest[0], self._newest[-1]
        counts = {
            key.partition("/")[2]: number(new, key) - (number(old, key) if key in old else 0.0)
            for key in new
            if key.startswith("rejected/")
        }
        trained = sum(number(record, "batch/num_prompts") for record in list(self._newest)[1:])
        total = sum(counts.values())
        share = total / (total + trained) if total + trained > 0 else 0.0
        if not share >= REJECTED:
            return None
        reason = max(counts, key=lambda name: counts[name])
        remedy = REMEDIES.get(reason, "see the log of the rollout workers")
        text = f"{share:.0%} of the prompts were rejected, most of them as {reason}. {remedy[0].upper()}{remedy[1:]}"
        return Symptom("rejected", f"rejected {share:.0%}", text)

    def _entropy(self) -> Symptom | None:
        entropy = self._average("actor/entropy")
        if not entropy <= ENTROPY:
            return None
        text = (
            f"the entropy is {entropy:.3f} nats a token: the policy samples nearly the same response each time. Lower "
            "train.optimizer.lr, or set train.ppo.entropy_coef, and begin anew"
        )
        return Symptom("entropy", f"entropy {entropy:.3f}", text)

    def _average(self, key: str) -> float:
        return _mean([number(record, key) for record in self._newest])


class AdviceNews:
    """Selects the advice to print during a run: each symptom when it appears, and again when the steps have doubled."""

    def __init__(self) -> None:
        self._advice = Advice()
        self._said: dict[str, int] = {}

    def briefs(self) -> list[str]:
        """The symptoms of the newest steps, for a step's line."""
        return [symptom.brief for symptom in self._advice.symptoms()]

    def new(self, record: Mapping[str, Any]) -> list[str]:
        """Add the record of a train step. Returns the lines to print now."""
        self._advice.add(record)
        num_steps = self._advice.num_steps
        due = [one for one in self._advice.symptoms() if num_steps >= 2 * self._said.get(one.name, 0)]
        self._said |= {symptom.name: num_steps for symptom in due}
        return [f"step {record['step']}: the reward does not rise: {symptom.text}" for symptom in due]


def _mean(values: Iterable[float]) -> float:
    """NaN if a value is missing."""
    there = list(values)
    return sum(there) / len(there) if there else math.nan
