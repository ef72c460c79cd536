"""A run whose SGLang server gets deltas, which it writes in full for SGLang to load."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, train_steps
from asyncrl.weights.versions import list_versions, read_manifest, role_dir
from tests.support.weight_store import WeightStore

LIMIT_S = 240.0  # of one start of SGLang
STEPS = 4

pytestmark = pytest.mark.timeout(900)


def test_sglang_serves_deltas_and_computes_the_trainers_logprobs(
    store: WeightStore, sglang_python: str, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with launch(
        make_tiny_run(tmp_path / "tiny"),
        "allocation=sglang.d1+d1",
        "manager.max_head_offpolicyness=0",  # so every version is loaded before the next step
        f"generation.python={sglang_python}",
        "generation.dtype=bfloat16",
        f"generation.load_timeout_s={LIMIT_S}",
        f"model_path={store.model_path}",
        f"train.max_steps={STEPS}",
        "train.dtype=bfloat16",
        "train.optimizer.lr=3e-6",
        "weights.full_every=3",
        "weights.keep=9",
        "weights.verify_logprobs=true",
        f"weights.fetch_dir={memory}",
    ) as run:
        assert run.wait(LIMIT_S + 120) == 0, run.output()
        directory = role_dir(run.run_dir, "actor")
        kinds = [read_manifest(directory / str(version)).kind for version in list_versions(directory)]
        assert kinds == ["full", "delta", "delta", "full", "delta"]
        told = (run.run_dir / "logs" / "attempt_1" / "generation_server_0.log").read_text()
        for number in range(STEPS):
            assert (
                f"weights a0001-v{number:08d} verified: logprobs of the check's text and of 12 decoded tokens differ by at most"
                in told
            )
        assert len(train_steps(run.run_dir)) == STEPS
        assert not list(memory.rglob("*.safetensors"))
        assert_nothing_left(run.run_dir)
