"""The key of the run's ticket ids: a file in the run's folder. The gserver manager and the master can both read it, so it
survives their restarts and new attempts.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from asyncrl.runtime.disk import write_private, write_when_there_is_room

KEY_FILE = "ticket.key"  # readable only by its owner
_KEY_BYTES = 32


def make_key(run_dir: Path) -> bytes:
    """Return the run's ticket key, creating it if it does not exist. Raises StorageError. Only the gserver manager calls it."""
    path = run_dir / KEY_FILE

    def make() -> bytes:
        if (key := read_key(run_dir)) is not None:
            return key
        run_dir.mkdir(parents=True, exist_ok=True)
        key = secrets.token_bytes(_KEY_BYTES)
        write_private(path, key)
        return key

    return write_when_there_is_room(path, make)


def read_key(run_dir: Path) -> bytes | None:
    """Return the run's ticket key; None if no manager has created it yet."""
    try:
        return (run_dir / KEY_FILE).read_bytes()
    except FileNotFoundError:
        return None
