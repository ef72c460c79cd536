"""A reward function of the rollout workers, and the same one as an MFC on a CPU worker that reads words: equal rewards."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from whole_runs import resumed

from asyncrl.data.trajectories import find_recording, list_recording, read_trajectory
from asyncrl.testing.runs import RunHandle, launch, make_tiny_run, processes_of, train_steps
from asyncrl.weights.checkpoints import list_checkpoints
from asyncrl.weights.lineage import audit

pytestmark = [pytest.mark.timeout(600), pytest.mark.release]

STEPS, BATCH, LIMIT_S = 3, 4, 240.0
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
import asyncio
from pathlib import Path


async def step(models, batch):
    info = batch.meta_info
    assert info["step"] == info["version"] + 1 and info["num_groups"] == len(batch), info
    while batch.step == {held} and not Path("{folder}/go").exists():  # so that the test kills the run at work
        await asyncio.sleep(0.05)
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


def settings_of(folder: Path) -> list[str]:
    return [
        f"rollout.tasks.default.reward={folder}/mine.py:judged",
        f"train.mfcs=[{folder}/mine.py:again]",
        f"train.step={folder}/my_step.py:step",
        "train.words=[words_completion,prompt_words_prompt,prompt_words_answer]",
        "allocation=transformers.d1+d1+again:cpu1",
        f"train.batch_size={BATCH}",
        f"train.max_steps={STEPS}",
    ]


def kill_everything(run: RunHandle) -> None:
    run.signal(signal.SIGKILL)
    for process in processes_of(run.run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait(LIMIT_S)


def test_a_reward_on_cpu_workers_equals_that_of_rollout_workers_and_words_are_recorded(tmp_path: Path) -> None:
    """The step function compares the rewards of every step: before the kill, after the resume, and of the replayed recording."""
    config = make_tiny_run(tmp_path, num_prompts=STEPS * BATCH)
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "my_step.py").write_text(STEP.format(folder=tmp_path, held=STEPS))
    settings = settings_of(tmp_path)
    with launch(config, *settings, "record.trajectories=true", "checkpoint.every_steps=1") as run:
        run.wait_for_step(STEPS - 1, LIMIT_S)
        run.wait_until(lambda: list_checkpoints(run.run_dir), "a checkpoint was written", LIMIT_S)
        kill_everything(run)
    (tmp_path / "go").touch()
    with resumed(run.run_dir) as again:
        assert again.wait(LIMIT_S) == 0, again.output()
    assert audit(run.run_dir).problems == []
    newest = find_recording(run.run_dir)
    assert newest.name == "attempt_2"
    first = newest.with_name("attempt_1")  # begins with the initial weights
    for folder in (newest, first):
        recorded = [read_trajectory(path).sample for path in list_recording(folder)]
        assert recorded
        for sample in recorded:
            assert all(isinstance(text, str) for text in sample.words("words_completion")[0])
    num_steps = len(recorded) // BATCH
    # CPU workers need mode=async: the trainer runs the function
    replay = ("trial=replayed", "mode=train_only", "allocation=transformers.d1+d1", f"replay.path={first}")
    with launch(config, *settings, *replay, f"train.max_steps={num_steps}") as replayed:
        assert replayed.wait(LIMIT_S) == 0, replayed.output()
    assert len(train_steps(replayed.run_dir)) == num_steps >= 1
