"""The services of the machine that a process uses. The simulation gives its processes replacements."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.clock import Clock, SystemClock
from asyncrl.runtime.http_server import Listen, listen_http
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.runtime.transport import Transport

STATUS_FD_ENV = "ASYNCRL_STATUS_FD"
LEASE_ENV = "ASYNCRL_LEASE"


class Launcher(Protocol):
    """A process's view of its launcher."""

    @property
    def lease(self) -> int | None:
        """A lease in name resolve that the launcher keeps alive for this process. None: the process keeps its own."""

    def show(self, board: StatusBoard) -> None:
        """Send the process's status to the launcher. Does not block."""


class LauncherPipe:
    """A launcher on this machine. It passes the write end of a pipe and a lease in environment variables."""

    def __init__(self, fd: int, lease: int | None) -> None:
        self.lease = lease
        self._fd = fd
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)  # no child process inherits the pipe, so it closes when this process ends

    @classmethod
    def of_environment(cls) -> LauncherPipe | None:
        """Build it from the environment; None in a process that was started by hand."""
        fd, lease = os.environ.get(STATUS_FD_ENV), os.environ.get(LEASE_ENV)
        return cls(int(fd), int(lease) if lease else None) if fd else None

    def show(self, board: StatusBoard) -> None:
        line = msgspec.json.encode(board.snapshot())
        # The launcher is busy or gone: skip this line, as the next one replaces it
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._fd, line + b"\n")


@dataclass(frozen=True)
class System:
    """Time, identities, name resolve, the transport of streams, HTTP servers, and the launcher."""

    clock: Clock = field(default_factory=SystemClock)
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex  # 32 hex digits, unique
    pid: int = field(default_factory=os.getpid)
    open_names: Callable[[NameResolveConfig, float], NameResolver] = open_name_resolver
    transport: Transport | None = None  # None: ZeroMQ, with the faults in runtime.faults
    listen: Listen = listen_http
    launcher: Launcher | None = field(default_factory=LauncherPipe.of_environment)
    status_interval_s: float = 0.5
