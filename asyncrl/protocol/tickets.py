"""Ids of tickets: what they say, and the seal that proves that a gserver manager of this run has granted them.

The manager ends each id with a code over the rest of it, made with the run's ticket key. The master checks the code
before it takes a trajectory, so nothing is trained for a ticket that was not granted. It needs no call for that. The key
is a file in the run's folder, which both processes see: it survives restarts of both, and attempts.
"""

from __future__ import annotations

import hmac
import re
import secrets
from pathlib import Path

from msgspec import Struct

from asyncrl.protocol.messages import Locator
from asyncrl.runtime.disk import write_private, writing

KEY_FILE = "ticket.key"  # in the run's folder, for its owner only
_KEY_BYTES = 32
_SEAL_BYTES = 8
_TICKET_ID = re.compile(r"a(\d+)-e(\d+)-p(\d+)-i(\d+)-v(\d+)-h(\d+)-(\w+)", re.ASCII)


class TicketId(Struct, frozen=True):
    """What a ticket id says. The ledger reads it to know a ticket again that it has forgotten: one of a lost worker, or
    one that the manager before this one has issued."""

    attempt: int
    locator: Locator
    issue: int
    min_version: int
    head: int
    nonce: str  # of the manager process, and a count: an id is never given twice; of a granted one, the seal, too

    def __str__(self) -> str:
        epoch, position = self.locator.epoch, self.locator.position
        return f"a{self.attempt}-e{epoch}-p{position}-i{self.issue}-v{self.min_version}-h{self.head}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> TicketId | None:
        """Inverse of `str`; None for what no ledger has issued."""
        match = _TICKET_ID.fullmatch(text)
        if match is None or len(text) > 200:
            return None
        attempt, epoch, position, issue, min_version, head = (int(part) for part in match.groups()[:6])
        return cls(attempt, Locator(epoch, position), issue, min_version, head, match[7])


class TicketSeal:
    """Seals tickets, and tells sealed ones from all others."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, ticket: TicketId) -> str:
        """The id to hand out."""
        text = str(ticket)
        return f"{text}_{self._code(text)}"

    def read(self, text: str) -> TicketId | None:
        """What a sealed id says; None for one that no manager of this run has granted."""
        body, _, code = text.rpartition("_")
        if not code.isascii() or not hmac.compare_digest(code, self._code(body)):
            return None
        return TicketId.parse(text)

    def _code(self, text: str) -> str:
        return hmac.digest(self._key, text.encode(errors="replace"), "sha256")[:_SEAL_BYTES].hex()


def make_key(run_dir: Path) -> bytes:
    """The run's ticket key, made where there is none. Raises StorageError. Only the gserver manager calls it."""
    path = run_dir / KEY_FILE
    with writing(path):
        if (key := read_key(run_dir)) is not None:
            return key
        run_dir.mkdir(parents=True, exist_ok=True)
        key = secrets.token_bytes(_KEY_BYTES)
        write_private(path, key)
    return key


def read_key(run_dir: Path) -> bytes | None:
    """The run's ticket key; None where no manager has made it."""
    try:
        return (run_dir / KEY_FILE).read_bytes()
    except FileNotFoundError:
        return None
