"""Agents with OpenAI's client over a real vLLM: the trained tokens are exactly those that vLLM sampled, across an update."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.schema import GenerationConfig
from tests.processes.served_engine import serve
from tests.processes.test_openai_generation import TOKENIZER, sessions_are_exact
from tests.support.real_servers import START_LIMIT_S


@pytest.mark.release
async def test_an_agents_sessions_are_the_tokens_of_vllm(vllm_config: GenerationConfig, tmp_path: Path) -> None:
    async with serve(
        tmp_path,
        TOKENIZER,
        engine="vllm",
        generation=vllm_config,
        start_limit_s=START_LIMIT_S,
        hidden_size=128,
        tie_embeddings=False,
    ) as served:
        await sessions_are_exact(served)
