"""Reward of the long tail: the share of subtractions before the first mistake; 1 if all are right and the completion ends there."""


def reward(prompt: str, completion: str, answer: str, *, finished: bool = True) -> float:
    """`finished` is False if the completion was cut off before its end token; its reward is then 0."""
    if not finished:
        return 0.0
    expected, found = answer.split(";"), completion.split(";")
    right = next(
        (i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(found)),
    )
    if right == len(expected) < len(found):  # all are right, but the completion continues
        right -= 1
    return right / len(expected)
