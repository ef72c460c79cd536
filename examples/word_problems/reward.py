"""Rewards of the word problems: 1 for the right number after the last `####`, else 0, from a slow judge.

The 100 ms stand for the work of a real judge: a sandbox, a database, another model. Generation does not wait for it.
"""

from __future__ import annotations

import asyncio
import os
import time

from answers import final_number  # in this folder, which asyncrl puts on sys.path

from asyncrl.rewards.score import Score

JUDGE_S = float(os.environ.get("JUDGE_S", "0.1"))


def judge(prompt: str, completion: str, answer: str, *, finished: bool = True) -> float:
    """A plain function. If it is slow, asyncrl judges the responses of a group in parallel."""
    time.sleep(JUDGE_S)
    return score(completion, answer, finished)


async def judge_async(prompt: str, completion: str, answer: str, *, finished: bool = True) -> float:
    """Like `judge`, as a coroutine function, for a judge that is called over the network: many calls run concurrently."""
    await asyncio.sleep(JUDGE_S)
    return score(completion, answer, finished)


def score(completion: str, answer: str, finished: bool) -> float:
    """A completion that was cut off at its limit is never right, because its answer may be incomplete."""
    found = final_number(completion) if finished else None
    is_right = found is not None and found == final_number(f"#### {answer}")
    return Score(is_right, f"{found.normalize():f}" if found is not None else None)
