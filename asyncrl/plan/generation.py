"""Plans generation servers (pure): weights, KV cache, and the requests that fit on each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ExperimentConfig, generating_sources
from asyncrl.config.transports import transport_of
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.checks.memory import DTYPE_BYTES
from asyncrl.plan.devices import Device, library_bytes
from asyncrl.plan.result import PlanError
from asyncrl.plan.shapes import ModelShape

Number = TypeVar("Number", int, float)

_GIB = 1 << 30
_MIB = 1 << 20
# SGLang's defaults by the GPU's memory (server_args.py of 0.5): memory below GiB, tokens of a chunk of prefill, and the largest
# batch of a CUDA graph with fewer than four tensor ranks and with four or more
_SGLANG_SIZES = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
_SGLANG_LARGEST = (16_384, 512, 512)
_SGLANG_LEAST_RESERVE = 10 * _GIB  # on GPUs with more than 60 GiB


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
    # Weights, received ones, cache, CUDA's libraries, and the reserve of SGLang for activations and graphs.
    memory: int

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_token

    def running(self, tokens: int) -> int:
        """Requests that run at the same time if each has this many tokens in the KV cache, at least one."""
        return max(min(self.blocks // -(-tokens // self.block_tokens), self.max_requests), 1)

    @property
    def remark(self) -> str:
        """A text if fewer requests than generation.max_running_requests fit; else ""."""
        if self.requests >= self.max_requests:
            return ""
        return (
            f"generation.max_running_requests={self.max_requests}: the KV cache of a server holds {self.requests} requests of "
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
    received = weights * (allocation.traits.is_embedded and transport_of(config.weights.transport).from_memory)
    is_8_bit = "fp8" in generation.server_args.get("kv-cache-dtype", "")
    kv_token = shape.kv_values_per_token(tensor) * (1 if is_8_bit else value)
    libraries = library_bytes(communicates=tensor > 1)
    tokens = request_tokens(config, shape)
    if allocation.traits.sizes_own_cache:
        block = _number(generation.server_args, "page-size", 1)
        share = sglang_memory_fraction(device.memory, tensor, generation.server_args)
        static = int((device.memory - libraries) * share)
        blocks = max(static - weights, 0) // (block * kv_token)
        blocks = min(blocks, _number(generation.server_args, "max-total-tokens", blocks * block) // block)
        beside = device.memory - static
        cache = max(blocks * block, tokens) * kv_token
    else:
        block, blocks, beside = generation.page_size, generation.num_blocks, libraries
        cache = blocks * block * kv_token
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
        requests=blocks // -(-tokens // block),
        max_requests=_number(generation.server_args, "max-running-requests", generation.max_running_requests),
        cache=cache,
        memory=weights + received + cache + beside,
    )


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
