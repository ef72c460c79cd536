"""The standstill report, made when no train step ends: the waits of each process, with their sources and durations."""

from asyncrl.launch.standstill import Watchdog, late_ranks, wait_texts
from asyncrl.protocol.status import Wait, WorkerStatus


def wait(what, on, since_s):
    return Wait(what=what, on=on, since_s=since_s, limit_s=600.0)


def test_a_wait_without_a_limit_is_shown_without_one():
    assert wait_texts([Wait(what="room", on="rollouts", since_s=329.0, limit_s=None)]) == ["room from rollouts (329 s)"]


def status(worker, *waits, state="running"):
    return WorkerStatus(worker=worker, pid=1, attempt=1, state=state, time=0.0, progress=1, waits=list(waits))


def test_the_report_lists_each_process_with_its_waits_and_missing_heartbeats():
    statuses = [
        status("generation_server/0", wait("a request", "rollout workers", 43.0)),
        status("generation_server/1", state="starting"),
        status("rollout_worker/1", *(wait("the next piece", "generation_server/0", 40.0 + i) for i in range(12))),
        status("master/0", wait("/evaluate", "gserver manager", 0.3), wait("2 stragglers", "rollout_worker/1", 45.0)),
        status("rollout_worker/0"),
    ]
    still_s = {"generation_server/0": 4.2, "rollout_worker/0": 4.0, "generation_server/1": 43.2}
    told = Watchdog(120.0, now=0.0).turn(121.0, statuses, still_s, {"generation_server/0"})
    assert told is not None
    assert told.splitlines() == [
        "no train step for 121 s",
        "  master/0: waits for 2 stragglers from rollout_worker/1 (45 of 600 s), waits for /evaluate from gserver manager "
        "(0 of 600 s)",
        "  generation_server/0: has sent no heartbeat for 4 s, is stopped (SIGSTOP, or a debugger), waits for a request from "
        "rollout workers (43 of 600 s)",
        "  generation_server/1: state starting, has sent no heartbeat for 43 s, waits for nothing",
        "  rollout_worker/1: waits for the next piece from generation_server/0 (51 of 600 s) x12",
        "  rollout_worker/0: waits for nothing",
    ]


def test_only_the_longest_of_many_waits_of_a_process_are_listed():
    waits = [wait("a reward", f"judge {i}", float(i)) for i in range(10)]
    assert wait_texts(waits)[:2] == ["a reward from judge 9 (9 of 600 s)", "a reward from judge 8 (8 of 600 s)"]
    told = Watchdog(1.0, now=0.0).turn(2.0, [status("rollout_worker/0", *waits)], {}, set())
    assert told is not None
    assert told.endswith(", waits for a reward from judge 6 (6 of 600 s), and 6 more waits")


def test_the_report_is_repeated_at_growing_intervals_until_a_step_ends():
    watchdog = Watchdog(120.0, now=1000.0)
    statuses = [status("master/0")]

    def told(times):
        return [now for now in times if watchdog.turn(now, statuses, {}, set()) is not None]

    assert told(range(1000, 3000)) == [1120, 1240, 1480, 1960, 2920]
    watchdog.stepped(3000.0)
    assert told(range(3000, 3200)) == [3120]
    assert watchdog.turn(3240.0, statuses, {}, set()) == "no train step for 240 s\n  master/0: waits for nothing"
    never = Watchdog(0.0, now=0.0)
    assert never.turn(1e9, statuses, {}, set()) is None


def rank(index, **collectives):
    """A model worker's status. collectives: by group, with _ for spaces."""
    entered = {group.replace("_", " "): number for group, number in collectives.items()}
    return WorkerStatus(
        worker=f"model_worker/{index}", pid=1, attempt=1, state="running", time=0.0, progress=1, collectives=entered
    )


def test_the_report_names_the_rank_that_has_not_entered_a_collective():
    statuses = [rank(0, actor_data_group_0=8), rank(1, actor_data_group_0=7), rank(2, actor_data_group_0=8)]
    told = Watchdog(1.0, now=0.0).turn(2.0, statuses, {}, set())
    assert told is not None
    assert told.splitlines()[1:] == [
        "  model_worker/0: waits for nothing",
        "  model_worker/1: has not entered collective 8 of actor data group 0, in which model_worker/0 and 1 others wait, "
        "waits for nothing",
        "  model_worker/2: waits for nothing",
    ]
    assert late_ranks([rank(0, actor_data_group_0=8), rank(1, actor_data_group_0=8), status("master/0")]) == {}


def test_a_rank_that_is_late_because_it_waits_for_another_is_not_named():
    """Ranks 0 and 1, and 2 and 3, are tensor groups. Rank 3 hangs; rank 2 waits for it, and rank 0 waits for rank 2."""
    statuses = [
        rank(0, actor_tensor_group_0=5, actor_data_group_0=3),
        rank(1, actor_tensor_group_0=5, actor_data_group_1=3),
        rank(2, actor_tensor_group_2=5, actor_data_group_0=2),
        rank(3, actor_tensor_group_2=4, actor_data_group_1=2),
    ]
    assert late_ranks(statuses).keys() == {"model_worker/3"}
    # Each waits for the other: both are named
    crossed = [rank(0, one=2, other=1), rank(1, one=1, other=2)]
    assert late_ranks(crossed).keys() == {"model_worker/0", "model_worker/1"}
