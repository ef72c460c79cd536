"""train.mismatch: a run whose behaviour logprobs are not the trainer's ends before its first update, with the reason on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, train_steps

pytestmark = pytest.mark.timeout(300)

# The agent reports logprobs as if the engine had sampled at another temperature: an engine that is wrong about its own tokens
_AGENT = """
from dataclasses import replace
from asyncrl.rollout.agent import SingleStepAgent

class Wrong(SingleStepAgent):
    async def generate(self, inputs, obs_queue, act_queue):
        responses = await super().generate(inputs, obs_queue, act_queue)
        return [replace(found, logprobs=[1.5 * value for value in found.logprobs]) for found in responses]
"""


def test_a_run_whose_logprobs_are_wrong_stops_before_it_trains(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path / "tiny", num_prompts=40)
    (tmp_path / "agent.py").write_text(_AGENT)
    with launch(
        config,
        f"fileroot={tmp_path}",
        f"rollout.tasks.default.agent={tmp_path}/agent.py:Wrong",
        "allocation=transformers.d1+d2",
        "train.max_steps=3",
    ) as run:
        assert run.wait(200.0) == 1, run.output()
        output = run.output()
    told = output[output.index("failed: model_worker") :].splitlines()
    assert "the generation servers' logprobs are not the trainer's in the first train step" in told[2], output
    assert "tokens differ by more than 0.001 (allowed: 1.00%)" in told[3]
    assert any(", response " in line and "servers -" in line and "trainer -" in line for line in told), output
    assert "restart" not in output  # no restart would help
    assert train_steps(run.run_dir) == []
    assert_nothing_left(run.run_dir)
