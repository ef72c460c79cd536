"""Data managers of four real workers, over gloo: plans are executed exactly, byte for byte."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch.distributed as dist

from asyncrl.data.sequence import DTYPES, SequenceSample
from asyncrl.dataflow.redistribution import plan_redistribution, transfers
from asyncrl.model.data_manager import DataManager
from asyncrl.model.store import DataStore
from asyncrl.protocol.calls import RedistribStep
from tests.support.rank_processes import RankError, RankProcesses

NUM_WORKERS = 4
LIMIT_S = 60.0
SHORT_S = 1.0


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(NUM_WORKERS, limit_s=100.0) as ranks:
        yield ranks


def make_group(ticket: str) -> SequenceSample:
    """Make a group with keys of every dtype and varied values and lengths. The same ticket gives the same group."""
    rng = np.random.default_rng(list(ticket.encode()))
    lengths = [int(n) for n in rng.integers(0, 9, rng.integers(1, 4))]
    group = {
        f"key_{name}": [rng.integers(0, 256, n * np.dtype(name).itemsize).astype(np.uint8).view(name) for n in lengths]
        for name in DTYPES
        if name != "bool"
    }
    group["key_bool"] = [rng.random(n) < 0.5 for n in lengths]
    group["packed_input_ids"] = [rng.integers(0, 2**62, n) for n in lengths]
    group["rewards"] = rng.normal(size=len(lengths)).astype(np.float32)
    group["birth_time"] = float(rng.random())
    group["nothing"] = [np.zeros(0, np.int8) for _ in lengths]
    return SequenceSample.from_groups([ticket], [group])


KEYS = make_group("any").keys


def same_bytes(a: SequenceSample, b: SequenceSample) -> bool:
    return (a.ids, a.seqlens) == (b.ids, b.seqlens) and all(
        a.data[key].dtype == b.data[key].dtype and a.data[key].tobytes() == b.data[key].tobytes() for key in a.keys
    )


def make_manager(rank: int, limit_s: float = LIMIT_S, capacity: int = 64) -> tuple[DataStore, DataManager]:
    store = DataStore(capacity)
    return store, DataManager(store, worker=rank, limit_s=limit_s)


def random_holders(seed: int) -> tuple[dict[str, dict[str, list[int]]], dict[int, list[str]]]:
    """Groups with their keys at random workers, and random ids that each worker needs."""
    rng = Random(seed)
    ids = [f"s{seed}-{i}" for i in range(rng.randint(1, 8))]
    workers = list(range(NUM_WORKERS))
    holders = {i: dict.fromkeys(KEYS, sorted(rng.sample(workers, rng.randint(1, 3)))) for i in ids}
    for i in ids:
        holders[i]["rewards"] = [rng.choice(workers)]
    needed = {worker: rng.sample(ids, rng.randint(0, len(ids))) for worker in rng.sample(workers, rng.randint(1, 4))}
    replica = rng.sample(workers, 2)
    return holders, needed | {worker: needed.get(replica[0], ids) for worker in replica}


def move_and_compare(rank: int, seeds: list[int]) -> list[int]:
    """Execute the plan and compare with the original groups. Return the bytes sent for each seed."""
    sent = []
    for seed in seeds:
        store, manager = make_manager(rank)
        holders, needed = random_holders(seed)
        for ticket, held in holders.items():
            keys = [key for key in KEYS if rank in held[key]]
            if keys:
                store.add_copies(make_group(ticket).select_keys(keys))
        sent.append(manager.execute(plan_redistribution(needed, KEYS, holders)))
        for ticket in needed.get(rank, []):
            assert same_bytes(store.select([ticket], KEYS), make_group(ticket))
        store.discard(holders)
        assert len(store) == 0
        manager.close()
    return sent


@pytest.mark.full
def test_what_is_needed_arrives_as_it_was(ranks):
    seeds = list(range(25))
    sent = np.array(ranks.run(move_and_compare, seeds)).sum(0)
    for seed, num_bytes in zip(seeds, sent, strict=True):
        holders, needed = random_holders(seed)
        least = sum(
            make_group(ticket).select_keys([key]).num_bytes
            for worker, ids in needed.items()
            for ticket in ids
            for key in KEYS
            if worker not in holders[ticket][key]
        )
        assert num_bytes >= least
        assert (num_bytes == 0) == (least == 0)


STEP = RedistribStep("scatter", 0, [1], [["t"]], list(KEYS))


def send_to_one_who_is_busy(rank: int) -> None:
    """Worker 1 is busy when the data arrives, until worker 0 has gone on. A sender that waited for the receiver would deadlock."""
    store, manager = make_manager(rank)
    if rank == 0:
        store.put(make_group("t"))
        manager.execute([STEP])
    dist.barrier()
    if rank == 1:
        manager.execute([STEP])
        assert same_bytes(store.whole("t"), make_group("t"))


def test_a_sender_waits_for_nobody(ranks):
    ranks.run(send_to_one_who_is_busy)


def relay(rank: int) -> bool:
    """A worker forwards data that an earlier step of the same call has brought to it."""
    store, manager = make_manager(rank)
    if rank == 0:
        store.put(make_group("t"))
    steps = [RedistribStep("scatter", k, [k + 1], [["t"]], list(KEYS)) for k in range(NUM_WORKERS - 1)]
    manager.execute(steps)
    return same_bytes(store.whole("t"), make_group("t"))


def test_steps_build_on_one_another(ranks):
    assert ranks.run(relay) == [True] * NUM_WORKERS


def nobody_sends(rank: int) -> None:
    _, manager = make_manager(rank, limit_s=SHORT_S)
    if rank == 1:
        manager.execute([STEP])


def what_is_not_here(rank: int) -> None:
    _, manager = make_manager(rank)
    if rank == 0:
        manager.execute([STEP])


def others_than_planned(rank: int) -> None:
    store, manager = make_manager(rank)
    if rank == 0:
        store.put(make_group("other"))
        manager.execute([RedistribStep("scatter", 0, [1], [["other"]], list(KEYS))])
    elif rank == 1:
        manager.execute([STEP])


def too_many_copies(rank: int) -> None:
    store, manager = make_manager(rank, capacity=1)
    if rank == 1:
        store.add_copies(make_group("earlier"))
        manager.execute([STEP])
    if rank == 0:
        store.put(make_group("t"))
        manager.execute([STEP])


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            others_than_planned,
            r"rank 1: (.|\n)*expected 1 groups' .* from model_worker/0, \['t'\]; received \['other'\]",
        ),
        (too_many_copies, r"rank 1: (.|\n)*the limit is 1"),
        (what_is_not_here, r"rank 0: (.|\n)*such as \['t'\]; master and workers disagree"),
        (nobody_sends, r"rank 1: (.|\n)*receiving 1 groups' .* from model_worker/0"),  # last: it closes the connection
    ],
)
def test_what_goes_wrong_is_told_in_time(ranks, what, told):
    with pytest.raises(RankError, match=told):
        ranks.run(what)


def test_the_plans_of_these_tests_have_all_kinds_of_steps():
    plans = [plan_redistribution(needed, KEYS, holders) for holders, needed in map(random_holders, range(25))]
    assert {step.kind for plan in plans for step in plan} == {"bcast", "scatter", "gather"}
    assert all(transfer.ids for plan in plans for step in plan for transfer in transfers(step))
