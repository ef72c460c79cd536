"""Layers that carry a state from token to token: convolutions, linear attention and state space models."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from asyncrl.architectures.attention import backbone_of


def modules_with_state(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, the modules of the backbone that carry a state. A module counts as one if it has a convolution of its own, as all of
    transformers' have, and the number of its layer, which its state is cached by. An encoder of audio has no such number."""
    return {
        name: module
        for name, module in backbone_of(model).named_modules()
        if hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())
    }
