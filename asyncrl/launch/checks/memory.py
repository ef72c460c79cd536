"""A quick estimate of the memory of a run, from its processes and the sizes of its models (pure, except ModelSize.of).

Each part of it is on one device. A part that counts at least is certain:

- Each rank of a trained model holds its share of the weights, gradients and two Adam moments, in float32.
- Each rank of a frozen model, or of the frozen base of adapters, holds its share of the weights, in train.dtype. Adapters are not
  counted. A reference that is the base of the actor has no weights of its own.
- Each rank of the actor keeps its share of weights, in train.dtype and in main memory, for each model of another worker group
  that follows the actor.
- A generation server holds weights and KV cache, in generation.dtype. On GPUs SGLang's cache is not counted, because SGLang chooses
  the size of its cache.
- SGLang servers of the engine external are not counted.
- On GPUs, models that are offloaded (train.offload, or because servers share the devices) are in pinned main memory, in chunks.
- Processes that share devices hold them in turns, so the larger turn counts.

The other parts are each rank's copies of a version, of a checkpoint and of buckets in main memory, and the main memory of processes
beside their models, as measured. Activations are in neither. asyncrl/plan has the exact plan of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.engines import traits_of
from asyncrl.config.processes import GenerationServerConfig, ModelConfig, ModelWorkerConfig
from asyncrl.config.schema import ConfigError, GenerationConfig
from asyncrl.config.transports import transport_of
from asyncrl.data.model_folder import read_object, text_config
from asyncrl.data.state_layers import StateLayer, layers_with_attention
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import WorkerGroups, gets_kept_weights
from asyncrl.launch.checks.model_files import count_parameters
from asyncrl.launch.program import ProcessSpec
from asyncrl.runtime.disk import size_text

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Memory of a process before it loads a model or data: measured in the quickstart, rounded up
_COMPUTING_BYTES = 600 << 20  # with torch and transformers
_OTHER_BYTES = 130 << 20
CHECKPOINT_BYTES = 12  # of a trained parameter: weights and two moments, in float32
_BUCKETS = 2  # of the sender of a broadcast: with NCCL pinned ones that it sends, with gloo ones that it receives
_CHUNK_BYTES = 256 << 20  # of pinned memory (model/offload.py)
_FIXED_BYTES = 200 << 20  # launcher and etcd


@dataclass(frozen=True)
class ModelSize:
    """A model's size, read from its folder without loading it. A field is 0 if the folder does not give it."""

    num_parameters: int = 0
    kv_values_per_token: int = 0  # values that one token needs in the KV cache, all layers with attention together
    state_layers: int = 0  # layers that have `state` in place of attention
    state: StateLayer | None = None

    @classmethod
    def of(cls, model_path: str) -> ModelSize:
        try:
            config = text_config(read_object(Path(model_path).expanduser() / "config.json"))
            heads = int(config.get("num_attention_heads", 0))
            head_dim = int(config.get("head_dim") or int(config.get("hidden_size", 0)) // max(heads, 1))
            kv_heads = int(config.get("num_key_value_heads") or heads)
            layers, state = layers_with_attention(config), StateLayer.of(config)
            others = int(config.get("num_hidden_layers", 0)) - layers
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # preflight reports the error
            return cls()
        try:
            num_parameters = count_parameters(model_path)
        except (OSError, ConfigError):
            num_parameters = 0
        return cls(num_parameters, 2 * layers * kv_heads * head_dim, others, state)

    def states_bytes(self, generation: GenerationConfig) -> int:
        """Bytes of the states of as many requests as run at the same time."""
        if self.state is None:
            return 0
        each = self.state.state_bytes(DTYPE_BYTES.get(generation.dtype, 4))
        return generation.max_running_requests * self.state_layers * each

    def cache_bytes(self, generation: GenerationConfig) -> int:
        """Bytes of a KV cache of all blocks."""
        tokens = generation.num_blocks * generation.page_size
        return tokens * self.kv_values_per_token * DTYPE_BYTES.get(generation.dtype, 4)


@dataclass(frozen=True)
class Part:
    """Memory on one device that a process needs for one purpose."""

    what: str
    num_bytes: float
    device: str = ""  # its name in CUDA_VISIBLE_DEVICES; "": main memory
    remedy: str = ""
    side: str = ""  # "generation" or "training": it is on a shared device only in this side's turns; "": always
    is_least: bool = True


def resident_bytes(model: ModelConfig, dtype: str) -> dict[str, int]:
    """Bytes of each parameter of a model, by kind, on all its ranks together. dtype: train.dtype."""
    if model.base_of:
        return {}
    if model.trainable and model.lora is None:
        return {"parameters": 4, "gradients": 4, "optimizer": 8}
    return {"parameters": 4 if model.float32 else DTYPE_BYTES.get(dtype, 4)}


def estimate(specs: Sequence[ProcessSpec], sizes: Mapping[str, ModelSize]) -> list[Part]:
    """Estimate the memory of these processes. sizes: by model path."""
    parts = [Part("launcher and etcd", _FIXED_BYTES, is_least=False)]
    for spec in specs:
        parts.append(Part("libraries", _COMPUTING_BYTES if spec.computes else _OTHER_BYTES, is_least=False))
        devices = spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if isinstance(spec.config, ModelWorkerConfig):
            parts += _parts_of_worker(spec.config, devices[0], sizes)
        elif isinstance(spec.config, GenerationServerConfig):
            parts += _parts_of_server(spec.config, devices, sizes[spec.config.model_path])
    return parts


def total(parts: Sequence[Part]) -> int:
    return round(sum(part.num_bytes for part in parts))


def too_little_memory(parts: Sequence[Part], limits: Mapping[str, int]) -> tuple[str, str] | None:
    """Find the first device with less memory than the processes on it need at least. Returns a text about the shortage, and the
    remedy. None: every device has enough.

    limits: bytes by device ("": available main memory); devices without a limit are not checked.
    """
    for device, limit in limits.items():
        on_device = [part for part in parts if part.device == device and part.is_least]
        turns = [[part for part in on_device if part.side in ("", side)] for side in ("generation", "training")]
        here = max(turns, key=total)
        if (needed := total(here)) > limit:
            by_name = {
                name: total([part for part in here if part.what == name])
                for name in dict.fromkeys(part.what for part in here)
            }
            figures = ", ".join(f"{name} {size_text(size)}" for name, size in by_name.items() if size)
            largest = max(here, key=lambda part: by_name[part.what])
            place = f"of GPU {device}" if device else "available"
            return f"{size_text(limit)} {place}, at least {size_text(needed)} needed: {figures}", largest.remedy
    return None


def sizes_of(specs: Sequence[ProcessSpec], size_of: Callable[[str], ModelSize] = ModelSize.of) -> dict[str, ModelSize]:
    """Return the sizes of all models that the processes load, by path. Reads the models' folders."""
    paths: set[str] = set()
    for spec in specs:
        if isinstance(spec.config, ModelWorkerConfig):
            paths |= {spec.config.model_path} | {model.path for model in spec.config.models if model.kind != "none"}
        elif isinstance(spec.config, GenerationServerConfig):
            paths.add(spec.config.model_path)
    return {path: size_of(path) for path in paths}


def _parts_of_worker(config: ModelWorkerConfig, device: str, sizes: Mapping[str, ModelSize]) -> Iterator[Part]:
    for model in config.models:
        held_here = config.worker.index in model.workers and model.kind != "none" and not model.base_of
        if not held_here:
            continue
        kinds = resident_bytes(model, config.train.dtype)
        if device and (model.offload or config.shares_devices):
            moved = sum(size for kind, size in kinds.items() if kind != "gradients")
            whole = sizes[model.path].num_parameters * moved * ParallelGrid.parse(model.grid).num_copies
            chunks = math.ceil(whole / len(model.workers) / _CHUNK_BYTES)
            yield Part(f"{model.name}, offloaded", chunks * _CHUNK_BYTES, is_least=False)
        if device and model.offload:
            continue
        each = sum(kinds.values())
        held = "weights, gradients and Adam state" if "optimizer" in kinds else "weights"
        share = sizes[model.path].num_parameters * each * ParallelGrid.parse(model.grid).num_copies / len(model.workers)
        remedy = f"use a smaller model than {model.path}" + (", or more GPUs in allocation=..." if device else "")
        side = "training" if config.shares_devices else ""
        yield Part(f"{model.name} ({held})", share, device, remedy, side)
    yield from _kept_parts(config, sizes)
    yield from _copied_parts(config, device, sizes)
    if config.groups is not None:  # mode=sync
        size, generation = sizes[config.model_path], config.groups.generation
        yield Part("KV cache", size.cache_bytes(generation), device, is_least=False)
        if states := size.states_bytes(generation):
            yield Part("states of requests", states, device, is_least=False)


def _copied_parts(config: ModelWorkerConfig, device: str, sizes: Mapping[str, ModelSize]) -> Iterator[Part]:
    """Copies of weights and of optimizers in this worker's main memory (model/export.py, model/held_weights.py)."""
    for model in config.models:
        trains_all = model.kind != "none" and model.trainable and model.lora is None
        if not trains_all or config.worker.index not in model.workers:
            continue
        own = sizes[model.path].num_parameters / len(model.workers)
        yield Part("a checkpoint", CHECKPOINT_BYTES * own, is_least=False)
        if model is not config.models[0]:
            continue
        version, weights = own * DTYPE_BYTES.get(config.train.dtype, 4), config.weights
        from_memory = transport_of(weights.transport).from_memory
        # The last one is still being sent, or the next one holds only what differs from it
        yield Part("weight versions", version * (1 + (from_memory or weights.full_every > 1)), is_least=False)
        if from_memory and config.worker.index == model.workers[0] and (device or len(model.workers) > 1):
            yield Part("buckets", _BUCKETS * min(weights.bucket_bytes, version), is_least=False)


def _kept_parts(config: ModelWorkerConfig, sizes: Mapping[str, ModelSize]) -> Iterator[Part]:
    """The weights that this worker keeps for models of other worker groups (model/kept_weights.py)."""
    actor, groups = config.models[0], WorkerGroups.of_config(config.worker_groups, config.worker.count)
    if config.worker.index in actor.workers and actor.lora is None:
        for model in config.models[1:]:
            if gets_kept_weights(ModelPlacement.of(model), groups, config.train):
                num_bytes = sizes[actor.path].num_parameters * DTYPE_BYTES.get(config.train.dtype, 4)
                remedy = f"take {model.name} out of the allocation, so that it shares the actor's workers"
                yield Part(f"weights kept for {model.name}", num_bytes / len(actor.workers), remedy=remedy)


def _parts_of_server(config: GenerationServerConfig, devices: Sequence[str], size: ModelSize) -> Iterator[Part]:
    traits, generation = traits_of(config.engine), config.generation
    if not traits.starts_servers:
        return
    yield Part(
        traits.program.name if traits.program else "", config.tensor_parallel * traits.rank_bytes, is_least=False
    )
    side = "generation" if config.shares_devices else ""
    for device in devices:
        weights = size.num_parameters * DTYPE_BYTES.get(generation.dtype, 4) / len(devices)
        remedy = "use fewer generation servers in allocation=..., or a smaller model_path=..."
        yield Part("weights of generation servers", weights, device, remedy, side)
        if device and traits.sizes_own_cache:
            continue
        remedy = (
            f"set generation.num_blocks below {generation.num_blocks} (pages of generation.page_size="
            f"{generation.page_size} tokens), or use fewer generation servers in allocation=..."
        )
        yield Part("KV caches", size.cache_bytes(generation) / len(devices), device, remedy, side)
        if states := size.states_bytes(generation):
            remedy = f"set generation.max_running_requests below {generation.max_running_requests}"
            yield Part("states of requests", states / len(devices), device, remedy, side, is_least=False)
