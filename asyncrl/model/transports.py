"""The table of the trainer's sides of transports. What other code needs to know of a transport: config/transports.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from asyncrl.config.transports import FILES
from asyncrl.model.broadcast import broadcasting
from asyncrl.model.trainer_side import Rank, TrainerSide


@asynccontextmanager
async def _files(rank: Rank) -> AsyncIterator[TrainerSide]:
    """Sends nothing: the exporter writes the files."""
    yield TrainerSide()


# Functions that open a kind. They run on the worker's event loop
KINDS: dict[str, Callable[[Rank], AbstractAsyncContextManager[TrainerSide]]] = {
    FILES: _files,
    "broadcast": broadcasting,
}
