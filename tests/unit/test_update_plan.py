"""Updates of generation servers: waves, retries, and versions that never go back."""

from __future__ import annotations

import pytest

from asyncrl.manager.routing import ServerState, ServerTable
from asyncrl.manager.update_plan import Update, UpdatePlan
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.versions import WeightVersion


def v(version: int, attempt: int = 1) -> WeightVersion:
    return WeightVersion(attempt, version)


class Setup:
    def __init__(self, count: int, *, serving: int | None = 0, **options: float) -> None:
        self.table = ServerTable()
        self.names = [f"generation_server/{index}" for index in range(count)]
        for name in self.names:
            self.table.announce(name, f"http://{name}", 0.0)
        self.plan = UpdatePlan(self.table, **options)
        if serving is not None:
            self.plan.publish(v(serving))
            for update in self.plan.due(0.0):
                assert self.plan.succeeded(update, 0.0)

    def states(self) -> str:
        """One letter per server: s(tale), h(ealthy), u(pdating), d(ead). Not for draining servers, whose letter would be d, too."""
        return "".join(self.table.servers[name].state.value[0] for name in self.names)

    def versions(self) -> list[int | None]:
        servers = [self.table.servers[name] for name in self.names]
        return [None if server.version is None else server.version.version for server in servers]


def test_no_update_is_due_before_a_version_is_published() -> None:
    setup = Setup(2, serving=None)
    assert setup.plan.due(100.0) == []
    assert setup.states() == "ss"


def test_stale_servers_load_all_at_once() -> None:
    setup = Setup(4, serving=None, update_fraction=0.25)
    assert setup.plan.publish(v(0))
    updates = setup.plan.due(0.0)
    assert [update.server for update in updates] == setup.names
    assert updates[0] == Update(setup.names[0], "http://generation_server/0", 0, v(0), 60.0, is_new=True)
    assert setup.plan.due(0.0) == []


def test_a_server_that_leaves_loads_nothing_and_counts_in_no_wave() -> None:
    setup = Setup(4, update_fraction=0.5)
    setup.table.leave(setup.names[0], 0.0)
    setup.table.leave(setup.names[3], 0.0)
    setup.plan.publish(v(1))
    (update,) = setup.plan.due(1.0)  # half of the two that stay
    assert update.server == setup.names[1]
    setup.table.leave(setup.names[1], 1.0)
    assert not setup.plan.succeeded(update, 2.0)
    setup.table.stay(setup.names[3])
    assert [update.server for update in setup.plan.due(2.0)] == [setup.names[2], setup.names[3]]


def test_waves_keep_the_rest_serving() -> None:
    setup = Setup(4, update_fraction=0.5)
    setup.plan.publish(v(1))
    first, second = setup.plan.due(1.0)
    assert setup.states() == "uuhh"
    assert setup.plan.due(1.0) == []
    assert setup.plan.succeeded(second, 2.0)
    (third,) = setup.plan.due(2.0)
    assert setup.states() == "uhuh"
    setup.plan.succeeded(first, 3.0)
    setup.plan.succeeded(third, 3.0)
    (fourth,) = setup.plan.due(3.0)
    setup.plan.succeeded(fourth, 4.0)
    assert setup.versions() == [1, 1, 1, 1]
    assert setup.plan.due(5.0) == []


def test_a_slow_server_leaves_its_wave() -> None:
    setup = Setup(2, update_fraction=0.5, update_timeout_s=20.0)
    setup.plan.publish(v(1))
    (slow,) = setup.plan.due(0.0)
    assert setup.plan.next_change(0.0) == 5.0
    assert setup.plan.due(4.9) == []
    (other,) = setup.plan.due(5.0)
    assert other.server != slow.server
    setup.plan.succeeded(other, 6.0)
    assert setup.plan.due(6.0) == []
    assert setup.plan.succeeded(slow, 20.0)
    assert setup.versions() == [1, 1]


def test_a_large_version_has_a_longer_limit() -> None:
    setup = Setup(2, update_fraction=0.5, update_timeout_s=60.0)
    setup.plan.publish(v(1), num_bytes=10_000_000_000)
    (first,) = setup.plan.due(0.0)
    assert first.limit_s == 60.0 + 100.0  # at SLOW_BYTES_PER_S
    assert setup.plan.next_change(0.0) == 40.0
    setup.plan.succeeded(first, 1.0)
    setup.plan.publish(v(2), num_bytes=0)
    assert setup.plan.due(1.0)[0].limit_s == 60.0


def test_a_failing_server_is_stale_and_retried_after_growing_pauses() -> None:
    setup = Setup(2)
    setup.plan.publish(v(1))
    bad, good = setup.plan.due(0.0)
    setup.plan.succeeded(good, 0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        pauses.append(setup.plan.failed(bad, "refused", now))
        assert setup.states() == "sh"
        assert setup.table.servers[bad.server].reason == "refused"
        now += pauses[-1]
        assert setup.plan.due(now - 0.01) == []
        (bad,) = setup.plan.due(now)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert setup.plan.succeeded(bad, now)
    assert setup.plan.num_failures(bad.server) == 0
    setup.plan.publish(v(2))
    setup.plan.failed(setup.plan.due(now)[0], "refused", now)
    setup.plan.publish(v(3))  # a new version is tried without a pause
    assert len(setup.plan.due(now)) == 1


def test_a_server_that_answers_again_is_retried_at_once_and_keeps_its_backoff() -> None:
    setup = Setup(2, update_fraction=1.0)
    setup.plan.publish(v(1))
    bad = next(update for update in setup.plan.due(0.0) if update.server == setup.names[0])
    now = 0.0
    for _ in range(7):  # the network fails
        now += setup.plan.failed(bad, "no way to it", now)
        (bad,) = setup.plan.due(now)
    assert setup.plan.failed(bad, "no way to it", now) == 30.0

    assert not setup.plan.answers(bad.server, now + 1)  # it answered all the time, so its loads fail for another reason
    assert setup.plan.due(now + 1) == []
    setup.plan.silent(bad.server)
    assert setup.plan.due(now + 2) == []
    assert not setup.plan.answers(setup.names[1], now + 3)
    assert setup.plan.answers(bad.server, now + 3)
    assert not setup.plan.answers(bad.server, now + 3)
    (again,) = setup.plan.due(now + 3)
    assert again.server == bad.server

    assert setup.plan.failed(again, "refused", now + 3) == 30.0  # the network was not the cause
    assert not setup.plan.answers(bad.server, now + 4)
    assert setup.plan.due(now + 4) == []
    (last,) = setup.plan.due(now + 33)
    setup.plan.succeeded(last, now + 34)
    setup.plan.silent(bad.server)
    assert not setup.plan.answers(bad.server, now + 35)  # nothing to retry


def test_versions_never_go_back() -> None:
    setup = Setup(1, serving=5)
    for older in (v(5), v(4), v(0), v(9, attempt=0)):
        assert not setup.plan.publish(older)
    assert setup.plan.due(1.0) == []
    assert setup.plan.publish(v(2, attempt=2))  # a new attempt starts with the version of its checkpoint
    assert not setup.plan.publish(v(9))
    (update,) = setup.plan.due(1.0)
    assert update.version == v(2, attempt=2)
    assert setup.plan.succeeded(update, 1.0)


def test_a_version_of_an_attempt_that_is_over_is_refused() -> None:
    setup = Setup(1, serving=None)
    setup.table.begin_attempt(3)
    assert not setup.plan.publish(v(7, attempt=2))


def test_a_server_loads_the_newest_version_after_the_load_in_progress() -> None:
    setup = Setup(1)
    setup.plan.publish(v(1))
    (update,) = setup.plan.due(0.0)
    setup.plan.publish(v(2))
    setup.plan.publish(v(3))
    assert setup.plan.due(0.0) == []
    setup.plan.succeeded(update, 1.0)
    assert setup.versions() == [1]
    (update,) = setup.plan.due(1.0)
    assert update.version == v(3)


def test_the_load_of_a_server_that_dies_is_void_and_its_successor_loads_at_once() -> None:
    setup = Setup(2, update_fraction=0.5, update_timeout_s=20.0)
    setup.plan.publish(v(1))
    (old,) = setup.plan.due(0.0)
    setup.table.withdraw(old.server)
    assert [update.server for update in setup.plan.due(1.0)] == [setup.names[1]]
    setup.table.announce(old.server, "http://new", 2.0)
    (new,) = setup.plan.due(2.0)
    assert (new.server, new.url) == (old.server, "http://new")
    assert not setup.plan.succeeded(old, 3.0)
    assert setup.states() == "uu"
    setup.plan.failed(old, "its connection broke", 3.0)
    assert setup.states() == "uu"
    assert setup.plan.succeeded(new, 4.0)
    assert setup.table.servers[new.server].update_s == 2.0


def test_dead_and_suspect_servers_get_no_updates() -> None:
    setup = Setup(3)
    setup.table.withdraw(setup.names[0])
    setup.table.silent(setup.names[1], "no answer", 1.0)
    setup.plan.publish(v(1))
    assert [update.server for update in setup.plan.due(1.0)] == [setup.names[2]]


def test_there_are_five_states_besides_draining() -> None:
    assert len({state.value for state in ServerState} - {"draining"}) == 5


def test_admission_waits_briefly_for_servers_that_began_to_load_with_the_first() -> None:
    """A new version admits many groups at once. The first server that has it must not get all of them."""
    setup = Setup(3)
    setup.plan.publish(v(1))
    first, second, third = setup.plan.due(10.0)
    assert setup.plan.succeeded(first, 12.0)
    assert setup.table.served == 1
    assert setup.table.awaits_companions(12.0)
    assert setup.table.companions_wait_s(12.0) == pytest.approx(2.1)  # as long as the first load (2 s), and 0.1 s more
    assert setup.plan.succeeded(second, 13.0)
    assert setup.table.awaits_companions(13.0)
    assert not setup.table.awaits_companions(14.2)  # a slow server does not prolong the wait
    assert setup.plan.succeeded(third, 14.3)
    assert not setup.table.awaits_companions(13.0)  # no server is left to wait for


# ----------------------------------------------------------------------------------------------------- shared devices


def test_in_trainings_turn_servers_sleep_and_none_loads() -> None:
    setup = Setup(3, serving=None, shares_devices=True)
    table, plan = setup.table, setup.plan
    plan.publish(v(0))
    assert plan.due(0.0) == []  # a new manager begins in training's turn
    assert not table.devices_free
    sleepers = plan.sleepers(0.0)
    assert [sleep.server for sleep in sleepers] == setup.names
    assert plan.sleepers(0.0) == []  # all are being asked
    for sleep in sleepers[:2]:
        plan.slept(sleep, 1.0)
    assert not table.devices_free
    assert plan.sleepless(sleepers[2], 1.0) == 0.5
    assert plan.sleepers(1.4) == []
    (again,) = plan.sleepers(1.5)
    plan.slept(again, 2.0)
    assert table.devices_free
    assert plan.due(3.0) == []

    assert plan.take_turn(training=False, version=v(0))
    assert not plan.take_turn(training=False, version=v(0))  # no news
    updates = plan.due(3.0)
    assert not table.devices_free
    for update in updates:
        assert plan.succeeded(update, 4.0)
    assert setup.states() == "hhh"
    assert plan.sleepers(5.0) == []


def test_servers_wake_with_the_version_of_the_new_turn_only() -> None:
    setup = Setup(1, shares_devices=False)
    plan = UpdatePlan(setup.table, shares_devices=True)
    plan.publish(v(0))
    (sleep,) = plan.sleepers(0.0)
    plan.slept(sleep, 0.0)
    plan.take_turn(training=False, version=v(1))
    assert plan.due(1.0) == []  # version 1 is trained, but the manager has not verified it yet
    plan.publish(v(1))
    (update,) = plan.due(1.0)
    assert update.version == v(1)


def test_a_server_that_dies_or_is_replaced_must_release_its_devices_again() -> None:
    setup = Setup(2, shares_devices=False)
    table, plan = setup.table, UpdatePlan(setup.table, shares_devices=True)
    plan.publish(v(0))
    first, second = plan.sleepers(0.0)
    plan.slept(first, 0.0)
    table.announce(second.server, "http://new", 1.0)  # while the old process was being asked
    plan.slept(second, 1.0)
    assert not table.devices_free
    (again,) = plan.sleepers(1.0)
    assert (again.server, again.url) == (second.server, "http://new")
    plan.slept(again, 1.0)
    assert table.devices_free
    table.silent(first.server, "no answer", 100.0)
    assert setup.states() == "ds"
    assert not table.devices_free  # it may be alive, and hold memory
    table.withdraw(first.server)
    assert table.devices_free  # its process has ended


def test_a_server_that_still_loads_is_waited_for() -> None:
    setup = Setup(1, serving=None, shares_devices=True)
    plan = setup.plan
    plan.publish(v(0))
    (sleep,) = plan.sleepers(0.0)
    plan.slept(sleep, 0.0)
    plan.take_turn(training=False, version=v(0))
    (update,) = plan.due(1.0)
    plan.take_turn(training=True, version=v(0, attempt=2))  # the trainer group has begun anew
    assert not setup.table.devices_free
    assert plan.sleepers(1.0) == []
    plan.failed(update, "took too long", 2.0)
    assert not setup.table.devices_free
    assert [sleep.server for sleep in plan.sleepers(10.0)] == setup.names


# ------------------------------------------------------------------------------------------------- versions that are given up


PERMANENT, UNKNOWN, PASSING = ErrorClass.PERMANENT, ErrorClass.UNKNOWN, ErrorClass.PASSING


def fail_until_given_up(setup: Setup, name: str, error_class: ErrorClass, now: float, reason: str = "unfit") -> int:
    """Have every load of this server fail. Returns the number of loads until the server gives the version up."""
    for count in range(1, 100):
        for update in setup.plan.due(now):
            if update.server == name:
                pause = setup.plan.failed(update, reason, now, error_class)
        if pause is None:
            return count
        now += pause
    raise AssertionError("it is never given up")


@pytest.mark.parametrize(("error_class", "count"), [(PERMANENT, 3), (UNKNOWN, 5)])
def test_a_version_that_every_server_refuses_is_given_up_after_a_few_loads(error_class: ErrorClass, count: int) -> None:
    setup = Setup(2, serving=None)
    setup.plan.publish(v(0))
    first, second = setup.names
    setup.table.withdraw(second)
    assert fail_until_given_up(setup, first, error_class, 0.0) == count
    assert setup.plan.due(1e6) == []  # it loads this version no more
    assert setup.plan.next_change(0.0) is None
    given_up = setup.plan.given_up()
    assert given_up is not None
    assert (given_up.version, given_up.reasons) == (v(0), {first: "unfit"})


def test_a_version_is_not_given_up_while_another_server_may_load_it() -> None:
    setup = Setup(2, serving=None)
    setup.plan.publish(v(0))
    first, second = setup.plan.due(0.0)
    for _ in range(2):
        setup.plan.failed(first, "unfit", 0.0, PERMANENT)
    assert setup.plan.failed(first, "unfit", 0.0, PERMANENT) is None
    assert setup.plan.given_up() is None  # the second one still loads
    setup.plan.succeeded(second, 1.0)
    assert setup.states() == "sh"
    assert setup.plan.given_up() is None
    setup.table.withdraw(second.server)  # its successor may serve the version, too
    assert setup.plan.given_up() is None
    setup.table.leave(second.server, 2.0)  # it has left the run for good
    assert setup.plan.given_up() is not None


def test_a_newer_version_is_tried_by_a_server_that_has_given_up_the_last_one() -> None:
    setup = Setup(1, serving=None)
    setup.plan.publish(v(0))
    fail_until_given_up(setup, setup.names[0], PERMANENT, 0.0)
    setup.plan.publish(v(1))
    assert setup.plan.given_up() is None
    (update,) = setup.plan.due(0.0)
    assert setup.plan.succeeded(update, 0.0)


def test_failures_of_an_older_version_do_not_give_up_the_newest_one() -> None:
    setup = Setup(1, serving=None)
    setup.plan.publish(v(0))
    (update,) = setup.plan.due(0.0)
    setup.plan.publish(v(1))  # while the server loads v0
    for _ in range(9):
        assert setup.plan.failed(update, "unfit", 0.0, PERMANENT) is not None
    assert setup.plan.given_up() is None


def test_passing_failures_end_after_the_time_limit() -> None:
    setup = Setup(1, serving=None, patience_s=100.0)
    setup.plan.publish(v(0))
    (update,) = setup.plan.due(0.0)
    assert setup.plan.failed(update, "no room", 0.0, PASSING) is not None
    assert setup.plan.failed(update, "no room", 100.0, PASSING) is not None
    assert setup.plan.failed(update, "no room", 101.0, PASSING) is None
    assert setup.plan.given_up() is not None


def test_a_server_that_is_replaced_loads_a_version_that_its_predecessor_has_given_up() -> None:
    setup = Setup(1, serving=None)
    setup.plan.publish(v(0))
    (name,) = setup.names
    fail_until_given_up(setup, name, PERMANENT, 0.0)
    setup.table.announce(name, "http://successor", 5.0)
    setup.plan.silent(name)
    assert setup.plan.answers(name, 5.0)
    assert setup.plan.given_up() is None
    (update,) = setup.plan.due(5.0)
    assert setup.plan.failed(update, "unfit", 5.0, PERMANENT) is None  # once more, and it is given up again


def test_files_that_were_replaced_are_tried_again() -> None:
    setup = Setup(1, serving=None)
    setup.plan.publish(v(0))
    fail_until_given_up(setup, setup.names[0], PERMANENT, 0.0)
    setup.plan.replaced()
    assert setup.plan.given_up() is None
    assert len(setup.plan.due(0.0)) == 1


def test_a_server_that_has_given_up_a_version_still_releases_shared_devices() -> None:
    setup = Setup(1, serving=None, shares_devices=True)
    setup.plan.take_turn(training=False, version=v(0))
    setup.plan.publish(v(0))
    fail_until_given_up(setup, setup.names[0], PERMANENT, 0.0)
    setup.plan.take_turn(training=True, version=v(1))
    assert [sleep.server for sleep in setup.plan.sleepers(1e6)] == setup.names
