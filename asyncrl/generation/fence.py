"""Weights that a generation server refuses from any sender: those of a lower attempt than it has loaded, of an older
version, and of a version that the run has not reached.

A gserver manager that was frozen, or a trainer, may speak after its successor: it must not take a server back. After a
version that is far ahead the server would refuse all versions that follow.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asyncrl.generation.engine import WeightsRefused
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.messages import WeightVersion

Published = Callable[[], Awaitable[WeightVersion | None]]


class VersionFence:
    """Remembers the newest version that was loaded. The same again is fine: the load may have failed half-way."""

    def __init__(self, published: Published | None = None) -> None:
        """published: asks for the newest version that the trainer has published. None: versions have no upper bound."""
        self._loaded = Fence[WeightVersion | None](None)
        self._published = published
        self._highest: WeightVersion | None = None  # that `published` has named so far

    def check(self, version: WeightVersion) -> None:
        """Before a load. Raises WeightsRefused."""
        newest = self._loaded.newest
        if newest is not None and self._loaded.is_over(version):
            over = f"; attempt {version.attempt} is over" if version.attempt < newest.attempt else ""
            raise WeightsRefused(f"version {version} is older than {newest}, which was loaded here{over}")

    async def check_published(self, version: WeightVersion) -> None:
        """Before weights come from elsewhere than the run's folder, which holds what the trainer has made.

        Raises WeightsRefused, and what `published` raises. Asks once a version.
        """
        if self._published is None or (self._highest is not None and version <= self._highest):
            return
        self._highest = await self._published()
        if self._highest is None or version > self._highest:
            newest = f"{self._highest} is the newest" if self._highest is not None else "there is none yet"
            raise WeightsRefused(f"weight_version is {version}, which the trainer has not published; {newest}")

    def loaded(self, version: WeightVersion) -> None:
        self._loaded.adopt(version)
