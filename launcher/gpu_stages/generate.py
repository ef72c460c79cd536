"""The embedded engine with Qwen3-0.6B's shape: speed by the number of requests, and loads."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.sharding import load_config
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import version_dir, write_version

from .bench import Bench, random_weights
from .sheet import Row

PROMPT_TOKENS, MOST_REQUESTS = 64, 256
NEW_TOKENS, FEW_TOKENS = 256, 64  # of the most requests at once; of fewer, whose passes take as long
_SHM = Path("/dev/shm")


def start(bench: Bench) -> Iterator[Row]:
    """Start the engine from a folder in memory. Its start has a self-check of about a dozen passes."""
    folder = Path(tempfile.mkdtemp(dir=_SHM if _SHM.is_dir() else None))
    bench.found["folder"] = folder
    source = Path(bench.model_folder("0.6B"))
    config = load_config(source, "lm")
    model = random_weights(bench.device).load_whole(source, "lm", config, torch.bfloat16)
    paths = {version: version_dir(folder, "actor", version) for version in (WeightVersion(1, 0), WeightVersion(2, 0))}
    for version, path in paths.items():
        named = ((name, parameter.detach().cpu()) for name, parameter in model.named_parameters())
        write_version(path, named, source_dir=source, version=version, fsync=False)
    num_bytes = sum(2 * parameter.numel() for parameter in model.parameters())
    del model
    settings = GenerationConfig(
        dtype="bfloat16", num_blocks=bench.size(4096, 64), max_running_requests=bench.size(MOST_REQUESTS, 8)
    )
    engine = TransformersEngine(EngineArguments(str(path), settings), device=str(bench.device))
    runner = asyncio.Runner()
    yield Row("start of the embedded engine", bench.clock(partial(runner.run, engine.start())), "s")
    bench.found["engine"] = engine, runner, config, num_bytes
    for version, path in paths.items():
        seconds = bench.clock(lambda path=path, version=version: runner.run(engine.load_weights(path, version)))
        rate = f"{num_bytes / seconds / 1e9:.2f} GB/s"
        yield Row(f"load_weights from memory, version {version}", seconds, "s", note=rate)


def throughput(count: int, bench: Bench) -> Iterator[Row]:
    """Tokens per second of so many requests at once; planned: the least time in which the card reads weights and KV cache."""
    engine, runner, config, num_bytes = bench.found["engine"]
    new = NEW_TOKENS if count == MOST_REQUESTS else FEW_TOKENS
    new, prompt, used = (
        bench.size(new, new // 32),
        bench.size(PROMPT_TOKENS, 8),
        min(count, bench.size(MOST_REQUESTS, 4)),
    )
    prompts = np.random.default_rng(count).integers(1, config.vocab_size, (used, prompt)).tolist()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)

    async def answers() -> None:
        await asyncio.gather(
            *(engine.submit(EngineRequest(f"{count}-{i}", ids, params)) for i, ids in enumerate(prompts))
        )

    seconds = bench.clock(lambda: runner.run(answers()))
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    read = num_bytes + used * (prompt + new / 2) * per_token
    planned = used * bench.kind.memory_bandwidth / read if bench.kind else None
    note = f"{1e3 * seconds / new:.1f} ms a pass"
    yield Row(f"{count} requests of {new} new tokens", used * new / seconds, "tokens/s", planned, note)


def close(bench: Bench) -> Iterator[Row]:
    shutil.rmtree(bench.found["folder"], ignore_errors=True)
    engine, runner, *_ = bench.found["engine"]
    yield Row("close of the engine", bench.clock(partial(runner.run, engine.close())), "s")


MEASUREMENTS = (
    ("start", start),
    *((f"{count} requests", partial(throughput, count)) for count in (MOST_REQUESTS, 64, 16, 1)),
    ("close", close),
)
