"""Ticket ids: the fields that they contain, and the seal that proves that a gserver manager of this run has granted
them.

The manager ends each id with a code over the rest of it, made with the run's ticket key. The master checks the code
before it accepts a trajectory, so no trajectory is trained without a granted ticket. The check needs no call to the
manager. The key is a file of the run (runtime/ticket_key.py).
"""

from __future__ import annotations

import hmac
import re

from msgspec import Struct

from asyncrl.protocol.trajectories import Locator

_SEAL_BYTES = 8
_TICKET_ID = re.compile(r"a(\d+)-e(\d+)-p(\d+)-i(\d+)-v(\d+)-h(\d+)-(\w+)", re.ASCII)


class TicketId(Struct, frozen=True):
    """The fields of a ticket id. The ledger uses them to recognize a ticket that it has forgotten: one of a lost
    worker, or one issued by the previous manager.
    """

    attempt: int
    locator: Locator
    issue: int
    min_version: int
    head: int
    nonce: str  # the manager process's nonce and a counter, so no id is issued twice; a granted id also has the seal

    def __str__(self) -> str:
        epoch, position = self.locator.epoch, self.locator.position
        return f"a{self.attempt}-e{epoch}-p{position}-i{self.issue}-v{self.min_version}-h{self.head}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> TicketId | None:
        """Inverse of `str`. Returns None for a text of another form. `TicketSeal.read` also checks the seal."""
        match = _TICKET_ID.fullmatch(text)
        if match is None or len(text) > 200:
            return None
        attempt, epoch, position, issue, min_version, head = (int(part) for part in match.groups()[:6])
        return cls(attempt, Locator(epoch, position), issue, min_version, head, match[7])


class TicketSeal:
    """Seals ticket ids, and recognizes sealed ids."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, ticket: TicketId) -> str:
        """Return the sealed id, ready to hand out."""
        text = str(ticket)
        return f"{text}_{self._code(text)}"

    def read(self, text: str) -> TicketId | None:
        """Return the fields of a sealed id; None for an id that no manager of this run has granted."""
        body, _, code = text.rpartition("_")
        if not code.isascii() or not hmac.compare_digest(code, self._code(body)):
            return None
        return TicketId.parse(text)

    def _code(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(errors="replace"), "sha256")[:_SEAL_BYTES].hex()
