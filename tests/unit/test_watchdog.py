"""Who waits for whom: the chain that a person is shown when no train step comes."""

import pytest

from asyncrl.launch.watchdog import Watchdog, chain, workers_meant
from asyncrl.messages import Wait, WorkerStatus


def status(worker, *waits, state="running"):
    """waits: (what, on, seconds so far)"""
    return WorkerStatus(
        worker=worker,
        pid=1,
        attempt=1,
        state=state,
        time=0.0,
        progress=1,
        waits=[Wait(what=what, on=on, since_s=since_s, limit_s=600.0) for what, on, since_s in waits],
    )


MASTER = status("master/0", ("2 stragglers", "rollout_worker/1, rollout_worker/2", 45.0))
SERVERS = [status("generation_server/0"), status("generation_server/1")]
MANAGER = status("gserver_manager/0")
WORKERS = [status(f"rollout_worker/{index}", ("/allocate_rollout", "gserver manager", 3.0)) for index in (0, 2)]


def test_a_chain_ends_at_who_does_not_move():
    waiting = status(
        "rollout_worker/1",
        ("/allocate_rollout", "gserver manager", 300.0),  # as ever
        ("the next piece", "generation_server/1", 2.0),
        ("the next piece", "generation_server/0", 44.0),
    )
    statuses = [MASTER, waiting, *WORKERS, *SERVERS, MANAGER]
    still = {"generation_server/0": 43.0}
    told = (
        "master/0 waits for 2 stragglers from rollout_worker/1, rollout_worker/2 (45 of 600 s); of them rollout_worker/1, "
        "which waits for the next piece from generation_server/0 (44 of 600 s), which has not moved for 43 s"
    )
    assert chain(statuses, still, {}) == told
    assert chain(statuses, still, {"generation_server/0": "is stopped (SIGSTOP)"}) == f"{told}: it is stopped (SIGSTOP)"
    # the one that does not move is followed to, though another wait is longer
    still = {"generation_server/1": 9.0}
    assert chain(statuses, still, {}).endswith("from generation_server/1 (2 of 600 s), which has not moved for 9 s")
    assert chain(statuses, {"rollout_worker/2": 8.0}, {}).endswith(
        "; of them rollout_worker/2, which has not moved for 8 s"
    )
    without = [entry for entry in statuses if entry.worker != "generation_server/0"]
    assert chain(without, {}, {}).endswith("from generation_server/0 (44 of 600 s), which is not there")


def test_of_many_the_one_that_does_not_wait_is_to_blame():
    gang = [
        status("master/0", ("actor_train", "model workers", 100.0)),
        status("model_worker/0", ("the group", "model_worker/2", 99.0)),
        status("model_worker/1", ("the group", "model_worker/2", 99.0)),
        status("model_worker/2"),
    ]
    told = "master/0 waits for actor_train from model workers (100 of 600 s): model_worker/0, "
    told += "model_worker/1, model_worker/2; of them model_worker/{0}, which {1}"
    at_work = "waits for nobody: it is at work, or hangs"
    assert chain(gang, {}, {}) == told.format(2, at_work)
    frozen = told.format(1, "has not moved for 60 s")
    assert chain(gang, {"model_worker/1": 60.0}, {}) == frozen


def test_who_waits_for_each_other_is_said():
    statuses = [
        status("master/0", ("a batch", "rollout_worker/0", 50.0)),
        status("rollout_worker/0", ("a verdict on a trajectory", "head 0", 49.0)),
        status("model_worker/0", ("a verdict on a trajectory", "master", 48.0)),
    ]
    assert chain(statuses, {}, {}) == (
        "master/0 waits for a batch from rollout_worker/0 (50 of 600 s), which waits for a verdict on a trajectory from head 0 "
        "(49 of 600 s), that is model_worker/0, which waits for a verdict on a trajectory from master (48 of 600 s), that is "
        "master/0: they wait for each other"
    )


def test_a_chain_ends_where_no_process_of_the_run_is_meant():
    statuses = [
        status("master/0", ("a batch", "rollout_worker/0", 50.0)),
        status("rollout_worker/0", ("reward", "verify.py:reward", 49.0)),
    ]
    assert chain(statuses, {}, {}).endswith(", which waits for reward from verify.py:reward (49 of 600 s)")
    assert chain([], {}, {}) == "there is no master: it is gone or about to be started"
    assert chain([status("master/0", state="error")], {}, {}) == "master/0 is in state error"
    own = [
        status("master/0", ("a verdict", "head 0", 9.0)),
        status("model_worker/0", ("the write", "model_worker/0", 8.0)),
    ]
    assert chain(own, {}, {}).endswith(", which waits for the write from model_worker/0 (8 of 600 s)")


@pytest.mark.parametrize(
    ("on", "meant"),
    [
        ("gserver manager", ["gserver_manager/0"]),
        ("asyncrl/sorter/t0/gserver_manager", ["gserver_manager/0"]),
        ("asyncrl/sorter/t0/generation_server/1", ["generation_server/1"]),
        ("asyncrl/sorter/t0/stream/request_reply/3", ["model_worker/3"]),
        ("asyncrl/sorter/t0/stream/master_meta", ["master/0"]),
        ("asyncrl/sorter/t0/process_group/actor/1", ["model_worker/0", "model_worker/1"]),
        ("head 1", ["model_worker/0", "model_worker/1"]),
        ("rollout workers", ["rollout_worker/0"]),
        ("rollout_worker/1, rollout_worker/3", ["rollout_worker/1", "rollout_worker/3"]),
        ("name resolve", []),
        ("W&B", []),
        ("examples/12/reward.py", []),
    ],
)
def test_whom_a_name_means(on, meant):
    names = {name: status(name) for name in ("master/0", "model_worker/0", "model_worker/1", "rollout_worker/0")}
    assert workers_meant(on, names) == meant


def test_it_is_told_once_and_again_at_growing_intervals_until_there_is_a_step():
    watchdog = Watchdog(120.0, now=1000.0)
    statuses = [status("master/0")]

    def told(times):
        return [now for now in times if watchdog.turn(now, statuses, {}, {}) is not None]

    assert told(range(1000, 3000)) == [1120, 1240, 1480, 1960, 2920]
    watchdog.stepped(3000.0)
    assert told(range(3000, 3200)) == [3120]
    assert watchdog.turn(3240.0, statuses, {}, {}) == (
        "no train step for 240 s: master/0 waits for nobody: it is at work, or hangs"
    )
    never = Watchdog(0.0, now=0.0)
    assert never.turn(1e9, statuses, {}, {}) is None
