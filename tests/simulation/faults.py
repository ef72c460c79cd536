"""Injects faults into a simulated run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.scenario import Fault
from tests.simulation.world import ChannelFaults, Event, HTTPFaults

if TYPE_CHECKING:
    from tests.simulation.run import SimulatedRun


class Injector:
    """Injects each fault at the time `at`, or `at` seconds after the event that it waits for."""

    def __init__(self, run: SimulatedRun, faults: tuple[Fault, ...]) -> None:
        self._run = run
        self._waiting: dict[str, list[Fault]] = {}
        self._seen: Counter[str] = Counter()
        for fault in faults:
            if fault.event:
                self._waiting.setdefault(fault.event, []).append(fault)
            else:
                run.scheduler.at(fault.at, self._strike, fault)

    def __call__(self, event: Event) -> None:
        waiting = self._waiting.get(event.kind)
        if not waiting:
            return
        self._seen[event.kind] += 1
        for fault in [fault for fault in waiting if fault.count <= self._seen[event.kind]]:
            waiting.remove(fault)
            self._run.scheduler.at(self._run.now + fault.at, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        run = self._run
        if run.stopped:
            return
        until = run.now + fault.lasts_s
        run.note(None, "fault", what=str(fault))
        run.quiet_since = max(run.quiet_since, until)
        process = run.processes.get(fault.target)
        if fault.kind == "kill":
            if process is not None:
                run.kill(process)
        elif fault.kind == "power":  # the machine loses power and comes back: another launch
            run.supervisor.lose_power(fault.lasts_s)
        elif fault.kind == "torn":
            run.tear_newest_checkpoint()
        elif fault.kind == "damage":
            run.damage_newest_weights()
        elif fault.kind == "freeze":
            if process is not None:
                run.freeze(process, until)
        elif fault.kind == "cut":
            pair = frozenset(fault.target.split())
            run.partitions[pair] = until
            run.partition_loses = fault.strength > 0.5
            run.scheduler.at(until, run.heal, pair)
        elif fault.kind == "messages":
            run.channel_faults = ChannelFaults(
                lose=0.2 * fault.strength,
                double=0.2 * fault.strength,
                delay=0.2 * fault.strength,
                corrupt=0.05 * fault.strength,
                delay_s=2.0,
            )
            run.scheduler.at(until, run.calm, "channel_faults", run.channel_faults)
        elif fault.kind == "requests":
            run.http_faults = HTTPFaults(lose=0.2 * fault.strength, lose_answer=0.2 * fault.strength)
            run.scheduler.at(until, run.calm, "http_faults", run.http_faults)
        elif fault.kind == "outage":
            run.names.down_until = max(run.names.down_until, until)
        elif fault.kind == "slow_disk":
            run.slow_disk[fault.target] = fault.strength
            run.scheduler.at(until, run.slow_disk.pop, fault.target, None)
        elif fault.kind == "late_disk":
            run.late_disk_until, run.late_disk_s = until, fault.strength
        else:
            raise ValueError(f"unknown fault {fault.kind!r}")
