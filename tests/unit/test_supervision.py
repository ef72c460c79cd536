"""Restart policy: a process restarts alone, with its group, once with everything, or never. Detection of frozen processes."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.hosts.remote_pool import RemoteChild
from asyncrl.launch.program import plan
from asyncrl.launch.supervisor.children import Child
from asyncrl.launch.supervisor.policy import (
    CALM_S,
    EVERYTHING,
    TRAINER_GROUP,
    WINDOW_S,
    Decision,
    End,
    EndRun,
    FreezeWatch,
    RestartBudget,
    StartAgain,
    Supervision,
    Trouble,
)
from asyncrl.protocol.hosts import ObservedProcess
from asyncrl.protocol.status import WorkerStatus

NAMES = [
    "master/0",
    "model_worker/0",
    "model_worker/1",
    "generation_server/0",
    "gserver_manager/0",
    "rollout_worker/0",
    "rollout_worker/1",
]
UNITS = {TRAINER_GROUP if name.startswith(("master", "model_worker")) else name for name in NAMES}


def end(name: str, number: int = 0, *, could_run: bool = True, fatal: bool = False) -> End:
    return End(name, "was killed", f"{name} was killed, cause {number}", could_run, fatal)


def decide(supervision: Supervision, ended: End, now: float = 0.0) -> Decision:
    return supervision.decide(ended, 1000.0 + now, now)


def test_delays_grow_and_restarts_within_an_hour_are_bounded() -> None:
    budget = RestartBudget(3)
    assert [budget.ended("s", f"end {i}", 10.0 * i) for i in range(4)] == [0.0, 1.0, 2.0, None]
    assert budget.recent("s", 40.0) == ["end 0", "end 1", "end 2", "end 3"]
    assert budget.count("s") == 3
    assert budget.ended("other", "killed", 40.0) == 0.0
    assert budget.ended("s", "much later", WINDOW_S + 50.0) == 0.0
    assert budget.count("s") == 4
    assert RestartBudget(0).ended("s", "killed", 0.0) is None
    long = RestartBudget(100)
    assert max(long.ended("s", "", 0.0) or 0.0 for _ in range(50)) == 30.0


def test_a_process_that_has_run_for_a_while_restarts_at_once() -> None:
    """Delays are for processes that fail again soon after each start, not for occasional ends."""
    budget = RestartBudget(100)
    assert {budget.ended("s", "killed", number * (CALM_S + 1.0)) for number in range(20)} == {0.0}
    now, pauses = 10_000.0, []
    for _ in range(7):  # after each start it runs for nearly CALM_S
        pauses.append(budget.ended("t", "killed", now) or 0.0)
        now += pauses[-1] + CALM_S - 1.0
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert budget.ended("t", "killed", now + 2.0) == 0.0


@pytest.mark.parametrize(
    ("mode", "name", "unit"),
    [
        ("async", "rollout_worker/1", "rollout_worker/1"),
        ("async", "generation_server/0", "generation_server/0"),
        ("async", "gserver_manager/0", "gserver_manager/0"),
        ("async", "master/0", TRAINER_GROUP),
        ("async", "model_worker/7", TRAINER_GROUP),
        ("sync", "model_worker/0", TRAINER_GROUP),
        ("rollout_only", "rollout_worker/0", "rollout_worker/0"),
        ("rollout_only", "master/0", ""),
        ("rollout_only", "recorder/0", ""),
        ("train_only", "model_worker/0", ""),
        ("train_only", "replayer/0", ""),
    ],
)
def test_the_unit_that_restarts_with_a_process(mode: str, name: str, unit: str) -> None:
    supervision = Supervision(3, mode=mode)
    assert supervision.unit_of(name) == unit
    decision = decide(supervision, end(name))
    assert decision == (StartAgain(unit, 0.0) if unit else EndRun(f"{name} was killed, cause 0"))


def test_each_detached_group_restarts_alone_and_completely() -> None:
    detached = {("model_worker/1",): False, ("model_worker/2", "model_worker/3"): False}
    supervision = Supervision(2, groups=detached)
    assert decide(supervision, end("model_worker/1")) == StartAgain("model_worker/1", 0.0, 1)
    assert decide(supervision, end("model_worker/3")) == StartAgain("model_worker/2, model_worker/3", 0.0, 1)
    assert decide(supervision, end("model_worker/2")) == StartAgain("model_worker/2, model_worker/3", 1.0, 2)
    assert (supervision.count("model_worker/2"), supervision.count("model_worker/3")) == (2, 2)
    assert supervision.members("model_worker/2") == ("model_worker/2", "model_worker/3")
    assert supervision.members("rollout_worker/0") == ("rollout_worker/0",)
    assert decide(supervision, end("model_worker/0")) == StartAgain(TRAINER_GROUP, 0.0, 1)  # has a budget of its own
    assert decide(supervision, end("model_worker/3")) == StartAgain(EVERYTHING, 2.0)
    by_hand = Supervision(2, groups=detached, by_hand=["model_worker/3"])
    assert isinstance(decide(by_hand, end("model_worker/2")), EndRun)
    assert decide(by_hand, end("model_worker/1")) == StartAgain("model_worker/1", 0.0, 1)


def test_the_trainer_group_shares_one_budget_and_other_processes_have_their_own() -> None:
    supervision = Supervision(2)
    assert decide(supervision, end("master/0")) == StartAgain(TRAINER_GROUP, 0.0, 1)
    assert decide(supervision, end("rollout_worker/0")) == StartAgain("rollout_worker/0", 0.0, 1)
    assert decide(supervision, end("model_worker/1")) == StartAgain(TRAINER_GROUP, 1.0, 2)
    assert (supervision.count("master/0"), supervision.count("rollout_worker/0")) == (2, 1)
    assert decide(supervision, end("model_worker/0")) == StartAgain(EVERYTHING, 2.0)
    assert (supervision.count("master/0"), supervision.count("rollout_worker/1")) == (3, 1)


def test_after_too_many_ends_everything_restarts_once_and_then_the_run_fails_with_the_first_cause() -> None:
    supervision = Supervision(1)
    decisions = [decide(supervision, end("rollout_worker/0", number), 10.0 * number) for number in range(3)]
    *again, last = decisions
    assert [decision.unit for decision in again if isinstance(decision, StartAgain)] == ["rollout_worker/0", EVERYTHING]
    assert isinstance(last, EndRun)
    assert last.cause == "rollout_worker/0 was killed, cause 0"
    assert [line.partition(" ")[2] for line in last.tried] == [
        "rollout_worker/0 was killed: rollout_worker/0 started again (1 of 1)",
        "rollout_worker/0 was killed: everything started again",
        "rollout_worker/0 was killed",
    ]


def test_an_end_much_later_has_a_first_cause_of_its_own() -> None:
    supervision = Supervision(1)
    for number in range(2):
        decide(supervision, end("rollout_worker/0", number))
    later = 2 * WINDOW_S
    assert decide(supervision, end("master/0", 2), later) == StartAgain(TRAINER_GROUP, 0.0, 1)
    last = decide(supervision, end("master/0", 3), later + 1.0)
    assert isinstance(last, EndRun)  # everything restarts only once per launch
    assert last.cause == "master/0 was killed, cause 2"
    assert len(last.tried) == 2


def test_an_end_that_would_recur_fails_the_run() -> None:
    supervision = Supervision(3)
    assert isinstance(decide(supervision, end("rollout_worker/0", could_run=False)), EndRun)
    supervision.runs("rollout_worker/1")
    assert isinstance(decide(supervision, end("rollout_worker/1", could_run=False)), StartAgain)  # it has run before
    assert isinstance(decide(supervision, end("rollout_worker/1", fatal=True)), EndRun)
    assert isinstance(decide(Supervision(0), end("rollout_worker/0")), EndRun)


def test_a_failure_that_a_restart_repeats_ends_the_run_the_third_time() -> None:
    def failed(mfc: str, name: str = "model_worker/1") -> End:
        return End(name, "failed", f"cause {mfc}", could_run=True, recurs_as=f"out of GPU memory in {mfc}")

    def decisions(supervision: Supervision, *ends: End, apart_s: float = 1800.0) -> list[Decision]:
        return [decide(supervision, one, apart_s * number) for number, one in enumerate(ends)]

    train, inf = failed("actor_train"), failed("actor_inf")
    *before, last = decisions(Supervision(3), train, inf, train, end("model_worker/0"), train)
    assert [type(one) for one in before] == [StartAgain] * 4
    assert isinstance(last, EndRun)
    assert last.cause == (
        "out of GPU memory in actor_train, 3 times within 6 hours: a restart does not help\ncause actor_train"
    )
    assert len(last.tried) == 2  # within the last hour
    rare = decisions(Supervision(3), *[train] * 9, apart_s=4 * 3600.0)
    assert [type(one) for one in rare] == [StartAgain] * 9
    # Without a group with on_missing=continue the run goes on
    group = Supervision(3, groups={("model_worker/1",): True})
    assert [type(one) for one in decisions(group, *[train] * 5)] == [StartAgain] * 5


def test_a_process_killed_during_its_start_restarts_and_one_that_fails_by_itself_does_not() -> None:
    def killed(number: int) -> End:
        return End("rollout_worker/0", "was killed", f"cause {number}", could_run=False, struck=True)

    supervision = Supervision(2)
    assert decide(supervision, killed(0)) == StartAgain("rollout_worker/0", 0.0, 1)
    assert isinstance(decide(supervision, end("rollout_worker/0", could_run=False)), EndRun)
    decisions = [decide(supervision, killed(number)) for number in range(1, 4)]
    assert isinstance(decisions[0], StartAgain)
    assert decisions[1] == StartAgain(EVERYTHING, 2.0)
    assert isinstance(decisions[2], EndRun)  # these restarts are bounded, too
    assert decisions[2].cause == "cause 0"
    assert isinstance(decide(Supervision(0), killed(0)), EndRun)


def test_failed_starts_do_not_fail_the_run_if_a_process_of_their_unit_was_killed() -> None:
    supervision = Supervision(3)
    struck, peer = Trouble("model_worker/0", struck=True), Trouble("model_worker/1")
    assert supervision.outlives_all([])
    assert supervision.outlives_all([struck, peer, Trouble("master/0")])
    assert not supervision.outlives_all([peer])
    # a process of another unit fails for another reason
    assert not supervision.outlives_all([struck, Trouble("rollout_worker/0")])
    assert not supervision.outlives_all([struck, Trouble("master/0", fatal=True)])


def test_only_a_process_killed_from_outside_counts_as_struck(tmp_path: Path) -> None:
    error = WorkerStatus(worker="w", pid=1, attempt=1, state="error", time=0.0, progress=0, error="ValueError")

    def child(**fields: Any) -> Child:
        return Child(spec=cast(Any, None), process=None, log=tmp_path / "log", pipe=-1, lease=cast(Any, None), **fields)

    assert child(returncode=-signal.SIGKILL).was_struck
    assert not child(returncode=-signal.SIGKILL, froze_s=31.0).was_struck  # killed by the launcher
    assert not child(returncode=-signal.SIGKILL, status=error).was_struck  # it had reported an error before
    assert not child(returncode=-signal.SIGSEGV).was_struck
    assert not child(returncode=1).was_struck
    assert not child().was_struck


def test_a_unit_with_a_process_started_by_hand_does_not_restart() -> None:
    supervision = Supervision(1, by_hand=["model_worker/1"])
    assert isinstance(decide(supervision, end("master/0")), EndRun)
    assert isinstance(decide(supervision, end("rollout_worker/0")), StartAgain)
    assert isinstance(decide(supervision, end("rollout_worker/0")), EndRun)  # a restart of everything is not possible


Step = tuple[str, bool, float]
STEPS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.booleans(), st.floats(0.0, WINDOW_S / 100)), min_size=1, max_size=100
)


@given(limit=st.integers(0, 4), steps=STEPS)
def test_restarts_are_bounded_and_the_first_cause_is_reported(limit: int, steps: list[Step]) -> None:
    """For any sequence of ends within an hour: the number of restarts is bounded, and the run fails with the oldest cause of the
    unit, or with the cause of the restart of everything."""
    supervision, now = Supervision(limit), 0.0
    first: dict[str, str] = {}
    of_everything = ""
    counts: dict[str, int] = {}
    ran: set[str] = set()
    rows: dict[str, tuple[int, float]] = {}  # per unit: times in a row that it ended early; its latest start
    for number, (name, could_run, after_s) in enumerate(steps):
        now += after_s
        ended = end(name, number, could_run=could_run)
        unit = supervision.unit_of(name)
        if could_run:
            ran.add(name)
        decision = decide(supervision, ended, now)
        if now > WINDOW_S:
            return
        if limit == 0 or name not in ran:
            assert isinstance(decision, EndRun)
            assert decision.cause == ended.cause
            return
        first.setdefault(unit, ended.cause)
        if isinstance(decision, EndRun):
            assert counts[unit] == limit
            assert of_everything
            assert decision.cause == of_everything
            return
        if decision.unit == EVERYTHING:
            assert decision.pause_s == 2.0 ** (limit - 1)
        else:
            row, started = rows.get(unit, (0, -math.inf))
            row = row + 1 if now - started < CALM_S else 0
            assert decision.pause_s == (min(30.0, 2.0 ** (row - 1)) if row else 0.0)
            rows[unit] = row, now + decision.pause_s
        counts[decision.unit] = counts.get(decision.unit, 0) + 1
        assert counts[decision.unit] <= (1 if decision.unit == EVERYTHING else limit)
        if decision.unit == EVERYTHING:
            of_everything = first[unit]
    assert sum(counts.values()) <= limit * len(UNITS) + 1


def test_a_process_without_heartbeats_is_frozen() -> None:
    watch = FreezeWatch(10.0, 100.0)
    assert watch.turn(0.0, {1: 5, 2: 7}) == {}
    for second in range(1, 11):
        assert watch.turn(float(second), {1: 5, 2: 7 + second}) == {}
    assert watch.turn(11.0, {1: 5, 2: 18}) == {1: 11.0}
    assert watch.turn(12.0, {1: 6, 2: 19}) == {}  # a heartbeat came after all


def test_a_process_that_computes_is_busy_and_not_frozen() -> None:
    """A busy process has 20 times the limit. A process that uses as little CPU as background threads do counts as frozen."""
    watch = FreezeWatch(10.0, 100.0)
    for second in range(11):
        assert (
            watch.turn(float(second), {1: 5, 2: 5, 3: 5}, {1: float(second), 2: 0.002 * second, 3: 0.02 * second}) == {}
        )
        assert watch.busy == {}
    assert watch.turn(11.0, {1: 5, 2: 5, 3: 5}, {1: 11.0, 2: 0.022, 3: 0.22}) == {2: 11.0}
    assert watch.busy == {1: 11.0, 3: 11.0}
    for second in range(12, 201):
        assert watch.turn(float(second), {1: 5}, {1: float(second)}) == {}
    assert watch.turn(201.0, {1: 5}, {1: 201.0}) == {1: 201.0}
    assert watch.turn(202.0, {1: 6}, {1: 202.0}) == {}
    assert watch.busy == {}


def test_a_busy_process_that_is_stopped_is_frozen_one_limit_later() -> None:
    watch = FreezeWatch(10.0, 100.0)
    for second in range(16):
        assert watch.turn(float(second), {1: 5}, {1: float(second)}) == {}
    for second in range(16, 26):
        assert watch.turn(float(second), {1: 5}, {1: 15.0}) == {}
    assert watch.turn(26.0, {1: 5}, {1: 15.0}) == {1: 26.0}


def test_a_suspension_of_the_launcher_makes_no_process_frozen() -> None:
    watch = FreezeWatch(10.0, 100.0)
    watch.turn(0.0, {1: 5})
    assert watch.turn(1000.0, {1: 5}) == {}
    for second in range(1, 10):
        assert watch.turn(1000.0 + second, {1: 5}) == {}
    assert list(watch.turn(1010.0, {1: 5})) == [1]


def test_before_its_first_heartbeat_a_process_has_the_limit_of_a_start() -> None:
    watch = FreezeWatch(10.0, 20.0)
    for second in range(21):
        assert watch.turn(float(second), {1: None}) == {}
    assert list(watch.turn(21.0, {1: None})) == [1]
    assert watch.turn(22.0, {2: None}) == {}
    assert watch.turn(23.0, {2: 0}) == {}
    off = FreezeWatch(0.0, 20.0)
    assert not any(off.turn(float(second), {1: None, 2: 5}) for second in range(100))


def test_a_process_that_was_lost_with_its_host_can_restart(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        f"experiment: e\nfileroot: {tmp_path}\nmodel_path: {tmp_path}\nprompts: {{path: {tmp_path}/p}}\n"
        'rollout: {tasks: {default: {reward: "r:r"}}}\n'
    )
    spec = next(spec for spec in plan(load_experiment(file), attempt=1, num_prompts=9) if spec.name == "model_worker/0")
    child = RemoteChild(
        spec, cast(Any, None), run_dir=tmp_path, incarnation=1, host="h", host_daemon="a", order=cast(Any, None)
    )
    assert not child.could_run
    child.apply(ObservedProcess(name=child.name, incarnation=1, pid=5, cpu_s=7.0))
    assert child.cpu_s() == 7.0  # as reported by its host daemon: the launcher cannot measure it
    child.lose("was lost with its host n2")
    supervision = Supervision(3)
    supervision.runs("master/0")
    end = End(child.name, "was lost", "cause", child.could_run, child.is_fatal)
    assert isinstance(supervision.decide(end, 0.0, 0.0), StartAgain)
