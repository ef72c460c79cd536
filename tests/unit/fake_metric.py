"""A metric that no run has: the share of trained tokens that the policy now finds less likely than the anchor did. One function,
and one row in METRICS, as a new metric needs."""

from torch import Tensor

from asyncrl.algorithms.metrics import Metric, Tokens


def fallen(tokens: Tokens) -> Tensor:
    return tokens.logprobs_T < tokens.anchor_T


NAME = "actor/fallen_share"
FALLEN = Metric("clip_share", "less likely than before", percent=True, of=fallen)
