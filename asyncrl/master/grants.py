"""Which trajectories are of tickets that a gserver manager of this run has granted: the master takes no others.

A forged trajectory may reach a head's socket, and forged metadata the master's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from asyncrl.protocol.messages import TrajectoryMeta
from asyncrl.protocol.tickets import TicketSeal

_SAY_AGAIN_S = 60.0


class Grants:
    """Checks the ticket of each trajectory, and counts those that were not granted."""

    def __init__(self, read_key: Callable[[], bytes | None], logger: logging.Logger) -> None:
        """read_key: gives the run's ticket key; None, and then nothing is granted, until a manager has made it."""
        self.num_refused = 0
        self._read_key = read_key
        self._seal: TicketSeal | None = None
        self._logger = logger
        self._said = -math.inf

    def refusal(self, meta: TrajectoryMeta, now: float) -> str:
        """Why a trajectory is not taken; "" where its ticket was granted for this prompt, attempt and head."""
        if self._seal is None and (key := self._read_key()) is not None:
            self._seal = TicketSeal(key)
        name = self._seal.read(meta.ticket_id) if self._seal is not None else None
        if name is not None and (name.attempt, name.locator, name.head) == (meta.attempt, meta.locator, meta.head):
            return ""
        self.num_refused += 1
        if now - self._said >= _SAY_AGAIN_S:
            self._said = now
            self._logger.warning(
                "a trajectory is refused, %d so far: the manager has not granted its ticket %.100r (%s, head %d)",
                self.num_refused,
                meta.ticket_id,
                meta.locator,
                meta.head,
            )
        return "not_granted: the gserver manager of this run has granted no such ticket"
