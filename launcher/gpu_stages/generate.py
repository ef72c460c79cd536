"""The embedded engine with Qwen3-0.6B's shape: speed by the number of requests, loads, and its logprobs beside the trainer's."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from asyncrl.config.processes import ModelConfig
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import AUTO, ExperimentConfig, GenerationConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.generation.engine import EngineArguments, EngineRequest, Generated
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.engine import TrainEngine
from asyncrl.model.sharding import load_config
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import version_dir, write_version

from .bench import Bench, random_weights
from .sheet import Row

PROMPT_TOKENS, MOST_REQUESTS = 64, 256
NEW_TOKENS, FEW_TOKENS = 256, 64  # of the most requests at once; of fewer, whose passes take as long
_COMPARED = 16  # sequences
_SHM = Path("/dev/shm")


def start(bench: Bench) -> Iterator[Row]:
    """Start the engine from a folder in memory. Its start has a self-check of about a dozen passes."""
    folder = Path(tempfile.mkdtemp(dir=_SHM if _SHM.is_dir() else None))
    source = Path(bench.model_folder("0.6B"))
    bench.found |= {"folder": folder, "runner": asyncio.Runner()}
    config = load_config(source, "lm")
    model = random_weights(bench.device).load_whole(source, "lm", config, torch.bfloat16)
    bench.found["versions"] = versions = [WeightVersion(1, 0), WeightVersion(2, 0)]
    bench.found["num_bytes"] = sum(2 * parameter.numel() for parameter in model.parameters())
    for version in versions:
        named = ((name, parameter.detach().cpu()) for name, parameter in model.named_parameters())
        write_version(version_dir(folder, "actor", version), named, source_dir=source, version=version, fsync=False)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.1)
    del model
    settings = GenerationConfig(
        dtype="bfloat16", num_blocks=bench.size(4096, 64), max_running_requests=bench.size(MOST_REQUESTS, 8)
    )
    path = version_dir(folder, "actor", versions[0])
    engine = TransformersEngine(EngineArguments(str(path), settings), device=str(bench.device))
    yield Row("start of the embedded engine", bench.clock(partial(bench.found["runner"].run, engine.start())), "s")
    bench.found["engine"] = engine


def _engine(bench: Bench) -> tuple[TransformersEngine, asyncio.Runner]:
    if "engine" not in bench.found:
        raise RuntimeError("the engine did not start")
    return bench.found["engine"], bench.found["runner"]


def load_weights(bench: Bench) -> Iterator[Row]:
    engine, runner = _engine(bench)
    for version in bench.found["versions"]:
        path = version_dir(bench.found["folder"], "actor", version)
        seconds = bench.clock(lambda path=path, version=version: runner.run(engine.load_weights(path, version)))
        rate = f"{bench.found['num_bytes'] / seconds / 1e9:.2f} GB/s"
        yield Row(f"load_weights from memory, version {version}", seconds, "s", note=rate)


def throughput(count: int, bench: Bench) -> Iterator[Row]:
    """Tokens per second of so many requests at once; planned: the least time in which the card reads weights and KV cache."""
    engine, runner = _engine(bench)
    new = NEW_TOKENS if count == MOST_REQUESTS else FEW_TOKENS
    new, prompt = bench.size(new, new // 32), bench.size(PROMPT_TOKENS, 8)
    used = min(count, bench.size(MOST_REQUESTS, 4))
    config = load_config(bench.model_folder("0.6B"), "lm")
    prompts = np.random.default_rng(count).integers(1, config.vocab_size, (used, prompt)).tolist()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)

    async def answers() -> list[Generated]:
        requests = [EngineRequest(f"{count}-{i}", ids, params) for i, ids in enumerate(prompts)]
        return list(await asyncio.gather(*(engine.submit(request) for request in requests)))

    results: list[Generated] = []
    seconds = bench.clock(lambda: results.extend(runner.run(answers())))
    bench.found[count] = prompts, results
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    read = bench.found["num_bytes"] + used * (prompt + new / 2) * per_token
    planned = used * bench.kind.memory_bandwidth / read if bench.kind else None
    note = f"{1e3 * seconds / new:.1f} ms a pass"
    yield Row(f"{count} requests of {new} new tokens", used * new / seconds, "tokens/s", planned, note)


def logprobs(bench: Bench) -> Iterator[Row]:
    """The engine's logprobs beside the trainer's forward pass with the same weights, as in the check of a run's first step."""
    prompts, results = bench.found[MOST_REQUESTS]
    wanted = ExperimentConfig(train=TrainConfig(dtype=AUTO), generation=GenerationConfig(dtype=AUTO))
    config = resolve(wanted, Facts(on_gpu=True))
    path = version_dir(bench.found["folder"], "actor", bench.found["versions"][-1])
    model = ModelConfig("actor", str(path), "d1", [0], trainable=True)
    made: list[TrainEngine] = []
    seconds = bench.clock(lambda: made.append(TrainEngine(model, config.train, device=bench.device)))
    yield Row("trainer's load of 0.6B", seconds, "s", note=f"{bench.found['num_bytes'] / seconds / 1e9:.2f} GB/s")
    pairs = list(zip(prompts, results, strict=True))[:_COMPARED]
    groups = [{"packed_input_ids": [np.array(ids + result.token_ids)]} for ids, result in pairs]
    sample = SequenceSample.from_groups([str(number) for number in range(len(groups))], groups)
    found = made[0].logprobs(sample, temperature=1.0)
    assert found is not None
    runs = np.split(found, np.cumsum([len(ids) + len(result.token_ids) for ids, result in pairs])[:-1])
    gaps = [abs(run[len(ids) :] - result.logprobs) for run, (ids, result) in zip(runs, pairs, strict=True)]
    gap, allowed = np.concatenate(gaps), config.weights.verify_tolerance
    note = "" if gap.max() < allowed else f"failed: the logprob check of a run allows {allowed}"
    yield Row("engine against trainer, largest logprob gap", float(gap.max()), "nats", allowed, note, anywhere=True)
    yield Row("engine against trainer, mean logprob gap", float(gap.mean()), "nats", anywhere=True)


def close(bench: Bench) -> Iterator[Row]:
    shutil.rmtree(bench.found["folder"], ignore_errors=True)
    engine, runner = _engine(bench)
    yield Row("close of the engine", bench.clock(partial(runner.run, engine.close())), "s")
    runner.close()


MEASUREMENTS = (
    ("start", start),
    ("load_weights", load_weights),
    (f"{MOST_REQUESTS} requests", partial(throughput, MOST_REQUESTS)),
    ("logprobs", logprobs),
    *((f"{count} requests", partial(throughput, count)) for count in (64, 16, 1)),
    ("close", close),
)
