"""Makes the prompts of config.yaml: GSM8K and fractions, in one file; with --model also a small model for a CPU.

python make.py --out DIR                          # GSM8K from the Hub: pip install 'asyncrl[hub]'
python make.py --out DIR --gsm8k PATH [--model]   # a folder with train.jsonl and test.jsonl, or one file
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
from final_answer import number

from asyncrl.launch.experiment import load_experiment
from asyncrl.testing.chat_model import make_tokenizer, read_lines, render, system, user
from asyncrl.testing.warm_start import write_lines

CONFIG = Path(__file__).with_name("config.yaml")
GSM8K, FRACTIONS = "gsm8k", "fractions"  # the tasks of the config
HUB_NAME, HUB_SUBSET = "openai/gsm8k", "main"
MIN_FRACTIONS = 128
VOCABULARY = 2048
MAX_POSITIONS = 2048
Row = dict[str, str]  # question, answer, task

NAMES = ("Ann", "Ben", "Cleo", "Dmitri", "Eve", "Farid", "Gül", "Hana")
THINGS = (
    "a cup of flour",
    "a litre of paint",
    "a mile",
    "an hour",
    "a pound of nuts",
    "a metre of ribbon",
    "a gallon of water",
)
STORIES = (
    ("+", "{name} needs {a} of {thing} on Monday and {b} of {thing} on Tuesday. How much is that in all?"),
    ("-", "{name} has {a} of {thing} and gives away {b} of {thing}. How much is left?"),
    ("*", "{name} plans {a} of {thing} and has done {b} of that. How much is done?"),
    ("/", "{name} divides {a} of {thing} into parts of {b} of {thing} each. How many parts are there?"),
)
FORM = " Give a fraction in lowest terms, such as 2/3, or a whole number."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that gets data/, and model/ with --model")
    parser.add_argument("--gsm8k", type=Path, metavar="PATH", help="GSM8K's files instead of the Hub's")
    parser.add_argument(
        "--fractions", type=int, metavar="N", help="number of fraction problems (default: a quarter of GSM8K's)"
    )
    parser.add_argument(
        "--model", action="store_true", help="a small Qwen2 with random weights and a tokenizer of its own"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of a warm start that shows the model the format of answers"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    gsm8k, evaluation = from_hub() if arguments.gsm8k is None else from_files(arguments.gsm8k)
    count = max(MIN_FRACTIONS, len(gsm8k) // 4) if arguments.fractions is None else arguments.fractions
    train = gsm8k + fraction_problems(count, rng)
    write_lines(arguments.out / "data" / "train.jsonl", train)  # the run shuffles the lines
    write_lines(arguments.out / "data" / "eval.jsonl", evaluation)
    print(
        f"{arguments.out / 'data'}: {len(gsm8k)} problems of GSM8K and {count} with fractions, {len(evaluation)} to evaluate"
    )
    if arguments.model:
        make_small_model(arguments.out / "model", train, steps=arguments.steps, seed=arguments.seed)


# ---------------------------------------------------------------------------------------------------------------- GSM8K


def from_hub() -> tuple[list[Row], list[Row]]:
    try:
        from datasets import load_dataset

        splits = [load_dataset(HUB_NAME, HUB_SUBSET, split=split) for split in ("train", "test")]
    except Exception as error:  # of the network, the Hub, or the installation
        raise SystemExit(
            f"{HUB_NAME} could not be loaded from the Hub: {str(error).splitlines()[0]}\nThis needs pip install 'asyncrl[hub]' "
            "and a network. If you have GSM8K's files, use --gsm8k PATH, a folder with train.jsonl and test.jsonl"
        ) from error
    train, evaluation = ([gsm8k_row(line) for line in split] for split in splits)
    return train, evaluation


def from_files(path: Path) -> tuple[list[Row], list[Row]]:
    """Read a folder with both splits, or one file. Every fourth line of one file is for evaluation."""
    if path.is_dir():
        train, evaluation = (
            [gsm8k_row(line) for line in read_lines(path / f"{split}.jsonl")] for split in ("train", "test")
        )
        return train, evaluation
    rows = [gsm8k_row(line) for line in read_lines(path)]
    return [row for i, row in enumerate(rows) if i % 4 != 3], rows[3::4]


def gsm8k_row(line: Row) -> Row:
    """A line of GSM8K with its answer unchanged: the reward reads the number after ####."""
    question, answer = line["question"].strip(), line["answer"]
    if "####" not in answer or number(answer.rpartition("####")[2]) is None:
        raise SystemExit(f"no number after #### in {answer!r}: is this GSM8K?")
    return {"question": question, "answer": answer, "task": GSM8K}


# ------------------------------------------------------------------------------------------------------------ fractions


def fraction_problems(count: int, rng: np.random.Generator) -> list[Row]:
    """`count` different problems."""
    rows: dict[str, Row] = {}
    while len(rows) < count:
        row = fraction_problem(rng)
        rows[row["question"]] = row
    return list(rows.values())


def fraction_problem(rng: np.random.Generator) -> Row:
    operator, story = STORIES[rng.integers(len(STORIES))]
    a, b = (Fraction(int(rng.integers(1, under)), int(under)) for under in rng.integers(2, 13, 2))
    if operator == "-":
        a, b = max(a, b), min(a, b)
    answer = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operator]
    question = story.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b)
    return {"question": question + FORM, "answer": f"{answer}", "task": FRACTIONS}


# ---------------------------------------------------------------------------------------------------------- the small model


def make_small_model(path: Path, rows: list[Row], *, steps: int, seed: int) -> None:
    """Make a model that ends a response like Qwen2.5: at the end of the turn or of the text. It knows no mathematics."""
    from asyncrl.testing.tiny import make_tiny_model
    from asyncrl.testing.warm_start import Pair, Recipe, save, train

    prompt = load_experiment(CONFIG).prompts.system_prompt
    tokenizer = make_tokenizer(texts(rows, prompt), vocab_size=VOCABULARY)
    model = make_tiny_model(None, "qwen2", tokenizer=tokenizer, max_positions=MAX_POSITIONS, seed=seed)

    def demonstrate(rng: np.random.Generator) -> Pair:
        """Show the format of an answer, but not the right answer: it belongs to another problem."""
        asked, other = (rows[i] for i in rng.choice(len(rows), 2, replace=False))
        answer = other["answer"].rpartition("####")[2].strip()
        return render(tokenizer, [system(prompt), user(asked["question"])]), f"The answer is \\boxed{{{answer}}}."

    if steps:
        recipe = Recipe(
            name="math",
            alphabet="",  # the tokenizer is made above
            train=[],
            evaluation=[],
            demonstrate=demonstrate,
            reward=lambda prompt, completion, answer, *, finished=True: 0.0,  # unused: there are no evaluation prompts
            max_new_tokens=24,
            steps=steps,
            batch_size=16,
            lr=5e-3,
        )
        train(model, tokenizer, recipe, seed=seed)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    save(path, model, tokenizer)
    print(f"{path}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens, {steps} steps of warm start")


def texts(rows: list[Row], prompt: str) -> Iterator[str]:
    """The texts on which the tokenizer is trained."""
    yield prompt
    for row in rows:
        yield f"{row['question']}\n{row['answer']}"


if __name__ == "__main__":
    main()
