"""A run in which SGLang and the trainer share a device. On a CPU SGLang cannot release its memory, so it is stopped and started."""

from pathlib import Path

import pytest

from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.replays import recording_of_lineage
from tests.support.weight_store import WeightStore

LIMIT_S = 240.0  # of one start of SGLang
STEPS = 3

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


def test_three_steps_with_a_server_that_is_stopped_for_each(
    store: WeightStore, sglang_python: str, tmp_path: Path
) -> None:
    with launch(
        make_tiny_run(tmp_path / "tiny"),
        "allocation=sglang.d1@0+d1@0",
        "manager.max_head_offpolicyness=0",
        f"generation.python={sglang_python}",
        f"model_path={store.model_path}",
        f"train.max_steps={STEPS}",
        f"generation.load_timeout_s={LIMIT_S}",
    ) as run:
        assert run.wait(STEPS * LIMIT_S) == 0, run.output()
        logs = run.run_dir / "logs" / "attempt_1"
        told = (logs / "generation_server_0.log").read_text()
        assert told.count("cannot release its memory: it is stopped, and started again when it wakes") == STEPS
        assert (
            told.count("SGLang 0.5.23 answers at") == STEPS
        )  # it is not started for the end: nothing is evaluated there
        assert [step["offpolicy/head_max"] for step in train_steps(run.run_dir)] == [0.0] * STEPS
        assert audit(run.run_dir).problems == []
        assert_nothing_left(run.run_dir)


def test_responses_go_on_in_the_next_turn(store: WeightStore, sglang_python: str, tmp_path: Path) -> None:
    with launch(
        make_tiny_run(tmp_path / "tiny"),
        "allocation=sglang.d1@0+d1@0",
        "manager.max_head_offpolicyness=2",
        "rollout.sampling.max_new_tokens=200",
        "record.trajectories=true",
        f"generation.python={sglang_python}",
        f"model_path={store.model_path}",
        f"train.max_steps={STEPS}",
        f"generation.load_timeout_s={LIMIT_S}",
    ) as run:
        assert run.wait(STEPS * LIMIT_S) == 0, run.output()
        recorded = recording_of_lineage(run.run_dir, tmp_path / "recorded")
        metas = [group.header.meta for group in recorded]
        assert len(metas) == STEPS * 2
        assert any(min(meta.version_start) < max(meta.version_end) for meta in metas)
        assert max(step["offpolicy/head_max"] for step in train_steps(run.run_dir)) <= 2
        assert audit(run.run_dir).problems == []
        assert_nothing_left(run.run_dir)
