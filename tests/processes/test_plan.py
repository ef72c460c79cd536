"""Plans agree with real ranks: peaks within 5 %, traffic exactly. benchmarks/plan_accuracy.py has all layouts.

A plan extrapolates from two micro-batches and two minibatches; the measured steps have three micro-batches and two minibatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.schema import ExperimentConfig, PromptSourceConfig, TrainConfig
from asyncrl.plan.ranks import plan_training
from asyncrl.plan.result import PlanError
from asyncrl.testing.tiny import make_tiny_model
from tests.support.plan_accuracy import Case, compare
from tests.support.rank_processes import RankProcesses

pytestmark = pytest.mark.timeout(600)

LENGTHS = (192, 192, 128)  # the planner makes micro-batches of exactly these


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(4, limit_s=120.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


@pytest.mark.parametrize(
    "case",
    [
        Case("tiny", "d2m2", "actor", True, 2, 3, LENGTHS),
        Case("tiny", "p2", "critic", False, 2, 3, LENGTHS),
    ],
    ids=str,
)
def test_a_plan_agrees_with_real_ranks(case: Case, model: Path, ranks: RankProcesses) -> None:
    found = compare(case, model, ranks)
    assert {(one.mfc, one.stage): one.predicted_traffic for one in found} == {
        (one.mfc, one.stage): one.measured_traffic for one in found
    }
    assert {one.mfc: one.error for one in found if abs(one.error) > 0.05} == {}


def test_a_run_is_planned_from_its_config(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())  # no weights
    train = TrainConfig(batch_size=4, max_tokens_per_mb=1024)
    config = ExperimentConfig(
        model_path=str(tmp_path), allocation="transformers.d1+d2", prompts=PromptSourceConfig(path="-"), train=train
    )
    (plan,) = plan_training(config, device_type="cuda")
    assert (plan.shards, plan.stands_for) == (["actor:d0p0m0"], [0, 1])
    assert [step.mfc for step in plan.steps] == ["actor_inf", "advantages", "actor_train"]
    assert plan.peak == max(step.peak for step in plan.steps) == sum(plan.at_peak.values())
    parameters = 127_552 // 2 * 4
    assert plan.at_peak["parameters"] == pytest.approx(parameters, rel=0.05)
    assert plan.at_peak["optimizer"] == pytest.approx(2 * parameters, rel=0.05)
    assert plan.load_peak == pytest.approx(3 * parameters, rel=0.05)  # a whole unit, and the shard cut from it

    (tmp_path / "config.json").unlink()
    with pytest.raises(PlanError, match=r"actor, stage 0 .* cannot be planned: .*model_path"):
        plan_training(config, device_type="cuda")
