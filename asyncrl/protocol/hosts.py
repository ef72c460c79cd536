"""The launcher and the host daemons, through name resolve."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Struct

from asyncrl.protocol.status import WorkerStatus


class LauncherRecord(Struct, frozen=True, kw_only=True):
    """The launcher that leads the run. A host daemon refuses the desired state of an earlier launcher incarnation."""

    incarnation: str
    host: str
    run_dir: str
    attempt: int
    start: str = ""  # identifies one start of a batch job; a requeued job starts new host daemons and a new launcher
    ends: bool = False  # the run is over: host daemons exit


class HostRecord(Struct, frozen=True, kw_only=True):
    """A host that is ready to run processes."""

    host: str  # its name in the config
    incarnation: str
    address: str  # its processes bind this address, and processes on other hosts connect to it
    gpus: list[str] = []  # as in CUDA_VISIBLE_DEVICES
    cores: int
    memory_bytes: int
    pid: int


class DesiredProcess(Struct, frozen=True, kw_only=True):
    """The desired state of a process on a host."""

    launcher: str  # the launcher's incarnation
    host_daemon: str  # incarnation of the intended host daemon; a later host daemon does not start this process
    attempt: int
    name: str
    incarnation: Annotated[int, msgspec.Meta(ge=1)]  # counts the starts of all processes; a higher one replaces a lower
    state: Literal["run", "stop", "kill"] = "run"  # stop: ask the process to end
    config: str  # its resolved config, YAML
    env: dict[str, str] = {}
    lease: int
    computes: bool


class ObservedProcess(Struct, frozen=True, kw_only=True):
    """The observed state of a process, as its host daemon sees it."""

    name: str
    incarnation: int
    pid: int = 0  # 0: not forked yet
    log: str = ""
    status: WorkerStatus | None = None
    cpu_s: float = 0.0  # CPU time of a live process, in whole seconds, because each change of a report is sent
    returncode: int | None = None  # exit code of a process that has ended or could not be started
    ended: float = 0.0  # unix seconds
    how: str = ""  # how it ended, in one line
    tail: str = ""  # end of its log, once it has ended


class HostReport(Struct, frozen=True, kw_only=True):
    """The observed state of a host, published a few times a second. It lists an ended process until its desired state
    is removed.
    """

    host_daemon: str  # the host daemon's incarnation
    launcher: str  # incarnation of the launcher that the host daemon obeys
    processes: list[ObservedProcess] = []
    notices: list[tuple[int, str]] = []  # messages for the user: the newest ones, numbered
