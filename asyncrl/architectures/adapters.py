"""Low-rank adapters (LoRA, arXiv:2106.09685) beside the linear layers of a model.

The trainer and the embedded engine compute them here, with the values and names of peft: W x + alpha / rank * B A x. The matrices
are parameters `lora_A` and `lora_B` of the linear layer itself, and a hook adds their output. So all other parameters keep their
names, and the layers keep their class and their place in transformers' plans. peft would replace each layer by a module of its
own, which renames every tensor of the base, and takes 1.2 s of CPU time to import.

A and B are float32. They are cast to the dtype of the layer's input when they compute: in bfloat16 the base and the adapter compute
as the base alone does. The output layer of a value model is trained in full, in float32: it begins with zeros in most checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from asyncrl.architectures.checkpoint_names import Place
from asyncrl.architectures.states import modules_with_state
from asyncrl.config.schema import ConfigError, LoraConfig
from asyncrl.weights.adapter import ALL_LINEAR, HEAD, PREFIX, check_about, check_files, name_of, targets_of
from asyncrl.weights.form import WeightsError

A, B = "lora_A", "lora_B"


@dataclass
class Adapters:
    """The adapters of a model."""

    lora: LoraConfig
    base: str  # path of the base model
    # Of all matrices, by the names of the model's parameters; also of other ranks' stages
    shapes: dict[str, torch.Size]
    heads: list[str] = field(default_factory=list)  # parameters of a value model's output layer, trained in full
    enabled: bool = True  # off: the model computes as its base does, bit for bit
    # Of a layer whose inputs are split over tensor ranks: adds up the ranks' parts of A x
    sums: dict[nn.Module, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    # The output of a layer's adapter, given the layer's input; None: own_low_rank
    low_rank: Callable[[nn.Module, Tensor], Tensor] | None = None

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have adapters."""
        return [name.removesuffix(f".{A}") for name in self.shapes if name.endswith(A)]

    @property
    def names(self) -> dict[str, str]:
        """peft's name of each trained parameter, by its name among the model's parameters."""
        matrices = {name: name_of(name[: -len(A) - 1], name[-1]) for name in self.shapes}
        return matrices | {name: f"{PREFIX}{name}" for name in self.heads}

    @property
    def places(self) -> dict[str, Place]:
        """The place of each tensor of an adapter's file in the model."""
        return {
            self.names[name]: Place(name, shape, torch.empty(shape, device="meta").stride(), 0, True)
            for name, shape in self.shapes.items()
        }

    def own_low_rank(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        """The output of a layer's adapter with the layer's own matrices."""
        return self.of_matrices(layer, inputs, layer.get_parameter(A), layer.get_parameter(B))

    def of_matrices(self, layer: nn.Module, inputs: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The output of a layer's adapter with these matrices."""
        low = functional.linear(inputs, _part(a, inputs))
        if layer in self.sums:
            low = self.sums[layer](low)
        return functional.linear(low, _part(b, low)) * (self.lora.alpha / self.lora.rank)

    def initial(self, name: str) -> Tensor:
        """The whole matrix that training begins with, the same in every layout: peft's values, A random and B zero."""
        value = torch.zeros(self.shapes[name])
        if name.endswith(A):
            generator = torch.Generator().manual_seed(self.lora.seed << 32 | zlib.crc32(name.encode()))
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        return value

    def start(self) -> Callable[[str], Tensor]:
        """The function that returns the matrix that training begins with, by its name: of train.lora.start, if it is set. Raises
        ConfigError if that adapter does not fit."""
        if not self.lora.start:
            return self.initial
        folder = Path(self.lora.start)
        try:
            file = check_files(folder)
            check_about(folder, self.lora, self.base, self.layers)
            tensors = load_file(file)
        except (WeightsError, SafetensorError, OSError) as error:
            raise ConfigError(f"train.lora.start={self.lora.start!r}: {error}") from error
        for name, shape in self.shapes.items():
            tensor = tensors.pop(self.names[name], None)
            found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}, expected {tuple(shape)}"
            if tensor is None or tensor.shape != shape:
                raise ConfigError(
                    f"train.lora.start={self.lora.start!r}: {self.names[name]} {found}; give another adapter"
                )
            if not tensor.isfinite().all():
                raise ConfigError(
                    f"train.lora.start={self.lora.start!r}: {self.names[name]} has values that are not finite"
                )
            tensors[name] = tensor.float()
        if unknown := sorted(tensors.keys() - self.shapes.keys()):
            raise ConfigError(f"train.lora.start={self.lora.start!r}: {unknown[0]} is no matrix of train.lora.targets")
        return tensors.__getitem__


def add_adapters(model: Any, lora: LoraConfig, path: str | Path) -> Adapters:
    """Give the target layers of a model adapters without values, float32, on the device of their weights. Freezes all other
    parameters but those of a value model's output layer. Raises ConfigError if the model cannot have them."""
    what = f"model_path={str(path)!r} with train.lora"
    if getattr(model.config, "quantization_config", None):
        raise ConfigError(f"{what}: the base is quantised, which is not supported; use its original weights")
    output_layer = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output_layer and name != HEAD
    }
    fused = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    experts = [name for name in fused if "expert" in name]
    if experts and lora.targets == [ALL_LINEAR]:
        raise ConfigError(
            f"{what}: {experts[0]} holds experts in one tensor, which gets no adapter; name the targets instead"
        )
    try:
        targets = targets_of(lora, list(linear))
    except ValueError as error:
        raise ConfigError(f"train.lora.targets={lora.targets}: {error}") from error
    with_state = modules_with_state(model)
    if inside := [name for name in targets if any(name.startswith(f"{state}.") for state in with_state)]:
        raise ConfigError(
            f"{what}: {inside[0]} is in a layer with a state, where adapters are not proven; use other targets"
        )
    model.requires_grad_(False)
    adapters = Adapters(lora, str(path), {})
    if isinstance(head := getattr(model, HEAD, None), nn.Linear):
        head.float().requires_grad_(True)
        adapters.heads = [f"{HEAD}.{name}" for name, _ in head.named_parameters()]
    for name in targets:
        layer = linear[name]
        for attribute, shape in ((A, (lora.rank, layer.in_features)), (B, (layer.out_features, lora.rank))):
            value = torch.zeros(shape, device=layer.weight.device, dtype=torch.float32)
            layer.register_parameter(attribute, nn.Parameter(value))
            adapters.shapes[f"{name}.{attribute}"] = value.shape
        layer.register_forward_hook(partial(_add_output, adapters))
    return adapters


def _add_output(adapters: Adapters, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    if not adapters.enabled:
        return output
    return output + (adapters.low_rank or adapters.own_low_rank)(layer, inputs[0])


def _part(tensor: Tensor, like: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.to(like.dtype)
