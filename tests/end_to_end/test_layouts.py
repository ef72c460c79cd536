"""The same batches give the same update in every layout: one trainer and one server, or two of each."""

from pathlib import Path

import pytest
import torch
from whole_runs import STEPS, launch_synchronous, published_weights, trained_events, trained_prompts

from asyncrl.testing.runs import RunHandle

pytestmark = pytest.mark.timeout(900)


def test_one_worker_and_two_train_the_same_weights(synchronous: RunHandle, sorter: Path, tmp_path: Path) -> None:
    with launch_synchronous(sorter, tmp_path, "allocation=transformers.d1+d1") as run:
        assert run.wait(600) == 0, run.output()
    assert heads(run.run_dir) == {0}
    assert heads(synchronous.run_dir) == {0, 1}
    assert trained_prompts(run.run_dir) == trained_prompts(synchronous.run_dir)
    for version in range(STEPS + 1):
        one, two = (published_weights(directory, version) for directory in (run.run_dir, synchronous.run_dir))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(
                tensor, two[name], rtol=0, atol=1e-5, msg=lambda text, where=f"v{version} {name}": f"{where}: {text}"
            )


def heads(run_dir: Path) -> set[int]:
    return {group["head"] for event in trained_events(run_dir) for group in event["groups"]}
