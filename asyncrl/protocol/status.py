"""A worker's status, which it reports to the launcher."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Wait(Struct, frozen=True, kw_only=True):
    """A named wait: the awaited event, its source, the time waited so far, and the limit."""

    what: str
    on: str
    since_s: float  # seconds waited so far
    limit_s: float | None  # at this limit the wait ends or fails; None: no limit


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """A worker's status, as `asyncrl-launch status` shows it."""

    worker: str
    pid: int
    attempt: int
    state: Literal[
        "starting", "running", "stopping", "stopped", "done", "error"
    ]  # stopped: stopped on request before its work was done
    time: float  # seconds since the epoch
    progress: int  # counts signs of life: units of work, and status reports, which need a turn of the event loop
    waits: list[Wait] = []
    queues: dict[str, int] = {}
    version: str = ""
    error: str = ""
    fatal: bool = False  # the cause lies in the user's input (config, data) or the disk: it would recur after a restart
    recurs_as: str = (
        ""  # a failure that a restart is likely to repeat: the third of this name within six hours ends the run
    )
    notes: list[str] = []  # what the user should know as long as it holds; the terminal shows each once
    restarts: int = 0  # how often the launcher has restarted this worker
    host: str = ""  # host of this worker, in a run with several hosts; the launcher fills it in
    memory_bytes: int = 0  # peak memory so far (runtime/devices.py)
    # A model worker: the number of collectives that it has entered in each of its groups of ranks. All ranks of a group call the
    # same collectives, so one with a lower number has not entered the collective in which the others wait
    collectives: dict[str, int] = {}
