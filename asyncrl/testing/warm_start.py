"""Starting models for small tasks (public): a supervised warm start, and the files of a run (model/, data/*.jsonl).

A script that makes a task describes it as a Recipe. `main` is a complete command line for it; `make` is the same as a function. RL
needs a starting model that gets some samples right and most wrong, so the warm start has a fixed number of steps, not a target
accuracy. `asyncrl.testing.chat_model` makes chat models the same way. The API is stable within a major version.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from asyncrl.cli.progress import StepProgress
from asyncrl.data.chat import with_start
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Pair = tuple[str, str]  # prompt, and its answer or a demonstration
_POOL_BATCHES = 8  # so many batches of demonstrations are drawn together and sorted by length, for less padding


class Reward(Protocol):
    """A reward function with an argument `finished`: whether the completion ended with EOS."""

    def __call__(self, prompt: str, completion: str, answer: str, *, finished: bool = True) -> float: ...


@dataclass(frozen=True)
class Recipe:
    """A task, and the training of its starting model."""

    name: str
    alphabet: str
    train: Sequence[Pair]  # prompts with their correct answers
    evaluation: Sequence[Pair]
    demonstrate: Callable[[np.random.Generator], Pair]  # draws a prompt and the completion to learn from
    reward: Reward
    max_new_tokens: int
    steps: int
    batch_size: int = 128
    lr: float = 2e-3


@dataclass(frozen=True)
class Completion:
    text: str  # without EOS
    finished: bool  # ended with EOS


def main(
    make_recipe: Callable[[np.random.Generator], Recipe], description: str, *, clock: Clock = SYSTEM_CLOCK
) -> None:
    """`make.py --out DIR [--seed N] [--architecture NAME]`: write DIR/data/{train,eval}.jsonl and DIR/model, and print the model's
    rewards."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="directory to write model/ and data/ into")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--architecture", default="qwen2", help="of the model: a name in ARCHITECTURES of asyncrl.testing.tiny"
    )
    arguments = parser.parse_args()
    started = clock.monotonic()
    recipe = make_recipe(np.random.default_rng(arguments.seed))
    sampled, greedy = make(recipe, arguments.out, seed=arguments.seed, architecture=arguments.architecture)
    print(
        f"{arguments.out / 'model'}: sampled reward {sampled:.3f}, greedy reward {greedy:.3f} "
        f"({clock.monotonic() - started:.0f} s)"
    )


def make(recipe: Recipe, out: Path, *, seed: int = 1, architecture: str = "qwen2") -> tuple[float, float]:
    """Write data and model of a recipe. Return the mean sampled and greedy reward on the evaluation prompts."""
    with StepProgress(f"{recipe.name}: importing torch and transformers"):
        import transformers  # noqa: F401  # takes seconds

        from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model

    for split, pairs in (("train", recipe.train), ("eval", recipe.evaluation)):
        write_lines(out / "data" / f"{split}.jsonl", ({"prompt": prompt, "answer": answer} for prompt, answer in pairs))
    tokenizer = make_char_tokenizer(None, recipe.alphabet)
    model = make_tiny_model(None, architecture, tokenizer=tokenizer, seed=seed)
    train(model, tokenizer, recipe, seed=seed)
    save(out / "model", model, tokenizer)
    return evaluate(model, tokenizer, recipe, greedy=False, seed=seed), evaluate(model, tokenizer, recipe, greedy=True)


def write_lines(path: Path, rows: Iterable[object]) -> None:
    """Write a JSONL file, for example prompts: {"prompt": ..., "answer": ...} per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def save(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a model's folder. It appears only when it is complete, and replaces an older one."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # there is only one shard
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the block, and restore the number of threads after it.

    More threads do not speed up a tiny model. With other processes on the machine they slow it down, because threads that share
    cores wait for each other: a step took 4 s instead of 0.8 s.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, *, seed: int = 1) -> None:
    """Supervised steps on the recipe's demonstrations: AdamW, constant rate, loss on the completions and their EOS. One thread."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0, fused=True)
    batches = _batches(tokenizer, recipe, np.random.default_rng([seed, 1]))
    model.train()
    with one_thread(), StepProgress(f"{recipe.name}: warm start", recipe.steps) as progress:
        for _ in range(recipe.steps):
            input_ids, labels, mean_tokens = next(batches)
            logits = model(input_ids=input_ids, use_cache=False).logits
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            # Divide by the mean number of tokens per batch, not by that of this batch: each token then has the same weight in short
            # and in long batches
            loss = losses / mean_tokens
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress.advance(note=f"loss {loss.item():.3f}")
    model.train(False)


def _batches(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe, rng: np.random.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Endless batches of demonstrations, padded on the right: input_ids, labels (-100: no loss), mean number of labels per
    batch.
    """
    import torch

    eos = tokenizer.eos_token_id
    while True:
        pairs = [recipe.demonstrate(rng) for _ in range(_POOL_BATCHES * recipe.batch_size)]
        prompts = _encoded(tokenizer, [prompt for prompt, _ in pairs])
        completions = tokenizer([completion for _, completion in pairs], add_special_tokens=False)["input_ids"]
        pool = [(prompt, [*completion, eos]) for prompt, completion in zip(prompts, completions, strict=True)]
        mean_tokens = sum(len(completion) for _, completion in pool) / _POOL_BATCHES
        pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        for i in rng.permutation(_POOL_BATCHES):
            batch = pool[i * recipe.batch_size : (i + 1) * recipe.batch_size]
            width = max(len(prompt) + len(completion) for prompt, completion in batch)
            input_ids = np.full((len(batch), width), eos)
            labels = np.full((len(batch), width), -100)
            for row, (prompt, completion) in enumerate(batch):
                end = len(prompt) + len(completion)
                input_ids[row, :end] = prompt + completion
                labels[row, len(prompt) : end] = completion
            yield torch.from_numpy(input_ids), torch.from_numpy(labels), mean_tokens


def _encoded(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of prompts, as a run reads them."""
    ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    return list(map(with_start, ids, tokenizer(list(prompts))["input_ids"]))


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, *, greedy: bool, seed: int = 1
) -> float:
    """Mean reward on the evaluation prompts, with one completion each."""
    prompts = [prompt for prompt, _ in recipe.evaluation]
    mode = "greedy" if greedy else "sampled"
    with StepProgress(f"{recipe.name}: evaluation, {mode}", len(prompts), unit="prompts") as progress:
        completions = complete(
            model,
            tokenizer,
            prompts,
            max_new_tokens=recipe.max_new_tokens,
            greedy=greedy,
            seed=seed,
            progress=progress.advance,
        )
    rewards = [
        recipe.reward(prompt, completion.text, answer, finished=completion.finished)
        for (prompt, answer), completion in zip(recipe.evaluation, completions, strict=True)
    ]
    return float(np.mean(rewards))


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    greedy: bool,
    seed: int = 1,
    progress: Callable[[int], None] = lambda num_prompts: None,
) -> list[Completion]:
    """Completions, sampled at temperature 1 or greedy, on one thread. Prompts of equal length are batched, so there is no padding.

    progress: called with the number of further completed prompts.
    """
    import torch

    generate: Any = model.generate
    completions: dict[int, Completion] = {}
    encoded = sorted(enumerate(_encoded(tokenizer, prompts)), key=lambda item: len(item[1]))
    with one_thread(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for length, group in groupby(encoded, key=lambda item: len(item[1])):
            positions, rows = zip(*group, strict=True)
            ids = torch.tensor(rows)
            output = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=not greedy,
                temperature=None if greedy else 1.0,
                top_k=None if greedy else 0,
                top_p=None if greedy else 1.0,
            )
            for position, tokens in zip(positions, output[:, length:].tolist(), strict=True):
                finished = tokenizer.eos_token_id in tokens
                text = tokens[: tokens.index(tokenizer.eos_token_id)] if finished else tokens
                completions[position] = Completion(str(tokenizer.decode(text)), finished)
            progress(len(rows))
    return [completions[i] for i in range(len(prompts))]
