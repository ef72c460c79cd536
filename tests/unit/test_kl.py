"""KL estimates and controllers."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate, make_kl_controller
from asyncrl.config.schema import PPOConfig


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -0.5, 0.0]), ("k2", [0.125, 0.125, 0.0]), ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0])],
)
def test_estimates_by_hand(estimator: str, expected: list[float]) -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.5, -3.0])
    assert kl_estimate(logprobs, ref, estimator).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_estimates_against_the_exact_divergence(estimator: str, unbiased: bool) -> None:
    """The expectation over the policy is computed exactly."""
    policy, ref = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = float((policy * (policy / ref).log()).sum())
    expectation = float((policy * kl_estimate(policy.log(), ref.log(), estimator)).sum())
    assert (abs(expectation - exact) < 1e-6) is unbiased


def test_k2_and_k3_are_never_negative_and_k3_stays_finite() -> None:
    logprobs, ref = -10 * torch.rand(1000), -10 * torch.rand(1000)
    assert (kl_estimate(logprobs, ref, "k2") >= 0).all()
    assert (kl_estimate(logprobs, ref, "k3") >= -1e-4).all()  # float32 rounding of numbers as large as e^10
    assert kl_estimate(torch.tensor([-1000.0]), torch.tensor([0.0]), "k3").isfinite().all()


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4'; use one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_a_fixed_coefficient_does_not_change() -> None:
    controller = make_kl_controller(PPOConfig(kl_coef=0.1))
    assert isinstance(controller, FixedKLController)
    controller.update(100.0, 100)
    assert controller.coef == 0.1


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 512 / 10000)),  # 10 % above
        (60.0, 0.1 * (1 + 0.2 * 512 / 10000)),  # far above: the error is clipped
        (0.0, 0.1 * (1 - 0.2 * 512 / 10000)),  # far below
        (math.nan, 0.1),
    ],
)
def test_adaptive_by_hand(kl: float, expected: float) -> None:
    controller = make_kl_controller(PPOConfig(kl_coef=0.1, kl_adaptive=True))
    assert isinstance(controller, AdaptiveKLController)
    controller.update(kl, 512)
    assert controller.coef == pytest.approx(expected, rel=1e-9)


def test_the_adaptive_coefficient_is_never_negative() -> None:
    controller = AdaptiveKLController(0.1, target=6.0, horizon=10.0)
    controller.update(0.0, 1000)  # 1 - 0.2 * 100 would be -19
    assert controller.coef == 0.0


@pytest.mark.parametrize("name", ["kl_target", "kl_horizon"])
def test_adaptive_settings_of_zero_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"train.ppo.{name} is 0.0"):
        make_kl_controller(PPOConfig(kl_coef=0.1, kl_adaptive=True, **{name: 0.0}))
