"""Normalisation over the batch on all ranks, and within groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch

from asyncrl.algorithms.packed import normalise_batch, normalise_groups


def reference(values: list[float], mask: list[bool], eps: float) -> list[float]:
    """The straightforward implementation, with floats."""
    chosen = [value for value, on in zip(values, mask, strict=True) if on]
    mean = sum(chosen) / len(chosen) if chosen else 0.0
    std = (sum((value - mean) ** 2 for value in chosen) / len(chosen)) ** 0.5 if chosen else 0.0
    return [(value - mean) / (std + eps) if on else 0.0 for value, on in zip(values, mask, strict=True)]


def sum_over_threads(n: int) -> list[Callable[[list[float]], np.ndarray]]:
    """Return the all_reduce_sum of n ranks that are threads."""
    barrier, slots = Barrier(n, timeout=60), [np.zeros(0)] * n

    def make(rank: int) -> Callable[[list[float]], np.ndarray]:
        def all_reduce_sum(values: list[float]) -> np.ndarray:
            slots[rank] = np.array(values, np.float64)
            barrier.wait()
            total = np.sum(slots, axis=0)
            barrier.wait()
            return total

        return all_reduce_sum

    return [make(rank) for rank in range(n)]


def test_normalisation_over_a_batch_by_hand() -> None:
    x, mask = torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True])
    assert normalise_batch(x, mask, eps=0.0).tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("cuts", [[], [10], [3, 3], [0, 7], [20, 20]])
def test_normalisation_over_a_batch_does_not_depend_on_the_layout_of_ranks(cuts: list[int]) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(20) * 3 + 7, torch.rand(20) < 0.6
    expected = reference(x.tolist(), mask.tolist(), 1e-5)
    bounds = [0, *cuts, 20]
    sums = sum_over_threads(len(bounds) - 1)
    with ThreadPoolExecutor(len(sums)) as pool:
        parts = pool.map(
            lambda rank: normalise_batch(
                x[bounds[rank] : bounds[rank + 1]], mask[bounds[rank] : bounds[rank + 1]], sums[rank]
            ),
            range(len(sums)),
        )
        assert torch.cat(list(parts)).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_batch_without_values_or_of_equal_values_is_normalised_to_zero(n: int) -> None:
    x = torch.full((5,), 0.1)
    mask = torch.arange(5) < n
    assert normalise_batch(x, mask).tolist() == [0.0] * 5


def test_normalisation_over_a_batch_is_accurate_with_a_large_mean() -> None:
    x = torch.tensor([1e4, 1e4 + 1, 1e4 + 2])
    expected = reference(x.tolist(), [True] * 3, 1e-5)
    assert normalise_batch(x, torch.ones(3, dtype=torch.bool)).tolist() == pytest.approx(expected, rel=1e-6)


def test_normalisation_within_groups_against_the_reference() -> None:
    torch.manual_seed(1)
    sizes = [3, 1, 0, 6, 2]
    x, mask = torch.randn(sum(sizes)), torch.rand(sum(sizes)) < 0.7
    expected, start = [], 0
    for size in sizes:
        expected += reference(x[start : start + size].tolist(), mask[start : start + size].tolist(), 1e-6)
        start += size
    assert normalise_groups(x, mask, sizes).tolist() == pytest.approx(expected, abs=1e-5)


def test_groups_of_equal_values_are_normalised_to_zero() -> None:
    """0.1 is not exact in float32. A mean rounded to float32 would leave a remainder that eps=1e-6 does not hide."""
    x = torch.full((8,), 0.1)
    assert normalise_groups(x, torch.ones(8, dtype=torch.bool), [7, 1]).abs().max() < 1e-8


def test_no_groups_are_normalised_to_an_empty_tensor() -> None:
    assert normalise_groups(torch.zeros(0), torch.zeros(0, dtype=torch.bool), []).tolist() == []
