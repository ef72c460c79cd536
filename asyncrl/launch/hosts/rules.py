"""The host daemon's decisions (pure): which processes to start and end, and whether its processes may keep running."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl.protocol.hosts import DesiredProcess, LauncherRecord
from asyncrl.protocol.names import is_earlier

# How long the launcher's key may be absent while name resolve answers. The launcher's session may be restoring the key meanwhile
_ABSENT_LIMIT_S = 8.0
# How long name resolve may refuse connections before the launcher counts as dead. A live launcher restarts its private etcd well
# within this time
_REFUSED_LIMIT_S = 20.0

Verb = Literal["start", "stop", "kill", "skip", "forget"]


@dataclass(frozen=True)
class Observed:
    """The observed state of a process of this host daemon."""

    incarnation: int
    ended: bool
    asked: bool  # it was asked to stop


@dataclass(frozen=True)
class Action:
    """start: start the process. stop: ask it to stop. kill: kill it. skip: report the process as ended although it was never
    started. forget: no longer report it."""

    verb: Verb
    name: str


def decide(desired: Mapping[str, DesiredProcess], observed: Mapping[str, Observed]) -> Iterator[Action]:
    """Yield the actions that move the observed state towards the desired state. The actions are idempotent."""
    for name, process in observed.items():
        goal = desired.get(name)
        if goal is None or goal.incarnation > process.incarnation:
            yield Action("forget" if process.ended else "kill", name)
        elif goal.incarnation == process.incarnation and not process.ended:
            if goal.state == "kill":
                yield Action("kill", name)
            elif goal.state == "stop" and not process.asked:
                yield Action("stop", name)
    for name, goal in desired.items():
        if name not in observed:
            yield Action("start" if goal.state == "run" else "skip", name)


def obeyed(published: Collection[DesiredProcess], launcher: str, host_daemon: str) -> dict[str, DesiredProcess]:
    """Return the desired state that this launcher has published for this host daemon, by process name. Ignores entries of an
    earlier launcher, and entries for an earlier host daemon."""
    return {one.name: one for one in published if one.launcher == launcher and one.host_daemon == host_daemon}


class Tether:
    """Decides whether a host daemon's processes may keep running: yes while the launcher is known to be alive, and for a limited
    time after the last sign of life. Before a launcher appears, decides how long the host daemon waits for one."""

    def __init__(self, now: float, *, cut_off_limit_s: float, wait_s: float) -> None:
        """cut_off_limit_s: longest time without name resolve. wait_s: longest time until a launcher appears."""
        self.launcher: LauncherRecord | None = None
        self._cut_off_limit_s, self._wait_s = cut_off_limit_s, wait_s
        self._began = now
        self._absent: float | None = None  # when the absence of the launcher's key began; None: it is present
        self._cut_off: float | None = None
        self._refused: float | None = None

    def sees(self, record: LauncherRecord | None, now: float) -> None:
        """Record an answer of name resolve: the launcher's record; None: there is none."""
        self._cut_off = self._refused = None
        if record is None:
            self._absent = now if self._absent is None else self._absent
            return
        known = self.launcher
        if known is not None and is_earlier(record.incarnation, known.incarnation):
            # The record of an earlier launcher says neither that a new launcher exists nor that the known one is gone
            return
        if known is None and record.ends:
            return  # the record of a launcher that ended before this host daemon started
        self._absent = None
        self.launcher = record

    def unreachable(self, now: float, *, refused: bool) -> None:
        """Record that name resolve does not answer. refused: its host refuses the connection, so nothing listens there."""
        self._cut_off = now if self._cut_off is None else self._cut_off
        self._refused = (now if self._refused is None else self._refused) if refused else None

    @property
    def is_over(self) -> bool:
        """Whether the launcher has announced the end of the run."""
        return self.launcher is not None and self.launcher.ends

    def broken(self, now: float) -> str:
        """Return the reason why all processes of the host daemon must end; "": they may keep running."""
        if self.launcher is None:
            if now - self._began > self._wait_s:
                return f"no launcher has appeared within {self._wait_s:g} s (network.hosts_limit_s)"
            return ""
        if self._absent is not None and now - self._absent > _ABSENT_LIMIT_S:
            return "the launcher is gone"
        if self._refused is not None and now - self._refused > _REFUSED_LIMIT_S:
            return "the launcher and its name resolve are gone"
        if self._cut_off is not None and now - self._cut_off > self._cut_off_limit_s:
            return (
                f"name resolve could not be reached for {self._cut_off_limit_s:g} s (network.cut_off_limit_s): the launcher may be "
                "gone"
            )
        return ""
