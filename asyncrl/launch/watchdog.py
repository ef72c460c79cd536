"""Who waits for whom, when no train step has been made for long: from the master up to whoever does not wait (pure).

    master/0 waits for 3 stragglers from rollout_worker/1 (45 of 3600 s), which waits for the next piece from
    generation_server/0 (44 of 600 s), which has not moved for 43 s: it is stopped (SIGSTOP)

Told once, and again after twice the time, and so on, until there is a step.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.messages import Wait, WorkerStatus

_STILL_S = 5.0  # statuses come twice a second: a process whose progress counter has not moved for longer does not turn
_MAX_NAMED = 4
_WORKER = re.compile(r"\b[a-z]+(?:_[a-z]+)*/\d+\b")
# Whom the names mean that waits are given: kinds of worker, in the order in which the guilty one is looked for
_MEANT = (
    (re.compile(r"gserver[ _]manager"), "gserver_manager"),
    (re.compile(r"/generation_server(/|$)"), "generation_server"),
    (re.compile(r"model workers|barrier|weight writer|^head \d+$|/process_group/|/stream/puller"), "model_worker"),
    (re.compile(r"rollout workers"), "rollout_worker"),
    (re.compile(r"^master\b|/stream/master"), "master"),
)
_CALL_STREAM = re.compile(r"/stream/request_reply/(\d+)$")
# What a process also waits for while all is well: looked at last
_IDLE = re.compile(r"^/allocate_rollout|^room for another rollout")


class Watchdog:
    """consumes: statuses, steps. produces: texts."""

    def __init__(self, after_s: float, now: float) -> None:
        """after_s: without a step; 0: never."""
        self._after_s = after_s
        self._since = now
        self._due_s = after_s

    def stepped(self, now: float) -> None:
        """There was a train step, or a new attempt has begun."""
        self._since, self._due_s = now, self._after_s

    def turn(
        self, now: float, statuses: Sequence[WorkerStatus], still_s: Mapping[str, float], stopped: Mapping[str, str]
    ) -> str | None:
        """What a person should be told now, if anything. still_s: how long the progress counter of each process has stood still.
        stopped: of those that cannot move why not (stopped by a signal, gone)."""
        if not self._after_s or now - self._since < self._due_s:
            return None
        self._due_s = 2 * (now - self._since)
        return f"no train step for {now - self._since:.0f} s: {chain(statuses, still_s, stopped)}"


def chain(statuses: Sequence[WorkerStatus], still_s: Mapping[str, float], stopped: Mapping[str, str]) -> str:
    """Who waits for whom, from the master to whoever is to blame: by the shortest way to one that does not move, and where there
    is none, to the likeliest."""
    by_name = {status.worker: status for status in statuses}
    master = next((name for name in by_name if name.startswith("master/")), None)
    if master is None:
        return "there is no master: it is gone or about to be started"

    def trouble(name: str) -> str:
        return _trouble(name, by_name, still_s, stopped)

    links = _way_to_trouble(master, by_name, trouble) or _likeliest_way(master, by_name)
    end = links[-1].peer if links else master
    told = [link.told for link in links]
    if end in [master, *(link.peer for link in links[:-1])] and links:
        last = f"{told.pop()}: they wait for each other"
    elif what := trouble(end):
        last = what
    elif wait := _longest(by_name[end]):
        last = _waits_for(wait)
    else:
        last = "waits for nobody: it is at work, or hangs"
    return f"{master} {', which '.join([*told, last])}"


@dataclass(frozen=True)
class _Link:
    """A wait, whom it is for, and of those the one that is looked at."""

    wait: Wait
    peers: Sequence[str]
    peer: str

    @property
    def told(self) -> str:
        text = _waits_for(self.wait)
        named = self.peer in self.wait.on
        if len(self.peers) == 1:
            return text if named else f"{text}, that is {self.peer}"
        if not named:
            text += f": {', '.join(self.peers[:_MAX_NAMED])}{', ...' if len(self.peers) > _MAX_NAMED else ''}"
        return f"{text}; of them {self.peer}"


def _waits_for(wait: Wait) -> str:
    return f"waits for {wait.what} from {wait.on} ({wait.since_s:.0f} of {wait.limit_s:.0f} s)"


def _links(name: str, by_name: Mapping[str, WorkerStatus]) -> list[_Link]:
    """For whom a process waits: those first that it should not wait for for long, the longest first."""
    waits = sorted(by_name[name].waits, key=lambda wait: (bool(_IDLE.match(wait.what)), -wait.since_s))
    found = []
    for wait in waits:
        peers = [peer for peer in workers_meant(wait.on, by_name) if peer != name]
        found += [_Link(wait, peers, peer) for peer in peers]
    return found


def _longest(status: WorkerStatus) -> Wait | None:
    """Of the waits for what is no process of the run, or for itself."""
    owed = [wait for wait in status.waits if not _IDLE.match(wait.what)]
    return max(owed, key=lambda wait: wait.since_s, default=None)


def _way_to_trouble(
    start: str, by_name: Mapping[str, WorkerStatus], trouble: Callable[[str], str]
) -> list[_Link] | None:
    """The shortest; None: nobody who is waited for is in trouble. [] means that start is."""
    ways: deque[tuple[str, list[_Link]]] = deque([(start, [])])
    seen = {start}
    while ways:
        name, way = ways.popleft()
        if trouble(name):
            return way
        for link in _links(name, by_name):
            if link.peer not in seen:
                seen.add(link.peer)
                ways.append((link.peer, [*way, link]))
    return None


def _likeliest_way(start: str, by_name: Mapping[str, WorkerStatus]) -> list[_Link]:
    """From wait to wait, to one that waits for nobody, or in a circle."""
    way: list[_Link] = []
    name, seen = start, {start}

    def is_waiting(name: str) -> bool:
        return any(not _IDLE.match(wait.what) for wait in by_name[name].waits)

    while links := _links(name, by_name):
        first = [link for link in links if link.wait is links[0].wait]
        link = min(first, key=lambda link: (link.peer in seen, is_waiting(link.peer)))
        if _IDLE.match(link.wait.what) and way:
            break  # whoever waits for work only is not to blame for what others wait for
        way.append(link)
        if link.peer in seen:
            break
        name = link.peer
        seen.add(name)
    return way


def _trouble(
    name: str, by_name: Mapping[str, WorkerStatus], still_s: Mapping[str, float], stopped: Mapping[str, str]
) -> str:
    """Why nothing will come of waiting for this one; "": it turns."""
    if name not in by_name:
        return "is not there"
    status = by_name[name]
    if status.state in ("error", "done", "stopping"):
        return f"is in state {status.state}"
    quiet_s = still_s.get(name, 0.0)
    if name in stopped:
        return f"has not moved for {quiet_s:.0f} s: it {stopped[name]}"
    if quiet_s > _STILL_S:
        return f"has not moved for {quiet_s:.0f} s"
    return ""


def workers_meant(on: str, names: Mapping[str, WorkerStatus]) -> list[str]:
    """The workers that a wait's `on` names: as such, by their kind, or by a key of theirs in name resolve."""
    if named := [name for name in _WORKER.findall(on) if name.partition("/")[0] in _KINDS]:
        return list(dict.fromkeys(named))
    if match := _CALL_STREAM.search(on):
        return [f"model_worker/{match[1]}"]
    for pattern, kind in _MEANT:
        if pattern.search(on):
            meant = [name for name in names if name.startswith(f"{kind}/")]
            return meant or [f"{kind}/0"]
    return []


_KINDS = {
    "master",
    "model_worker",
    "generation_server",
    "gserver_manager",
    "rollout_worker",
    "recorder",
    "replayer",
}
