"""Ways in which vLLM misbehaves, and that asyncrl keeps them from happening."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import (
    ConfigError,
    ExperimentConfig,
    GenerationConfig,
    PromptSourceConfig,
    RolloutConfig,
    TaskConfig,
)
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.vllm import VLLMEngine, own_server
from asyncrl.protocol.generation import SamplingParams
from tests.support.preflight import preflight
from tests.support.server_load import make_prompt, within
from tests.support.weight_store import EXACT, V0, V1, WeightStore


def config_of(store: WeightStore, python: str, tmp_path: Path) -> ExperimentConfig:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "1+1="}\n' * 64)
    return ExperimentConfig(
        allocation="vllm.d1+d1",
        fileroot=str(tmp_path / "runs"),
        model_path=str(store.model_path),
        prompts=PromptSourceConfig(path=str(prompts)),
        rollout=RolloutConfig(tasks={"default": TaskConfig(reward="json:dumps")}),
        generation=GenerationConfig(python=python),
    )


@pytest.mark.parametrize(
    ("hidden_size", "tied", "said"),
    [
        (128, True, "has tied embeddings; on a CPU vLLM keeps a packed copy of the output layer"),
        (64, False, "has attention heads of width 16; on a CPU vllm has only 32, 64"),
    ],
)
def test_a_model_that_vllm_cannot_serve_on_a_cpu_is_refused(
    tmp_path: Path, vllm_python: str, hidden_size: int, tied: bool, said: str
) -> None:
    store = WeightStore(tmp_path / "store", hidden_size=hidden_size, tied=tied)
    with pytest.raises(ConfigError, match=said):
        preflight(config_of(store, vllm_python, tmp_path))


@pytest.mark.release
async def test_tied_embeddings_are_loaded_only_in_part(vllm_config: GenerationConfig, tmp_path: Path) -> None:
    """vLLM reports the new version, and computes the output layer of the old one."""
    store = WeightStore(tmp_path / "store", hidden_size=128, tied=True)
    config = replace(vllm_config)
    engine = VLLMEngine(
        EngineArguments(str(store.model_path), config),
        own_server(config, str(store.model_path), tensor=1, seed=1, log=tmp_path / "vllm.log"),
    )
    await engine.start()
    try:
        worst = []
        for version in (V0, V1):
            await engine.load_weights(store.path(version), version)
            params = SamplingParams(max_new_tokens=20, ignore_eos=True)
            result = await within(engine.submit(EngineRequest(str(version), [1, 2, 3], params)))
            assert result.spans[0].version == str(version)
            expected = store.logprobs(version, [1, 2, 3], result.token_ids)
            worst.append(max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)))
    finally:
        await engine.close()
    assert worst[0] < EXACT
    assert worst[1] > 0.1


@pytest.mark.release
async def test_logprobs_of_guessed_tokens_are_wrong(
    vllm_store: WeightStore, vllm_config: GenerationConfig, tmp_path: Path
) -> None:
    """n-gram speculation: greedy tokens are identical, but logprobs of sampled tokens are not those of any distribution."""
    speculation = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    config = replace(vllm_config, server_args={"speculative-config": speculation})
    engine = VLLMEngine(
        EngineArguments(str(vllm_store.model_path), config),
        own_server(config, str(vllm_store.model_path), tensor=1, seed=1, log=tmp_path / "vllm.log"),
    )
    rng, worst = random.Random(8), 0.0
    await engine.start()
    try:
        await engine.load_weights(vllm_store.path(V0), V0)
        for i in range(5):
            prompt = make_prompt(rng, 6) * 5
            greedy, sampled = SamplingParams(max_new_tokens=60, temperature=0.0), SamplingParams(max_new_tokens=200)
            result = await within(engine.submit(EngineRequest(f"g{i}", prompt, greedy)))
            assert result.token_ids == vllm_store.greedy(V0, prompt, 60)
            result = await within(engine.submit(EngineRequest(f"s{i}", prompt, sampled)))
            expected = vllm_store.logprobs(V0, prompt, result.token_ids)
            worst = max(worst, *(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)))
    finally:
        await engine.close()
    assert worst > 1.0
