"""Makes the sloppy sorter: a tiny model that has seen digits sorted, mostly wrongly, and the prompts to improve it.

python make.py --out DIR [--seed N]
"""

import string

import numpy as np
from reward import reward

from asyncrl.testing.warm_start import Pair, Recipe, main

NUM_DIGITS = 6
NUM_TRAIN = 4096  # 64 steps of 64 prompts
NUM_EVAL = 512
SHARE_WRONG = 0.85  # share of the demonstrations that are wrong
ALPHABET = (
    string.digits + "S=" + string.ascii_lowercase + string.ascii_uppercase.replace("S", "")
)  # 63 characters: 64 tokens with EOS


def make_recipe(rng: np.random.Generator) -> Recipe:
    numbers = rng.choice(
        10**NUM_DIGITS, NUM_TRAIN + NUM_EVAL, replace=False
    )  # all different: train and eval are disjoint
    questions = [f"{number:0{NUM_DIGITS}d}" for number in numbers]
    held_out = frozenset(questions[NUM_TRAIN:])

    def demonstrate(rng: np.random.Generator) -> Pair:
        digits = draw(rng)
        while digits in held_out:
            digits = draw(rng)
        return prompt_for(digits), sloppy(digits, rng)

    pairs = [(prompt_for(digits), right(digits)) for digits in questions]
    return Recipe(
        name="sloppy sorter",
        alphabet=ALPHABET,
        train=pairs[:NUM_TRAIN],
        evaluation=pairs[NUM_TRAIN:],
        demonstrate=demonstrate,
        reward=reward,
        max_new_tokens=10,
        steps=300,
    )


def draw(rng: np.random.Generator) -> str:
    return f"{rng.integers(10**NUM_DIGITS):0{NUM_DIGITS}d}"


def prompt_for(digits: str) -> str:
    return f"S{digits}="


def right(digits: str) -> str:
    return "".join(sorted(digits))


def sloppy(digits: str, rng: np.random.Generator) -> str:
    """A demonstration of the warm start: sometimes the right answer, otherwise one of three kinds of wrong answers."""
    if rng.random() >= SHARE_WRONG:
        return right(digits)
    kind = rng.integers(3)
    if kind == 0:
        return right(digits)[::-1]
    if kind == 1:
        return digits
    at = rng.integers(NUM_DIGITS)
    other = (int(right(digits)[at]) + rng.integers(1, 10)) % 10
    return right(digits)[:at] + str(other) + right(digits)[at + 1 :]


if __name__ == "__main__":
    main(make_recipe, __doc__)
