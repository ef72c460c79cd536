"""The least memory that a run needs, from its plan and the sizes of its models. Activations and libraries come on top.

Each rank of a trained model holds its share of weights, gradients and two moments of Adam in float32; a frozen one its share of
weights in train.dtype; a generation server weights and KV cache in generation.dtype.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.schema import ConfigError, GenerationServerConfig, ModelWorkerConfig
from asyncrl.launch.checks.model_files import count_parameters
from asyncrl.launch.program import ProcessSpec
from asyncrl.runtime.disk import size_text

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TRAINED_PARAMETER_BYTES = 16  # weight, gradient and two moments


@dataclass(frozen=True)
class ModelSize:
    """What a model's folder tells of its size, without loading it. Zeros where it tells nothing."""

    num_parameters: int = 0
    kv_values_per_token: int = 0  # in the KV cache, all layers

    @classmethod
    def of(cls, model_path: str) -> ModelSize:
        try:
            config = json.loads((Path(model_path).expanduser() / "config.json").read_text(encoding="utf-8"))
            heads = int(config.get("num_attention_heads", 0))
            head_dim = int(config.get("head_dim") or int(config.get("hidden_size", 0)) // max(heads, 1))
            kv_heads = int(config.get("num_key_value_heads") or heads)
            kinds = Counter(config.get("layer_types") or [""] * int(config.get("num_hidden_layers", 0)))
            layers = min(kinds.values(), default=0)  # layers of several kinds share the pages of the cache
        except (OSError, ValueError, TypeError, AttributeError):  # preflight says what is wrong with it
            return cls()
        try:
            num_parameters = count_parameters(model_path)
        except (OSError, ConfigError):
            num_parameters = 0
        return cls(num_parameters, 2 * layers * kv_heads * head_dim)


@dataclass(frozen=True)
class _Part:
    what: str
    device: str  # as CUDA_VISIBLE_DEVICES names it; "": main memory
    num_bytes: int
    remedy: str


def too_little_memory(
    specs: Sequence[ProcessSpec], sizes: Mapping[str, ModelSize], limits: Mapping[str, int]
) -> tuple[str, str] | None:
    """What is needed where it does not fit, and the remedy (pure). None: the least that is needed fits everywhere.

    sizes: by the path of a model. limits: bytes by device ("": main memory that is available); of others nothing is known.
    """
    parts = [part for spec in specs for part in _parts_of(spec, sizes)]
    for device, limit in limits.items():
        here = [part for part in parts if part.device == device]
        if (needed := sum(part.num_bytes for part in here)) > limit:
            by_name: dict[str, int] = {}
            for part in here:
                by_name[part.what] = by_name.get(part.what, 0) + part.num_bytes
            figures = ", ".join(f"{name} {size_text(size)}" for name, size in by_name.items() if size)
            largest = max(here, key=lambda part: by_name[part.what])
            place = f"of GPU {device}" if device else "available"
            return f"{size_text(limit)} {place}, at least {size_text(needed)} needed: {figures}", largest.remedy
    return None


def sizes_of(specs: Sequence[ProcessSpec]) -> dict[str, ModelSize]:
    """Of all models that the processes load, by path. Reads their folders."""
    paths: set[str] = set()
    for spec in specs:
        if isinstance(spec.config, ModelWorkerConfig):
            paths |= {model.path for model in spec.config.models}
        elif isinstance(spec.config, GenerationServerConfig):
            paths.add(spec.config.model_path)
    return {path: ModelSize.of(path) for path in paths}


def _parts_of(spec: ProcessSpec, sizes: Mapping[str, ModelSize]) -> Iterator[_Part]:
    config, devices = spec.config, spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if isinstance(config, ModelWorkerConfig):
        for model in config.models:
            on_gpu = bool(devices[0])
            if config.worker.index not in model.workers or (on_gpu and model.offload):
                continue
            frozen = DTYPE_BYTES.get(config.train.dtype, 4)
            each = TRAINED_PARAMETER_BYTES if model.trainable else frozen
            held = "weights, gradients and Adam state" if model.trainable else "weights"
            share = sizes[model.path].num_parameters * each // len(model.workers)
            remedy = f"use a smaller model than {model.path}" + (", or more GPUs in allocation=..." if on_gpu else "")
            yield _Part(f"{model.name} ({held})", devices[0], share, remedy)
    elif isinstance(config, GenerationServerConfig) and config.engine != "external":
        size, generation = sizes[config.model_path], config.generation
        value = DTYPE_BYTES.get(generation.dtype, 4)
        for device in devices:
            weights = size.num_parameters * value // len(devices)
            remedy = "use fewer generation servers in allocation=..., or a smaller model_path=..."
            yield _Part("weights of generation servers", device, weights, remedy)
            if device and config.engine == "sglang":  # it sizes its cache itself
                continue
            tokens = generation.num_blocks * generation.page_size
            cache = tokens * size.kv_values_per_token * value // len(devices)
            remedy = (
                f"set generation.num_blocks below {generation.num_blocks} (pages of generation.page_size="
                f"{generation.page_size} tokens), or use fewer generation servers in allocation=..."
            )
            yield _Part("KV caches", device, cache, remedy)
