"""Chaos tests of whole runs: a small run that learns, faults given by cells of (target, kind, phase), and checks at its end.

config = make_chaos_run(folder)
with ChaosRun(config, f"fileroot={folder}") as run:
    for cell in (Cell("rollout_worker", "kill", "push"), Cell("master", "kill", "train_step")):
        assert not run.strike(cell).problem
    assert run.finish().problems == []

The task: answer with the digit 7 only. A random policy has a reward of 0.02. After 50 steps of 8 prompts it is at least 0.9 if
training is correct. The reward function is slow while cells remain (`_PACE`), so that the run does not end before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from asyncrl.config.schema import max_head_offpolicyness
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.process import python_module
from asyncrl.testing.faults.injector import Injector
from asyncrl.testing.faults.schedule import Fault, Kind, Phase
from asyncrl.testing.runs import (
    RunHandle,
    assert_nothing_left,
    launch,
    make_tiny_run,
    train_steps,
)
from asyncrl.weights.lineage import audit

STEPS, BATCH, GROUP, ETA = 60, 8, 4, 2
REWARD_BAR = 0.8  # the mean reward of the last steps must reach this; a policy that learned nothing has 0.02
LAUNCHER_LIMIT_S = 10.0  # after the launcher has ended, all its processes must end within this time

_LAST_STEPS = 5
_STEP_LIMIT_S = 120.0  # limit until the run trains again after a fault
_START_LIMIT_S = 180.0
_END_LIMIT_S = 300.0

_CHAOS = """\
experiment: chaos
allocation: transformers.d2+d1
rollout:
  num_workers: 2
  group_size: {group}
  sampling: {{max_new_tokens: 32}}
generation: {{num_blocks: 512}}
manager: {{max_head_offpolicyness: {eta}, lease_s: 4.0, heartbeat_s: 0.5}}
train:
  batch_size: {batch}
  max_steps: {steps}
  optimizer: {{lr: 0.003}}
  ppo: {{minibatches: 2}}
checkpoint: {{every_steps: 3, every_s: 0.0}}
runtime: {{max_restarts: 1000, frozen_after_s: 8.0, resend_after_s: 1.0}}
"""

_PACE = """\
import os, time
PACE = {pace!r}
def reward(prompt, completion, answer):
    if os.path.exists(PACE):
        time.sleep(0.1)
    return completion.count("7") / max(1, len(completion))
"""


def make_chaos_run(folder: Path, *, steps: int = STEPS) -> Path:
    """Write the config of the small run, its model, prompts and reward function. Takes some seconds."""
    from omegaconf import OmegaConf

    tiny = make_tiny_run(folder)
    ours = OmegaConf.create(_CHAOS.format(group=GROUP, eta=ETA, batch=BATCH, steps=steps))
    path = folder / "chaos.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(tiny), ours), path)
    (folder / "reward.py").write_text(_PACE.format(pace=str(folder / "pace")), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Cell:
    """One fault: the process that it strikes, the kind of fault, and the phase of the run in which it happens."""

    target: str
    kind: Kind
    phase: Phase
    stop_s: float = 20.0

    def __str__(self) -> str:
        return f"{self.kind} {self.target} in {self.phase or 'any phase'}"


@dataclass
class Outcome:
    """The result of a cell."""

    cell: Cell
    name: str = ""  # of the struck process
    in_phase: bool = False
    back_s: float | None = None  # seconds until another process had its name; None: it survived
    useful_s: float | None = None  # seconds until the run had trained a further step
    problem: str = ""


@dataclass
class Report:
    """A finished run."""

    exit_code: int
    reward: float
    problems: list[str] = field(default_factory=list)


class ChaosRun:
    """A run that gets its faults cell by cell. Leaving the `with` block kills all remaining processes."""

    def __init__(
        self, config: Path, *overrides: str, env: Mapping[str, str] | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.config = load_experiment(config, overrides)
        self.run_dir = run_directory(self.config)
        self._env, self._clock = env, clock
        self._pace = config.parent / "pace"
        self._pace.touch()
        self._handles = [launch(config, *overrides, env=env)]
        self._injector: Injector | None = None
        self._number = 0

    @property
    def handle(self) -> RunHandle:
        """The current launcher."""
        return self._handles[-1]

    def wait_for_step(self) -> None:
        """Wait for train step 2, so that every process has worked."""
        self.handle.wait_for_step(2, _START_LIMIT_S)

    def strike(self, cell: Cell) -> Outcome:
        """Inject one fault; then wait until the process is back and the run trains."""
        if self._injector is None:
            self.wait_for_step()
            self._injector = Injector(self.run_dir, clock=self._clock)
        outcome = Outcome(cell)
        try:
            self._strike(self._injector, cell, outcome)
        except AssertionError as error:
            outcome.problem = str(error)
        return outcome

    def finish(self) -> Report:
        """Let the run complete, and check its results."""
        if self._injector is not None:
            self._injector.close()
            self._injector = None
        self._pace.unlink(missing_ok=True)
        report = Report(-1, 0.0)
        try:
            report.exit_code = self.handle.wait(_END_LIMIT_S)
            if report.exit_code != 0:
                report.problems.append(f"the run ended with {report.exit_code}:\n{self.handle.output()[-6000:]}")
            assert_nothing_left(self.run_dir)
        except AssertionError as error:
            report.problems.append(str(error))
        steps = train_steps(self.run_dir)
        report.reward = sum(step["reward/mean"] for step in steps[-_LAST_STEPS:]) / max(1, len(steps[-_LAST_STEPS:]))
        if report.reward < REWARD_BAR:
            report.problems.append(f"the last rewards are {report.reward:.2f}; correct training gives {REWARD_BAR}")
        report.problems.extend(problems_of(self.run_dir, max_head_offpolicyness(self.config)))
        return report

    def close(self) -> None:
        if self._injector is not None:
            self._injector.close()
        for handle in self._handles:
            handle.close()

    def __enter__(self) -> ChaosRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------- inside

    def _strike(self, injector: Injector, cell: Cell, outcome: Outcome) -> None:
        assert self.handle.popen.poll() is None, f"the run ended before {cell}: it needs more steps"
        fault = Fault(
            number=self._number, kind=cell.kind, target=cell.target, at=0.0, phase=cell.phase, stop_s=cell.stop_s
        )
        self._number += 1
        strike = injector.strike(fault)
        assert strike is not None, f"no process to strike: {cell}"
        outcome.name, outcome.in_phase = strike.name, strike.in_phase
        trained = len(train_steps(self.run_dir))
        if cell.target == "launcher" and cell.kind != "stop":
            self._resume_after(strike.time)
            trained = len(train_steps(self.run_dir))
        self._wait(lambda: injector.num_open == 0, injector, f"{strike.name} was back after {cell}")
        outcome.back_s = injector.recovered_s.get(fault.number)
        if cell.kind == "stop":
            trained = len(train_steps(self.run_dir))
        self._wait(lambda: len(train_steps(self.run_dir)) > trained, injector, f"a train step after {cell}")
        outcome.useful_s = self._clock.time() - strike.time

    def _wait(self, condition: Callable[[], bool], injector: Injector, what: str) -> None:
        def turn() -> bool:
            injector.turn()
            return condition()

        self.handle.wait_until(turn, what, _STEP_LIMIT_S)

    def _resume_after(self, struck: float) -> None:
        """After the launcher's death: check that all processes end, then continue with `resume`."""
        self.handle.wait(LAUNCHER_LIMIT_S + 10.0)
        assert_nothing_left(self.run_dir, within_s=max(0.0, struck + LAUNCHER_LIMIT_S - self._clock.time()))
        command = python_module("asyncrl.cli.main", "resume", str(self.run_dir))
        self._handles.append(RunHandle(command, self.run_dir, self._env))


def problems_of(run_dir: Path, eta: int) -> list[str]:
    """Problems in the journals of a run: those of the audit, and too much off-policyness."""
    audited = audit(run_dir)
    found = [*audited.problems, *(() if audited.complete else ("the journal does not record the end of the run",))]
    worst = max((step["offpolicy/head_max"] for step in train_steps(run_dir)), default=0.0)
    if worst > eta:
        found.append(f"off-policyness reached {worst:g}, but manager.max_head_offpolicyness is {eta}")
    return found
