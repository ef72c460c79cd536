"""Reward of the reasoning-gym example: the verifier that each of its datasets brings."""

from __future__ import annotations

import functools
from typing import Any

from reasoning_gym import get_score_answer_fn

verifier = functools.cache(get_score_answer_fn)  # each call makes a dataset


def reward(prompt: str, completion: str, answer: dict[str, Any], *, finished: bool = True) -> float:
    """`answer` is the entry that the generator made, as the line has it: question, answer and metadata.

    1 for a right answer; some verifiers give a part of it for an answer that is nearly right.
    """
    if not finished:
        return 0.0
    return float(verifier(answer["metadata"]["source_dataset"])(completion.strip(), answer))
