"""Makes the calculator's problems, and a small chat model that has seen tool calls, mostly with a wrong expression.

python make.py --out DIR [--seed N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from agent import CALCULATOR, calculate

from asyncrl.rollout.tool_calls import parse_tool_calls
from asyncrl.testing import chat_model
from asyncrl.testing.warm_start import Pair, Recipe, write_lines

NUM_TRAIN, NUM_EVAL = 2048, 256
SHARE_WRONG = 0.6  # share of the demonstrated calls that are wrong
# ChatML with one line per tool, and calls in the format of Qwen and Hermes. Short, because every prompt contains it.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>tool\n"
    "{{ tool.function.name }}: {{ tool.function.description }}<|im_end|>\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LARGEST = 9
NAMES = ("Ann", "Ben", "Cleo", "Dmitri", "Eve", "Farid", "Gül", "Hana")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "pencils", "shells", "cards")
STORIES = (
    ("+", "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?"),
    ("+", "{name} finds {a} {things}, and {friend} finds {b}. How many do they find together?"),
    ("-", "{name} has {a} {things} and loses {b} of them. How many {things} are left?"),
    ("-", "There are {a} {things} on the table. {name} takes {b} away. How many are left?"),
)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that gets model/ and data/")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="steps of the warm start")
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    train, evaluation = invented(rng)
    write_lines(arguments.out / "data" / "train.jsonl", train)
    write_lines(arguments.out / "data" / "eval.jsonl", evaluation)

    tokenizer = make_tokenizer(np.random.default_rng([arguments.seed, 1]))

    def demonstration(rng: np.random.Generator) -> Pair:
        """Show a first turn or, one time in three, a second turn."""
        messages = conversation(rng)
        turn = 3 if rng.random() < 1 / 3 else 1
        return render(tokenizer, messages[:turn]), content_of(messages[turn])

    recipe = Recipe(
        name="calculator",
        alphabet="",  # the tokenizer is made above
        train=[],
        evaluation=[(render(tokenizer, row["messages"]), row["answer"]) for row in evaluation],
        demonstrate=demonstration,
        reward=lambda prompt, completion, answer, *, finished=True: float(finished and result_of(completion) == answer),
        max_new_tokens=32,
        steps=arguments.steps,
        batch_size=64,
    )
    chat_model.make_model(
        arguments.out, tokenizer, recipe, architecture="llama", max_positions=512, seed=arguments.seed
    )


def make_tokenizer(rng: np.random.Generator) -> Any:
    """Train a tokenizer on whole conversations. Each tag of a tool call is a token."""
    texts = [
        text
        for _ in range(NUM_TRAIN)
        for message in conversation(rng)
        for text in (message["role"], content_of(message))
    ]
    tokenizer = chat_model.make_tokenizer(texts, vocab_size=512)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


def invented(rng: np.random.Generator) -> tuple[list[Row], list[Row]]:
    """Prompts with their answers, all different."""
    answers: dict[str, str] = {}
    while len(answers) < NUM_TRAIN + NUM_EVAL:
        question, expression = draw(rng)
        answers[question] = calculate(json.dumps({"expression": expression}))
    rows = [{"messages": prompt(question), "answer": answer} for question, answer in answers.items()]
    return rows[:NUM_TRAIN], rows[NUM_TRAIN:]


def draw(rng: np.random.Generator) -> Pair:
    """A question, and the expression that answers it."""
    operator, story = STORIES[rng.integers(len(STORIES))]
    name, friend = rng.choice(NAMES, 2, replace=False)
    a, b = (int(number) for number in rng.integers(1, LARGEST + 1, 2))
    if operator == "-":
        a, b = max(a, b), min(a, b)
    question = story.format(name=name, friend=friend, things=rng.choice(THINGS), a=a, b=b)
    return question, f"{a} {operator} {b}"


def prompt(question: str) -> list[Row]:
    return [chat_model.user(question)]


def conversation(rng: np.random.Generator) -> list[Row]:
    """A story, a call (mostly with the other operation or another number), the tool's result, and the answer."""
    question, expression = draw(rng)
    a, operator, b = expression.split()
    if rng.random() < SHARE_WRONG:
        if rng.random() < 0.5:
            operator = "-" if operator == "+" else "+"
        else:
            b = str(int(b) + 1)
    arguments = {"expression": f"{a} {operator} {b}"}
    result = calculate(json.dumps(arguments))
    call = {"id": "call", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        *prompt(question),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        chat_model.assistant(f"#### {result}"),
    ]


def render(tokenizer: Any, messages: list[Row]) -> str:
    """The model's input for its next turn of a conversation."""
    return chat_model.render(tokenizer, messages, [CALCULATOR])


def content_of(message: Row) -> str:
    """A message in the template's format."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    return str(message["content"]) + "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def result_of(completion: str) -> str | None:
    """The calculator's result for a first turn; None if it has no call."""
    calls = parse_tool_calls(completion).tool_calls
    return calculate(calls[0].arguments) if calls else None


if __name__ == "__main__":
    main()
