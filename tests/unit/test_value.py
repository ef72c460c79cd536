"""The critic's loss, and the normalisation of its values."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.value import ValueLoss, ValueNorm, value_loss

torch.set_num_threads(1)

ON = torch.ones(4, dtype=torch.bool)


def test_value_loss_by_hand() -> None:
    """V_old 0, eps 0.2, return 1. The values lie within the range; above it (clipped to 0.2, no gradient); below it, away from the
    return; and beyond the return."""
    values = torch.tensor([0.1, 0.5, -0.5, 2.0], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(4), torch.ones(4), ON, 0.2)
    assert loss.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 2.25 / 2, 1.0 / 2])
    assert clipped.tolist() == [False, True, False, False]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5, 1.0])
    loss, clipped = value_loss(values, torch.zeros(4), torch.ones(4), ON, 0.0)
    assert loss.tolist() == pytest.approx([0.81 / 2, 0.25 / 2, 2.25 / 2, 1.0 / 2])
    assert not clipped.any()


def test_value_loss_is_symmetric() -> None:
    values = torch.tensor([0.1, 0.5, -0.5, 2.0])
    loss, clipped = value_loss(values, torch.zeros(4), torch.ones(4), ON, 0.2)
    mirrored, clipped_too = value_loss(-values, torch.zeros(4), -torch.ones(4), ON, 0.2)
    torch.testing.assert_close(mirrored, loss)
    assert clipped_too.tolist() == clipped.tolist()


def batch(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    keys = ("values", "returns")
    data = {key: torch.randn(12, generator=random) for key in keys}
    return data["values"] + 0.3 * torch.randn(12, generator=random), data | {
        "loss_mask": torch.rand(12, generator=random) < 0.6
    }


@pytest.mark.parametrize("eps_clip", [0.0, 0.2])
def test_micro_batches_add_up_and_the_mask_keeps_nan_out(eps_clip: float) -> None:
    values, data = batch(1)
    mask = data["loss_mask"]
    loss_fn = ValueLoss(eps_clip, float(mask.sum()))
    garbage = {key: value if key == "loss_mask" else value.masked_fill(~mask, math.nan) for key, value in data.items()}
    results = []
    for source, cuts in ((data, [0, 12]), (garbage, [0, 12]), (data, [0, 5, 5, 12])):
        current = values.clone() if source is data else values.masked_fill(~mask, math.nan)
        current.requires_grad_()
        total, sums = torch.zeros(()), {}
        for first, last in pairwise(cuts):
            here = slice(first, last)
            part = {key: value[here] for key, value in source.items()}
            loss, stats = loss_fn({"values": current[here]}, part, torch.tensor([0, last - first]))
            total = total + loss
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in stats.items()}
        total.backward()
        results.append((float(total.detach()), current.grad, sums))
    for loss, grad, sums in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        torch.testing.assert_close(grad, results[0][1])
        assert sums == pytest.approx(results[0][2], abs=1e-5)
    assert results[0][2]["num_tokens"] == mask.sum()
    assert results[0][2]["error_squared"] == pytest.approx(
        float((values - data["returns"])[mask].square().sum()), rel=1e-5
    )


def test_gradient_against_finite_differences() -> None:
    values, data = batch(2)
    data = {key: value.double() if value.is_floating_point() else value for key, value in data.items()}
    loss_fn = ValueLoss(0.2, 7.0)

    def loss_of(current: Tensor) -> Tensor:
        return loss_fn({"values": current}, data, torch.tensor([0, 12]))[0]

    assert torch.autograd.gradcheck(loss_of, values.double().requires_grad_(), eps=1e-7, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ value norm


def test_value_norm_by_hand() -> None:
    """beta 0.5. Batches have mean 2 and mean square 8, then 4 and 16: (2/4 + 4/2) / (3/4) = 10/3; (8/4 + 16/2) / (3/4) = 40/3."""
    norm = ValueNorm(0.5)
    assert (norm.mean, norm.std) == (0.0, 1.0)
    norm.update(torch.tensor([0.0, 4.0]))
    assert (norm.mean, norm.std) == (2.0, 2.0)  # bias-corrected: only the first batch counts
    norm.update(torch.tensor([4.0]))
    assert norm.mean == pytest.approx(10 / 3)
    assert norm.std == pytest.approx(math.sqrt(40 / 3 - 100 / 9))
    assert norm.normalise(torch.tensor([norm.mean + norm.std])).tolist() == pytest.approx([1.0])
    x = torch.randn(100)
    torch.testing.assert_close(norm.denormalise(norm.normalise(x)), x)
    assert norm.normalise(x).dtype == torch.float32


def test_value_norm_survives_a_large_mean_and_equal_returns() -> None:
    norm = ValueNorm(0.99995)
    norm.update(torch.full((1000,), 0.1))
    assert norm.mean == pytest.approx(0.1)
    assert norm.std == pytest.approx(0.1)  # the floor: sqrt(1e-2)
    norm = ValueNorm(0.9)
    for _ in range(3):
        norm.update(torch.tensor([1e4 - 1, 1e4 + 1]))
    assert norm.std == pytest.approx(1.0, rel=1e-6)


def test_empty_and_non_finite_returns_change_nothing() -> None:
    norm = ValueNorm(0.5)
    norm.update(torch.tensor([1.0, 3.0]))
    before = norm.state_dict()
    for returns in ([], [math.nan, 1.0], [math.inf]):
        norm.update(torch.tensor(returns))
    assert norm.state_dict() == before


def test_the_state_is_saved_and_restored() -> None:
    first, second = ValueNorm(0.9), ValueNorm(0.9)
    first.update(torch.tensor([1.0, 7.0]))
    second.load_state_dict(first.state_dict())
    for norm in (first, second):
        norm.update(torch.tensor([5.0]))
    assert first.state_dict() == second.state_dict()
    with pytest.raises(ValueError, match=r"value_norm_beta is 1.0"):
        ValueNorm(1.0)


def test_value_norm_does_not_depend_on_the_layout_of_ranks() -> None:
    """Three ranks, one of them without returns, hold what one rank holds."""
    returns = torch.randn(20) * 3 + 7
    alone = ValueNorm(0.9)
    alone.update(returns)
    barrier, slots = Barrier(3, timeout=60), [np.zeros(0)] * 3

    def run(rank: int, part: Tensor) -> ValueNorm:
        def all_reduce_sum(values: list[float]) -> npt.NDArray[np.float64]:
            slots[rank] = np.array(values, np.float64)
            barrier.wait()
            return np.asarray(np.sum(slots, axis=0))

        norm = ValueNorm(0.9)
        norm.update(part, all_reduce_sum)
        return norm

    with ThreadPoolExecutor(3) as pool:
        norms = list(pool.map(run, range(3), (returns[:13], returns[13:13], returns[13:])))
    assert {(norm.mean, norm.std) for norm in norms} == {(norms[0].mean, norms[0].std)}
    assert norms[0].mean == pytest.approx(alone.mean, rel=1e-12)
    assert norms[0].std == pytest.approx(alone.std, rel=1e-12)
