"""Tiny models and warm starts: real Hugging Face directories, which the Auto classes read unchanged."""

from __future__ import annotations

import string
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.protocol.trajectories import Locator
from asyncrl.testing.tiny import ALPHABET, ARCHITECTURES, EOS_TOKEN, make_char_tokenizer, make_tiny_model
from asyncrl.testing.warm_start import Pair, Recipe, complete, make, train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_char_tokenizer_round_trip(tmp_path: Path) -> None:
    alphabet = "ab \n.,é日<>"
    made = make_char_tokenizer(tmp_path, alphabet)
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert len(tokenizer) == len(alphabet) + 1
        assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
        assert tokenizer.encode(alphabet) == list(range(1, len(alphabet) + 1))
        assert tokenizer.decode(tokenizer.encode(" a  .b \n")) == " a  .b \n"
        assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == "ab"
        assert tokenizer.encode(f"a{EOS_TOKEN}") == [1, 0]
        with pytest.raises(Exception, match="UNK"):
            tokenizer.encode("z")


@pytest.mark.parametrize("alphabet", ["", "aa"])
def test_an_alphabet_has_each_character_once(alphabet: str) -> None:
    with pytest.raises(ValueError, match="each character once"):
        make_char_tokenizer(None, alphabet)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models_make_the_round_trip(tmp_path: Path, architecture: str) -> None:
    made = make_tiny_model(tmp_path, architecture)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.config.model_type == architecture
    assert loaded.config.vocab_size == len(tokenizer) == 64
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert loaded.dtype == torch.float32
    assert tokenizer.encode(ALPHABET + EOS_TOKEN) == [*range(1, 64), 0]
    assert tokenizer.decode(range(1, 64)) == ALPHABET
    ids = torch.tensor([tokenizer.encode("tiny=42")])
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, loaded(ids).logits, rtol=0, atol=0)


def test_the_seed_makes_the_weights_and_torch_does_not_notice() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    models = [make_tiny_model(None, seed=seed) for seed in (1, 1, 2)]
    assert torch.rand(1) == expected
    first, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert first.numel() == 127_552
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="'gpt5': choose one of qwen2, qwen3, llama, mistral"):
        make_tiny_model(None, "gpt5")


def echo_recipe(steps: int) -> Recipe:
    """A quickly learnable task: repeat the letter, twice after "!". Prompts have two or three characters."""
    pairs = [
        *((f"{c}=", c) for c in string.ascii_lowercase[:6]),
        *((f"!{c}=", c * 2) for c in string.ascii_lowercase[:6]),
    ]

    def demonstrate(rng: np.random.Generator) -> Pair:
        return pairs[rng.integers(len(pairs))]

    def reward(prompt: str, completion: str, answer: str, *, finished: bool = True) -> float:
        return float(finished and completion == answer)

    return Recipe(
        "echo",
        "!=" + string.ascii_lowercase,
        pairs,
        pairs,
        demonstrate,
        reward,
        max_new_tokens=4,
        steps=steps,
        batch_size=32,
    )


def test_a_warm_start_teaches_and_leaves_a_whole_run(tmp_path: Path) -> None:
    before, _ = make(echo_recipe(steps=0), tmp_path)
    sampled, greedy = make(echo_recipe(steps=100), tmp_path)  # replaces the first model
    assert before < 0.2
    assert sampled > 0.5
    assert greedy > 0.9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]
    tokenizer = load_tokenizer(tmp_path / "model")
    source = PromptSource(PromptSourceConfig(path=str(tmp_path / "data" / "train.jsonl"), shuffle=False), tokenizer)
    assert len(source) == 12
    assert (source.get(Locator(0, 6)).text, source.get(Locator(0, 6)).answer) == ("!a=", "aa")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    texts = complete(model, tokenizer, ["!b=", "c=", "!a=", "d="], max_new_tokens=4, greedy=True)
    assert [(text.text, text.finished) for text in texts] == [("bb", True), ("c", True), ("aa", True), ("d", True)]
    cut = complete(model, tokenizer, ["!b="], max_new_tokens=2, greedy=True)
    assert (cut[0].text, cut[0].finished) == ("bb", False)


def test_a_warm_start_computes_on_one_thread_and_puts_the_others_back(tmp_path: Path) -> None:
    recipe = echo_recipe(steps=2)
    seen = []

    def demonstrate(rng: np.random.Generator) -> Pair:
        seen.append(torch.get_num_threads())
        return recipe.demonstrate(rng)

    tokenizer = make_char_tokenizer(None, recipe.alphabet)
    model = make_tiny_model(None, tokenizer=tokenizer)
    torch.set_num_threads(3)
    train(model, tokenizer, replace(recipe, demonstrate=demonstrate))
    assert torch.get_num_threads() == 3
    complete(
        model,
        tokenizer,
        ["a="],
        max_new_tokens=1,
        greedy=True,
        progress=lambda num_prompts: seen.append(torch.get_num_threads()),
    )
    assert torch.get_num_threads() == 3
    assert set(seen) == {1}


@pytest.mark.parametrize("example", ["sloppy_sorter", "long_tail"])
def test_the_examples_command_lines(example: str) -> None:
    command = [sys.executable, str(EXAMPLES / example / "make.py"), "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "--out" in shown
    assert "--seed" in shown
