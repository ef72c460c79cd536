"""Settings of a whole process (security, the folder of its Unix sockets) that a test needs only inside a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from asyncrl.runtime import security, unix_sockets


@contextlib.contextmanager
def secured_by(settings: security.Security | None) -> Iterator[None]:
    """Apply these security settings."""
    before = security.current()
    security.secure(settings)
    try:
        yield
    finally:
        security.secure(before)


@contextlib.contextmanager
def sockets_in(folder: str) -> Iterator[None]:
    """Bind and connect Unix sockets in this folder."""
    before = unix_sockets.new_path().rpartition("/")[0]
    unix_sockets.use(folder)
    try:
        yield
    finally:
        unix_sockets.use(before)
