"""The summary of a group of responses."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.protocol.trajectories import GroupSummary
from asyncrl.protocol.versions import WeightVersion


def group(*lengths: int, rewards: Sequence[float] = (), version_start: int = 0, version_end: int = 0) -> GroupSummary:
    """The summary of a group with these response lengths, sampled in attempt 1."""
    oldest, newest = (WeightVersion(1, version).pack() for version in (version_start, version_end))
    return GroupSummary(
        seqlens=list(lengths),
        response_lengths=list(lengths),
        rewards=list(rewards) or [0.0] * len(lengths),
        version_start=[oldest] * len(lengths),
        version_end=[newest] * len(lengths),
    )
