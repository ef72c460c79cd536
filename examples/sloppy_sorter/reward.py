"""Reward of the sloppy sorter: 1 for the digits in ascending order followed by the end token, else 0."""


def reward(prompt: str, completion: str, answer: str, *, finished: bool = True) -> float:
    """`finished` is False if the completion was cut off before its end token; it is then never right."""
    return float(finished and completion == answer)
