"""Faults for tests of whole runs, users' agents and clusters: kill, freeze and restart processes, determined by a seed.

with launch(config, ...) as run:
    faults = schedule(seed=7, every=(5.0, 15.0), for_s=120.0, kinds=["kill", "stop"], targets=["rollout_worker", "master"])
    with Injector(run.run_dir) as injector:
        injector.run(faults, until=lambda: run.popen.poll() is not None)

`asyncrl-launch chaos` does this with any config. For messages that are lost, duplicated, corrupted or delayed, use the config
section runtime.faults, which applies to every channel and HTTP call of a run (runtime/transport.py, runtime/http_client.py).
"""

from asyncrl.testing.faults.costs import Costs, cost_lines, read_costs
from asyncrl.testing.faults.injector import FAULTS_JOURNAL, Injector, Strike
from asyncrl.testing.faults.phases import PhaseWatch
from asyncrl.testing.faults.processes import RunProcesses
from asyncrl.testing.faults.schedule import KINDS, PHASES, TARGETS, Fault, check_target, schedule

__all__ = [
    "FAULTS_JOURNAL",
    "KINDS",
    "PHASES",
    "TARGETS",
    "Costs",
    "Fault",
    "Injector",
    "PhaseWatch",
    "RunProcesses",
    "Strike",
    "check_target",
    "cost_lines",
    "read_costs",
    "schedule",
]
