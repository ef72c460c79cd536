"""HTTP sessions between processes of a run. Who calls another process gets its session here, so that a simulation can stand in.

with replaced(make):          # asyncrl/testing/simulation
    open_session(...)         # is what `make` gives
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp

Maker = Callable[[int, dict[str, Any]], Any]


def _real_session(max_connections: int, options: dict[str, Any]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=max_connections), **options)


_make: Maker = _real_session


def open_session(*, max_connections: int, **options: Any) -> aiohttp.ClientSession:
    """A session with at most so many connections (0: any number). options: of aiohttp.ClientSession. Call it on the event loop."""
    session: aiohttp.ClientSession = _make(max_connections, options)
    return session


@contextlib.contextmanager
def replaced(make: Maker) -> Iterator[None]:
    """Have sessions made by `make`, of what open_session is given: something with a session's post, get, request and close."""
    global _make
    before, _make = _make, make
    try:
        yield
    finally:
        _make = before
