"""What the pools of one machine (process_pool.py) and of several hosts (hosts/remote_pool.py) have in common: how children stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from asyncrl.launch.rundir import LaunchError
from asyncrl.launch.supervisor.children import KILL_LIMIT_S, Child
from asyncrl.runtime.clock import Clock

_SAY_AFTER_S = 2.0  # after this time a stop reports which processes it waits for
_STOP_TURN_S = 0.02


class NoRoomError(LaunchError):
    """No host has room for a process."""


class Pool(ABC):
    """The children of a run (`children`), up to date after each `turn`."""

    def __init__(self, notice: Callable[[str], None], clock: Clock) -> None:
        self.children: list[Child] = []
        self._notice, self._clock = notice, clock

    @property
    def alive(self) -> list[Child]:
        """Children that have not ended, including pending ones."""
        return [child for child in self.children if child.returncode is None]

    @abstractmethod
    def turn(self, wait_s: float) -> list[Child]:
        """Wait up to wait_s for the first status or exit of a child, then process all that have arrived. Returns the children that
        have ended since the last turn."""

    def stop(self, limit_s: float, impatient: Callable[[], bool]) -> None:
        """Ask all children to stop, then kill those that have not ended in time. Rollout workers stop first, while the processes
        that they report to still run. Those then have no pending work."""
        rollout_workers = [child for child in self.children if child.spec.kind == "rollout_worker"]
        self._ask_and_wait(rollout_workers, limit_s / 3, impatient)
        self._ask_and_wait(self.children, limit_s * 2 / 3, impatient)
        deadline = self._clock.monotonic() + KILL_LIMIT_S
        while self.alive and self._clock.monotonic() < deadline:
            for child in self.alive:
                child.kill()
            self.turn(_STOP_TURN_S)

    def _ask_and_wait(self, children: Sequence[Child], limit_s: float, impatient: Callable[[], bool]) -> None:
        """Ask the children to stop. Waits for: their exit. Unblocked by: their exit, the limit, or impatient() (kill at once)."""
        for child in children:
            child.ask_to_stop()
        start, said = self._clock.monotonic(), False
        while alive := [child.name for child in children if child.returncode is None]:
            waited_s = self._clock.monotonic() - start
            if impatient() or waited_s > limit_s:
                return
            if waited_s > _SAY_AFTER_S and not said:
                said = True
                self._notice(
                    f"waiting up to {limit_s:g} s for {', '.join(alive)} to stop; a second Ctrl-C kills at once"
                )
            self.turn(_STOP_TURN_S)
