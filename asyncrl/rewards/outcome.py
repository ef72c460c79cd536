"""How a rollout ends without a group to train on: rejected (the prompt is finished) or released (it is issued again)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from asyncrl.config.schema import RolloutConfig

REWARD_LOST = "reward_lost"  # the processes that run the reward function died; the prompt is not at fault
TASK_CLOSED = "task_closed"  # the prompt's task waits for its gate (master/curriculum.py)

_NOT_A_LABEL = re.compile(r"[^A-Za-z0-9_]+")
_MAX_REASON_CHARS = 40


class RolloutEnded(Exception):
    """The rollout gives no trajectory. `reason` becomes a metric label, so it is short and of low cardinality."""

    outcome: Literal["rejected", "released"]

    def __init__(self, reason: str, detail: str = "") -> None:
        reason = _NOT_A_LABEL.sub("_", reason)[:_MAX_REASON_CHARS] or "unnamed"  # users' agents raise these too
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RolloutRejected(RolloutEnded):
    """The prompt is at fault (too long, its reward fails, ...). It is not tried again in this epoch."""

    outcome = "rejected"


class RolloutReleased(RolloutEnded):
    """The prompt is not at fault (lost server, stop, ...). Its ticket is returned, and the prompt is issued again."""

    outcome = "released"


def objection_to(rewards: Sequence[float], rollout: RolloutConfig) -> str:
    """The reason for not training on a group with these rewards: too_hard, too_easy or equal_rewards; "" to train on it."""
    success = sum(rewards) / len(rewards)
    if success < rollout.success_rate_lb:
        return "too_hard"
    if success > rollout.success_rate_ub:
        return "too_easy"
    if rollout.reject_equal_rewards and min(rewards) == max(rewards):
        return "equal_rewards"
    return ""
