"""One simulated run, from its scenario to an outcome."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from asyncrl.config.processes import MasterWorkerConfig, ModelWorkerConfig
from asyncrl.generation.worker import GenerationServer
from asyncrl.launch.program import ProcessSpec, plan
from asyncrl.manager.worker import GserverManager
from asyncrl.master.worker import MasterWorker
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.system import System
from asyncrl.runtime.worker import Worker
from asyncrl.weights.checkpoints import MasterState
from asyncrl.weights.versions import version_dir
from tests.simulation import seams
from tests.simulation.disk import Folder
from tests.simulation.faults import Injector
from tests.simulation.invariants import Invariants, Prompt
from tests.simulation.loop import StuckError
from tests.simulation.network import SimPull
from tests.simulation.processes import SimEngines, SimModelWorker, Weights
from tests.simulation.scenario import Scenario
from tests.simulation.supervisor import Supervisor
from tests.simulation.world import Event, Process, SimulatedWorld

_MAKERS: dict[str, Callable[[Any, System], Worker]] = {
    "generation_server": lambda config, system: GenerationServer(config, system, SimEngines(config)),
    "model_worker": SimModelWorker,
    "master": lambda config, system: MasterWorker(config, system, seams.SimMasterFiles(config)),
    "gserver_manager": lambda config, system: GserverManager(config, system, seams.SimManagerFiles(config)),
    "rollout_worker": lambda config, system: RolloutWorker(config, system, seams.SimRolloutData(config)),
}


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation. violation: the broken invariant and the details; "" if none was broken."""

    scenario: Scenario
    violation: str
    digest: str  # hash of the events: the same scenario always gives the same digest; "" if the events are not kept
    num_events: int
    num_handles: int
    num_steps: int
    virtual_s: float
    events: tuple[Event, ...] = ()


class SimulatedRun(SimulatedWorld):
    """The world of one scenario: its processes, its faults, its supervisor and its invariants."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.seed, latency_s=scenario.latency_s)
        self.scenario = scenario
        self.config = scenario.config()
        self.run_dir = f"/simulated/simulated/s{scenario.seed}"
        self.is_over = False
        self.attempt = 1
        self.lineage: dict[Prompt, str] = {}  # prompt -> the ticket whose group the weights were trained on
        self.rejected: dict[Prompt, str] = {}  # prompt -> reason, in the lineage
        self._rejected_at: dict[tuple[int, int], dict[Prompt, str]] = {}  # `rejected` at each checkpoint's snapshot
        self._torn: set[str] = set()  # torn checkpoints
        self.committed: set[str] = set()  # folders that are or were complete
        self._num_starts = 0
        self.group_incarnations: Counter[str] = Counter()  # by process: restarts of its detached group in this attempt
        self.died_at: dict[str, float] = {}  # a worker's incarnation -> time of its death
        self.num_dropped = 0
        self.quiet_since = 0.0  # end of the last fault
        self.late_disk_until = self.late_disk_s = 0.0
        self.specs = self._plan("")
        self.invariants = Invariants(self)
        self.supervisor = Supervisor(self, self.config.runtime)
        self.listeners += [self._listen, self.invariants, Injector(self, scenario.faults), self.supervisor]

    @property
    def stopped(self) -> bool:
        return self.scheduler.stopped

    def stop(self) -> None:
        self.scheduler.stopped = True

    def go(self) -> None:
        """Run to the end, or to the first broken invariant."""
        self.supervisor.start_everything()
        try:
            if not self.scheduler.run(self.scenario.limit_s):
                self.invariants.broken("progress", f"not over after {self.now:.0f} s; {self._waits()}")
        except StuckError as error:
            self.invariants.broken("stuck", str(error))

    def _plan(self, resume: str) -> dict[str, ProcessSpec]:
        specs = plan(self.config, attempt=self.attempt, num_prompts=self.scenario.num_prompts, resume=resume)
        return {spec.name: spec for spec in specs}

    def start_again(self, name: str) -> None:
        """Start a process of the newest attempt."""
        spec = self.specs[name]
        config = spec.config
        if isinstance(config, MasterWorkerConfig | ModelWorkerConfig) and self.scenario.one_mfc:
            config = replace(config, mfcs=[replace(config.mfcs[-1], input_keys=["packed_input_ids"])])
        self._num_starts += 1
        worker = replace(config.worker, start=self._num_starts, group_incarnation=self.group_incarnations[name])
        config = replace(config, worker=worker)
        make = _MAKERS[spec.kind]
        self.start(name, config, lambda process: make(process.config, seams.system_of(process)))

    # -------------------------------------------------------------------------------------------------- attempts, checkpoints

    def begin_attempt(self) -> None:
        """Begin the next attempt, from the newest checkpoint. Everything after that checkpoint is void."""
        self.attempt += 1
        self.group_incarnations.clear()
        path = self._newest_checkpoint()
        self.specs = self._plan(path)
        content: Weights = self.disk.folders[path].content if path else Weights()
        self.lineage = {(locator.epoch, locator.position): ticket for locator, ticket, _ in content.trained}
        self.rejected = dict(self._rejected_at[_of_checkpoint(path)]) if path else {}
        self.note(None, "attempt", number=self.attempt, path=path, trained=len(self.lineage))

    def _checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints, oldest first."""
        prefix = f"{self.run_dir}/checkpoints/recover/"
        return sorted((path for path in self.disk.folders if path.startswith(prefix)), key=_of_checkpoint)

    def _newest_checkpoint(self) -> str:
        return next((path for path in reversed(self._checkpoints()) if path not in self._torn), "")

    def tear_newest_checkpoint(self) -> None:
        """Make the newest checkpoint unreadable, if it is not the only one."""
        there = self._checkpoints()
        if len(there) > 1:
            self._torn.add(there[-1])

    def damage_newest_weights(self) -> None:
        """Damage the published version: its files do not match their manifest any more."""
        if self.invariants.published is not None:
            self.disk.damaged.add(self.path_of(self.invariants.published))

    def prune_checkpoints(self, keep_last: int) -> None:
        """Like checkpoints.prune: keep the newest checkpoints of the newest one's lineage."""
        there = self._checkpoints()
        if not there:
            return
        newest = _of_checkpoint(there[-1])
        state = msgspec.json.decode(self.masters[there[-1]], type=MasterState)
        parent = state.parent or (0, 0)
        alive = [path for path in there if not parent < _of_checkpoint(path) < (newest[0], 0)]
        for path in set(there) - set(alive[-keep_last:]):
            del self.disk.folders[path]

    # ----------------------------------------------------------------------------------------------- used by invariants

    def attempt_of(self, label: str) -> int:
        """The attempt of the newest incarnation of this process. label: name#incarnation."""
        return int(self.processes[label.partition("#")[0]].config.worker.attempt)

    def master_buffer(self, label: str) -> Any:
        return self.processes[label.partition("#")[0]].buffer

    def live_tickets(self, label: str) -> set[str]:
        """Tickets that are live in this manager's ledger."""
        process = self.processes[label.partition("#")[0]]
        return process.ledger._live.keys() | process.ledger._evals.keys() if process.ledger is not None else set()

    def version_on_disk(self, version: WeightVersion) -> Folder | None:
        return self.disk.folders.get(self.path_of(version))

    def path_of(self, version: WeightVersion) -> str:
        return str(version_dir(self.run_dir, ACTOR, version))

    def final_weights(self) -> Weights | None:
        folder = self.disk.folders.get(f"{self.run_dir}/checkpoints/final")
        return folder.content if folder is not None else None

    def note_death(self, process: Process) -> None:
        if process.worker is not None:
            self.died_at[process.worker.incarnation] = self.now

    # ------------------------------------------------------------------------------------------------------------ inside

    def on_journal(self, process: Process, record: dict[str, Any]) -> None:
        if record["event"] == "rejected":
            prompt = record["prompt"]
            self.rejected[prompt.epoch, prompt.position] = record["reason"]
            self.note(process, "rejected", prompt=(prompt.epoch, prompt.position), reason=record["reason"])
        elif record["event"] == "snapshot":
            self._rejected_at[record["attempt"], record["step"]] = dict(self.rejected)
            self.note(process, "snapshot", step=record["step"])

    def look_at(self, process: Process, board: StatusBoard) -> None:
        self.invariants.look_at(process, board)

    def look_at_queue(self, pull: SimPull) -> None:
        self.invariants.look_at_queue(pull)

    def _listen(self, event: Event) -> None:
        if event.kind == "ended" and event.process.startswith("master") and not event.fields["error"]:
            self.is_over = True
            self.invariants.at_end()
            self.stop()
        elif event.kind == "committed":
            path = event.fields["path"]
            self.committed.add(path)
            if self.now < self.late_disk_until:
                self.disk.hidden_until[path] = self.now + self.late_disk_s
        elif event.kind == "summary":
            self.num_dropped = event.fields["dropped"]

    def _waits(self) -> str:
        """The named waits of all processes, as text."""
        told = []
        for process in self.processes.values():
            state = "dead" if process.dead else "frozen" if process.loop.halted else ""
            waits = process.worker.board.snapshot().waits if process.worker is not None else []
            named = [f"{wait.what} from {wait.on} for {wait.since_s:.0f} s" for wait in waits]
            told.append(f"{process.label}{f' ({state})' if state else ''}: {', '.join(named) or 'nothing named'}")
        return "; ".join(told)


def _of_checkpoint(path: str) -> tuple[int, int]:
    """Return (attempt, step) of a checkpoint's folder."""
    attempt, _, step = path.rpartition("/")[2].partition("-")
    return int(attempt[1:]), int(step[1:])


def simulate(scenario: Scenario, *, keep_events: bool = False) -> Outcome:
    """Simulate a scenario to its end. Call it while seams are installed."""
    world = SimulatedRun(scenario)
    seams.use(world)
    try:
        world.go()
        events = tuple(world.events)
        text = "\n".join(map(str, events)) if keep_events else ""
        return Outcome(
            scenario,
            world.invariants.violation,
            hashlib.sha256(text.encode()).hexdigest() if text else "",
            len(events),
            world.scheduler.num_handles,
            world.count["trained"],
            world.now,
            events if keep_events else (),
        )
    finally:
        world.tear_down()
