"""The model worker's group maker in mode=sync: tasks other than sampling."""

from __future__ import annotations

import asyncio
from pathlib import Path

from asyncrl.config.processes import ModelWorkerConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import plan
from asyncrl.model.engine import TrainEngine
from asyncrl.model.group_maker import GroupMaker
from asyncrl.protocol.calls import ExecuteMFC
from asyncrl.protocol.trajectories import Locator
from asyncrl.testing.runs import make_tiny_run
from tests.support.services import make_services

# Reward raises this error when the processes that run a reward function are lost
REWARD = """
from asyncrl.rewards.outcome import REWARD_LOST, RolloutReleased

errors = [RolloutReleased(REWARD_LOST), RolloutReleased(REWARD_LOST)]

async def reward(prompt, completion, answer):
    if errors:
        raise errors.pop()
    return float(prompt)
"""


async def test_a_group_is_rewarded_again_after_its_reward_processes_are_lost(tmp_path: Path) -> None:
    tiny = make_tiny_run(tmp_path, num_prompts=20)
    (tmp_path / "lost.py").write_text(REWARD)
    overrides = ["mode=sync", "prompts.shuffle=false", "rollout.reward_isolation=thread"]
    experiment = load_experiment(tiny, [*overrides, f"rollout.tasks.default.reward={tmp_path}/lost.py:reward"])
    configs = [spec.config for spec in plan(experiment, attempt=1, num_prompts=20)]
    (config,) = (config for config in configs if isinstance(config, ModelWorkerConfig))
    maker = GroupMaker(config, TrainEngine(config.models[0], config.train), make_services(config.worker))
    call = ExecuteMFC(mfc=config.mfcs[0].name, version=0, ids=["g"], locators=[Locator(0, 7)])
    made = await asyncio.wait_for(asyncio.to_thread(maker.make, call, ["g"]), 60)
    maker.close()
    assert made.rejected == []
    (meta,) = made.metas
    assert meta.rewards == [7.0] * experiment.rollout.group_size
