"""What a train step says about itself, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from asyncrl.algorithms.advantages import Advantages
from asyncrl.algorithms.packed import count_per_sequence
from asyncrl.model.interfaces.common import LocalBatch, Ranks, Stats

_MIN_STD = 1e-4  # returns that differ less are equal but for rounding


def batch_stats(engine: Ranks, local: LocalBatch, made: Advantages) -> Stats:
    """Statistics of the whole batch, over all ranks. Two collective calls."""
    rewards_S, mask_T, kl_T = made.rewards_S, made.mask_T, made.kl_T
    raw_S = local.data["rewards"].double()
    response_S = count_per_sequence(local.data["loss_mask"], local.cu_seqlens)
    advantages = made.advantages_T[mask_T].double()
    groups = np.split(rewards_S.numpy(), np.cumsum(local.group_sizes, dtype=np.int64)[:-1])
    sums = {
        "groups": float(len(local.group_sizes)),
        "sequences": float(len(raw_S)),
        "tokens": float(len(mask_T)),
        "sampled": float(response_S.sum()),
        "trained": float(advantages.numel()),
        "reward": float(raw_S.sum()),
        "reward_squared": float(raw_S.square().sum()),
        "model": float(local.data["model_rewards"].double().sum()) if "model_rewards" in local.data else 0.0,
        "shaped": float(rewards_S.double().sum()),
        "equal_groups": float(sum(bool((rewards == rewards[0]).all()) for rewards in groups if rewards.size)),
        "prompt": float(local.data["prompt_mask"].sum()),
        "truncated": float(local.data["seq_no_eos_mask"].sum()),
        "advantage": float(advantages.sum()),
        "advantage_squared": float(advantages.square().sum()),
        "kl": float(kl_T.double().sum()) if kl_T is not None else 0.0,
    }
    total = dict(zip(sums, engine.all_reduce_sum(list(sums.values())).tolist(), strict=True))
    sequences, trained = max(total["sequences"], 1.0), max(total["trained"], 1.0)
    longest, highest, lowest = _max_over_ranks(
        engine,
        [
            max(response_S.tolist(), default=0.0),
            max(advantages.tolist(), default=-math.inf),
            max((-advantages).tolist(), default=-math.inf),
        ],
    )
    stats = {
        "batch/num_groups": total["groups"],
        "batch/num_sequences": total["sequences"],
        "batch/num_tokens": total["tokens"],
        "batch/num_trained_tokens": total["trained"],
        "reward/mean": total["reward"] / sequences,
        "reward/std": _std(total["reward"], total["reward_squared"], sequences),
        "reward/shaped_mean": total["shaped"] / sequences,
        "reward/equal_group_share": total["equal_groups"] / max(total["groups"], 1.0),
        "length/response_mean": total["sampled"] / sequences,
        "length/response_max": longest,
        "length/prompt_mean": total["prompt"] / sequences,
        "length/truncated_share": total["truncated"] / sequences,
        "advantages/mean": total["advantage"] / trained,
        "advantages/std": _std(total["advantage"], total["advantage_squared"], trained),
        "advantages/max": highest if total["trained"] else 0.0,
        "advantages/min": -lowest if total["trained"] else 0.0,
    }
    if "model_rewards" in local.data:
        stats["reward/model_mean"] = total["model"] / sequences
    if kl_T is not None:
        stats["kl/token_mean"] = total["kl"] / max(total["sampled"], 1.0)
        stats["kl/sequence_mean"] = total["kl"] / sequences
    return stats


def value_stats(engine: Ranks, values: Tensor, returns: Tensor) -> Stats:
    """How well the values foresaw the returns, over the states of the whole batch, in units of rewards. A collective call.

    explained_variance = 1 - Var(returns - values) / Var(returns): 1 foresees all, 0 no more than a constant does, below 0 less.
    """
    values, returns = values.double(), returns.double()
    errors = returns - values
    sums = [values.sum(), returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]
    total = engine.all_reduce_sum([float(values.numel()), *map(float, sums)])
    count, value, returned, squares, error, error_squares = total.tolist()
    count = max(count, 1.0)
    std = _std(returned, squares, count)
    explained = 1 - (_std(error, error_squares, count) / std) ** 2 if std > _MIN_STD else 0.0
    return {
        "critic/values_mean": value / count,
        "critic/returns_mean": returned / count,
        "critic/returns_std": std,
        "critic/explained_variance": explained,
    }


class StepStats:
    """Statistics of the minibatches of one train step, put together.

    Of what an engine gives: *_max are maxima, *_steps counts, MEANS means over the minibatches, all else sums over tokens.
    """

    MEANS = ("loss", "grad_norm", "lr")

    def __init__(self) -> None:
        self.steps = 0
        self.empty = 0
        self.num_tokens = 0.0
        self.values: Stats = {}  # sums and maxima over the minibatches

    def add(self, stats: Mapping[str, float], num_tokens: float) -> None:
        """What one `train_step` returned (nothing before the last stage); num_tokens: masked tokens of the minibatch, all ranks."""
        self.steps += 1
        self.num_tokens += num_tokens
        for name, value in stats.items():
            if name.endswith("_max"):
                self.values[name] = max(self.values.get(name, -math.inf), value)
            else:
                self.values[name] = self.values.get(name, 0.0) + value

    def result(self, role: str) -> Stats:
        """<role>/<name>: means over minibatches or tokens, maxima, counts."""
        result = {"optimizer_steps": float(self.steps), "empty_minibatches": float(self.empty)}
        for name, value in self.values.items():
            if name == "num_tokens":  # for stop_reason
                continue
            counted = name.endswith(("_max", "_steps"))
            divisor = 1.0 if counted else self.steps if name in self.MEANS else self.num_tokens
            result[name] = value / divisor
        return {f"{role}/{name}": value for name, value in result.items()}


def _std(total: float, squares: float, count: float) -> float:
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0))


def _max_over_ranks(engine: Ranks, values: list[float]) -> list[float]:
    """Maxima by a sum: every rank fills its own row."""
    rows = np.zeros((engine.dp_size, len(values)))
    rows[engine.dp_rank] = values
    return engine.all_reduce_sum(rows.ravel().tolist()).reshape(rows.shape).max(axis=0).tolist()  # type: ignore[no-any-return]
