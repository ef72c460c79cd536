"""How a rollout ends without a group to train on: rejected (the prompt is done with) or released (it is handed out again)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from asyncrl.config.schema import RolloutConfig

REWARD_LOST = "reward_lost"  # the processes that run a reward function died through no fault of a prompt

_NOT_A_LABEL = re.compile(r"[^A-Za-z0-9_]+")
_MAX_REASON_CHARS = 40


class RolloutEnded(Exception):
    """A rollout that gives no trajectory. `reason` is short and of low cardinality: it becomes a metric label."""

    outcome: Literal["rejected", "released"]

    def __init__(self, reason: str, detail: str = "") -> None:
        reason = _NOT_A_LABEL.sub("_", reason)[:_MAX_REASON_CHARS] or "unnamed"  # users' agents raise these too
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RolloutRejected(RolloutEnded):
    """The prompt itself will not do (too long, a reward that fails, ...): it is not tried again in this epoch."""

    outcome = "rejected"


class RolloutReleased(RolloutEnded):
    """Not the prompt's fault (a lost server, a stop, ...): its ticket goes back and the prompt is handed out again."""

    outcome = "released"


def objection_to(rewards: Sequence[float], rollout: RolloutConfig) -> str:
    """Why a group with these rewards is not to be trained: too_hard, too_easy, equal_rewards; "" if it is."""
    success = sum(rewards) / len(rewards)
    if success < rollout.success_rate_lb:
        return "too_hard"
    if success > rollout.success_rate_ub:
        return "too_easy"
    if rollout.reject_equal_rewards and min(rewards) == max(rewards):
        return "equal_rewards"
    return ""
