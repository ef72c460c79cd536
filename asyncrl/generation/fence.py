"""Weights that a generation server refuses whoever sends them: those of a lower attempt than it has loaded, or of an older version.

A gserver manager that was frozen, or a trainer, may speak after its successor: it must not take a server back.
"""

from __future__ import annotations

from asyncrl.generation.engine import WeightsRefused
from asyncrl.messages import WeightVersion


class VersionFence:
    """Remembers the newest version that was loaded. The same again is fine: the load may have failed half-way."""

    def __init__(self) -> None:
        self._newest: WeightVersion | None = None

    def check(self, version: WeightVersion) -> None:
        """Before a load. Raises WeightsRefused."""
        if self._newest is not None and version < self._newest:
            over = f"; attempt {version.attempt} is over" if version.attempt < self._newest.attempt else ""
            raise WeightsRefused(f"version {version} is older than {self._newest}, which was loaded here{over}")

    def loaded(self, version: WeightVersion) -> None:
        if self._newest is None or version > self._newest:
            self._newest = version
