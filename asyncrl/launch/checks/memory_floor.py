"""Computes the least memory that a run needs, from its plan and the sizes of its models. Activations and libraries need more.

- Each rank of a trained model holds its share of the weights, gradients and two Adam moments, in float32.
- Each rank of a frozen model holds its share of the weights, in train.dtype.
- A generation server holds weights and KV cache, in generation.dtype. On GPUs SGLang's cache is not counted, because SGLang chooses
  the size of its cache.
- SGLang servers of the engine external are not counted.
- On GPUs, models that are offloaded (train.offload) are not counted.
- Processes that share devices hold them in turns, so the larger turn counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.engines import traits_of
from asyncrl.config.processes import GenerationServerConfig, ModelWorkerConfig
from asyncrl.config.schema import ConfigError
from asyncrl.data.model_folder import read_object
from asyncrl.launch.checks.model_files import count_parameters
from asyncrl.launch.program import ProcessSpec
from asyncrl.runtime.disk import size_text

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TRAINED_PARAMETER_BYTES = 16  # weight, gradient and two moments


@dataclass(frozen=True)
class ModelSize:
    """A model's size, read from its folder without loading it. A field is 0 if the folder does not give it."""

    num_parameters: int = 0
    kv_values_per_token: int = 0  # values that one token needs in the KV cache, all layers together

    @classmethod
    def of(cls, model_path: str) -> ModelSize:
        try:
            config = read_object(Path(model_path).expanduser() / "config.json")
            heads = int(config.get("num_attention_heads", 0))
            head_dim = int(config.get("head_dim") or int(config.get("hidden_size", 0)) // max(heads, 1))
            kv_heads = int(config.get("num_key_value_heads") or heads)
            kinds = Counter(config.get("layer_types") or {"": int(config.get("num_hidden_layers", 0))})
            # Layers of different kinds (full, sliding attention) share the cache's pages, so count those of the rarest kind
            layers = min(kinds.values(), default=0)
        except (OSError, ValueError, TypeError, AttributeError):  # preflight reports the error
            return cls()
        try:
            num_parameters = count_parameters(model_path)
        except (OSError, ConfigError):
            num_parameters = 0
        return cls(num_parameters, 2 * layers * kv_heads * head_dim)


@dataclass(frozen=True)
class _Part:
    what: str
    device: str  # its name in CUDA_VISIBLE_DEVICES; "": main memory
    num_bytes: int
    remedy: str
    side: str = ""  # "generation" or "training": it is on a shared device only in this side's turns; "": always


def too_little_memory(
    specs: Sequence[ProcessSpec], sizes: Mapping[str, ModelSize], limits: Mapping[str, int]
) -> tuple[str, str] | None:
    """Find the first device with less memory than the processes on it need at least. Returns a text about the shortage, and the
    remedy. None: every device has enough. Pure.

    sizes: by model path. limits: bytes by device ("": available main memory); devices without a limit are not checked.
    """
    parts = [part for spec in specs for part in _parts_of(spec, sizes)]
    for device, limit in limits.items():
        turns = [
            [part for part in parts if part.device == device and part.side in ("", side)]
            for side in ("generation", "training")
        ]
        here = max(turns, key=lambda turn: sum(part.num_bytes for part in turn))
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
    """Return the sizes of all models that the processes load, by path. Reads the models' folders."""
    paths: set[str] = set()
    for spec in specs:
        if isinstance(spec.config, ModelWorkerConfig):
            paths |= {model.path for model in spec.config.models if model.kind != "none"}
        elif isinstance(spec.config, GenerationServerConfig):
            paths.add(spec.config.model_path)
    return {path: ModelSize.of(path) for path in paths}


def _parts_of(spec: ProcessSpec, sizes: Mapping[str, ModelSize]) -> Iterator[_Part]:
    config, devices = spec.config, spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if isinstance(config, ModelWorkerConfig):
        for model in config.models:
            on_gpu = bool(devices[0])
            held_here = config.worker.index in model.workers and model.kind != "none"
            if not held_here or (on_gpu and model.offload):
                continue
            frozen = DTYPE_BYTES.get(config.train.dtype, 4)
            each = TRAINED_PARAMETER_BYTES if model.trainable else frozen
            held = "weights, gradients and Adam state" if model.trainable else "weights"
            share = sizes[model.path].num_parameters * each // len(model.workers)
            remedy = f"use a smaller model than {model.path}" + (", or more GPUs in allocation=..." if on_gpu else "")
            side = "training" if config.shares_devices else ""
            yield _Part(f"{model.name} ({held})", devices[0], share, remedy, side)
    elif isinstance(config, GenerationServerConfig) and traits_of(config.engine).starts_servers:
        size, generation = sizes[config.model_path], config.generation
        value = DTYPE_BYTES.get(generation.dtype, 4)
        side = "generation" if config.shares_devices else ""
        for device in devices:
            weights = size.num_parameters * value // len(devices)
            remedy = "use fewer generation servers in allocation=..., or a smaller model_path=..."
            yield _Part("weights of generation servers", device, weights, remedy, side)
            if device and traits_of(config.engine).sizes_own_cache:
                continue
            tokens = generation.num_blocks * generation.page_size
            cache = tokens * size.kv_values_per_token * value // len(devices)
            remedy = (
                f"set generation.num_blocks below {generation.num_blocks} (pages of generation.page_size="
                f"{generation.page_size} tokens), or use fewer generation servers in allocation=..."
            )
            yield _Part("KV caches", device, cache, remedy, side)
