"""The table of the trainer's sides of transports. What other code needs to know of a transport: config/transports.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from asyncrl.config.transports import FILES
from asyncrl.model.broadcast import broadcasting
from asyncrl.model.trainer_side import Rank, TrainerSide

# Functions that open a kind. They run on the worker's event loop
KINDS: dict[str, Callable[[Rank], AbstractAsyncContextManager[TrainerSide]]] = {
    FILES: lambda rank: nullcontext(TrainerSide()),  # sends nothing: the exporter writes the files
    "broadcast": broadcasting,
}
