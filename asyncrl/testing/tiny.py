"""Tiny models in Hugging Face format: real files that every process loads like a real model.

`make_tiny_model` writes a whole model directory (weights, config, tokenizer) in well under a second. torch is imported only inside
the functions.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"  # with another name, Qwen2Tokenizer would add this token
ALPHABET = string.digits + string.ascii_letters + "="  # with EOS: 64 tokens
CHAT_TEMPLATE = (  # ChatML, with tool calls in the format of Qwen and Hermes
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_5_text", "qwen3_moe")


def make_char_tokenizer(path: str | Path | None, alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, and EOS = id 0; saved to path if that is given.

    EOS is also the padding token. There is no other special token, because a policy could sample it in the middle of its text
    and decoding would not show it. Encoding a character outside the alphabet raises. AutoTokenizer loads every `qwen2` directory
    as Qwen2Tokenizer, which supports only printable ASCII without the space; asyncrl's own load_tokenizer supports every alphabet.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(alphabet)) != len(alphabet) or not alphabet:
        raise ValueError(f"alphabet {alphabet!r}: give at least one character, and each character once")
    vocabulary = {token: i for i, token in enumerate([EOS_TOKEN, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # no such token: unknown characters raise
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN, clean_up_tokenization_spaces=False
    )
    if path is not None:
        tokenizer.save_pretrained(path)
    return tokenizer


def make_chat_tokenizer(path: str | Path | None, chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, which encodes any text, and a chat template with tools; EOS ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    if path is not None:
        tokenizer.save_pretrained(path)
    return tokenizer


def make_tiny_model(
    path: str | Path | None,
    architecture: str = "qwen2",
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    hidden_size: int = 64,
    intermediate_size: int = 256,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 512,
    tie_embeddings: bool = True,
    initializer_range: float = 0.05,
    seed: int = 1,
) -> PreTrainedModel:
    """A causal language model with random weights (float32), saved to path with its tokenizer (default: of ALPHABET).

    The same arguments give the same weights. torch's global random state does not change.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r}: choose one of {', '.join(ARCHITECTURES)}")
    if tokenizer is None:
        tokenizer = make_char_tokenizer(None)
    width = hidden_size // num_heads
    more: dict[str, Any] = {}
    if architecture == "qwen3_5_text":  # every second layer, from the first on, is linear attention
        kinds = ["linear_attention", "full_attention"]
        more = {f"linear_{part}_head_dim": width for part in ("key", "value")}
        more |= {"linear_num_key_heads": num_kv_heads, "linear_num_value_heads": num_heads}
        more |= {"layer_types": [kinds[layer % 2] for layer in range(num_layers)], "pad_token_id": None}
    if architecture == "qwen3_moe":  # two of eight experts compute as much as a dense layer
        more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": intermediate_size // 2}
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=width,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert model.generation_config is not None
    # Not in `config`: the embedding of the padding token, which is EOS here, would not learn
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    if path is not None:
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    return model
