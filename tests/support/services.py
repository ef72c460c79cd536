"""The services of a process for one object of it."""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.runtime.background import BackgroundTasks
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.services import Services
from asyncrl.runtime.trace import OFF


def make_services(
    info: WorkerInfo | None = None, *, logger: logging.Logger | str = "asyncrl.test", **given: Any
) -> Services:
    """info: of the process; None: of any. given: fields of Services that a test watches or replaces."""
    if info is None:
        info = WorkerInfo("test", 0, 1, "e", "t", 1, "", 1, NameResolveConfig(), RuntimeConfig())
    logger = logging.getLogger(logger) if isinstance(logger, str) else logger
    trace = given.get("trace", OFF)
    made: dict[str, Any] = {
        "board": StatusBoard(info, logger, trace),
        "trace": trace,
        "logger": logger,
        "clock": SYSTEM_CLOCK,
        "tasks": BackgroundTasks(info.kind, logger),
    }
    return Services(**(made | given))
