"""A reward with the answer that it judges. Imports nothing heavy, because reward functions import it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_MAX_CHARS = 200  # of an answer; evaluations send and store one for each response
_DIGEST_CHARS = 16


class Score(float):
    """A reward, and the final answer of the response: `return Score(1.0, "42")`.

    Reward functions, environments and agents may return it wherever they return the reward of a response. Evaluations count equal
    answers of a prompt as votes for the same answer (majority@k), so give equal answers the same text. Equal answers must be
    judged alike. None: the response has no answer, and no vote.
    """

    __slots__ = ("answer",)
    answer: str | None

    def __new__(cls, reward: float, answer: str | None) -> Score:
        """A text beyond 200 characters is cut, and ends with a digest of the whole, so that other texts stay different. Raises
        TypeError if the answer is neither text nor None."""
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"the answer {answer!r} of a Score must be text or None; use str(answer)")
        self = super().__new__(cls, reward)
        if answer is not None and len(answer) > _MAX_CHARS:
            digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()[:_DIGEST_CHARS]
            answer = f"{answer[: _MAX_CHARS - _DIGEST_CHARS - 1]}#{digest}"
        self.answer = answer
        return self

    def __reduce__(self) -> tuple[type[Score], tuple[float, str | None]]:
        return Score, (float(self), self.answer)


def answers_of(rewards: Iterable[object]) -> list[str | None]:
    """The answers of the responses with these rewards. Empty if none of the rewards is a Score."""
    found = list(rewards)
    if not any(isinstance(reward, Score) for reward in found):
        return []
    return [reward.answer if isinstance(reward, Score) else None for reward in found]
