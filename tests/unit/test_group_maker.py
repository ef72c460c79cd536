"""Groups of mode=sync: what a model worker does beside sampling."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

from asyncrl.data.prompts import Prompt
from asyncrl.model.group_maker import GroupMaker, _Group
from asyncrl.protocol.messages import Locator
from asyncrl.rewards.outcome import REWARD_LOST, RolloutReleased

PROMPT = Prompt(prompt_id="e0-p0", text="2+2=", input_ids=[1], answer="4", task="sum", row={}, too_long=False)


async def test_a_group_whose_reward_processes_are_lost_is_judged_again() -> None:
    errors = [RolloutReleased(REWARD_LOST), RolloutReleased(REWARD_LOST)]

    async def score(*_: Any) -> list[float]:
        if errors:
            raise errors.pop()
        return [1.0]

    maker = object.__new__(GroupMaker)
    maker._judging = asyncio.Semaphore(1)
    maker._logger = logging.getLogger("test_group_maker")
    maker._rewards = {"sum": SimpleNamespace(score=score)}  # type: ignore[dict-item]
    assert await maker._judge(_Group("g", Locator(0, 0), PROMPT)) == [1.0]
    assert not errors
