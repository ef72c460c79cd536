"""Experts that ranks share out compute what the layer's own code does, in value and gradient. Threads are the ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.split_experts import FAMILIES, Outcome, assert_whole, layer_of, own_outcome

LIMIT_S = 20.0


@dataclass(frozen=True)
class Group:
    """A process group, from the point of view of the thread that is one of its ranks."""

    rank: int
    barrier: threading.Barrier
    sent: list[list[Tensor]]  # by rank: what it sends to each

    def size(self) -> int:
        return self.barrier.parties


def exchange(
    output: Tensor, rows: Tensor, here: list[int] | None = None, there: list[int] | None = None, *, group: Group
) -> None:
    """As dist.all_to_all_single."""
    group.sent[group.rank] = list(rows.split(there if there is not None else len(rows) // group.size()))
    group.barrier.wait()
    received = [parts[group.rank] for parts in group.sent]
    assert here is None or [len(part) for part in received] == here
    output.copy_(torch.cat(received))
    group.barrier.wait()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_token_goes_to_its_experts_and_comes_back(family: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have other numbers of tokens, and with four ranks one has experts that no token goes to."""
    torch.set_num_threads(1)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    layer = layer_of(family)
    barrier, sent = threading.Barrier(size, timeout=LIMIT_S), [[] for _ in range(size)]

    def run(rank: int) -> Outcome:
        try:
            return own_outcome(layer, rank, Group(rank, barrier, sent))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    assert_whole(found, layer, 1e-5)
