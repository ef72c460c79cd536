"""What most objects of a worker use: one `Services` instead of up to five parameters of each constructor."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncrl.runtime.background import BackgroundTasks
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.trace import Tracer


@dataclass(frozen=True)
class Services:
    """A worker makes one of these. Its objects take from it what they use."""

    board: StatusBoard
    trace: Tracer
    logger: logging.Logger
    clock: Clock
    tasks: BackgroundTasks
