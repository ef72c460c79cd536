"""A GPU gives the same numbers as a CPU: one update of the training engine, one response of the embedded generation engine."""

import asyncio

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import GenerationConfig, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.self_check import load_checked
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


def make_sample(rng, lengths) -> SequenceSample:
    groups = [
        {
            "packed_input_ids": [rng.integers(0, 64, n)],
            "loss_mask": [np.arange(n) >= 2],
            "advantages": [rng.normal(size=n).astype(np.float32)],
        }
        for n in lengths
    ]
    return SequenceSample.from_groups([f"g{i}" for i in range(len(groups))], groups)


def loss_fn(outputs, data, cu_seqlens):
    mask_T = data["loss_mask"]
    return -(data["advantages"] * outputs["logprobs"])[mask_T].mean(), {"tokens": mask_T.sum()}


def test_an_update_is_the_same(model_path):
    rng = np.random.default_rng(0)
    sample = make_sample(rng, rng.integers(3, 30, 12))
    train = TrainConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0))
    weights = {}
    for device in ("cpu", "cuda"):
        model = ModelConfig("actor", str(model_path), "d1", [0], trainable=True, optimizer=train.optimizer)
        engine = TrainEngine(model, train, device=device)
        engine.train_step(sample, loss_fn, temperature=1.0, lr_step=0)
        weights[device] = take_share(engine)
    for name, tensor in weights["cpu"].items():
        torch.testing.assert_close(weights["cuda"][name], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_logprobs_are_those_of_a_forward_pass(model_path, tmp_path, dtype):
    """64 requests at once: each pass has inputs of many requests, which the pass before it did not have."""
    version = WeightVersion(1, 0)
    path = version_dir(tmp_path, "actor", version)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tensors = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    write_version(path, tensors, source_dir=model_path, version=version)
    config = GenerationConfig(dtype=dtype)
    engine = TransformersEngine(EngineArguments(model_path, config, eos_token_ids=[0]))
    assert engine.weights_device == torch.device("cuda", 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 64, length).tolist() for length in rng.integers(3, 40, 64)]
    requests = [
        EngineRequest(f"r{number}", prompt, SamplingParams(max_new_tokens=24 + number % 8, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    await engine.start()
    try:
        await engine.load_weights(path, version)
        responses = await asyncio.gather(*map(engine.submit, requests))
    finally:
        await engine.close()
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = list(response.token_ids)
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1], dim=-1)
        expected = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-3 if dtype == "float32" else 0.05)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch's own code
@pytest.mark.parametrize("checkpointing", [False, True, "attention"])
def test_compiled_layers_give_the_same_update(model_path, checkpointing):
    """In bfloat16, with the varlen kernel within the compiled code, and packed rows of other lengths in the second step."""
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, rng.integers(3, 200, count)) for count in (12, 5)]
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0)
    norms, logprobs = {}, {}
    for choice in ("off", "on"):
        train = TrainConfig(optimizer=optimizer, dtype="bfloat16", gradient_checkpointing=checkpointing, compile=choice)
        model = ModelConfig("actor", str(model_path), "d1", [0], trainable=True, optimizer=optimizer)
        engine = load_checked(model, train, mesh=None, device=torch.device("cuda", 0))
        steps = [engine.train_step(sample, loss_fn, temperature=1.0, lr_step=0) for sample in samples]
        norms[choice] = [step["grad_norm"] for step in steps]
        logprobs[choice] = engine.logprobs(samples[0], temperature=1.0)
    np.testing.assert_allclose(norms["on"], norms["off"], rtol=0.02)
    np.testing.assert_allclose(logprobs["on"], logprobs["off"], atol=0.1)


class AttentionCalls(TorchDispatchMode):
    """Counts the forward passes of attention, in any kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.count += "backward" not in name and ("_varlen_attn" in name or "_scaled_dot_product" in name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [(700, 30, 1), (2500, 1900)], ids=str)
def test_backward_takes_the_kept_outputs_of_attention(model_path, lengths):
    """The gradient of checkpointing and of no checkpointing, with the calls of attention of the latter. Long sequences take sdpa on
    a GPU like an H100."""
    sample = make_sample(np.random.default_rng(0), lengths)
    found = {}
    for checkpointing in (False, True, "attention"):
        train = TrainConfig(dtype="bfloat16", gradient_checkpointing=checkpointing)
        model = ModelConfig("actor", str(model_path), "d1", [0], trainable=True)
        engine = TrainEngine(model, train, device="cuda:0")
        with AttentionCalls() as calls:
            grad_norm = engine.try_step(sample, loss_fn, temperature=1.0)["grad_norm"]
        found[checkpointing] = calls.count, grad_norm
    (calls, norm), (twice, _), (kept, of_kept) = found.values()
    assert (twice, kept) == (2 * calls, calls)
    assert of_kept == pytest.approx(norm, rel=0.01)
