"""Reward of the sloppy sorter: 1 for the digits in ascending order and then the end, 0 for all else."""


def reward(prompt: str, completion: str, answer: str, *, finished: bool = True) -> float:
    """`finished` is False where the completion was cut off before its end token; such a one is never right."""
    return float(finished and completion == answer)
