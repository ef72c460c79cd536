"""What a host daemon does with what it sees (pure): which processes to start and end, and whether they may go on at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl.protocol.messages import DesiredProcess, LauncherRecord
from asyncrl.protocol.names import is_earlier

# Of a launcher whose key is gone though name resolve answers: its session may be bringing it back.
_ABSENT_LIMIT_S = 8.0
_REFUSED_LIMIT_S = 20.0  # a private etcd is started again by its launcher well within; then that is dead, too

Verb = Literal["start", "stop", "kill", "skip", "forget"]


@dataclass(frozen=True)
class Observed:
    """The state of a process that the host daemon has."""

    incarnation: int
    ended: bool
    asked: bool  # to stop


@dataclass(frozen=True)
class Action:
    """start it | ask it to stop | kill it | report as ended what was never started | report it no more."""

    verb: Verb
    name: str


def decide(desired: Mapping[str, DesiredProcess], observed: Mapping[str, Observed]) -> Iterator[Action]:
    """The actions that bring the observed state nearer to the desired one. Doing them twice changes nothing."""
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
    """The desired state that this launcher has published for this host daemon, by name. That of an earlier launcher, or for an
    earlier host daemon, is refused."""
    return {one.name: one for one in published if one.launcher == launcher and one.host_daemon == host_daemon}


class Tether:
    """Whether a host daemon's processes may go on. They may while their launcher lives, as far as can be known, and some time
    longer."""

    def __init__(self, now: float, *, cut_off_limit_s: float, wait_s: float) -> None:
        """wait_s: for a launcher to come."""
        self.launcher: LauncherRecord | None = None
        self._cut_off_limit_s, self._wait_s = cut_off_limit_s, wait_s
        self._began = now
        self._absent: float | None = None  # since when
        self._cut_off: float | None = None
        self._refused: float | None = None

    def sees(self, record: LauncherRecord | None, now: float) -> None:
        """Name resolve has answered; None: it knows no launcher."""
        self._cut_off = self._refused = None
        if record is None:
            self._absent = now if self._absent is None else self._absent
            return
        known = self.launcher
        if known is not None and is_earlier(record.incarnation, known.incarnation):
            return  # of a launcher that is over; it counts neither as ours nor as its absence
        if known is None and record.ends:
            return  # one that was over before we came
        self._absent = None
        self.launcher = record

    def unreachable(self, now: float, *, refused: bool) -> None:
        """Name resolve does not answer. refused: its host does, and says that nothing listens there."""
        self._cut_off = now if self._cut_off is None else self._cut_off
        self._refused = (now if self._refused is None else self._refused) if refused else None

    @property
    def is_over(self) -> bool:
        """The launcher has said that the run is over."""
        return self.launcher is not None and self.launcher.ends

    def broken(self, now: float) -> str:
        """Why everything is to end; "": it goes on."""
        if self.launcher is None:
            if now - self._began > self._wait_s:
                return f"no launcher has come within {self._wait_s:g} s (network.hosts_limit_s)"
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
