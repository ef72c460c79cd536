"""Inject faults into the processes of a live run, and record the results in <run>/journal/faults.jsonl.

One line per fault: {"event": "fault", "number", "kind", "target", "name", "pid", "phase", "in_phase", "time"}; one when a stopped
process continues or is found dead: {"event": "continued" | "killed_meanwhile", ...}; one when another process has taken the name of
the struck one: {"event": "recovered", "name", "pid", "after_s", "time"}; {"event": "missed", "why"} if no process of the
target was alive, or if it ended before the phase came.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from msgspec import Struct

from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.metrics import JsonLinesWriter
from asyncrl.testing.faults.phases import PhaseWatch
from asyncrl.testing.faults.processes import RunProcesses
from asyncrl.testing.faults.schedule import Fault

FAULTS_JOURNAL = "faults"  # <run>/journal/faults.jsonl

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "restart": signal.SIGTERM}
_PHASE_LIMIT_S = 60.0
_POLL_S = 0.05


class Strike(Struct, frozen=True, kw_only=True):
    """A fault that was injected."""

    fault: Fault
    name: str  # of the process, e.g. `rollout_worker/1`
    pid: int
    in_phase: bool  # False: the phase did not come in time, and the fault was injected nevertheless
    time: float  # unix seconds


@dataclass
class _Stopped:
    process: psutil.Process
    strike: Strike
    until: float  # monotonic seconds


class Injector:
    """Acts on one run, from a process outside it.

    consumes: faults. produces: signals, lines of the journal, notices.
    waits for: a fault's time; its phase, for at most phase_limit_s.
    `close` continues all processes that it has stopped.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        notice: Callable[[str], None] = lambda _: None,
        phase_limit_s: float = _PHASE_LIMIT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.strikes: list[Strike] = []
        self.recovered_s: dict[int, float] = {}  # number of a fault -> seconds until another process had the name
        self._processes = RunProcesses(run_dir)
        self._phases = PhaseWatch(run_dir, clock)
        self._phase_limit_s = phase_limit_s
        self._notice, self._clock = notice, clock
        self._journal = JsonLinesWriter(run_dir / "journal" / f"{FAULTS_JOURNAL}.jsonl")
        self._stopped: list[_Stopped] = []
        self._lost: list[Strike] = []  # injected faults whose process must be replaced and is not yet

    def run(
        self, faults: Sequence[Fault], *, until: Callable[[], bool], after_each: Callable[[], None] = lambda: None
    ) -> None:
        """Inject each fault at its time. Return when all processes are back, or when `until` reports the end of the run."""
        start = self._clock.monotonic()
        for fault in faults:
            while self._clock.monotonic() < start + fault.at:
                if until():
                    return
                self.turn()
                self._clock.sleep(_POLL_S)
            self.strike(fault)
            after_each()
        while self.num_open and not until():
            self.turn()
            self._clock.sleep(_POLL_S)

    def strike(self, fault: Fault) -> Strike | None:
        """Wait for the fault's phase, and inject the fault. None if no process of the target is alive, or if it
        ended before the phase came; the journal then has the event `missed`.
        """
        living = self._processes.of(fault.target)
        if not living:
            self._note("missed", fault, why=f"no {fault.target} is alive")
            return None
        name = sorted(living)[int(fault.draw * len(living))]
        process = living[name]
        in_phase = not fault.phase or self._phases.wait(fault.phase, process, self._phase_limit_s)
        try:
            process.send_signal(_SIGNALS[fault.kind])  # psutil checks that the pid is still the same process
        except psutil.NoSuchProcess:
            self._note("missed", fault, why=f"{name} ended before the phase came")
            return None
        finally:
            self._phases.release(fault.phase, process if fault.kind == "stop" else None)
        strike = Strike(fault=fault, name=name, pid=process.pid, in_phase=in_phase, time=self._clock.time())
        self.strikes.append(strike)
        if fault.kind == "stop":
            self._stopped.append(_Stopped(process, strike, self._clock.monotonic() + fault.stop_s))
        else:
            self._lost.append(strike)
        self._note("fault", fault, name=name, pid=process.pid, in_phase=in_phase)
        how = f" for {fault.stop_s:.1f} s" if fault.kind == "stop" else ""
        when = f", in {fault.phase}" if fault.phase and in_phase else ""
        self._notice(f"fault {fault.number}: {fault.kind} {name} (process {process.pid}){how}{when}")
        return strike

    @property
    def num_open(self) -> int:
        """Number of faults with a process that is stopped, or not back yet."""
        return len(self._stopped) + len(self._lost)

    def turn(self) -> None:
        """Continue processes that were stopped long enough; record processes that are back. Does not wait."""
        now = self._clock.monotonic()
        for stopped in [stopped for stopped in self._stopped if stopped.until <= now or not _lives(stopped.process)]:
            self._stopped.remove(stopped)
            self._go_on(stopped)
        if self._lost:
            self._note_recovered()

    def close(self) -> None:
        """Continue all stopped processes, and close the journal."""
        for stopped in self._stopped:
            self._go_on(stopped)
        self._stopped.clear()
        self._journal.close()

    def __enter__(self) -> Injector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------- inside

    def _go_on(self, stopped: _Stopped) -> None:
        strike = stopped.strike
        if _lives(stopped.process):
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped.process.send_signal(signal.SIGCONT)
            self._note("continued", strike.fault, name=strike.name, pid=strike.pid)
        else:  # the launcher killed it because it did not respond
            self._lost.append(strike)
            self._note("killed_meanwhile", strike.fault, name=strike.name, pid=strike.pid)

    def _note_recovered(self) -> None:
        living = self._processes.by_name()
        for strike in list(self._lost):
            found = living.get(strike.name)
            if found is None or found.pid == strike.pid:
                continue
            self._lost.remove(strike)
            after_s = self.recovered_s[strike.fault.number] = self._clock.time() - strike.time
            self._note("recovered", strike.fault, name=strike.name, pid=found.pid, after_s=round(after_s, 3))
            self._notice(
                f"fault {strike.fault.number}: {strike.name} is back after {after_s:.1f} s (process {found.pid})"
            )

    def _note(self, event: str, fault: Fault, **more: object) -> None:
        record = {"event": event, "number": fault.number, "kind": fault.kind, "target": fault.target}
        self._journal.write({**record, "phase": fault.phase, "time": self._clock.time(), **more})


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
