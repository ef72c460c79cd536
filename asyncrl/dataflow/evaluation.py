"""The result of an evaluation from the results of its prompts (pure). The master uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.algorithms.estimators import Estimate, estimate
from asyncrl.protocol.manager import EvalPart, EvaluatedPrompt
from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.protocol.versions import WeightVersion


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one part of an evaluation. Prompts that failed count in no mean."""

    eval_set: str  # "": that of eval.prompts
    mode: str
    num_prompts: int
    num_failed: int
    reward: Estimate | None  # mean over prompts of the mean reward of their responses; None: every prompt failed
    mean_length: float  # of a response, in tokens; 0 without one
    version_min: int  # of the sampled tokens; -1 without one
    version_max: int


def summarize(part: EvalPart, results: Sequence[EvaluatedPrompt]) -> EvaluationResult:
    """results: of this part, one for each prompt. Each prompt counts alike."""
    groups = [result.group for result in results if result.group is not None]
    lengths = [length for group in groups for length in group.response_lengths]
    oldest = min((version for group in groups for version in group.version_start), default=None)
    newest = max((version for group in groups for version in group.version_end), default=None)
    return EvaluationResult(
        eval_set=part.eval_set,
        mode=part.mode,
        num_prompts=len(results),
        num_failed=len(results) - len(groups),
        reward=estimate([_mean(group) for group in groups]) if groups else None,
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        version_min=WeightVersion.unpack(oldest).version if oldest is not None else -1,
        version_max=WeightVersion.unpack(newest).version if newest is not None else -1,
    )


def _mean(group: GroupSummary) -> float:
    return sum(group.rewards) / len(group.rewards)
