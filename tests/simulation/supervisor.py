"""Test double of the launcher: notices ended and frozen processes, and restarts processes as launch/supervisor/policy.py decides.

Actions are instant, except for delays drawn from the seed: until an end is noticed, for a start, and for reading the newest
checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.config.schema import RuntimeConfig
from asyncrl.launch.program import groups_that_restart_alone
from asyncrl.launch.supervisor.policy import EVERYTHING, TRAINER_KINDS, End, EndRun, FreezeWatch, Supervision
from tests.simulation.world import Event, Process

if TYPE_CHECKING:
    from tests.simulation.run import SimulatedRun

_TURN_S = 0.5
_KILLED = "was killed"


class Supervisor:
    """Supervises a run through its successive launches."""

    def __init__(self, run: SimulatedRun, runtime: RuntimeConfig) -> None:
        self._run, self._runtime = run, runtime
        self._supervision = self._new_supervision()
        self._freezes = FreezeWatch(runtime.frozen_after_s, runtime.start_limit_s)
        self._renewing = ""  # unit that is restarting as a whole; "" if none is
        self._launch = 1
        self._coming: set[str] = set()
        run.scheduler.at(_TURN_S, self._turn)

    def _new_supervision(self) -> Supervision:
        return Supervision(self._runtime.max_restarts, groups=groups_that_restart_alone(self._run.config))

    def start_everything(self) -> None:
        for name in self._run.specs:
            self._start(name, self._launch)

    def __call__(self, event: Event) -> None:
        if event.kind not in ("ended", "killed"):
            return
        run = self._run
        process = run.processes[event.process.partition("#")[0]]
        run.note_death(process)
        if process.lease is not None:
            run.scheduler.at(run.now + 0.2 * run.network.random(), run.names.revoke, process.lease)
        if run.is_over or self._concerns(process.name) or (event.kind == "ended" and not event.fields["error"]):
            return
        how = _KILLED if event.kind == "killed" else event.fields["error"]
        run.scheduler.at(run.now + 0.5 * run.network.random(), self._see_to, process, how, self._launch)

    def _turn(self) -> None:
        run = self._run
        alive = {process.label: process for process in run.processes.values() if not process.dead}
        for process in alive.values():
            if process.worker is not None and process.worker.board.state == "running":
                self._supervision.runs(process.name)
        labels = {process.number: label for label, process in alive.items()}
        counts = {
            process.number: process.worker.board.snapshot().progress if process.worker is not None else None
            for process in alive.values()
        }
        for number in self._freezes.turn(run.scheduler.monotonic(), counts):
            run.kill(alive[labels[number]])
        if not run.is_over:
            run.scheduler.at(run.now + _TURN_S, self._turn)

    def _concerns(self, name: str) -> bool:
        """Whether the process belongs to the unit that is restarting."""
        return self._renewing == EVERYTHING or (bool(self._renewing) and name.partition("/")[0] in TRAINER_KINDS)

    def _see_to(self, process: Process, how: str, launch: int) -> None:
        run = self._run
        if run.is_over or launch != self._launch or self._concerns(process.name):
            return
        board = process.worker.board if process.worker is not None else None
        end = End(process.name, how, how, board is not None and board.state != "starting", bool(board and board.fatal))
        decision = self._supervision.decide(end, run.scheduler.time(), run.scheduler.monotonic())
        if isinstance(decision, EndRun):
            if how == _KILLED and not self._supervision.outlives(process.name):
                # the process was killed during its first start: the launcher gives up, and the user starts the run again
                self.lose_power(run.network.random())
                return
            run.invariants.broken("failed", f"the run ended: {decision.cause}")
            return
        if decision.unit == process.name:
            run.group_incarnations[process.name] += 1
            run.scheduler.at(run.now + decision.pause_s + 0.3 * run.network.random(), self._start, process.name, launch)
            return
        self._renew(decision.unit, decision.pause_s)

    def _renew(self, unit: str, pause_s: float) -> None:
        """Kill the whole unit. After the pause at the earliest, begin the next attempt."""
        run = self._run
        self._renewing = unit
        for process in list(run.processes.values()):
            if self._concerns(process.name) and not process.dead:
                run.kill(process)
        run.scheduler.at(run.now + pause_s + 0.2 * run.network.random(), self._next_attempt, self._launch)

    def _next_attempt(self, launch: int) -> None:
        run = self._run
        if run.is_over or launch != self._launch:
            return
        names = [name for name in run.specs if self._concerns(name)]
        self._renewing = ""
        run.begin_attempt()
        for name in names:
            self._start(name, launch)

    def lose_power(self, pause_s: float) -> None:
        """Lose all processes and the data of name resolve. After the pause, the run resumes."""
        run = self._run
        self._launch += 1
        self._renewing = EVERYTHING
        for process in list(run.processes.values()):
            if not process.dead:
                run.kill(process)
        run.names.forget()
        self._supervision = self._new_supervision()
        self._coming.clear()
        run.scheduler.at(run.now + pause_s, self._next_attempt, self._launch)

    def _start(self, name: str, launch: int) -> None:
        """Start a process, as soon as name resolve can grant a lease."""
        run = self._run
        if run.is_over or launch != self._launch or (name in run.processes and not run.processes[name].dead):
            return
        if run.names.down:
            if name not in self._coming:
                self._coming.add(name)
                run.scheduler.at(run.names.down_until + 0.1, self._start_late, name, launch)
            return
        self._coming.discard(name)
        run.start_again(name)

    def _start_late(self, name: str, launch: int) -> None:
        """Try again at the planned end of an outage, which may have been prolonged meanwhile."""
        if launch == self._launch:
            self._coming.discard(name)
        self._start(name, launch)
