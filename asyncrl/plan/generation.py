"""Plans generation servers (pure): weights, KV cache, states of layers without attention, and the requests that fit on each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from asyncrl.config.engines import EngineTraits
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ExperimentConfig, generating_sources, num_kept_versions
from asyncrl.config.transports import transport_of
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.checks.memory import DTYPE_BYTES
from asyncrl.plan.devices import Device, library_bytes
from asyncrl.plan.result import PlanError
from asyncrl.plan.shapes import ModelShape
from asyncrl.weights.adapter import ALL_LINEAR

Number = TypeVar("Number", int, float)

_FLOAT = 4  # bytes
_GIB = 1 << 30
_MIB = 1 << 20
# SGLang's defaults by the GPU's memory (server_args.py of 0.5): memory below GiB, tokens of a chunk of prefill, and the largest
# batch of a CUDA graph with fewer than four tensor ranks and with four or more
_SGLANG_SIZES = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
_SGLANG_LARGEST = (16_384, 512, 512)
_SGLANG_LEAST_RESERVE = 10 * _GIB  # on GPUs with more than 60 GiB
# SGLang's defaults for layers with a state (model_runner_kv_cache_mixin.py of 0.5): bytes of states / bytes of the KV cache, and
# states for each running request, as its prefix cache holds states, too
_SGLANG_STATE_RATIO, _SGLANG_STATES = 0.9, 3


class ServerPlan(msgspec.Struct, frozen=True):
    """A generation server; all servers of a run are equal. Bytes are of one of its GPUs."""

    engine: str
    count: int  # servers
    gpus: int  # of each server
    weights: int
    received: int  # of the next version, which the embedded engine receives by broadcast beside the weights in use; 0: it does not
    kv_token: int  # KV cache of one token
    block_tokens: int
    blocks: int  # that fit under the engine's limit of memory
    request_tokens: int  # prompt and response of the configured lengths
    requests: int  # of this length that fit at the same time
    max_requests: int  # generation.max_running_requests
    cache: int  # all blocks; at least one request, which SGLang needs
    # Weights, received ones, adapters, cache, states, CUDA's libraries, and the reserve of SGLang for activations and graphs.
    memory: int
    adapters: int = 0  # of all versions that it holds at the same time (train.lora)
    request_state: int = 0  # the state of one request in layers without attention; 0: the model has none
    states: int = 0  # all states
    with_state: int = 0  # requests that have a state at the same time
    shares_prefixes: bool = True  # the prompt of a group is computed once

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_token

    def running(self, tokens: int) -> int:
        """Requests that run at the same time if each has this many tokens in the KV cache, at least one."""
        fit = min(self.blocks // -(-tokens // self.block_tokens), self.max_requests)
        return max(min(fit, self.with_state) if self.request_state else fit, 1)

    @property
    def remark(self) -> str:
        """A text if fewer requests than generation.max_running_requests fit; else ""."""
        if self.requests >= self.max_requests:
            return ""
        holds = (
            "the states of a server hold" if self.requests == self.with_state > 0 else "the KV cache of a server holds"
        )
        return (
            f"generation.max_running_requests={self.max_requests}: {holds} {self.requests} requests of "
            f"{self.request_tokens:,} tokens, so it runs fewer of that length at the same time"
        )


def plan_server(config: ExperimentConfig, shape: ModelShape, device: Device) -> ServerPlan | None:
    """Plan the run's generation servers on this kind of GPU. config: without `auto`. None: the run starts none."""
    allocation = allocation_of(config)
    if not mode_of(config.mode).has_servers or not allocation.traits.starts_servers:
        return None
    generation, tensor = config.generation, allocation.generation.replica_size
    value = DTYPE_BYTES[generation.dtype]
    weights = shape.parameters_of_rank(tensor) * value
    adapter = _adapter_bytes(config, shape, allocation.traits)
    adapters = adapter * allocation.traits.adapter_slots(num_kept_versions(config))
    from_memory = allocation.traits.is_embedded and transport_of(config.weights.transport).from_memory
    received = (adapter or weights) * from_memory
    is_8_bit = "fp8" in generation.server_args.get("kv-cache-dtype", "")
    kv_token = shape.kv_values_per_token(tensor) * (1 if is_8_bit else value)
    libraries = library_bytes(communicates=tensor > 1)
    tokens = request_tokens(config, shape)
    state = shape.state_bytes(value, tensor)
    max_requests = _number(generation.server_args, "max-running-requests", generation.max_running_requests)
    shares = generation.prefix_sharing and generation.interrupt != "in_place"
    if allocation.traits.sizes_own_cache:
        block = _number(generation.server_args, "page-size", 1)
        share = allocation.traits.memory_share
        if share:
            share = _number(generation.server_args, "gpu-memory-utilization", share)
        else:
            share = sglang_memory_fraction(device.memory, tensor, generation.server_args)
        static = int((device.memory - libraries) * share)
        free, of_request = max(static - weights - adapters, 0), _SGLANG_STATES if shares else 1
        num_states = _sglang_states(generation.server_args, free, state, max_requests, shares=shares)
        with_state = num_states // of_request
        blocks = max(free - num_states * state, 0) // (block * kv_token)
        blocks = min(blocks, _number(generation.server_args, "max-total-tokens", blocks * block) // block)
        beside = device.memory - static
        cache = max(blocks * block, tokens) * kv_token
    else:
        block, blocks, beside = generation.page_size, generation.num_blocks, libraries
        num_states = with_state = max_requests if state else 0
        shares = shares and not state  # generation/transformers.py keeps no state for a page
        cache = blocks * block * kv_token
    requests = blocks // -(-tokens // block)
    return ServerPlan(
        engine=allocation.engine,
        count=allocation.num_servers,
        gpus=tensor,
        weights=weights,
        received=received,
        kv_token=kv_token,
        block_tokens=block,
        blocks=blocks,
        request_tokens=tokens,
        requests=min(requests, with_state) if state else requests,
        max_requests=max_requests,
        cache=cache,
        memory=weights + received + adapters + cache + num_states * state + beside,
        adapters=adapters,
        request_state=state,
        states=num_states * state,
        with_state=with_state,
        shares_prefixes=shares,
    )


def _adapter_bytes(config: ExperimentConfig, shape: ModelShape, traits: EngineTraits) -> int:
    """Bytes of one version of an adapter. vLLM reserves them for each linear layer, in the dtype of the weights; the embedded
    engine has what is trained, in float32."""
    lora = config.train.lora
    if lora is None:
        return 0
    reserves = traits.program is not None
    parameters = shape.adapter_parameters(traits.adapter_rank(lora.rank), [ALL_LINEAR] if reserves else lora.targets)
    return parameters * (DTYPE_BYTES[config.generation.dtype] if reserves else _FLOAT)


def _sglang_states(server_args: Mapping[str, str], free: int, state: int, max_requests: int, *, shares: bool) -> int:
    """How many states SGLang holds beside the KV cache. free: bytes for both. state: bytes of one."""
    if not state:
        return 0
    ratio = _number(server_args, "mamba-full-memory-ratio", _SGLANG_STATE_RATIO)
    by_memory = int(free * ratio / (1 + ratio)) // state
    return _number(server_args, "max-mamba-cache-size", by_memory if shares else max_requests)


def request_tokens(config: ExperimentConfig, shape: ModelShape) -> int:
    """Tokens of the longest prompt and response that the config allows, within the model's limit."""
    longest = max(new for _, _, _, new in generating_sources(config))
    return min(config.prompts.max_prompt_length + longest, shape.max_length)


def sglang_memory_fraction(memory: int, tensor: int, server_args: Mapping[str, str]) -> float:
    """The share of a GPU's memory that SGLang gives to weights and KV cache: mem-fraction-static, or else SGLang's own choice.

    memory: bytes. SGLang chooses by the memory, the tokens of a chunk of prefill and the largest batch of its CUDA graphs.
    """
    if "mem-fraction-static" in server_args:
        return _number(server_args, "mem-fraction-static", 0.0)
    chunk, small, large = next((sizes for limit, *sizes in _SGLANG_SIZES if memory < limit * _GIB), _SGLANG_LARGEST)
    chunk = _number(server_args, "chunked-prefill-size", chunk)
    batch = _number(server_args, "cuda-graph-max-bs", large if tensor >= 4 else small)
    reserved = int((512 + 1.5 * max(chunk, 2048) + 2 * batch + 128 * tensor) * _MIB)
    if memory > 60 * _GIB:
        reserved = max(reserved, _SGLANG_LEAST_RESERVE)
    return round((memory - reserved) / memory, 3)


def _number(server_args: Mapping[str, str], name: str, default: Number) -> Number:
    """A numeric argument of SGLang, in the type of its default. Raises PlanError."""
    text = server_args.get(name)
    if text is None:
        return default
    try:
        return type(default)(text)
    except ValueError as error:
        raise PlanError(f"generation.server_args.{name}={text!r}: must be a number") from error
