"""Advice from the records of a run, each with its figure and remedy (pure). The terminal prints it, and the page shows it.

Symptoms of the learning: a run learns if its reward rises. Only if it does not are they looked for, so a healthy run gets no such
advice: near the end of a task that is solved, most groups have equal rewards, too. Symptoms of the data (sampler and trainer
differ) and of the time (a side is idle) are looked for in every run. All thresholds are here.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.cli.run_files import Run, number
from asyncrl.master.report import REMEDIES
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S

LEAST_STEPS = 12  # with fewer steps nothing is said
WINDOW = 10  # steps: the newest are compared with the first
RISE = 0.05  # of the spread of all rewards: with less, the reward does not rise
NEARLY_SOLVED = 0.8  # of that spread: above it, equal groups and low entropy are normal
EQUAL_GROUPS = 0.7  # share of groups with equal rewards
EQUAL_GROUPS_NEARLY_SOLVED = 0.9
TRUNCATED = 0.5  # share of responses
REJECTED = 0.3  # share of prompts
ENTROPY = 0.05  # nats a token
CAPPED = 0.05  # share of trained tokens
MISMATCH = 0.05  # share of the first step's tokens, as in the wide bounds of train.mismatch (docs/algorithms.md)
IDLE = 0.2  # share of the time
SLACK = 0.5  # share of what the servers can generate: with less, another split is proposed if it makes steps shorter
OVERLAP = 0.1  # share of the training time in which servers generate: with less, the two sides alternate
_BEST = 10  # one of so many tenths of a second in which a server generates is at its full speed
LEAST_S = 10.0  # of steps: the servers' journals have tenths of a second
_NOT_LEARNING = "the reward does not rise"


@dataclass(frozen=True)
class Symptom:
    """Something in the records that has a remedy."""

    name: str
    brief: str  # for a step's line, such as `equal groups 94%`
    figure: str
    remedy: str
    title: str = _NOT_LEARNING

    @property
    def line(self) -> str:
        return f"{self.title}: {self.figure}. {self.remedy}"


class Advice:
    """The symptoms of a run, from the records of its train steps in metrics.jsonl."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._first: list[float] = []  # rewards of the first steps
        self._newest: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._lowest, self._highest = math.inf, -math.inf
        self._largest_mismatch = math.nan  # share of tokens, of the first steps of attempts
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
        if math.isfinite(share := number(record, "mismatch/share")):
            self._largest_mismatch = max(share, self._largest_mismatch) if self._largest_mismatch >= 0 else share

    def symptoms(self) -> list[Symptom]:
        """The symptoms of the newest steps; none if there are too few steps to tell."""
        if self.num_steps < LEAST_STEPS:
            return []
        found = (self._first_step(), self._capped(), self._slow_rewards())
        return [*self._of_learning(), *(symptom for symptom in found if symptom is not None)]

    def _of_learning(self) -> list[Symptom]:
        """None if the reward rises."""
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

    def _same_reward(self) -> Symptom:
        remedy = (
            "Compare responses and answers (record.trajectories=true, then `asyncrl-launch inspect RUN`), and correct the reward "
            "function or the prompts"
        )
        figure = f"every response so far has the reward {self._lowest:g}, so nothing can be learned"
        return Symptom("same_reward", f"all rewards {self._lowest:g}", figure, remedy)

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
        remedy += "; rollout.reject_equal_rewards=true trains only on other groups"
        return Symptom("equal_groups", f"equal groups {share:.0%}", what, remedy)

    def _truncated(self) -> Symptom | None:
        share = self._average("length/truncated_share")
        if not share >= TRUNCATED:
            return None
        figure = f"{share:.0%} of the responses were cut off at rollout.sampling.max_new_tokens"
        remedy = (
            "Raise it, or let the model end its responses: check chat template and EOS token, or shorten them by "
            "train.ppo.overlong_penalty"
        )
        return Symptom("truncated", f"cut off {share:.0%}", figure, remedy)

    def _rejected(self) -> Symptom | None:
        shares = self._rejected_shares()
        share = sum(shares.values())
        if not share >= REJECTED:
            return None
        reason = max(shares, key=lambda name: shares[name])
        remedy = REMEDIES.get(reason, "see the log of the rollout workers")
        figure = f"{share:.0%} of the prompts were rejected, most of them as {reason}"
        return Symptom("rejected", f"rejected {share:.0%}", figure, remedy[0].upper() + remedy[1:])

    def _rejected_shares(self) -> dict[str, float]:
        """Of the newest steps' prompts, the share that was rejected, by reason."""
        old, new = self._newest[0], self._newest[-1]
        counts = {
            key.partition("/")[2]: number(new, key) - (number(old, key) if key in old else 0.0)
            for key in new
            if key.startswith("rejected/")
        }
        total = sum(counts.values()) + sum(number(record, "batch/num_prompts") for record in list(self._newest)[1:])
        return {reason: count / total for reason, count in counts.items()} if total > 0 else {}

    def _entropy(self) -> Symptom | None:
        entropy = self._average("actor/entropy")
        if not entropy <= ENTROPY:
            return None
        figure = f"the entropy is {entropy:.3f} nats a token: the policy samples nearly the same response each time"
        remedy = "Lower train.optimizer.lr, or set train.ppo.entropy_coef, and begin anew"
        return Symptom("entropy", f"entropy {entropy:.3f}", figure, remedy)

    def _first_step(self) -> Symptom | None:
        share = self._largest_mismatch
        if not share > MISMATCH:
            return None
        figure = (
            f"{share:.0%} of the tokens of a first step have another logprob for the trainer than for their sampler"
        )
        remedy = "docs/debugging.md, A mismatch in the first step, says how to find the cause"
        return Symptom("mismatch", f"mismatch {share:.0%}", figure, remedy, "sampler and trainer differ")

    def _capped(self) -> Symptom | None:
        share = self._average("actor/cap_share")
        if not share >= CAPPED:
            return None
        figure = f"{share:.0%} of the trained tokens have a behaviour weight out of bounds"
        remedy = (
            "If train.mismatch and weights.verify_logprobs find no error, the data is too old for the correction: lower "
            "manager.max_head_offpolicyness or train.optimizer.lr"
        )
        return Symptom("capped", f"out of bounds {share:.0%}", figure, remedy, "sampler and trainer differ")

    def _slow_rewards(self) -> Symptom | None:
        share = self._rejected_shares().get("reward_timeout", 0.0)
        if not share > 0:
            return None
        figure = f"{share:.1%} of the prompts were rejected because a reward exceeded rollout.reward_timeout_s"
        remedy = REMEDIES["reward_timeout"]
        return Symptom(
            "reward_timeout", f"timeouts {share:.1%}", figure, remedy[0].upper() + remedy[1:], "slow rewards"
        )

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
        return [f"step {record['step']}: {symptom.line}" for symptom in due]


def advise(run: Run) -> list[Symptom]:
    """All symptoms of a run's newest steps."""
    idle = _idle(run)
    return [*Advice(run.steps).symptoms(), *([idle] if idle is not None else [])]


@dataclass(frozen=True)
class _Times:
    """How the time of the newest steps was spent, as shares of it. The servers' journals have tenths of a second."""

    waits_data: float
    waits_weights: float
    idle_servers: float  # no server generated
    idle_both: float  # ... while the trainer waited for data
    overlap: float  # share of the training time in which a server generated

    @classmethod
    def of(cls, run: Run) -> _Times | None:
        """None: unknown, as for a run without servers, or too short. Steps that ended after the journals' newest entry, and a
        second, are unknown."""
        sums, newest_s = [0.0] * 7, run.generating.newest * JOURNAL_BUCKET_S + 1
        for record in [record for record in run.steps[-WINDOW:] if number(record, "time") <= newest_s]:
            keys = ("time", "time/step_s", "time/wait_data_s", "time/train_s", "time/wait_weights_s")
            end, step_s, data_s, train_s, weights_s = (number(record, key) for key in keys)
            begin, has_data = end - step_s, end - step_s + data_s
            spans = ((begin, has_data), (has_data, has_data + train_s), (begin, end))
            values = (step_s, data_s, train_s, weights_s, *(_busy_s(run, *span) for span in spans))
            sums = [total + value for total, value in zip(sums, values, strict=True)]
        total, waits_data, train, waits_weights, while_waiting, while_training, busy = sums
        if run.generating.newest < 0 or not total >= LEAST_S or not train > 0:
            return None
        idle_both = max(0.0, waits_data - while_waiting) / total
        return cls(
            waits_data / total, waits_weights / total, max(0.0, 1 - busy / total), idle_both, while_training / train
        )


def _busy_s(run: Run, begin: float, end: float) -> float:
    """Seconds of this span in which a server generated. NaN if the span is unknown."""
    if not math.isfinite(begin + end):
        return math.nan
    first, last = math.floor(begin / JOURNAL_BUCKET_S), math.floor(end / JOURNAL_BUCKET_S)
    return run.generating.count(first, last) * JOURNAL_BUCKET_S if last > first else 0.0


def _idle(run: Run) -> Symptom | None:
    """The side that is idle, and what would help: rewards, eta, or another split of the devices."""
    times = _Times.of(run)
    if times is None:
        return None
    waits, idle = f"the trainer waits for data {times.waits_data:.0%} of the time", f"{times.idle_servers:.0%}"
    servers = f"no server generates in {idle} of the time"
    if times.idle_both >= IDLE:
        figure = f"in {times.idle_both:.0%} of the time the trainer waits for data and no server generates"
        remedy = (
            "Rewards, agents or tools take that time: make them faster, raise rollout.num_workers, or raise "
            "manager.max_head_offpolicyness so that servers generate meanwhile"
        )
        return Symptom("idle_both", f"both idle {times.idle_both:.0%}", figure, remedy, "slow rewards")
    if times.waits_data >= IDLE and times.overlap < OVERLAP:
        remedy = "With devices of their own for both sides, manager.max_head_offpolicyness=1 or more lets them overlap"
        return Symptom(
            "alternating", f"waits {times.waits_data:.0%}", f"{waits}, and {servers}", remedy, "the sides alternate"
        )
    if times.waits_data >= IDLE and times.waits_data >= times.idle_servers:
        remedy = _split(run, times) or "Give generation more devices, or sample shorter responses"
        return Symptom(
            "idle_trainer", f"trainer idle {times.waits_data:.0%}", f"{waits}; {servers}", remedy, "the trainer is idle"
        )
    if times.idle_servers >= IDLE:
        remedy = (
            _split(run, times) or "Give training more devices. A larger manager.max_head_offpolicyness does not help"
        )
        return Symptom("idle_servers", f"servers idle {idle}", f"{servers}; {waits}", remedy, "the servers are idle")
    if (used := _used(run)) <= SLACK and times.waits_data < IDLE and (remedy := _split(run, times)):
        figure = f"the servers generate {used:.0%} of what they can; {waits}"
        return Symptom("idle_servers", f"servers at {used:.0%}", figure, remedy, "the servers are idle")
    if times.waits_weights >= IDLE:
        figure = f"the trainer waits {times.waits_weights:.0%} of the time until the previous version is written"
        remedy = "Use a faster disk for the run's folder, or weights.fsync=false"
        return Symptom("weights", f"weights {times.waits_weights:.0%}", figure, remedy, "the trainer is idle")
    return None


def _split(run: Run, times: _Times) -> str:
    """The split of the same devices with the shortest step, if the work of each side is spread evenly over its devices. "": it is
    unknown, or the present one."""
    training, generation = (_devices(run, kind) for kind in ("train", "generated"))
    used = _used(run)
    shares = 1 - times.waits_data - times.waits_weights, used if math.isfinite(used) else 1 - times.idle_servers
    busy = training * shares[0], generation * shares[1]
    total = training + generation
    if min(training, generation) < 1 or not min(busy) > 0:
        return ""

    def step(servers: int) -> float:
        """The duration of a step with this many generation devices, as a multiple of the present one."""
        return max(busy[0] / (total - servers), busy[1] / servers)

    best = min(range(1, total), key=step)
    if not step(best) < min(1.0, step(generation)):
        return ""
    return (
        f"Of these {total} devices, about {best} should generate and {total - best} train; now {generation} and {training} do. "
        f"A step then takes about {step(best):.0%} of its time"
    )


def _used(run: Run) -> float:
    """The share of what the servers can generate that they generated in the newest steps. They can generate the least of what they
    did in the best tenth of their time. Its mean would count bursts, such as after a pause. NaN: unknown."""
    steps = run.steps[-WINDOW:]
    begin = number(steps[0], "time") - number(steps[0], "time/step_s")
    first, end = begin / JOURNAL_BUCKET_S, number(steps[-1], "time") / JOURNAL_BUCKET_S
    if not end > first:
        return math.nan
    sums = Counter[tuple[int, int]]()
    for server, newest in enumerate(run.newest_tokens):
        for tenth, tokens in newest:
            if first <= tenth < end:
                sums[server, tenth] += tokens  # type: ignore[assignment]
    if not sums:
        return math.nan
    can = sorted(sums.values())[-max(1, len(sums) // _BEST)]
    return min(1.0, sum(sums.values()) / (can * len(run.newest_tokens) * (end - first)))


def _devices(run: Run, kind: str) -> int:
    """The devices of a side, from its throughput in all and for each device; 0: unknown."""
    key = f"throughput/{kind}_tokens_per_s"
    for record in reversed(run.steps[-WINDOW:]):
        if (devices := number(record, key) / (number(record, f"{key}_per_device") or math.nan)) > 0:
            return round(devices)
    return 0


def _mean(values: Iterable[float]) -> float:
    """NaN if a value is missing."""
    there = list(values)
    return sum(there) / len(there) if there else math.nan
