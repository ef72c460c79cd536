"""A run on texts of a model that reads images, too: versions, deltas and the final model have its tower as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.testing.runs import launch, make_tiny_run, train_steps
from asyncrl.weights.versions import list_versions, read_manifest, tensor_files
from tests.support.vision_models import bits_of, is_of_text, make_vision_model

pytestmark = pytest.mark.timeout(300)

STEPS, LIMIT_S = 3, 200.0


def towers(folder: Path) -> dict[str, object]:
    tensors = {name: tensor for file in tensor_files(folder) for name, tensor in load_file(file).items()}
    return dict(bits_of({name: tensor for name, tensor in tensors.items() if not is_of_text(name)}))


def test_a_tower_is_in_each_full_version_and_in_the_final_model(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path / "task")
    # The tower is larger than the language model, so a version without the tower is a delta that is worthwhile
    make_vision_model(tmp_path / "task" / "model", "qwen3_5", depth=16)
    options = ["manager.max_head_offpolicyness=0", "weights.full_every=2", "weights.keep=9"]
    with launch(config, *options, f"train.max_steps={STEPS}", f"fileroot={tmp_path}") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert len(steps) == STEPS
    for step in steps:
        assert abs(step["actor/behav_approx_kl"]) < 1e-6  # the mean difference of the logprobs
    source = towers(tmp_path / "task" / "model")
    assert source
    assert towers(run.run_dir / "checkpoints" / "final") == source
    folder = run.run_dir / "weights" / "actor"
    kinds = {version: read_manifest(folder / str(version)).kind for version in list_versions(folder)}
    assert {"full", "delta"} == set(kinds.values())
    for version, kind in kinds.items():
        assert towers(folder / str(version)) == (source if kind == "full" else {})
