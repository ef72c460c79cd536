"""The master's metrics of a step and its summary of the run. Pure, except that it reads the journals at the end."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.algorithms.metrics import EvalName
from asyncrl.dataflow.evaluation import EvaluationResult
from asyncrl.protocol.manager import ServerView
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S, read_json_lines

_SHORTEST_SPAN_S = 10.0
MISSING = "missing/"  # with on_missing=continue, by MFC: 1 in a step that is trained without its output keys, else 0

logger = logging.getLogger(__name__)

# Remedies for rejections, by reason. The log of the rollout worker (mode=sync: of the model worker) has the traceback of the first
# rejection for each reason.
REMEDIES = {
    "agent_declined": "have the agent return a trajectory",
    "agent_error": "fix the agent or environment",
    "agent_hangs": "let agents end when they are cancelled: do not catch asyncio.CancelledError",
    "agent_output": "let the agent's program write less, or raise agent_args.output_bytes",
    "agent_timeout": "find out what the agent's program waits for, or raise agent_args.limit_s",
    "bad_logprobs": "see the generation servers' logs: overflowing weights or activations cause such values (try "
    "generation.dtype=bfloat16 or float32)",
    "bad_tokens": "check that tokenizer and model belong together",
    "bad_prompt": "leave such prompts out, or use a tokenizer that knows their characters",
    "empty_response": "check that prompts leave room for a response in the model's positions",
    "generation_refused": "check that prompts and rollout.sampling fit the model and generation.num_blocks",
    "episode_gone": "the processes of episodes do not start any more: is agent_args.python still there, with its packages?",
    "max_issues": "find out why their rollouts did not end; manager.max_issues limits how often a prompt is tried",
    "prompt_too_long": "leave long prompts out, or raise prompts.max_prompt_length",
    "push_refused": "raise runtime.max_message_bytes, or sample fewer tokens for each prompt",
    "reward_gone": "the processes of the reward do not start any more: is its file still there, and can it be imported?",
    "reward_died": "find out what ends the judge process: os._exit, a crash in a C extension, memory (rollout.reward_memory_bytes)",
    "reward_error": "fix the reward function",
    "reward_not_finite": "have the reward function return a finite number",
    "reward_timeout": "make the reward function faster, or raise rollout.reward_timeout_s",
    "rollout_timeout": "find out what the agent waits for, or raise rollout.rollout_timeout_s",
    "equal_rewards": "use prompts of middling difficulty or a larger rollout.group_size, or set rollout.reject_equal_rewards=false",
    "task_closed": "wait, or lower the pass_rate of the task's gate; its prompts come again in the next epoch",
    "too_easy": "use harder prompts, or raise rollout.success_rate_ub",
    "too_hard": "use easier prompts, or lower rollout.success_rate_lb",
    "unknown_task": "name the task in rollout.tasks",
}


@dataclass
class StepTimes:
    """Seconds of one step, from the end of the previous step to its own end."""

    wait_data_s: float
    train_s: float
    wait_weights_s: float

    @property
    def total_s(self) -> float:
        return self.wait_data_s + self.train_s + self.wait_weights_s


def head_offpolicyness(meta: TrajectoryMeta, version: int) -> int:
    """Version that the step trains from (`version`), minus the oldest version that sampled a first token in the group."""
    return version - WeightVersion.unpack(min(meta.version_start)).version


def tail_offpolicyness(meta: TrajectoryMeta, version: int) -> int:
    """Version that the step trains from (`version`), minus the newest version that sampled a last token in the group."""
    return version - WeightVersion.unpack(max(meta.version_end)).version


def step_metrics(
    metas: Sequence[TrajectoryMeta],
    version: int,
    times: StepTimes,
    tasks: Sequence[str] = (),
    *,
    trained: Collection[str] | None = None,
) -> dict[str, float]:
    """Return the metrics of a batch trained at `version` that only the master knows: rewards, lengths, off-policyness, times.

    tasks: names by task_id. With several tasks, the metrics include each task's mean reward and its count of responses. trained:
    the groups of the batch that train.step has trained; None: all.
    """
    in_update = [meta for meta in metas if trained is None or meta.ticket_id in trained]
    rewards = [reward for meta in metas for reward in meta.rewards]
    lengths = [length for meta in metas for length in meta.response_lengths]
    heads = [head_offpolicyness(meta, version) for meta in metas]
    tails = [tail_offpolicyness(meta, version) for meta in metas]
    mixed = sum(start != end for meta in metas for start, end in zip(meta.version_start, meta.version_end, strict=True))
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "length/response_mean": _mean(lengths),
        "length/response_max": float(max(lengths)),
        **_spread("reward/", rewards),
        **_spread("length/response_", lengths),
        "batch/num_prompts": float(len(metas)),
        "batch/num_sequences": float(len(rewards)),
        "batch/num_generated_tokens": float(sum(lengths)),
        "batch/num_trained_prompts": float(len(in_update)),
        "batch/num_trained_sequences": float(sum(len(meta.rewards) for meta in in_update)),
        "batch/num_trained_generated_tokens": float(sum(sum(meta.response_lengths) for meta in in_update)),
        "batch/num_sequences_of_two_versions": float(mixed),
        "offpolicy/head_mean": _mean(heads),
        "offpolicy/head_max": float(max(heads)),
        "offpolicy/tail_mean": _mean(tails),
        "offpolicy/tail_max": float(max(tails)),
        "time/step_s": times.total_s,
        "time/wait_data_s": times.wait_data_s,
        "time/train_s": times.train_s,
        "time/wait_weights_s": times.wait_weights_s,
        "throughput/tokens_per_s": sum(lengths) / max(times.total_s, 1e-9),
    }
    for distance, count in sorted(Counter(heads).items()):
        metrics[f"offpolicy/head_count/{distance}"] = float(count)
    return metrics | (_task_metrics(metas, tasks) if len(tasks) > 1 else {})


def of_whole_batch(stats: Mapping[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a batch together with the statistics of its MFCs. Both have some names in common. If a step function
    has computed advantages for a part of the batch only, those that the master knows of the whole batch count."""
    if stats.get("batch/num_groups", metrics["batch/num_prompts"]) == metrics["batch/num_prompts"]:
        return {**metrics, **stats}
    return {**stats, **metrics}


def throughput_metrics(
    *,
    num_tokens: int,
    num_generated: int,
    step_s: float,
    seconds: Mapping[str, float],
    peak_s: Mapping[str, float],
    train_mfc: str,
    training_devices: int,
    generation_devices: int,
) -> dict[str, float]:
    """Return tokens per second, in all and for each device, and the MFU of each train step MFC.

    num_tokens: of the trained groups, prompts included; they count once, however often the step passes over them. num_generated:
    tokens of the responses that arrived since the previous step. seconds: of each MFC, at its slowest worker. peak_s: see
    StepResult; empty on CPUs, which have no MFU. training_devices: those of train_mfc, the actor's. generation_devices: 0 if
    nothing generates.
    """
    metrics = {f"mfu/{mfc}": peak_s[mfc] / max(seconds[mfc], 1e-9) for mfc in peak_s}
    rates = {}
    if seconds.get(train_mfc):
        rates["train"] = (num_tokens / seconds[train_mfc], training_devices)
    if generation_devices:
        rates["generated"] = (num_generated / max(step_s, 1e-9), generation_devices)
    for kind, (rate, devices) in rates.items():
        metrics[f"throughput/{kind}_tokens_per_s"] = rate
        metrics[f"throughput/{kind}_tokens_per_s_per_device"] = rate / devices
    return metrics


def _task_metrics(metas: Sequence[TrajectoryMeta], tasks: Sequence[str]) -> dict[str, float]:
    """Return count and mean reward of each task. A task without a response in the batch has a count of 0 and no mean."""
    metrics: dict[str, float] = {}
    for task_id, task in enumerate(tasks):
        rewards = [reward for meta in metas if meta.task_id == task_id for reward in meta.rewards]
        metrics[f"count/{task}"] = float(len(rewards))
        if rewards:
            metrics[f"reward/{task}"] = _mean(rewards)
    return metrics


class UpdateSeconds:
    """The cost of weight updates to generation: seconds of interruption, as a mean over the servers."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since_last(self, servers: Sequence[ServerView]) -> float:
        """Return the mean over the servers of the seconds of interruption since the last call. A restarted manager counts from 0: a
        server whose count has decreased contributes 0."""
        new = [max(0.0, server.update_s - self._before.get(server.server, 0.0)) for server in servers]
        self._before = {server.server: server.update_s for server in servers}
        return _mean(new) if new else 0.0


def rejection_lines(rejected: Mapping[str, int], details: Mapping[str, str]) -> list[str]:
    """Return one line for each reason, the most frequent first: count, detail of the first rejection, remedy."""
    lines = []
    for reason, count in sorted(rejected.items(), key=lambda entry: -entry[1]):
        first = f"; the first: {details[reason]}" if reason in details else ""
        remedy = f". {REMEDIES[reason][0].upper()}{REMEDIES[reason][1:]}" if reason in REMEDIES else ""
        lines.append(f"{reason}: {count}{first}{remedy}")
    return lines


@dataclass
class Ages:
    """How old the trained responses of a run were: counts of all of them.

    The age of a response is its head off-policyness: the version that the step trained from, minus the version that sampled the
    first token. Its tail off-policyness is the same for the last token. Both are in weight versions. The counts are part of the
    master's state, so a continued run keeps those of the steps before its checkpoint. Memory: one number for each tail
    off-policyness, and for each pair of length bin and age."""

    by_length: dict[int, dict[int, int]] = field(default_factory=dict)  # bits of the length -> age -> responses
    tails: dict[int, int] = field(default_factory=dict)  # tail off-policyness -> responses

    def add(self, metas: Sequence[TrajectoryMeta], version: int) -> None:
        """Count the responses of a batch. version: the step trains from it."""
        for meta in metas:
            versions = zip(meta.response_lengths, meta.version_start, meta.version_end, strict=True)
            for length, first, last in versions:
                ages = self.by_length.setdefault(length.bit_length(), {})
                head, tail = (version - WeightVersion.unpack(packed).version for packed in (first, last))
                ages[head] = ages.get(head, 0) + 1
                self.tails[tail] = self.tails.get(tail, 0) + 1

    def as_dict(self) -> dict[str, object]:
        """Return the report for summary.json. `head` and `tail` map an off-policyness (as text, for JSON) to a number of responses.
        `by_length` has one entry for each length bin with responses: lengths from `tokens_min` to `tokens_max`, where the bins are
        the powers of two, with the mean and the largest age."""
        heads: Counter[int] = Counter()
        for ages in self.by_length.values():
            heads.update(ages)
        return {
            "head": _by_age(heads),
            "tail": _by_age(self.tails),
            "by_length": [_bin(bits, ages) for bits, ages in sorted(self.by_length.items())],
        }


def _by_age(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(age): count for age, count in sorted(counts.items())}


def _bin(bits: int, ages: Mapping[int, int]) -> dict[str, float]:
    count = sum(ages.values())
    return {
        "tokens_min": (1 << bits) >> 1,
        "tokens_max": (1 << bits) - 1,
        "responses": count,
        "head_mean": sum(age * number for age, number in ages.items()) / count,
        "head_max": max(ages),
    }


@dataclass
class RunSummary:
    """Totals of the run, collected during the run and written as summary.json at its end."""

    num_steps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    first_reward: float | None = None
    last_reward: float | None = None
    reward_sum: float = 0.0
    head_sum: float = 0.0
    head_max: float = 0.0
    num_prompts: int = 0
    num_mixed: int = 0
    num_untrained_sequences: int = 0  # of num_sequences: in groups that train.step has not trained
    num_untrained_tokens: int = 0  # ... of num_tokens
    num_finished_sequences: int = 0  # responses in all groups that were stored, trained or not
    num_finished_tokens: int = 0
    num_skipped_steps: int = 0  # optimizer steps with a loss or gradient that was not finite
    num_missing: dict[str, int] = field(default_factory=dict)  # MFC -> steps trained without it (on_missing=continue)
    num_dropped: int = 0  # groups that arrived and were too old to train
    wait_data_s: float = 0.0
    train_s: float = 0.0
    wait_weights_s: float = 0.0
    servers_updating_s: float = 0.0
    evaluations: list[dict[str, float | int | str]] = field(default_factory=list)
    ages: Ages = field(default_factory=Ages)

    def add_trajectory(self, meta: TrajectoryMeta) -> None:
        """Count a group that has arrived."""
        self.num_finished_sequences += len(meta.response_lengths)
        self.num_finished_tokens += sum(meta.response_lengths)

    def add_step(self, metrics: Mapping[str, float]) -> None:
        self.num_steps += 1
        self.num_sequences += int(metrics["batch/num_sequences"])
        self.num_tokens += int(metrics["batch/num_generated_tokens"])
        self.num_untrained_sequences += _untrained("sequences", metrics)
        self.num_untrained_tokens += _untrained("generated_tokens", metrics)
        self.first_reward = metrics["reward/mean"] if self.first_reward is None else self.first_reward
        self.last_reward = metrics["reward/mean"]
        self.reward_sum += metrics["reward/mean"] * metrics["batch/num_sequences"]
        self.num_prompts += int(metrics["batch/num_prompts"])
        self.head_sum += metrics["offpolicy/head_mean"] * metrics["batch/num_prompts"]
        self.head_max = max(self.head_max, metrics["offpolicy/head_max"])
        self.num_mixed += int(metrics["batch/num_sequences_of_two_versions"])
        self.num_skipped_steps += int(sum(value for name, value in metrics.items() if name.endswith("/skipped_steps")))
        for name, value in metrics.items():
            if name.startswith(MISSING) and value:
                mfc = name.removeprefix(MISSING)
                self.num_missing[mfc] = self.num_missing.get(mfc, 0) + 1
        self.wait_data_s += metrics["time/wait_data_s"]
        self.train_s += metrics["time/train_s"]
        self.wait_weights_s += metrics["time/wait_weights_s"]
        self.servers_updating_s += metrics.get("time/servers_updating_s", 0.0)

    def add_evaluation(self, step: int, results: Sequence[EvaluationResult], prefix: str = "") -> dict[str, float]:
        """Return the metrics of an evaluation, and keep them for the summary. prefix: of the modes' names."""
        metrics: dict[str, float] = {}
        for result in results:
            values: dict[str, float | None] = {
                "reward": result.reward.mean if result.reward is not None else 0.0,
                "reward_ci95": result.reward.half_width if result.reward is not None else None,
                "length": result.mean_length,
                "num_prompts": float(result.num_prompts),
                "num_failed": float(result.num_failed),
                "version_min": float(result.version_min),
                "version_max": float(result.version_max),
            }
            for name, found in result.at_k.items():
                values |= {name: found.mean, f"{name}_ci95": found.half_width}
            for name, value in values.items():
                if value is not None:
                    metrics[str(EvalName(result.eval_set, f"{prefix}{result.mode}", name, result.task))] = value
        self.evaluations.append({"step": step, **metrics})
        return metrics

    def as_dict(
        self,
        *,
        mode: str,
        attempt: int,
        wall_s: float,
        version: int,
        rejected: Mapping[str, int],
        generation_idle: float | None,
    ) -> dict[str, object]:
        """Return the content of summary.json. generation_idle: share of training time in which no server generated a token."""
        training_s = max(self.wait_data_s + self.train_s + self.wait_weights_s, 1e-9)
        num_sequences = self.num_sequences - self.num_untrained_sequences
        num_tokens = self.num_tokens - self.num_untrained_tokens
        return {
            "mode": mode,
            "attempt": attempt,
            "steps": self.num_steps,
            "version": version,
            "groups": self.num_prompts,
            "mean_reward": self.reward_sum / max(self.num_sequences, 1),
            "sequences": num_sequences,
            "generated_tokens": num_tokens,
            "wall_s": wall_s,
            "training_s": training_s,
            "first_reward": self.first_reward,
            "last_reward": self.last_reward,
            "evaluations": self.evaluations,
            "trainer_idle_share": (self.wait_data_s + self.wait_weights_s) / training_s,
            "trainer_waits_data_share": self.wait_data_s / training_s,
            "trainer_waits_weights_share": self.wait_weights_s / training_s,
            "generation_idle_share": generation_idle,
            "generation_interrupted_share": self.servers_updating_s / training_s,
            "head_offpolicyness_mean": self.head_sum / max(self.num_prompts, 1),
            "head_offpolicyness_max": self.head_max,
            "sequences_of_two_versions": self.num_mixed,
            "sequences_of_two_versions_share": self.num_mixed / max(self.num_sequences, 1),
            "offpolicyness": self.ages.as_dict(),
            # These two show whether training favours short responses: trained ones would be shorter than finished ones.
            "trained_response_length_mean": num_tokens / max(num_sequences, 1),
            "finished_response_length_mean": self.num_finished_tokens / max(self.num_finished_sequences, 1),
            "dropped_groups": self.num_dropped,
            "skipped_steps": self.num_skipped_steps,
            "steps_without": self.num_missing,
            "rejected": dict(rejected),
        }


def _untrained(what: str, metrics: Mapping[str, float]) -> int:
    of_batch = metrics[f"batch/num_{what}"]
    return int(of_batch - metrics.get(f"batch/num_trained_{what}", of_batch))


def generation_idle_share(run_dir: Path, start: float, end: float) -> float | None:
    """Return the share of [start, end] (seconds since the epoch) in which no server generated a token.

    None without journals, and for a span below _SHORTEST_SPAN_S: servers may not have written the last second yet, which would
    matter in so short a span.
    """
    journals = sorted((run_dir / "journal").glob("generation_server_*.jsonl"))
    if not journals or end - start < _SHORTEST_SPAN_S:
        return None
    busy = {
        round(float(str(record["time"])) / JOURNAL_BUCKET_S)
        for journal in journals
        for record in read_json_lines(journal, broken=logger.warning)
        if start <= float(str(record["time"])) < end and int(str(record["tokens"])) > 0
    }
    return max(0.0, 1.0 - len(busy) * JOURNAL_BUCKET_S / (end - start))


def _spread(name: str, values: Sequence[float] | Sequence[int]) -> dict[str, float]:
    """The values that 10 %, 50 % and 90 % of the others are at or below."""
    ordered = sorted(values)
    return {f"{name}p{share}": float(ordered[(len(ordered) - 1) * share // 100]) for share in (10, 50, 90)}


def _mean(values: Sequence[float] | Sequence[int]) -> float:
    return sum(values) / len(values)
