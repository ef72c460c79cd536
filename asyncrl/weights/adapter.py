"""Folders of LoRA adapters, in peft's format: adapter_config.json and adapter_model.safetensors. Imports no torch.

An adapter is a pair of matrices A (rank, inputs) and B (outputs, rank) beside a linear layer of a frozen base model. The layer then
computes W x + alpha / rank * B A x. As a version such a folder is of the form `adapter`: it has no base among the versions, because
the base model is in model_path and never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.schema import LoraConfig
from asyncrl.protocol.errors import DECODE_ERRORS, ErrorClass
from asyncrl.weights.form import WeightForm, WeightsError

ADAPTER = "adapter"
TENSORS, ABOUT = "adapter_model.safetensors", "adapter_config.json"
ALL_LINEAR = "all-linear"  # a target: each linear layer but the output layer
PREFIX = "base_model.model."  # of peft's names
HEAD = "score"  # the output layer of a value model, which is trained in full beside its adapters
# Fields of adapter_config.json that change what an adapter computes, and the only values that are computed here
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": (None,),
    "exclude_modules": (None,),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "target_parameters": (None,),
    "trainable_token_indices": (None,),
}


class AdapterForm(WeightForm):
    stem, about = "adapter_model", ABOUT
    has_model = False


def name_of(layer: str, which: str) -> str:
    """peft's name of a matrix in the file. which: A or B."""
    return f"{PREFIX}{layer}.lora_{which}.weight"


def about(lora: LoraConfig, base: str, layers: list[str], *, with_head: bool = False) -> bytes:
    """The content of adapter_config.json. layers: full names of the layers with adapters, so that no name matches others.
    with_head: the files have the output layer of a value model."""
    fields = {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS" if with_head else "CAUSAL_LM",
        "modules_to_save": [HEAD] if with_head else None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": layers,
        "bias": "none",
        "inference_mode": True,
    }
    return msgspec.json.format(msgspec.json.encode(fields), indent=1)


def check_about(folder: Path, lora: LoraConfig, base: str, layers: list[str]) -> None:
    """Check that a folder's adapter is one of these layers, rank and base. Raises WeightsError, permanent, with the difference."""
    given = read_about(folder)
    for name, allowed in _PLAIN.items():
        if name in given and given[name] not in allowed and given[name]:
            raise _refused(folder, f"{name} is {given[name]!r}, which this version cannot compute; use {allowed[0]!r}")
    for name, wanted in (("r", lora.rank), ("lora_alpha", lora.alpha)):
        if given.get(name) != wanted:
            field = {"r": "rank", "lora_alpha": "alpha"}[name]
            raise _refused(
                folder, f"{name} is {given.get(name)!r}, but train.lora.{field} is {wanted:g}; make them equal"
            )
    trained_on = str(given.get("base_model_name_or_path") or "")
    if trained_on and base and Path(trained_on).name != Path(base).name:
        raise _refused(
            folder, f"it belongs to {trained_on!r}, but model_path is {base!r}; use the adapter's own base model"
        )
    targets = given.get("target_modules")
    if isinstance(targets, list) and layers:
        ends = {target for target in targets if not any(_matches(layer, target) for layer in layers)}
        lacking = [layer for layer in layers if not any(_matches(layer, target) for target in targets)]
        if ends or lacking:
            name = min(ends) if ends else lacking[0]
            raise _refused(folder, f"its target_modules and train.lora.targets differ in {name}; make them equal")


def read_about(folder: Path) -> Mapping[str, Any]:
    """The fields of adapter_config.json. Raises WeightsError."""
    file = folder / ABOUT
    try:
        given = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        raise _refused(folder, f"it has no {ABOUT}, so it is no adapter") from None
    except (*DECODE_ERRORS, OSError) as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise _refused(folder, f"{ABOUT} is not an object")
    return given


def check_files(folder: Path) -> Path:
    """The file of an adapter's tensors. Raises WeightsError, permanent, if there is none, or if the folder has a pickle."""
    pickles = sorted(file.name for file in folder.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".pkl"))
    if pickles:
        raise _refused(folder, f"it has {pickles[0]}, a pickle, which could run code; save it as {TENSORS}")
    if not (folder / TENSORS).is_file():
        raise _refused(folder, f"it has no {TENSORS}")
    return folder / TENSORS


def _matches(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def targets_of(lora: LoraConfig, linear: list[str]) -> list[str]:
    """Those of a model's linear layers that get adapters. Raises ValueError, with the names that exist, if a target is none of
    them."""
    if lora.targets == [ALL_LINEAR]:
        return linear
    for target in lora.targets:
        if not any(_matches(layer, target) for layer in linear):
            ends = sorted({layer.rpartition(".")[2] for layer in linear})
            raise ValueError(
                f"{target!r} is no linear layer of this model; there are {', '.join(ends)}, or {ALL_LINEAR} alone"
            )
    return [layer for layer in linear if any(_matches(layer, target) for target in lora.targets)]


def _refused(folder: Path, why: str) -> WeightsError:
    return WeightsError(f"{folder}: {why}", ErrorClass.PERMANENT)
