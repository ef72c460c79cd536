"""Whether a step trains on data that its own weights have sampled (train.mismatch). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion


class OnPolicy:
    """Knows whether the actor still has the weights with which the attempt began: until its first train step, all versions of the
    attempt are the same weights."""

    def __init__(self) -> None:
        self._first: int | None = None  # the version with which the attempt began
        self._is_trained = False

    def begin(self, version: int, metas: Iterable[TrajectoryMeta]) -> bool:
        """The step from this version begins, or a part of it. Returns whether the weights of the actor sampled all of these groups
        and have not been trained in this attempt."""
        self._first = version if self._first is None else self._first
        if self._is_trained:
            return False
        return all(self._is_own(packed, meta.attempt) for meta in metas for packed in meta.version_start)

    def trained(self) -> None:
        """The actor has been trained."""
        self._is_trained = True

    def _is_own(self, packed: int, attempt: int) -> bool:
        version = WeightVersion.unpack(packed)
        return version.attempt == attempt and version.version >= (self._first or 0)
