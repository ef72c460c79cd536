"""Which servers may get a version from the trainer's memory, before its files are complete (pure).

Servers that serve already may; all others load files. A server that has failed to get a version from memory loads that version or
a newer one from files. After 1, 2, 3, ... consecutive failures, it loads 1, 3, 7, ... versions (at most 31) from files before it
may get one from memory again.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.manager.routing import Server, ServerState
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.versions import WeightVersion

_MOST_FILES = 31  # maximum number of versions that a server loads from files after failures


@dataclass
class _Distrust:
    """A server that has failed to get versions from memory, and loads files for a while."""

    failures: int  # consecutive
    num_files: int  # versions that it has yet to load from files
    not_below: WeightVersion  # the version that failed, which it may hold in part; it loads this one or a newer one


class Offers:
    """The plan's side of a transport from memory."""

    def __init__(self) -> None:
        self._newest = Fence[WeightVersion | None](None)
        self._distrusted: dict[str, _Distrust] = {}

    def adopt(self, version: WeightVersion) -> bool:
        """The trainer has a version in memory. Returns False if it is not newer than the last one."""
        return self._newest.adopt(version)

    def may_get(self, server: Server, target: WeightVersion) -> bool:
        """Whether the server may get the target from memory now."""
        serves = server.state is ServerState.HEALTHY and server.version is not None
        distrust = self._distrusted.get(server.name)
        trusted = distrust is None or distrust.num_files <= 0
        return serves and trusted and self._newest.newest == target

    def least(self, server: str) -> WeightVersion | None:
        """The oldest version whose files the server may load. None: any."""
        distrust = self._distrusted.get(server)
        return distrust.not_below if distrust is not None else None

    def loaded(self, server: str, *, from_memory: bool) -> None:
        """The server has loaded a version."""
        if from_memory:
            self._distrusted.pop(server, None)
        elif (distrust := self._distrusted.get(server)) is not None:
            distrust.num_files -= 1

    def failed(self, server: str, version: WeightVersion) -> None:
        """The server has not got a version from memory."""
        failures = self._distrusted[server].failures + 1 if server in self._distrusted else 1
        num_files = min(2 ** min(failures, 16) - 1, _MOST_FILES)
        self._distrusted[server] = _Distrust(failures, num_files, version)
