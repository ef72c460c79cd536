"""Reads the sizes on which a model's FLOPs depend (protocol/model_flops.py)."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.attention import CAUSAL, patterns_in
from asyncrl.architectures.states import modules_with_state
from asyncrl.protocol.model_flops import ModelFlops, delta_rule_flops


def flops_of(model: PreTrainedModel) -> ModelFlops:
    """model: all of its layers; it needs no weights. Windows and chunks count if `read_attention` has read the model. Parameters
    without gradients count as frozen."""
    text = model.config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    chosen = getattr(text, "num_experts_per_tok", None) or experts
    num_parameters = num_frozen = 0
    for name, parameter in model.named_parameters():
        share = chosen / experts if ".experts." in name else 1.0
        num_parameters += (used := round(parameter.numel() * share))
        num_frozen += used * (not parameter.requires_grad)
    layers = text.per_layer_config if text.is_heterogeneous else [text] * text.num_hidden_layers
    patterns = patterns_in(model)
    if patterns and not text.is_heterogeneous:
        layers = [text] * len(patterns)  # layers with a state have no attention
    if len(patterns) != len(layers):
        patterns = [CAUSAL] * len(layers)
    widths: Counter[tuple[int, int]] = Counter()
    for layer, pattern in zip(layers, patterns, strict=True):
        widths[pattern.window, pattern.chunk] += _width_of_heads(layer)
    return ModelFlops(
        num_parameters=num_parameters,
        num_frozen=num_frozen,
        widths=[(*limits, width) for limits, width in widths.items()],
        of_states=sum(map(_flops_of_state, modules_with_state(model).values())),
    )


def _flops_of_state(module: nn.Module) -> int:
    """FLOPs of a token beside those of the module's parameters. A convolution has no others."""
    heads = getattr(module, "num_v_heads", 0)
    return delta_rule_flops(heads, module.head_k_dim, module.head_v_dim) if heads else 0  # type: ignore[arg-type]


def _width_of_heads(layer: PreTrainedConfig) -> int:
    """Query heads x size of a head."""
    num_heads: int = getattr(layer, "num_attention_heads", 0)
    return num_heads * (getattr(layer, "head_dim", None) or (layer.hidden_size // num_heads if num_heads else 0))
