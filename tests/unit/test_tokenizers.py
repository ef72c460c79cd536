"""Special tokens of a prompt, with every tokenizer that the tests build and all ways in which it adds BOS and EOS to a text.

The reference is transformers: `apply_chat_template` with tokenize=True for chats, and the tokens of the text itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.chat import SpecialTokens
from asyncrl.data.prompts import Prompt, PromptSource, load_tokenizer
from asyncrl.protocol.trajectories import Locator
from asyncrl.testing import chat_model
from asyncrl.testing.tiny import make_char_tokenizer, make_chat_tokenizer
from asyncrl.testing.warm_start import complete

TEXT = "hi, one  two."
BOS = "<s>"


def metaspace() -> PreTrainedTokenizerFast:
    """Like Llama 2's: a space before the first word, byte fallback."""
    pieces = ["<unk>", BOS, "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,."]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token="</s>", unk_token="<unk>")


def start_is_end() -> PreTrainedTokenizerFast:
    """Like OPT's: one token is BOS and EOS. It has a special token that no field of the tokenizer names."""
    backend = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|header|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="</s>", eos_token="</s>")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "char": lambda: make_char_tokenizer(None, "".join(map(chr, range(32, 127)))),
    "chat": lambda: make_chat_tokenizer(None),
    "bpe": lambda: chat_model.make_tokenizer([TEXT] * 5, 300),
    "metaspace": metaspace,
    "start_is_end": start_is_end,
}


@pytest.fixture(params=[(False, False), (True, False), (False, True), (True, True)], ids=["none", "bos", "eos", "both"])
def adds(request: pytest.FixtureRequest) -> tuple[bool, bool]:
    found: tuple[bool, bool] = request.param
    return found


@pytest.fixture(params=TOKENIZERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, adds: tuple[bool, bool]) -> Path:
    """A saved tokenizer with these settings."""
    tokenizer = TOKENIZERS[request.param]()
    if tokenizer.bos_token is None:
        tokenizer.add_special_tokens({"bos_token": BOS})
    if any(adds):
        tokenizer.add_bos_token, tokenizer.add_eos_token = adds
        tokenizer.update_post_processor()
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def prompt_of(tokenizer: Any, folder: Path, row: Any, **config: Any) -> Prompt:
    (folder / "p.jsonl").write_text(json.dumps({"prompt": row}))
    source = PromptSource(PromptSourceConfig(path=str(folder / "p.jsonl"), answer_key="", **config), tokenizer)
    return source.get(Locator(0, 0))


def test_a_prompt_begins_with_bos_once_and_has_no_end(folder: Path, adds: tuple[bool, bool]) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer.encode(TEXT) == [bos] * adds[0] + ids + [eos] * adds[1]
    prompt = prompt_of(tokenizer, folder, TEXT)
    assert prompt.input_ids == [bos] * adds[0] + ids
    assert prompt.plain_text == prompt.text == TEXT
    written = prompt_of(tokenizer, folder, tokenizer.bos_token + TEXT)  # a prompt that was rendered elsewhere
    assert written.input_ids == tokenizer.encode(written.text, add_special_tokens=False)
    assert written.plain_text == TEXT


@pytest.mark.parametrize("start", ["{{ bos_token }}", ""], ids=["template_writes_bos", "template_without_bos"])
def test_the_template_writes_the_special_tokens_of_a_chat(folder: Path, start: str) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = (
        start
        + "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a.{% endif %}"
    )
    messages = [{"role": "user", "content": TEXT}]
    prompt = prompt_of(tokenizer, folder, messages, chat_template=True)
    assert prompt.input_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = bool(start) + 1 if tokenizer.bos_token == tokenizer.eos_token else bool(start)
    assert prompt.input_ids.count(tokenizer.bos_token_id) == expected
    assert prompt.input_ids[-1] != tokenizer.eos_token_id
    assert prompt.plain_text == f"{TEXT}a."


def test_the_library_that_light_processes_use_reads_and_writes_the_same_tokens(folder: Path) -> None:
    fast, light = load_tokenizer(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (TEXT, fast.bos_token + TEXT, f"{TEXT}{fast.eos_token} a", fast.eos_token):
        for special in (False, True):
            ids = fast.encode(text, add_special_tokens=special)
            assert ids == light.encode(text, add_special_tokens=special).ids
            for skip in (False, True):
                assert fast.decode(ids, skip_special_tokens=skip) == light.decode(ids, skip_special_tokens=skip)


def test_text_without_special_tokens_keeps_every_other_character(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    shown = f"{tokenizer.eos_token}a{tokenizer.bos_token} ,  <s <|im_start|> {tokenizer.eos_token}"
    left = "a ,  <s  " if "<|im_start|>" in tokenizer.all_special_tokens else "a ,  <s <|im_start|> "
    assert SpecialTokens(tokenizer).removed_from(shown) == left
    assert SpecialTokens(start_is_end()).removed_from("a<|header|>b") == "ab"


def test_a_warm_start_reads_prompts_like_a_run(folder: Path) -> None:
    class Model:
        def generate(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
            self.read = ids.tolist()
            return ids

    tokenizer, model = load_tokenizer(folder), Model()
    complete(model, tokenizer, [TEXT], max_new_tokens=1, greedy=True)  # type: ignore[arg-type]
    assert model.read == [prompt_of(tokenizer, folder, TEXT).input_ids]
