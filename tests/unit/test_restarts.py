"""Pending restarts: the delay before a process starts again, its new lease, and the status shown meanwhile."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from asyncrl.launch.rundir import LaunchError
from asyncrl.launch.supervisor.restarts import Restarts
from tests.support.clock import ManualClock

NAME = "rollout_worker/1"


class FakeLease:
    id = 77


class World:
    """The launcher's side of restarts: grants and revokes leases, and records starts."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.leases: list[Future[FakeLease]] = []
        self.revoked: list[FakeLease] = []
        self.started: list[tuple[str, int]] = []
        self.restarts = Restarts(
            start=lambda name, _lease, count: self.started.append((name, count)),
            grant_lease_soon=self.grant,  # type: ignore[arg-type]
            revoke=self.revoked.append,  # type: ignore[arg-type]
            clock=self.clock,
        )

    def grant(self) -> Future[FakeLease]:
        self.leases.append(Future())
        return self.leases[-1]

    def expect(self) -> None:
        self.restarts.expect(NAME, "was killed by signal SIGKILL", attempt=3, count=2, pause_s=1.0)

    def turn(self, after_s: float) -> list[tuple[str, int]]:
        self.clock.now += after_s
        self.started.clear()
        self.restarts.turn()
        return self.started


@pytest.fixture
def world() -> World:
    return World()


def test_a_process_restarts_under_its_name_after_its_delay_with_a_new_lease(world: World) -> None:
    world.expect()
    assert world.turn(10.0) == []  # no lease yet: name resolve may be down
    assert world.restarts.statuses() == {}
    world.leases[0].set_result(FakeLease())
    (status,) = world.restarts.statuses().values()
    assert (status.worker, status.state, status.restarts, status.attempt) == (NAME, "starting", 2, 3)
    assert status.waits[0].what == "its next start: it was killed by signal SIGKILL"
    assert world.turn(0.1) == [(NAME, 2)]
    assert world.turn(10.0) == []


def test_a_process_does_not_restart_before_its_delay_is_over(world: World) -> None:
    world.expect()
    world.leases[0].set_result(FakeLease())
    assert world.turn(0.9) == []
    assert world.turn(0.2) == [(NAME, 2)]


def test_a_failed_lease_request_is_retried_within_a_limit(world: World) -> None:
    world.expect()
    world.leases[0].set_exception(LaunchError("etcd did not answer"))
    assert world.turn(2.0) == []
    assert len(world.leases) == 2
    world.leases[1].set_exception(LaunchError("etcd did not answer"))
    with pytest.raises(LaunchError, match="cannot be started again: etcd did not answer"):
        world.turn(100.0)


@pytest.mark.parametrize("granted", ["before", "after"])
def test_a_cancelled_restart_does_not_happen_and_its_lease_is_revoked(world: World, granted: str) -> None:
    world.expect()
    assert world.restarts.names() == [NAME]
    if granted == "before":
        world.leases[0].set_result(FakeLease())
    assert world.restarts.cancel(NAME)
    assert not world.restarts.cancel(NAME)
    if granted == "after":
        world.leases[0].set_result(FakeLease())
    assert len(world.revoked) == 1  # revoking it also deletes the status
    assert world.turn(100.0) == []
