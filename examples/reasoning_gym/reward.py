"""Reward of the reasoning-gym example: each dataset has its own verifier."""

from __future__ import annotations

import functools
from typing import Any

from reasoning_gym import get_score_answer_fn

verifier = functools.cache(get_score_answer_fn)  # cached, because each call makes a dataset


def reward(prompt: str, completion: str, answer: dict[str, Any], *, finished: bool = True) -> float:
    """1 for a right answer. Some verifiers give a fraction for an answer that is nearly right.

    `answer` is the generator's entry from the prompt file: question, answer and metadata.
    """
    if not finished:
        return 0.0
    return float(verifier(answer["metadata"]["source_dataset"])(completion.strip(), answer))
