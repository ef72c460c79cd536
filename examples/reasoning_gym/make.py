"""Makes the reasoning-gym example: prompts from its generators, and a small chat model that has seen the format of answers.

python make.py --out DIR [--seed N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.testing.chat_model import make_model, make_tokenizer, render, user
from asyncrl.testing.warm_start import Pair, Recipe, write_lines

try:
    import reasoning_gym
    from reward import reward
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: install it with pip install 'asyncrl[gym]' (it builds a package in C)") from error

DATASETS: dict[str, dict[str, Any]] = {  # any of reasoning-gym's datasets, with the arguments of its generator
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 12},
}
NUM_TRAIN, NUM_EVAL = 2048, 256
SHARE_WRONG = 0.7  # share of the demonstrations that are drawn from other problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that gets model/ and data/")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="steps of the warm start")
    arguments = parser.parse_args()
    train = prompt_lines(NUM_TRAIN, seed=arguments.seed)
    evaluation = prompt_lines(NUM_EVAL, seed=arguments.seed + 1)
    write_lines(arguments.out / "data" / "train.jsonl", train)
    write_lines(arguments.out / "data" / "eval.jsonl", evaluation)

    tokenizer = make_tokenizer((f"{row['prompt']}\n{row['entry']['answer']}" for row in train), vocab_size=512)

    def rendered(row: dict[str, Any]) -> str:
        return render(tokenizer, [user(row["prompt"])])

    def demonstrate(rng: np.random.Generator) -> Pair:
        """Show the right answer or, more often, the answer of another problem of the same dataset."""
        row = train[rng.integers(len(train))]
        shown = row
        if rng.random() < SHARE_WRONG:
            shown = train[rng.integers(len(train) // len(DATASETS)) * len(DATASETS) + position(row)]
        return rendered(row), shown["entry"]["answer"]

    recipe = Recipe(
        name="reasoning-gym",
        alphabet="",  # the tokenizer is made above
        train=[],
        evaluation=[(rendered(row), row["entry"]) for row in evaluation],
        demonstrate=demonstrate,
        reward=reward,
        max_new_tokens=8,
        steps=arguments.steps,
        batch_size=64,
    )
    make_model(arguments.out, tokenizer, recipe, architecture="qwen3", max_positions=512, seed=arguments.seed)


def prompt_lines(count: int, seed: int) -> list[dict[str, Any]]:
    """Lines from the datasets in turn. Each has the whole entry, because the verifier may need its metadata."""
    datasets = [
        reasoning_gym.create_dataset(name, size=count // len(DATASETS), seed=seed, **arguments)
        for name, arguments in DATASETS.items()
    ]
    return [
        {"prompt": entry["question"], "entry": entry} for entries in zip(*datasets, strict=True) for entry in entries
    ]


def position(row: dict[str, Any]) -> int:
    return list(DATASETS).index(row["entry"]["metadata"]["source_dataset"])


if __name__ == "__main__":
    main()
