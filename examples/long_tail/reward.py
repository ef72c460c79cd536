"""Reward of the long tail: how far the subtractions are right from the beginning on, 1 if all are and the completion ends there."""


def reward(prompt: str, completion: str, answer: str, *, finished: bool = True) -> float:
    """`finished` is False where the completion was cut off before its end token: that earns nothing."""
    if not finished:
        return 0.0
    expected, found = answer.split(";"), completion.split(";")
    right = next(
        (i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(found)),
    )
    if right == len(expected) < len(found):  # all right, but then it went on
        right -= 1
    return right / len(expected)
