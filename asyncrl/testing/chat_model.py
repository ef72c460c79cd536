"""Small chat models (public): a BPE tokenizer with a chat template, a tiny model, a supervised warm start (warm_start.py).

The result is a folder written by `save_pretrained`; a run accepts any other such folder too. The API is stable within a major
version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.data.chat import ChatTemplate, Tools, messages_for_template
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.testing.warm_start import Recipe, evaluate, save, train

PAD, TURN_START, TURN_END = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)  # TURN_END is EOS: an answer ends with its turn
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Message = dict[str, str]  # role, content


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the texts. Each digit is one token, which makes arithmetic learnable. Any text can be encoded."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None
) -> str:
    """The prompt text for the model's turn in a conversation, as `prompts.chat_template: true` renders a line."""
    return ChatTemplate(tokenizer, {}).prompt_text(messages_for_template(list(messages)), tools)


def make_model(
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    *,
    architecture: str,
    max_positions: int,
    seed: int,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Warm-start a model on the recipe's demonstrations, write it to out/model, and print its rewards."""
    started = clock.monotonic()
    model = make_tiny_model(
        None, architecture, tokenizer=tokenizer, hidden_size=64, max_positions=max_positions, seed=seed
    )
    train(model, tokenizer, recipe, seed=seed)
    save(out / "model", model, tokenizer)
    sampled = evaluate(model, tokenizer, recipe, greedy=False, seed=seed)
    greedy = evaluate(model, tokenizer, recipe, greedy=True)
    print(
        f"{out / 'model'}: {architecture}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens; "
        f"sampled reward {sampled:.3f}, greedy reward {greedy:.3f} ({clock.monotonic() - started:.0f} s)"
    )


def read_lines(path: Path) -> Iterator[dict[str, str]]:
    """Read a JSONL file. Split lines at newline bytes only: str.splitlines would also split GSM8K questions at U+2028."""
    for line in path.read_bytes().split(b"\n"):
        if line.strip():
            yield msgspec.json.decode(line)
