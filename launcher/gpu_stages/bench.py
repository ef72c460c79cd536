"""What all stages use: the device, timers, models with random weights."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.auto_class import auto_class
from asyncrl.model.attention import NAME as ATTENTION
from asyncrl.model.sharding import CHECKPOINT, WeightSource
from asyncrl.plan.devices import Device, device_named

from .sheet import Row

GIB = 2**30
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Qwen3's config.json
SHAPES = {"0.6B": (1024, 3072, 28, 16, 8), "1.7B": (2048, 6144, 28, 16, 8), "8B": (4096, 12288, 36, 32, 8)}
_TINY_SHAPE = (64, 128, 2, 4, 2)
_UNTIED = ("8B",)
_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "eos_token_id": 0,
    "dtype": "bfloat16",
}


@dataclass
class Bench:
    """The device, the sizes and the folder of a stage."""

    out: Path
    tiny: bool  # small sizes, for a CPU
    device: torch.device
    found: dict[str, Any] = field(default_factory=dict)  # what later measurements of the stage use

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def card(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"

    @property
    def kind(self) -> Device | None:
        """The card's data sheet; None: the plan's table lacks it."""
        return device_named(self.card)

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Free what earlier measurements held."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> tuple[int, int]:
        """Bytes allocated and reserved at most since `free`."""
        if not self.on_gpu:
            return 0, 0
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def clock(self, function: Callable[[], Any]) -> float:
        """Seconds of one call."""
        self.synchronize()
        began = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - began

    def seconds(self, function: Callable[[], Any], *, calls: int = 5, rounds: int = 3) -> float:
        """Seconds of a call: of successive calls, without the time between the host and an idle device; the median of rounds."""
        if not self.on_gpu:
            return self.clock(function)
        self.clock(function)

        def some() -> None:
            for _ in range(calls):
                function()

        return statistics.median(self.clock(some) for _ in range(rounds)) / calls

    def timed(self, name: str, function: Callable[[], Any], *, flops: float = 0.0, num_bytes: float = 0.0) -> Row:
        """The time of a kernel beside the least that the card needs for its FLOPs and the bytes that it must read and write."""
        seconds = self.seconds(function)
        rate = f"{flops / seconds / 1e12:.3g} TFLOP/s" if flops else f"{num_bytes / seconds / 1e9:.4g} GB/s"
        kind = self.kind
        least = max(flops / kind.flops, num_bytes / kind.memory_bandwidth) if kind is not None else 0.0
        return Row(name, 1e3 * seconds, "ms", 1e3 * least or None, rate)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype, requires_grad=grad)

    def model_folder(self, name: str, num_layers: int = 0) -> str:
        """A folder with the config.json of a model."""
        return write_config(self.out / "models", name, num_layers, tiny=self.tiny)


def write_config(folder: Path, name: str, num_layers: int, *, tiny: bool) -> str:
    """Write the config.json of a model with this shape. num_layers: 0: as many as it has."""
    shape = dict(zip(_SIZES, _TINY_SHAPE if tiny else SHAPES[name], strict=True))
    shape["num_hidden_layers"] = num_layers or shape["num_hidden_layers"]
    config = _COMMON | shape | {"tie_word_embeddings": name not in _UNTIED}
    if tiny:
        config |= {"vocab_size": 512, "head_dim": 16}
    path = folder / f"{name}-{shape['num_hidden_layers']}L"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def random_weights(device: torch.device) -> WeightSource:
    """Weights that are made on the device, in milliseconds: a folder with a config.json is enough."""

    def load_whole(path: Any, kind: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        with device:
            model = auto_class(config, kind).from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        return model.eval()

    return replace(CHECKPOINT, load_whole=load_whole)
