"""Skipped optimizer steps: how they count towards the limit, which batches are kept, and what the user sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import progress
from asyncrl.config.schema import TrainConfig
from asyncrl.data.bad_batches import folder_of, list_bad_batches, prune_bad_batches, weights_needed, write_why
from asyncrl.master.skipped import SkippedSteps, SkippedStepsError, num_skipped
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.versions import WeightVersion
from tests.support.services import make_services


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SkippedSteps]:
    return lambda **train: SkippedSteps(TrainConfig(**train), tmp_path, 1, make_services())


def stats(skipped: int, tried: int = 4, role: str = "actor") -> dict[str, float]:
    return {f"{role}/optimizer_steps": float(tried), f"{role}/skipped_steps": float(skipped), "actor/loss": 0.5}


def test_only_train_steps_without_any_optimizer_step_count_towards_the_limit(make: Callable[..., SkippedSteps]) -> None:
    skipped = make(max_skipped_steps=3)
    for _ in range(20):
        assert skipped.add(stats(3)) is True  # one of four optimizer steps was done, so training goes on
        skipped.check()
    for _ in range(2):
        skipped.add(stats(4))
        skipped.check()
    assert skipped.add(stats(0)) is False
    for _ in range(2):
        skipped.add(stats(4))
        skipped.check()
    skipped.add(stats(0, tried=0))  # a train step without a tried optimizer step (all tokens masked) is ignored
    skipped.add(stats(4))
    with pytest.raises(SkippedStepsError, match=r"the last 3 train steps of the actor were skipped") as caught:
        skipped.check()
    assert isinstance(caught.value, RunEndedError)
    assert "train.max_skipped_steps=3" in str(caught.value)
    assert "train.optimizer.lr" in str(caught.value)


def test_each_role_is_counted_separately(make: Callable[..., SkippedSteps]) -> None:
    skipped = make(max_skipped_steps=2)
    both = {**stats(0), **stats(4, role="critic")}
    assert num_skipped(both) == 4
    assert skipped.add(both)
    skipped.check()
    skipped.add(both)
    with pytest.raises(SkippedStepsError, match=r"of the critic were skipped.*a lower train\.critic\.optimizer\.lr"):
        skipped.check()


def test_without_a_limit_the_run_goes_on(make: Callable[..., SkippedSteps]) -> None:
    skipped = make(max_skipped_steps=0)
    for _ in range(50):
        skipped.add(stats(4))
        skipped.check()


def test_the_newest_bad_batches_and_the_weights_they_started_from_are_kept(tmp_path: Path) -> None:
    assert list_bad_batches(tmp_path) == weights_needed(tmp_path) == []
    for attempt, step in ((1, 12), (2, 3), (1, 9), (2, 11)):
        write_why(folder_of(tmp_path, attempt, step), 1.0, {"actor/loss": float("nan"), "actor/grad_norm": 1.0})
    (tmp_path / "bad_batches" / "notes of mine").mkdir()
    prune_bad_batches(tmp_path, 3)
    kept = list_bad_batches(tmp_path)
    assert [(batch.attempt, batch.step) for batch in kept] == [(1, 12), (2, 3), (2, 11)]
    assert weights_needed(tmp_path) == [WeightVersion(1, 11), WeightVersion(2, 2), WeightVersion(2, 10)]
    assert json.loads((kept[0].path / "why.json").read_text()) == {
        "time": 1.0,
        "stats": {"actor/loss": None, "actor/grad_norm": 1.0},
    }
    assert (tmp_path / "bad_batches" / "notes of mine").is_dir()


def test_the_first_skipped_steps_and_then_every_tenth_are_reported(tmp_path: Path) -> None:
    view = progress.SkippedSteps(tmp_path)
    sound: dict[str, Any] = {"step": 1, **stats(0)}
    assert view.news(sound) is None
    told = [text for step in range(2, 32) if (text := view.news({"step": step, **stats(1), **stats(2, 2, "critic")}))]
    assert told[0] == (
        "step 2: 1 of 4 optimizer steps of the actor and 2 of 2 optimizer steps of the critic skipped, because loss or gradient "
        f"was not finite. To find the sequences that caused it: python examples/bad_batch/examine.py {tmp_path} 2"
    )
    assert [text.partition(":")[0] for text in told] == ["step 2", "step 3", "step 4", "step 11", "step 21", "step 31"]
    assert "(10 such train steps so far)" in told[3]
