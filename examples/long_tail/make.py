"""Makes the long tail: subtract the digit sum again and again. A few completions are ten times as long as most.

python make.py --out DIR [--seed N]
"""

import math
import string

import numpy as np
from reward import reward

from asyncrl.testing.warm_start import Pair, Recipe, main

LOWEST, HIGHEST = (
    5,
    300,
)  # range of the starts, drawn log-uniformly: half of the completions have at most 10 tokens, some more than 100
NUM_TRAIN = 4096
NUM_EVAL = 256  # from the same 296 starts as the training prompts
ALPHABET = string.digits + ":;"


def make_recipe(rng: np.random.Generator) -> Recipe:
    return Recipe(
        name="long tail",
        alphabet=ALPHABET,
        train=[question(rng) for _ in range(NUM_TRAIN)],
        evaluation=[question(rng) for _ in range(NUM_EVAL)],
        demonstrate=question,
        reward=reward,
        max_new_tokens=128,
        steps=300,
        batch_size=64,
    )


def question(rng: np.random.Generator) -> Pair:
    start = int(math.exp(rng.uniform(math.log(LOWEST), math.log(HIGHEST + 1))))
    return f"{start}:", ";".join(map(str, descent(start)))


def descent(start: int) -> list[int]:
    """280 -> 270, 261, 252, 243, ..., 9, 0: subtract from each number its digit sum, down to 0."""
    numbers = [start]
    while numbers[-1] > 0:
        numbers.append(numbers[-1] - sum(map(int, str(numbers[-1]))))
    return numbers[1:]


if __name__ == "__main__":
    main(make_recipe, __doc__)
