"""The controller of the entropy bonus, by hand."""

from __future__ import annotations

import math

import pytest

from asyncrl.algorithms.entropy import EntropyController


def test_the_coefficient_rises_below_the_target_and_acts_only_there() -> None:
    controller = EntropyController(0.01, target=1.0, step=0.01)
    coefs = [controller.coef]
    for entropy in (0.5, 0.9, 1.2, 1.1, 0.99, 1.0, math.nan, math.inf):
        controller.update(entropy)
        coefs.append(controller.coef)
    # After 1.2 and 1.1 it is off, and falls from 0.03 to 0.01. At the target it stays. Broken batches change nothing.
    assert coefs == pytest.approx([0.0, 0.02, 0.03, 0.0, 0.0, 0.02, 0.02, 0.02, 0.02])


def test_the_coefficient_is_never_negative() -> None:
    controller = EntropyController(0.0, target=1.0, step=0.01)
    for _ in range(5):
        controller.update(2.0)
    controller.update(0.5)
    assert controller.coef == pytest.approx(0.01)


def test_the_state_is_restored() -> None:
    controller = EntropyController(0.0, target=1.0, step=0.01)
    for entropy in (0.5, 0.5, 1.5):
        controller.update(entropy)
    again = EntropyController(0.0, target=1.0, step=0.01)
    again.restore(controller.state())
    assert (again.kept, again.coef) == (controller.kept, controller.coef) == (pytest.approx(0.01), 0.0)
