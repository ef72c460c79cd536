"""A task opens when another task's pass rate reaches its gate, and stays open in a run that was killed and resumed. Each of the two
tasks has an algorithm of its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from whole_runs import resumed

from asyncrl.data.trajectories import read_trajectory
from asyncrl.testing.runs import assert_nothing_left, journal, launch, make_tiny_run, metrics, train_steps
from asyncrl.weights.checkpoints import list_checkpoints
from asyncrl.weights.lineage import audit

LIMIT_S = 200.0
BATCH, GROUPS = 4, 8
EASY, HARD = 1, 2  # task ids; 0 is of `default`, which has no prompts
SCALING = 0.5  # of the rewards of the easy task


def trained_tasks(run_dir: Path) -> list[set[str]]:
    """Of each step: the tasks that have a mean reward."""
    return [{name for name in ("easy", "hard") if f"reward/{name}" in step} for step in train_steps(run_dir)]


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_task_opens_at_its_gate_and_stays_open(tmp_path: Path) -> None:
    config = make_tiny_run(tmp_path)
    prompts = [{"prompt": f"{at:04d}", "answer": "", "task": ("easy", "hard")[at % 2]} for at in range(2000)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    reward = f"{tmp_path}/reward.py:reward"
    gate = {"task": "easy", "passes": -9.0, "groups": GROUPS}  # every response passes
    tasks = {"easy": {"reward": reward}, "hard": {"reward": reward, "gate": gate}}
    overrides = (
        "prompts.task_key=task",
        f"rollout.tasks={json.dumps(tasks)}",
        f"train.batch_size={BATCH}",
        "train.max_steps=40",
        "checkpoint.every_steps=1",
        "record.trajectories=true",
        "train.ppo.advantage_norm=none",
        f"train.tasks.easy.reward_scaling={SCALING}",
        "train.tasks.hard.baseline=group_mean",
    )
    with launch(config, *overrides) as run:
        run.wait_until(
            lambda: {"hard"} & set().union(*trained_tasks(run.run_dir)), "a step with the hard task", LIMIT_S
        )
        run.wait_until(
            lambda: (found := list_checkpoints(run.run_dir)) and found[-1][1] >= GROUPS // BATCH, "it", LIMIT_S
        )
        run.signal(signal.SIGKILL)
        assert_nothing_left(run.run_dir)
    closed = [step for step in metrics(run.run_dir) if step.get("curriculum/hard_open") == 0.0]
    assert len(closed) >= GROUPS // BATCH - 1
    assert all(tasks == {"easy"} for tasks in trained_tasks(run.run_dir)[: len(closed)])
    (opened,) = [event for event in journal(run.run_dir) if event["event"] == "task_opened"]
    assert opened["task"] == "hard"
    with resumed(run.run_dir, f"train.max_steps={opened['step'] + 8}") as again:
        assert again.wait(LIMIT_S) == 0, again.output()
    assert [event["event"] for event in journal(run.run_dir)].count("task_opened") == 1
    assert train_steps(run.run_dir)[-1]["curriculum/hard_open"] == 1.0
    assert "hard" in set().union(*trained_tasks(run.run_dir)[opened["step"] :])
    assert audit(run.run_dir).problems == []
    seen = [check_advantages(file) for file in (run.run_dir / "trajectories").glob("attempt_*/*.safetensors")]
    assert set(seen) == {EASY, HARD}


def check_advantages(file: Path) -> int:
    """The advantages of a group that was trained are those of its task's algorithm. Returns the task's id."""
    sample = read_trajectory(file).sample
    (task,) = sample.data["task_ids"].tolist()
    rewards = sample.data["rewards"]
    expected = SCALING * rewards if task == EASY else rewards - rewards.mean()
    (advantages_of,), (mask_of,) = sample.slices("advantages"), sample.slices("loss_mask")
    for advantages, mask, value in zip(advantages_of, mask_of, expected.tolist(), strict=True):
        assert advantages[mask] == pytest.approx(value, abs=1e-5)
    return int(task)
