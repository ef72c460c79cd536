"""The supervised term of the actor's loss (train.ptx): its value and gradient, and which texts a step trains on."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.supervised import SupervisedLoss
from asyncrl.config.schema import PromptSourceConfig, PtxConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model.supervised import SupervisedTexts
from asyncrl.testing.tiny import make_char_tokenizer

KEYS = ("packed_input_ids", "loss_mask", "advantages")
NUM_TEXTS = 5


def policy_loss(outputs: Any, data: Any, cu_seqlens: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum of the logprobs under loss_mask."""
    loss = -outputs["logprobs"].masked_fill(~data["loss_mask"], 0.0).sum()
    return loss, {"loss": loss.detach(), "num_tokens": data["loss_mask"].sum()}


def test_the_term_and_its_gradient_by_hand() -> None:
    """Probabilities 1/2 at a response's token, 1/4 and 1/8 at the supervised tokens, 1/16 at a text's prompt.

    ptx = (log 4 + log 8) / 2. Its gradient is -1/2 for each supervised logprob, times the coefficient.
    """
    logprobs = torch.tensor([1 / 2, 1 / 16, 1 / 4, 1 / 8]).log().requires_grad_()
    data = {
        "loss_mask": torch.tensor([True, False, False, False]),
        "supervised_mask": torch.tensor([False, False, True, True]),
    }
    loss, stats = SupervisedLoss(policy_loss, 0.1, 2)({"logprobs": logprobs}, data, torch.tensor([0, 1, 4]))
    ptx = 5 * math.log(2) / 2
    assert loss.item() == pytest.approx(math.log(2) + 0.1 * ptx)
    assert stats["loss"].item() == pytest.approx(loss.item())
    assert stats["ptx_loss"].item() == pytest.approx(ptx)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1, 0, -0.05, -0.05])


def test_other_tokens_of_a_text_have_no_effect() -> None:
    logprobs = torch.tensor([-1.0, float("nan"), -2.0], requires_grad=True)
    data = {"loss_mask": torch.tensor([True, False, False]), "supervised_mask": torch.tensor([False, False, True])}
    loss, _ = SupervisedLoss(policy_loss, 1.0, 1)({"logprobs": logprobs}, data, torch.tensor([0, 1, 3]))
    assert loss.item() == pytest.approx(3)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1, 0, -1]


def test_the_responses_still_stop_the_step() -> None:
    class Stopping:
        def __call__(self, *_: object) -> Any: ...

        def stop_reason(self, stats: object) -> str:
            return f"stopped by {stats}"

    assert SupervisedLoss(Stopping(), 1.0, 1).stop_reason({}) == "stopped by {}"
    assert SupervisedLoss(policy_loss, 1.0, 1).stop_reason({}) == ""


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    make_char_tokenizer(tmp_path / "tokenizer", "012345=")
    lines = [json.dumps({"prompt": f"{number}=", "answer": str(number) * (number + 1)}) for number in range(NUM_TEXTS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return tmp_path / "texts.jsonl"


def texts_of(file: Path, *, batch_size: int = 4, max_length: int = 100, seed: int = 1) -> SupervisedTexts:
    config = PtxConfig(PromptSourceConfig(path=str(file)), batch_size=batch_size, max_length=max_length)
    return SupervisedTexts(config, str(file.parent / "tokenizer"), seed=seed, keys=KEYS)


def ids_of(texts: SupervisedTexts, step: int, num_parts: int) -> list[list[list[int]]]:
    return [[text.input_ids for text in part] for part in texts.parts(step, num_parts)]


def test_a_text_is_prompt_answer_and_eos(texts_file: Path) -> None:
    (part,) = texts_of(texts_file, batch_size=NUM_TEXTS).parts(0, 1)
    one = min(part, key=lambda text: len(text.input_ids))  # "0=0", EOS
    assert (one.input_ids, one.prompt_length, one.num_supervised) == ([1, 7, 1, 0], 2, 2)


@pytest.mark.parametrize("answer", [None, ["0"], {"a": 1}])
def test_an_answer_that_is_no_text_is_refused_with_the_line(texts_file: Path, answer: Any) -> None:
    texts_file.write_text(texts_file.read_text() + "\n" + json.dumps({"prompt": "1=", "answer": answer}))
    with pytest.raises(
        ValueError, match=rf"texts.jsonl:{NUM_TEXTS + 1}: the answer is .*; it must be text or a number"
    ):
        texts_of(texts_file)


def test_a_text_that_the_tokenizer_cannot_encode_is_named_with_its_line(texts_file: Path) -> None:
    texts_file.write_text('\n{"prompt": "1=", "answer": "x"}')
    with pytest.raises(
        ValueError, match=r"train.ptx.texts: .*texts.jsonl:2: the tokenizer cannot encode the prompt 'x'"
    ):
        texts_of(texts_file, batch_size=1).parts(0, 1)


def test_no_end_stands_between_prompt_and_answer(tmp_path: Path) -> None:
    tokenizer = make_char_tokenizer(None, "012345=")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_bos_token = tokenizer.add_eos_token = True
    tokenizer.update_post_processor()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts.jsonl").write_text('{"prompt": "1=", "answer": 3}')
    (part,) = texts_of(tmp_path / "texts.jsonl", batch_size=1).parts(0, 1)
    (text,) = part
    assert tokenizer.decode(text.input_ids) == "<s>1=3<|endoftext|>"
    assert text.prompt_length == 3


def test_a_long_text_is_cut(texts_file: Path) -> None:
    (part,) = texts_of(texts_file, batch_size=NUM_TEXTS, max_length=3).parts(0, 1)
    assert {(len(text.input_ids), text.num_supervised) for text in part} == {(3, 1)}


def test_each_pass_has_every_text_once_in_its_own_order(texts_file: Path) -> None:
    texts = texts_of(texts_file)
    seen = [ids for step in range(5) for part in ids_of(texts, step, 2) for ids in part]  # 20 texts: four passes
    passes = [[tuple(ids) for ids in seen[at : at + NUM_TEXTS]] for at in range(0, 20, NUM_TEXTS)]
    assert all(len(set(one)) == NUM_TEXTS for one in passes)
    assert len(set(map(tuple, passes))) > 1


def test_seed_and_step_determine_the_texts(texts_file: Path) -> None:
    """A resumed run repeats them, whatever it has read before."""
    texts = texts_of(texts_file)
    first = [ids_of(texts, step, 3) for step in range(4)]
    assert [ids_of(texts_of(texts_file), step, 3) for step in reversed(range(4))] == first[::-1]
    assert [ids_of(texts_of(texts_file, seed=2), step, 3) for step in range(4)] != first


def responses(num: int = 1) -> SequenceSample:
    return SequenceSample.from_groups(
        [f"t{i}" for i in range(num)],
        [{"packed_input_ids": [[3, 4]], "loss_mask": [[False, True]], "advantages": [[0.0, 0.5]]}] * num,
    )


@pytest.mark.parametrize("layout", [[1], [1, 0], [0, 2, 1, 0, 0]])
def test_ranks_share_the_texts_and_the_denominator(texts_file: Path, layout: Sequence[int]) -> None:
    """layout: groups of each rank. Each text is on one rank, and every rank divides by the tokens of all texts."""
    texts = texts_of(texts_file)
    (part,) = texts.parts(0, 1)
    found = []
    for rank, num in enumerate(layout):
        sample = responses(num) if num else None
        mixed, loss = texts.mix(part, sample, policy_loss, replica=rank, num_replicas=len(layout))
        assert isinstance(loss, SupervisedLoss)
        assert loss.denominator == sum(text.num_supervised for text in part)
        if mixed is None:
            assert rank >= len(part)
            assert not num
            continue
        assert mixed.ids[:num] == tuple(f"t{i}" for i in range(num))
        assert set(mixed.keys) == {*KEYS, "supervised_mask"}
        assert not (mixed.data["loss_mask"] & mixed.data["supervised_mask"]).any()
        assert mixed.data["loss_mask"].sum() == num
        assert np.abs(mixed.data["advantages"]).sum() == num / 2
        found += [ids.tolist() for (ids,) in mixed.slices("packed_input_ids")[num:]]
    assert sorted(found) == sorted(text.input_ids for text in part)


def test_without_a_supervised_token_nothing_changes(texts_file: Path) -> None:
    """All prompts are longer than max_length."""
    texts = texts_of(texts_file, max_length=2)
    sample = responses()
    assert texts.mix(texts.parts(0, 1)[0], sample, policy_loss, replica=0, num_replicas=1) == (sample, policy_loss)
