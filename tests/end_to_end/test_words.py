"""A reward function of the rollout workers, and the same one as an MFC on a CPU worker that reads words: equal rewards."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.data.trajectories import find_recording, list_recording, read_trajectory
from asyncrl.testing.runs import launch, make_tiny_run, train_steps

pytestmark = [pytest.mark.timeout(600), pytest.mark.release]

STEPS, LIMIT_S = 2, 240.0
REWARDS = """\
import zlib

import numpy as np

from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.mfc import mfc


def judged(prompt, completion, answer):
    return zlib.crc32(repr((prompt, completion, answer)).encode()) % 1000 / 1000


@mfc(
    input_keys=["packed_input_ids", "words_completion", "prompt_words_prompt", "prompt_words_answer"],
    output_keys=["model_rewards_words", "words_verdict"],
)
def again(engine, sample, train):
    rewards, verdicts = [], []
    texts, prompts, answers = map(sample.words, ["words_completion", "prompt_words_prompt", "prompt_words_answer"])
    for completions, (prompt,), (answer,) in zip(texts, prompts, answers):
        values = [judged(prompt, completion, answer) for completion in completions]
        rewards.append(values)
        verdicts.append([{"reward": value} for value in values])
    groups = [{"model_rewards_words": r, "words_verdict": v} for r, v in zip(rewards, verdicts)]
    return SequenceSample.from_groups(sample.ids, groups) if groups else None
"""
STEP = """\
async def step(models, batch):
    info = batch.meta_info
    assert info["step"] == info["version"] + 1 and info["num_groups"] == len(batch), info
    judged = models.actor.again(batch)
    values, texts = await judged.read("model_rewards_words"), await judged.read("words_verdict")
    for group, mine, found in zip(batch.rewards, values, texts):
        assert [v for (v,) in mine] == group, (group, mine)
        assert all(abs(f["reward"] - r) < 1e-6 for f, r in zip(found, group)), (group, found)
    for function in models.functions:
        if function.mfc.name != "again":
            batch = batch.union(function(batch))
    await batch
"""


def test_a_reward_on_cpu_workers_equals_that_of_rollout_workers_and_words_are_recorded(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path, num_prompts=16)
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "my_step.py").write_text(STEP)
    settings = (
        f"rollout.tasks.default.reward={tmp_path}/mine.py:judged",
        f"train.mfcs=[{tmp_path}/mine.py:again]",
        f"train.step={tmp_path}/my_step.py:step",
        "train.words=[words_completion,prompt_words_prompt,prompt_words_answer]",
        "allocation=transformers.d1+d1+again:cpu1",
        "record.trajectories=true",
        "train.batch_size=4",
        f"train.max_steps={STEPS}",
    )
    with launch(config, *settings) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    assert len(train_steps(run.run_dir)) == STEPS
    recorded = [read_trajectory(path).sample for path in list_recording(find_recording(run.run_dir))]
    assert len(recorded) == STEPS * 4
    for sample in recorded:
        assert all(isinstance(text, str) for text in sample.words("words_completion")[0])
