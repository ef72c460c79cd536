"""Which of a run's processes are started again, how often, after which pause, and what is told of it."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from pathlib import Path

import pytest

from asyncrl.config import load_experiment
from asyncrl.launch import restarts
from asyncrl.launch.children import Child
from asyncrl.launch.program import plan
from asyncrl.launch.restarts import WINDOW_S, RestartBudget, ServerRestarts
from asyncrl.launch.rundir import LaunchError

CONFIG = """
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
"""


class FakeLease:
    id = 77


def test_pauses_grow_and_the_number_is_bounded_within_an_hour() -> None:
    budget = RestartBudget(3)
    assert [budget.ended("s", f"end {i}", 10.0 * i) for i in range(4)] == [1.0, 2.0, 4.0, None]
    assert budget.recent("s", 40.0) == ["end 0", "end 1", "end 2", "end 3"]
    assert budget.count("s") == 3
    assert budget.ended("other", "killed", 40.0) == 1.0
    assert budget.ended("s", "much later", WINDOW_S + 50.0) == 1.0
    assert budget.count("s") == 4
    assert RestartBudget(0).ended("s", "killed", 0.0) is None
    long = RestartBudget(100)
    assert max(long.ended("s", "", 0.0) for _ in range(50)) == 30.0


class World:
    """What the launcher gives: children, leases, and somebody to tell."""

    def __init__(self, folder: Path, limit: int) -> None:
        file = folder / "run.yaml"
        file.write_text(CONFIG)
        self.specs = {spec.name: spec for spec in plan(load_experiment(file), attempt=1, num_prompts=100)}
        self.folder = folder
        self.now = 1000.0
        self.told: list[str] = []
        self.leases: list[Future[FakeLease]] = []
        self.revoked: list[FakeLease] = []
        self.restarts = ServerRestarts(
            limit,
            start=self.child,
            grant_lease_soon=self.grant,
            revoke=self.revoked.append,
            notice=self.told.append,
        )

    def child(self, spec, lease, *, code=None, was_running=False):  # type: ignore[no-untyped-def]
        log = self.folder / "a.log"
        log.write_text("last words\n")
        return Child(spec, None, log, -1, lease, returncode=code, was_running=was_running)

    def ended(self, name="generation_server/0", *, code=-signal.SIGKILL, was_running=True) -> Child:  # type: ignore[no-untyped-def]
        return self.child(self.specs[name], FakeLease(), code=code, was_running=was_running)

    def grant(self) -> Future[FakeLease]:
        self.leases.append(Future())
        return self.leases[-1]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path, 2)
    monkeypatch.setattr(restarts.time, "monotonic", lambda: made.now)
    return made


def test_only_a_generation_server_that_has_served_is_started_again(world: World) -> None:
    assert world.restarts.concerns(world.ended())
    assert not world.restarts.concerns(world.ended(was_running=False))  # it would fail again
    for name in ("master/0", "model_worker/0", "rollout_worker/0", "gserver_manager/0"):
        assert not world.restarts.concerns(world.ended(name))


def test_it_comes_back_under_its_name_after_the_pause(world: World) -> None:
    dead = world.ended()
    world.restarts.replace(dead)
    assert world.told == [
        "generation_server/0 was killed by signal SIGKILL (by somebody, or for want of memory: see `dmesg`); it is started "
        f"again in 1 s (1 of 2); see {dead.log}"
    ]
    world.now += 10.0
    assert world.restarts.turn() == []  # no lease yet: name resolve may be down
    world.leases[0].set_result(FakeLease())
    (status,) = world.restarts.statuses().values()
    assert (status.worker, status.state, status.restarts) == ("generation_server/0", "starting", 1)
    assert status.waits[0].what.startswith("its next start: it was killed by signal SIGKILL")
    (child,) = world.restarts.turn()
    assert (child.spec, child.restarts) == (dead.spec, 1)
    assert world.restarts.turn() == []
    assert world.restarts.concerns(world.ended(was_running=False))  # one that fails in its second start may try again


def test_too_often_ends_the_run_with_the_cause_and_what_was_before(world: World) -> None:
    for code in (-signal.SIGKILL, 3):
        world.restarts.replace(world.ended(code=code))
    with pytest.raises(LaunchError) as caught:
        world.restarts.replace(world.ended(code=-signal.SIGSEGV))
    text = str(caught.value)
    assert text.startswith("generation_server/0 was killed by signal SIGSEGV")
    assert "started again 2 times within 60 minutes (runtime.max_restarts), after it" in text
    assert text.index("signal SIGKILL") < text.index("exit code 3")


def test_a_lease_that_cannot_be_had_is_asked_for_again_with_a_limit(world: World) -> None:
    world.restarts.replace(world.ended())
    world.leases[0].set_exception(LaunchError("etcd did not answer"))
    world.now += 2.0
    assert world.restarts.turn() == []
    assert len(world.leases) == 2
    world.leases[1].set_exception(LaunchError("etcd did not answer"))
    world.now += 100.0
    with pytest.raises(LaunchError, match="cannot be started again: etcd did not answer"):
        world.restarts.turn()


def test_one_that_is_not_wanted_any_more_does_not_come_back(world: World) -> None:
    world.restarts.replace(world.ended())
    assert world.restarts.names() == ["generation_server/0"]
    world.leases[0].set_result(FakeLease())
    assert world.restarts.cancel("generation_server/0")
    assert not world.restarts.cancel("generation_server/0")
    assert len(world.revoked) == 1  # and its status with it
    world.now += 100.0
    assert world.restarts.turn() == []
