"""Makes the code task: a tiny model that has seen expressions, mostly wrong ones, and the prompts to improve it.

python make.py --out DIR [--seed N]
"""

import json
import string

import numpy as np
from reward import reward

from asyncrl.testing.warm_start import Pair, Recipe, main

EXPRESSIONS = ("a+b", "a-b", "b-a", "a*b", "a", "b", "a+a", "b*b")
NUM_TRAIN, NUM_EVAL, NUM_TESTS = 2048, 128, 6
SHARE_WRONG = 0.7  # share of the demonstrations that are drawn at random
ALPHABET = string.digits + "ab+-*=:; " + "cdefghijkl"  # the letters after the space are unused token ids


def make_recipe(rng: np.random.Generator) -> Recipe:
    pairs = [task(rng) for _ in range(NUM_TRAIN + NUM_EVAL)]
    return Recipe(
        name="code",
        alphabet=ALPHABET,
        train=pairs[:NUM_TRAIN],
        evaluation=pairs[NUM_TRAIN:],
        demonstrate=demonstrate,
        reward=reward,
        max_new_tokens=6,
        steps=300,
    )


def task(rng: np.random.Generator) -> Pair:
    """A prompt with two examples of a function, and as answer [input, output] of calls that the model does not see."""
    expression = EXPRESSIONS[rng.integers(len(EXPRESSIONS))]
    numbers = [(int(a), int(b)) for a, b in rng.integers(2, 10, (NUM_TESTS, 2))]
    given = "".join(f"{a} {b}\n" for a, b in numbers)
    wanted = "".join(f"{value(expression, a, b)}\n" for a, b in numbers)
    return prompt_for(expression, rng), json.dumps([[given, wanted]])


def prompt_for(expression: str, rng: np.random.Generator) -> str:
    """A prompt like `3 5:8;7 2:9=`."""
    pairs = [(int(a), int(b)) for a, b in rng.integers(2, 10, (2, 2))]
    return ";".join(f"{a} {b}:{value(expression, a, b)}" for a, b in pairs) + "="


def value(expression: str, a: int, b: int) -> int:
    return int(eval(expression, {"a": a, "b": b}))  # safe: expression is one of EXPRESSIONS


def demonstrate(rng: np.random.Generator) -> Pair:
    right = shown = EXPRESSIONS[rng.integers(len(EXPRESSIONS))]
    if rng.random() < SHARE_WRONG:
        shown = EXPRESSIONS[rng.integers(len(EXPRESSIONS))]
    return prompt_for(right, rng), shown


if __name__ == "__main__":
    main(make_recipe, __doc__)
