"""The standstill report: what each process waits for, on which process and since when, if no train step ends for long (pure).

    no train step for 120 s
      master/0: waits for 3 stragglers from rollout_worker/1 (45 of 3600 s)
      rollout_worker/1: waits for the next piece from generation_server/0 (44 of 600 s) x12
      generation_server/0: has not moved for 43 s, is stopped (SIGSTOP, or a debugger), waits for nothing

It comes once, then after twice the time, and so on, until there is a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from asyncrl.protocol.messages import Wait, WorkerStatus

_STILL_S = 5.0  # statuses come twice a second, and the progress counter of a process that works grows with each
_MAX_WAITS = 4  # of a process, the longest


class Watchdog:
    """consumes: statuses, steps. produces: texts."""

    def __init__(self, after_s: float, now: float) -> None:
        """after_s: without a step; 0: never."""
        self._after_s = after_s
        self._since = now
        self._due_s = after_s

    def stepped(self, now: float) -> None:
        """A train step has ended, or a new attempt has begun."""
        self._since, self._due_s = now, self._after_s

    def turn(
        self, now: float, statuses: Sequence[WorkerStatus], still_s: Mapping[str, float], stopped: Collection[str]
    ) -> str | None:
        """The report, if one is due. still_s: seconds since the progress counter of each process grew. stopped: the processes
        that a signal or a debugger has stopped."""
        if not self._after_s or now - self._since < self._due_s:
            return None
        self._due_s = 2 * (now - self._since)
        lines = [f"  {status.worker}: {_facts(status, still_s, stopped)}" for status in sorted(statuses, key=_order)]
        return "\n".join([f"no train step for {now - self._since:.0f} s", *lines])


def wait_texts(waits: Sequence[Wait]) -> list[str]:
    """`the next piece from generation_server/0 (44 of 600 s) x12`: waits for one thing from one process are one, the longest."""
    kinds: dict[tuple[str, str], list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: -wait.since_s):
        kinds.setdefault((wait.what, wait.on), []).append(wait)
    return [
        f"{what} from {on} ({_age(same[0])}){f' x{len(same)}' if len(same) > 1 else ''}"
        for (what, on), same in kinds.items()
    ]


def _age(wait: Wait) -> str:
    return f"{wait.since_s:.0f} s" if wait.limit_s is None else f"{wait.since_s:.0f} of {wait.limit_s:.0f} s"


def _order(status: WorkerStatus) -> bool:
    """The master comes first."""
    return not status.worker.startswith("master/")


def _facts(status: WorkerStatus, still_s: Mapping[str, float], stopped: Collection[str]) -> str:
    facts = [f"state {status.state}"] if status.state != "running" else []
    quiet_s, is_stopped = still_s.get(status.worker, 0.0), status.worker in stopped
    if quiet_s > _STILL_S or is_stopped:
        facts.append(f"has not moved for {quiet_s:.0f} s")
    if is_stopped:
        facts.append("is stopped (SIGSTOP, or a debugger)")
    waits = wait_texts(status.waits)
    facts += [f"waits for {text}" for text in waits[:_MAX_WAITS]] or ["waits for nothing"]
    if len(waits) > _MAX_WAITS:
        facts.append(f"and {len(waits) - _MAX_WAITS} more waits")
    return ", ".join(facts)
