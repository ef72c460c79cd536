"""Which generation servers the run is to have: what somebody wishes, applied to the table of those that are there (pure).

A wish is a number: servers with that index and above leave. The launcher starts and stops processes by the same number; what
only the manager knows, that a leaving server has nothing left to do, it tells the launcher: each once a wish.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.manager.routing import ServerTable
from asyncrl.protocol.messages import ScaleWish


@dataclass
class Members:
    table: ServerTable
    wish: ScaleWish | None = None
    _told: dict[str, str] = field(default_factory=dict)  # server -> the wish under which it was told to have drained

    def set_wish(self, wish: ScaleWish | None, now: float) -> None:
        """The newest one counts."""
        self.wish = wish
        for name in self.table.servers:
            self.see(name, now)

    def see(self, name: str, now: float) -> None:
        """A server is there: it leaves or stays."""
        if self._is_wanted(name):
            self.table.stay(name)
        else:
            self.table.leave(name, now)

    def drained(self) -> list[tuple[str, str]]:
        """Servers that may be stopped and the wish they leave by, but for those that were told."""
        if self.wish is None:
            return []
        wish = self.wish.wish
        return [
            (name, wish)
            for name, server in self.table.servers.items()
            if server.leaving and self._told.get(name) != wish and self.table.has_drained(name)
        ]

    def told(self, name: str, wish: str) -> None:
        self._told[name] = wish

    def _is_wanted(self, name: str) -> bool:
        return self.wish is None or int(name.rpartition("/")[2]) < self.wish.generation
