"""Rank processes for tests: ordered results, failures with their tracebacks, bounded waits, and a new start after a crash."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_processes import RankError, RankProcesses

counts: dict[str, int] = {}


def summed(rank: int, value: float) -> float:
    tensor = torch.tensor(value + rank)
    dist.all_reduce(tensor)
    return float(tensor)


def count_calls(rank: int) -> int:
    counts["calls"] = counts.get("calls", 0) + 1
    return counts["calls"]


def fail_where(rank: int, failing: list[int], wait: bool) -> float:
    if rank in failing:
        raise LookupError(f"nothing at {rank}")
    return summed(rank, 0.0) if wait else 0.0


def die(rank: int) -> float:
    if rank == 1:
        os._exit(7)
    return summed(rank, 0.0)


def sleep(rank: int) -> None:
    time.sleep(60 if rank == 0 else 0)


def sums_in_groups(rank: int, count: int) -> tuple[list[float], int]:
    """The sums in groups that all ranks make, and the number of threads that poll for gloo."""
    found = []
    for group in [dist.new_group() for _ in range(count)]:
        tensor = torch.tensor(float(rank))
        dist.all_reduce(tensor, group=group)
        found.append(float(tensor))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return found, names.count("gloo_tcp_loop")


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(3) as ranks:
        yield ranks


def test_results_come_in_the_order_of_the_ranks(ranks):
    assert ranks.run(summed, 2.0) == [9.0] * 3
    assert len(ranks.run(count_calls, num_ranks=2)) == 2


def test_groups_share_the_thread_that_polls(ranks):
    assert ranks.run(sums_in_groups, 5) == [([3.0] * 5, 1)] * 3


def test_what_a_call_leaves_is_there_for_the_next(ranks):
    first = ranks.run(count_calls)[0]
    assert ranks.run(count_calls)[0] == first + 1


def test_an_error_of_all_that_are_called_leaves_the_processes_as_they_are(ranks):
    first = ranks.run(count_calls)[0]
    with pytest.raises(RankError, match=r"(?s)failed\nrank [02]: Traceback") as caught:
        ranks.run(fail_where, [0, 2], False, grace_s=60.0)
    told = dict(text.split(": ", 1) for text in str(caught.value).split("\nrank ")[1:])
    for rank in ("0", "2"):  # reported in order of arrival
        assert told[rank].startswith("Traceback")
        assert told[rank].rstrip().endswith(f"LookupError: nothing at {rank}")
    assert isinstance(caught.value.__cause__, LookupError)
    assert set(caught.value.errors) == {0, 2}
    assert ranks.run(count_calls)[0] == first + 1


@pytest.mark.parametrize(
    ("function", "arguments", "limit_s", "told"),
    [
        (
            fail_where,
            ([1], True),
            60,
            r"rank 1: Traceback(?s:.*)nothing at 1(?s:.*)no answer from ranks \[0, 2\](?s:.*) in summed",
        ),
        (die, (), 60, r"failed\nrank 1: died with exit code 7\n"),
        (sleep, (), 10, r"no answer from ranks \[0\] within 10 s(?s:.*) in sleep"),
    ],
    ids=["fails", "dies", "is late"],
)
def test_a_rank_that_the_others_wait_for_in_vain_ends_the_call(ranks, function, arguments, limit_s, told):
    ranks.run(summed, 0.0)  # starts the processes
    start = time.monotonic()
    with pytest.raises(RankError, match=told):
        ranks.run(function, *arguments, limit_s=limit_s)
    assert time.monotonic() - start < 40
    assert ranks.run(summed, 0.0) == [3.0] * 3
