"""eta = 0 is the synchronous algorithm: the whole system is compared with a plain loop in one process.

Greedy decoding and one response a prompt make both deterministic, so the weights must agree after some steps.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_runs import BATCH, CLIP, EPS, LR, MAX_NEW_TOKENS, SEED, STEPS, WARMUP, published_weights, trained_events

from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.testing.runs import RunHandle, assert_nothing_left, train_steps

pytestmark = pytest.mark.timeout(900)


def test_trains_only_on_its_own_version(synchronous: RunHandle) -> None:
    run_dir = synchronous.run_dir
    assert [record["offpolicy/head_max"] for record in train_steps(run_dir)] == [0.0] * STEPS
    for event in trained_events(run_dir):
        versions = {tuple(span) for group in event["groups"] for span in group["versions"]}
        assert versions == {(event["step"] - 1, event["step"] - 1)}
        positions = range((event["step"] - 1) * BATCH, event["step"] * BATCH)
        assert [tuple(group["prompt"]) for group in event["groups"]] == [(0, position) for position in positions]
    assert_nothing_left(run_dir)


def test_its_weights_equal_those_of_a_plain_loop(synchronous: RunHandle, sorter: Path) -> None:
    plain = plain_loop(sorter)
    trained = published_weights(synchronous.run_dir, STEPS)
    for name, tensor in trained.items():
        torch.testing.assert_close(
            tensor, plain[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    start = load_file(next((sorter / "model").glob("*.safetensors")))
    moved = {name: float((start[name] - tensor).abs().max()) for name, tensor in trained.items()}
    assert max(moved.values()) > 1e-4  # training has changed the weights; otherwise equal weights would prove nothing


def plain_loop(sorter: Path) -> dict[str, torch.Tensor]:
    """Policy gradient with PPO's ratio (which is 1: one minibatch), written as in a notebook."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(sorter / "model")
    model = AutoModelForCausalLM.from_pretrained(sorter / "model", dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (sorter / "data" / "train.jsonl").read_text().splitlines()]
    order = PromptSource(PromptSourceConfig(path=str(sorter / "data" / "train.jsonl")), None, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    for step in range(STEPS):
        batch = [rows[order.locate(0, step * BATCH + i)] for i in range(BATCH)]
        sequences, rewards = [], []
        for row in batch:
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            response = greedy(model, prompt, tokenizer.eos_token_id)
            finished = response[-1] == tokenizer.eos_token_id
            text = tokenizer.decode(response, skip_special_tokens=True)
            rewards.append(float(finished and text == row["answer"]))
            sequences.append((prompt, response))
        advantages = torch.cat(
            [torch.full((len(r),), x, dtype=torch.float64) for (_, r), x in zip(sequences, rewards, strict=True)]
        )
        advantages = ((advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-5)).float()
        logprobs = torch.cat([response_logprobs(model, prompt, response) for prompt, response in sequences])
        ratio = torch.exp(logprobs - logprobs.detach())
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * (step + 1) / WARMUP
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], eos: int) -> list[int]:
    response: list[int] = []
    while len(response) < MAX_NEW_TOKENS and eos not in response:
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, -1]
        response.append(int(logits.argmax()))
    return response


def response_logprobs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
