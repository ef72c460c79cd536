"""How often a pass of the embedded engine copies between host and device, and waits for it: counted on a simulated device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from asyncrl.architectures.attention import CAUSAL, Pattern
from asyncrl.config.schema import GenerationConfig
from asyncrl.generation import padded_attention
from asyncrl.generation import transformers as embedded
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from tests.support.other_device import DEVICE, Copy, OtherDevice

CONFIG = GenerationConfig(max_running_requests=16, max_batch_tokens=64, num_blocks=64, page_size=16)
LENGTHS = (3, 90, 20, 1)  # of the prompts; one needs two passes, and decoding needs two rectangles
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("device_copies")
    make_tiny_model(path)
    return str(path)


async def sample(model: str, device: str | torch.device) -> list[tuple[list[int], list[float]]]:
    engine = TransformersEngine(EngineArguments(model, CONFIG), device=device)
    await engine.start()
    try:
        engine._version = WeightVersion(1, 0)  # the weights of the folder, which it has loaded
        params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        prompts = [[1 + (7 * place + length) % 60 for place in range(length)] for length in LENGTHS]
        futures = [engine.submit(EngineRequest(f"{len(ids)}", ids, params)) for ids in prompts]
        return [((await future).token_ids, (await future).logprobs) for future in futures]
    finally:
        await engine.close()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[Copy]]:
    """Lets engines run on DEVICE. Returns the copies of each pass, from its preparation to its results."""
    passes: list[list[Copy]] = []
    load, control = AutoModelForCausalLM.from_pretrained, TransformersEngine._in_control
    loop, update = embedded._Manager._run_generation_loop, ContinuousBatchProcessor.update_batch

    def load_on_host(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return load(*args, **kwargs)

    async def in_control(self: TransformersEngine, function: Callable[[], Any]) -> Any:
        def run() -> Any:
            with OtherDevice():
                return function()

        return await control(self, run)

    def run_loop(self: Any) -> None:
        with OtherDevice() as there:

            def count(processor: Any) -> None:
                update(processor)
                passes.append(list(there.copies))
                there.copies.clear()

            monkeypatch.setattr(ContinuousBatchProcessor, "update_batch", count)
            loop(self)

    async def no_check(self: TransformersEngine) -> None:
        """It scores with attention of torch that knows no simulated tensors."""

    monkeypatch.setattr(TransformersEngine, "_self_check", no_check)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_on_host)
    monkeypatch.setattr(TransformersEngine, "_in_control", in_control)
    monkeypatch.setattr(embedded._Manager, "_run_generation_loop", run_loop)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # simulated tensors cannot be tensors of inference
    return passes


async def test_a_pass_copies_once_to_the_device_and_once_back(model: str, passes: list[list[Copy]]) -> None:
    """No copy waits: the end of the pass is the only wait. The results are those of a CPU."""
    found = await sample(model, DEVICE)
    assert len(passes) > NUM_TOKENS
    assert [copies for copies in passes if copies != [Copy("device", False), Copy("host", False)]] == []
    for (tokens, logprobs), expected in zip(found, await sample(model, "cpu"), strict=True):
        assert tokens == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=1e-5)


async def test_no_pass_uses_cudnn(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention builds a plan for each new shape, and each pass of a decoding request has one."""
    allowed: set[bool] = set()
    attend = padded_attention.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Any:
        allowed.add(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(padded_attention, "scaled_dot_product_attention", watched)
    await sample(model, "cpu")
    assert allowed == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()  # for other code of the process


@pytest.mark.parametrize("pattern", [CAUSAL, Pattern(window=5), Pattern(chunk=4)])
def test_masks_show_the_pattern(pattern: Pattern) -> None:
    plan = padded_attention.make_plan([1, 1, 3], [9, 7, 8], np.arange(24), trash_row=99, places={0: 0})
    for part in plan.rectangles:
        mask = part.mask(pattern, torch.bfloat16)
        shown = pattern.shows(part.query_at.numpy()[:, :, None], np.arange(part.key_length))
        assert (mask.dtype, mask.shape[1:3]) == (torch.bfloat16, (1, 1))
        assert ((mask[:, 0, 0] == 0).numpy() == shown).all()
        assert part.mask(pattern, torch.bfloat16) is mask
