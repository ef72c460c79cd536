"""The supervisor's decisions, turn by turn, for child processes whose ends the test simulates."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import ProcessSpec, plan
from asyncrl.launch.supervisor.children import KILL_LIMIT_S, Child
from asyncrl.launch.supervisor.fork_server import Forked
from asyncrl.launch.supervisor.policy import EVERYTHING, TRAINER_GROUP, EndRun, FreezeWatch, Supervision
from asyncrl.launch.supervisor.state_machine import (
    LAST_WORDS_S,
    BeginAttempt,
    Cancel,
    Decision,
    Forget,
    Kill,
    LookForCheckpoint,
    Notice,
    StartLater,
    Supervisor,
)
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.names.interface import Lease
from tests.support.clock import ManualClock

CONFIG = """
allocation: transformers.d1+d2+ref_inf:d1
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
train: {ppo: {kl_coef: 0.1}}
"""
DETACHED = "model_worker/2"
STOP_S = 10.0


class World:
    """A supervisor and the children of its launcher.

    `turn` carries out Kill and Forget, stores the notices in `told`, and returns these two and all other decisions.
    """

    def __init__(self, folder: Path, *, max_restarts: int = 3, frozen_after_s: float = 0.0) -> None:
        file = folder / "c.yaml"
        file.write_text(CONFIG)
        self.log = folder / "a.log"
        self.log.write_text("last words\n")
        self.clock = ManualClock()
        self.leases = itertools.count(1)
        self.config = load_experiment(file, ["runtime.start_timeout_s=100"])
        specs = plan(self.config, attempt=1, num_prompts=100)
        self.specs: dict[str, ProcessSpec] = {spec.name: spec for spec in specs}
        self.leaving: set[str] = set()
        self.supervisor = Supervisor(
            Supervision(max_restarts, groups={(DETACHED,): False}),
            FreezeWatch(frozen_after_s, 100.0),
            frozen_after_s=frozen_after_s,
            stop_timeout_s=STOP_S,
            trainer_group=lambda: "its names",
            leaves=lambda child: child.name in self.leaving,
        )
        self.children: list[Child] = []
        for name in self.specs:
            self.start(name)

    def start(self, name: str) -> Child:
        """Add a running child."""
        lease = Lease(None, next(self.leases), 30.0)  # type: ignore[arg-type]
        child = Child(self.specs[name], Forked(0), self.log, -1, lease, started=self.clock.now)
        child.was_running = True
        child.status = WorkerStatus(worker=name, pid=0, attempt=1, state="running", time=self.clock.now, progress=1)
        self.children.append(child)
        self.supervisor.policy.runs(name)
        return child

    def __getitem__(self, name: str) -> Child:
        return next(child for child in self.children if child.name == name)

    def die(self, name: str, code: int = -signal.SIGKILL) -> None:
        self[name].returncode, self[name].ended = code, self.clock.now

    def fail(self, name: str, error: str, *, fatal: bool = False, ago_s: float = 0.0, recurs_as: str = "") -> None:
        """The process reports the error and has not ended yet."""
        at = self.clock.now - ago_s
        self[name].status = WorkerStatus(
            worker=name,
            pid=0,
            attempt=1,
            state="error",
            time=at,
            progress=1,
            error=error,
            fatal=fatal,
            recurs_as=recurs_as,
        )

    def turn(self, after_s: float = 0.1, *, hurried: bool = False) -> list[Decision]:
        """Return all decisions but notices. Killed processes have ended by the next turn."""
        self.clock.now += after_s
        decisions = self.supervisor.turn(self.children, now=self.clock.now, wall_time=self.clock.now, hurried=hurried)
        for decision in decisions:
            if isinstance(decision, Kill):
                decision.child.froze_s = decision.child.froze_s or decision.froze_s
                self.die(decision.child.name)
            elif isinstance(decision, Forget):
                self.children.remove(decision.child)
        self.told = [decision.text for decision in decisions if isinstance(decision, Notice)]
        return [decision for decision in decisions if not isinstance(decision, Notice)]

    def kinds(self, after_s: float = 0.1) -> list[str]:
        """Return the type of each decision, with the name of its process if it has one."""

        def shown(decision: Any) -> str:
            name = decision.child.name if isinstance(decision, Kill | Forget) else getattr(decision, "name", "")
            return f"{type(decision).__name__} {name}".strip()

        return [shown(decision) for decision in self.turn(after_s)]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_rollout_worker_restarts_alone(world: World) -> None:
    world.die("rollout_worker/0")
    child, how = (
        world["rollout_worker/0"],
        "was killed by signal SIGKILL (by a person or another process, or because memory ran out: see `dmesg`)",
    )
    assert world.turn() == [Forget(child), StartLater("rollout_worker/0", how, 1, 0.0)]
    assert world.told == [f"rollout_worker/0 {how}; it is started again at once (1 of 3); see {world.log}"]
    assert world.turn() == []


def test_the_trainer_group_restarts_as_the_next_attempt_after_its_end_and_the_search_for_a_checkpoint(
    world: World,
) -> None:
    world.die("model_worker/0")
    assert world.kinds() == ["Cancel", "Kill model_worker/1", "Kill model_worker/2", "Kill master/0"]
    assert "the trainer group (its names) is started again at once (1 of 3)" in world.told[0]
    members = ["model_worker/0", "model_worker/1", "model_worker/2", "master/0"]
    assert world.kinds() == [*(f"Forget {name}" for name in members), "LookForCheckpoint"]
    assert world.turn(100.0) == []
    assert world.supervisor.begins_attempt
    world.supervisor.checkpoint_found()
    (begin,) = world.turn()
    assert isinstance(begin, BeginAttempt)
    assert begin.unit == TRAINER_GROUP
    assert not world.supervisor.begins_attempt
    assert [begin.concerns(kind) for kind in ("master", "model_worker", "rollout_worker")] == [True, True, False]


def test_a_detached_group_restarts_as_its_next_incarnation(world: World) -> None:
    world.die(DETACHED)
    assert world.kinds() == [f"Forget {DETACHED}", f"StartLater {DETACHED}"]
    assert world.supervisor.group_incarnation_of(DETACHED) == 1
    assert world.supervisor.group_incarnation_of("model_worker/0") == 0


def test_the_end_of_the_trainer_group_cancels_the_pending_restart_of_a_detached_group(world: World) -> None:
    world.die(DETACHED)
    world.die("master/0")
    decisions = world.kinds()
    assert decisions[0] == "Cancel"
    assert f"StartLater {DETACHED}" not in decisions
    world.turn()
    world.supervisor.checkpoint_found()
    assert world.kinds() == ["BeginAttempt"]
    assert world.supervisor.group_incarnation_of(DETACHED) == 0  # the numbers start again in each attempt


def test_after_too_many_ends_everything_restarts_once(tmp_path: Path) -> None:
    world = World(tmp_path, max_restarts=1)
    world.die("rollout_worker/0")
    assert world.kinds() == ["Forget rollout_worker/0", "StartLater rollout_worker/0"]
    world.start("rollout_worker/0")
    world.die("rollout_worker/0")
    decisions = world.turn()
    assert decisions[0] == Cancel(trainer_only=False)
    assert world.supervisor.starts_everything
    assert sum(isinstance(decision, Kill) for decision in decisions) == len(world.specs) - 1
    assert world.kinds()[-1] == "LookForCheckpoint"
    world.supervisor.checkpoint_found()
    (begin,) = world.turn(60.0)
    assert isinstance(begin, BeginAttempt)
    assert begin.unit == EVERYTHING


def test_peers_that_fail_because_of_a_kill_are_not_the_cause(world: World) -> None:
    """The peers fail at once. The supervisor sees the kill a moment later."""
    world.fail("model_worker/1", "RuntimeError: the connection was closed by its peer")
    assert world.turn() == []  # another process may have failed first
    world.die("model_worker/0")
    assert Cancel(trainer_only=True) in world.turn()
    assert world.told[0].startswith("model_worker/0 was killed by signal SIGKILL")


def test_a_forwarded_error_waits_for_the_report_of_its_origin(world: World) -> None:
    world.fail("master/0", "asyncrl.streams.request_reply.RemoteCallError: model_worker/1: ValueError: a loss")
    assert world.turn(LAST_WORDS_S + 0.1) == []
    assert world.turn(LAST_WORDS_S + 0.1) == []  # the origin has not reported yet
    world.fail("model_worker/1", "ValueError: a loss")
    assert world.turn(STOP_S)[0] == Cancel(trainer_only=True)
    assert world.told[0].startswith("model_worker/1 failed: ValueError: a loss")


def test_a_fatal_error_fails_the_run_after_a_wait_for_earlier_causes(world: World) -> None:
    """The earliest failure reported until the end of the wait is the cause."""
    world.fail("master/0", "asyncrl.config.schema.ConfigError: no such model", fatal=True)
    assert world.turn() == []
    assert world.supervisor.is_listening
    world.fail("rollout_worker/0", "ValueError: came before", ago_s=5.0)
    assert world.turn(LAST_WORDS_S / 2) == []
    (end,) = world.turn(LAST_WORDS_S)
    assert isinstance(end, EndRun)
    assert end.cause.startswith("rollout_worker/0 failed\n\nValueError: came before")
    assert "Failed after it: master/0" in end.cause


def test_the_third_lack_of_gpu_memory_ends_the_run_with_its_advice(world: World) -> None:
    """A peer that lost its connection may have failed first, by the times of the reports."""
    for number in range(3):
        world.fail("model_worker/1", "lost its peer", ago_s=0.1)
        world.fail("model_worker/0", "use less", recurs_as="out of GPU memory in actor_train")
        found = [*world.turn(), *world.turn(LAST_WORDS_S + 1.0)]
        if number == 2:
            break
        assert Cancel(trainer_only=True) in found
        world.turn()
        world.supervisor.checkpoint_found()
        assert any(isinstance(decision, BeginAttempt) for decision in world.turn(2.0))
        world.children.clear()
        for name in world.specs:
            world.start(name)
    (end,) = found
    assert isinstance(end, EndRun)
    assert end.cause.startswith("out of GPU memory in actor_train, 3 times within 6 hours: a restart does not help\n")


def test_a_run_that_is_stopped_does_not_wait_for_further_error_reports(world: World) -> None:
    world.fail("master/0", "asyncrl.config.schema.ConfigError: no such model", fatal=True)
    assert world.turn() == []
    (end,) = world.turn(0.1, hurried=True)
    assert isinstance(end, EndRun)
    assert "no such model" in end.cause


def test_a_failed_process_that_does_not_end_is_killed(world: World) -> None:
    world.fail("rollout_worker/0", "ValueError: x")
    assert world.turn() == []
    assert world.kinds(STOP_S + 0.1) == ["Kill rollout_worker/0"]
    assert world.kinds() == ["Forget rollout_worker/0", "StartLater rollout_worker/0"]


def test_a_process_that_cannot_be_killed_ends_the_run(world: World) -> None:
    world.die("master/0")
    world.turn()
    world["model_worker/1"].returncode = None  # for example, stuck in a system call
    decisions = world.turn(KILL_LIMIT_S + 1.0)
    (end,) = [decision for decision in decisions if isinstance(decision, EndRun)]
    assert "model_worker/1 cannot be started again: killed, and still not ended" in end.cause


def test_the_end_of_a_leaving_server_has_no_effect(world: World) -> None:
    world.leaving = {"generation_server/0"}
    world.die("generation_server/0", 1)
    assert world.turn() == []
    assert world.told == []


def test_a_frozen_process_is_reported_once_and_killed(tmp_path: Path) -> None:
    world = World(tmp_path, frozen_after_s=5.0)
    decisions: list[str] = []
    told: list[str] = []
    for _ in range(12):
        for child in world.children:
            assert child.status is not None
            if child.name != "generation_server/0":
                child.status = msgspec.structs.replace(child.status, progress=child.status.progress + 1)
        decisions += world.kinds(1.0)
        told += world.told
        if decisions:
            break
    assert decisions == ["Kill generation_server/0"]
    assert [text for text in told if "has sent no heartbeat for" in text] == told
    assert len(told) == 1


def test_the_next_attempt_begins_after_one_search_for_a_checkpoint(world: World) -> None:
    world.die("master/0")
    world.turn()
    assert LookForCheckpoint() in world.turn()
    assert not [decision for decision in world.turn() if isinstance(decision, LookForCheckpoint)]  # only one search
    world.supervisor.checkpoint_found()
    assert isinstance(world.turn()[0], BeginAttempt)
