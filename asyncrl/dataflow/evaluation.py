"""The result of an evaluation from the groups of its prompts (pure). The gserver manager and, with mode=sync, the master use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from asyncrl.algorithms.estimators import estimate
from asyncrl.protocol.manager import EvaluationResult
from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.protocol.versions import WeightVersion


def summarize(mode: Literal["greedy", "sampled"], groups: Sequence[GroupSummary], num_failed: int) -> EvaluationResult:
    """groups: of the judged prompts. num_failed: prompts without a group; they count in no mean.

    A prompt's score is the mean reward of its sequences, so each prompt counts alike. Without a group the means are 0 and the
    versions -1.
    """
    lengths = [length for group in groups for length in group.response_lengths]
    rewards = estimate([sum(group.rewards) / len(group.rewards) for group in groups]) if groups else None
    oldest = min((version for group in groups for version in group.version_start), default=None)
    newest = max((version for group in groups for version in group.version_end), default=None)
    return EvaluationResult(
        mode=mode,
        num_prompts=len(groups) + num_failed,
        num_failed=num_failed,
        mean_reward=rewards.mean if rewards else 0.0,
        reward_ci95=rewards.half_width if rewards else None,
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        version_min=WeightVersion.unpack(oldest).version if oldest is not None else -1,
        version_max=WeightVersion.unpack(newest).version if newest is not None else -1,
    )
