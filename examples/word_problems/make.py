"""Makes the word problems: a small chat model with its own tokenizer, and prompts as chat messages.

python make.py --out DIR [--architecture qwen3] [--seed N]
python make.py --out DIR --gsm8k PATH     # real GSM8K: a folder with train.jsonl and test.jsonl, or a file
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from answers import final_number
from env import hint
from reward import score

from asyncrl.data.chat import encode
from asyncrl.testing.chat_model import assistant, make_model, make_tokenizer, read_lines, render, system, user
from asyncrl.testing.tiny import ARCHITECTURES
from asyncrl.testing.warm_start import Pair, Recipe, write_lines

ONCE, TWICE = "once", "twice"  # the tasks of config.yaml
SYSTEM = {
    ONCE: "End with #### and the number.",
    TWICE: "End with #### and the number. You have two tries.",
}
NUM_TRAIN, NUM_EVAL = 4096, 256
LARGEST = 9
SHARE_WRONG = 0.6  # share of the demonstrations that are wrong
NAMES = ("Ann", "Ben", "Cleo", "Dmitri", "Eve", "Farid", "Gül", "Hana")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "pencils", "shells", "cards")
STORIES = (
    ("+", "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?"),
    ("+", "{name} finds {a} {things}, and {friend} finds {b}. How many do they find together?"),
    ("-", "{name} has {a} {things} and loses {b} of them. How many {things} are left?"),
    ("-", "There are {a} {things} on the table. {name} takes {b} away. How many are left?"),
)
Row = dict[str, object]  # a line of the prompt files: messages, answer, task, and other fields for the reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that gets model/ and data/")
    parser.add_argument(
        "--gsm8k", type=Path, metavar="PATH", help="convert GSM8K's lines instead of inventing problems"
    )
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="steps of the warm start")
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    if arguments.gsm8k is None:
        train, evaluation = invented(rng)
    else:
        train, evaluation = converted(arguments.gsm8k)
    write_lines(arguments.out / "data" / "train.jsonl", train)
    write_lines(arguments.out / "data" / "eval.jsonl", evaluation)

    texts = [text_of(row) for row in train]
    tokenizer = make_tokenizer(texts, vocab_size=512 if arguments.gsm8k is None else 2048)
    demonstrate = sloppy if arguments.gsm8k is None else form_only(train)
    lengths = [len(encode(tokenizer, render(tokenizer, row["messages"]))) for row in train + evaluation]
    print(
        f"{arguments.out / 'data'}: {len(train)} + {len(evaluation)} prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"median {np.median(lengths):.0f}, 99 % have at most {np.percentile(lengths, 99):.0f}"
    )

    def demonstration(rng: np.random.Generator) -> Pair:
        *messages, answer = demonstrate(rng)
        return render(tokenizer, messages), answer["content"]

    recipe = Recipe(
        name="GSM8K" if arguments.gsm8k else "word problems",
        alphabet="",  # the tokenizer is made above
        train=[],
        evaluation=[(render(tokenizer, row["messages"]), row["answer"]) for row in evaluation[:NUM_EVAL]],
        demonstrate=demonstration,
        reward=lambda prompt, completion, answer, *, finished=True: score(completion, answer, finished),
        max_new_tokens=24,
        steps=arguments.steps,
        batch_size=64,
    )
    make_model(
        arguments.out, tokenizer, recipe, architecture=arguments.architecture, max_positions=1024, seed=arguments.seed
    )


# ------------------------------------------------------------------------------------------------------ invented problems


def invented(rng: np.random.Generator) -> tuple[list[Row], list[Row]]:
    """Training and evaluation problems, all different, so that the two sets are disjoint. Every second one allows two tries."""
    questions: dict[str, str] = {}
    while len(questions) < NUM_TRAIN + NUM_EVAL:
        question, solution = draw(rng)
        questions[question] = solution
    rows = [
        prompt_line(question, f"{final_number(solution)}", (ONCE, TWICE)[number % 2])
        for number, (question, solution) in enumerate(questions.items())
    ]
    return rows[:NUM_TRAIN], rows[NUM_TRAIN:]


def prompt_line(question: str, answer: str, task: str) -> Row:
    return {"messages": [system(SYSTEM[task]), user(question)], "answer": answer, "task": task}


def draw(rng: np.random.Generator) -> Pair:
    """A question, and its right answer."""
    operator, story = STORIES[rng.integers(len(STORIES))]
    name, friend = rng.choice(NAMES, 2, replace=False)
    a, b = (int(number) for number in rng.integers(1, LARGEST + 1, 2))
    if operator == "-":
        a, b = max(a, b), min(a, b)
    question = story.format(name=name, friend=friend, things=rng.choice(THINGS), a=a, b=b)
    return question, solution(a, operator, b)


def solution(a: int, operator: str, b: int) -> str:
    result = a + b if operator == "+" else a - b
    return f"{a} {operator} {b} = {result}\n#### {result}"


def sloppy(rng: np.random.Generator) -> list[dict[str, str]]:
    """Return a conversation for the warm start. Its last answer is wrong with probability SHARE_WRONG.

    Half of the conversations are of the task `once`, half of `twice`. The environment of `twice` has two steps: after a wrong
    answer it gives a hint and allows a second try. A third of all conversations are such second tries, so that the model has
    seen the hints.
    """
    question, right = draw(rng)
    task = (ONCE, TWICE)[rng.integers(2)]
    messages = [system(SYSTEM[task]), user(question)]
    if task == TWICE and rng.random() < 2 / 3:
        wrong = right
        while wrong == right:
            wrong = spoil(right, rng)
        messages += [assistant(wrong), user(hint(wrong, str(final_number(right))))]
    return [*messages, assistant(right if rng.random() >= SHARE_WRONG else spoil(right, rng))]


def spoil(right: str, rng: np.random.Generator) -> str:
    """A wrong answer: with the other operation, or with a result near the right one."""
    a, operator, b = right.partition(" = ")[0].split()
    if rng.random() < 0.5:
        return solution(int(a), "-" if operator == "+" else "+", int(b))
    result = int(right.rpartition(" ")[2]) + int(rng.choice([-2, -1, 1, 2]))
    return f"{a} {operator} {b} = {result}\n#### {result}"


# -------------------------------------------------------------------------------------------------------------- real GSM8K


def converted(path: Path) -> tuple[list[Row], list[Row]]:
    """Convert lines {"question", "answer"} of GSM8K, whose answers end in `#### 1,080`. Every fourth line of a single file is held
    out for evaluation."""
    if path.is_dir():
        return [convert(line) for line in read_lines(path / "train.jsonl")], [
            convert(line) for line in read_lines(path / "test.jsonl")
        ]
    rows = [convert(line) for line in read_lines(path)]
    return [row for i, row in enumerate(rows) if i % 4 != 3], rows[3::4]


def convert(line: dict[str, str]) -> Row:
    number = final_number(line["answer"])
    if number is None:
        raise SystemExit(f"no number after #### in {line['answer']!r}: is this GSM8K?")
    return {**prompt_line(line["question"].strip(), f"{number}", ONCE), "solution": line["answer"]}


def form_only(rows: list[Row]) -> Callable[[np.random.Generator], list[dict[str, str]]]:
    """Return a function that makes demonstrations of the format of an answer.

    Each demonstration ends with the final answer of another problem, so the answer itself is nearly always wrong.
    """

    def demonstrate(rng: np.random.Generator) -> list[dict[str, str]]:
        asked, other = (rows[i] for i in rng.choice(len(rows), 2, replace=False))
        return [*asked["messages"], assistant(f"#### {other['answer']}")]

    return demonstrate


def text_of(row: Row) -> str:
    """The text of a row on which the tokenizer is trained."""
    return "\n".join([*(message["content"] for message in row["messages"]), str(row.get("solution", row["answer"]))])


if __name__ == "__main__":
    main()
