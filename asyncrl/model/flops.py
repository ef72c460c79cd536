"""Model FLOPs: those that the mathematics of a model needs. Recomputed activations do not count. MFU is defined by them
(arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of a whole model, from the sizes that they depend on."""

    num_parameters: int  # that one token uses: of a mixture of experts, its share of the experts; tied ones once
    attention_width: int  # layers x query heads x size of a head

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops:
        """model: all of its layers; it needs no weights."""
        text = model.config.get_text_config()
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
        chosen = getattr(text, "num_experts_per_tok", None) or experts
        num_parameters = 0
        for name, parameter in model.named_parameters():
            share = chosen / experts if ".experts." in name else 1.0
            num_parameters += round(parameter.numel() * share)
        layers = text.per_layer_config if text.is_heterogeneous else [text] * text.num_hidden_layers
        return cls(num_parameters, sum(map(_width_of_heads, layers)))

    def of_batch(self, num_tokens: int, squared_lengths: int, *, trains: bool) -> int:
        """FLOPs over sequences with num_tokens tokens in all, whose lengths have this sum of squares.

        A token of a sequence of T tokens needs 6 FLOPs for each parameter (forward 2), and 6 * attention_width * T for causal
        attention (forward 2).
        """
        return (6 if trains else 2) * (self.num_parameters * num_tokens + self.attention_width * squared_lengths)

    def of_training(self, lengths: Sequence[int]) -> int:
        """FLOPs of forward and backward pass over sequences of these lengths (tokens)."""
        return self.of_batch(sum(lengths), sum(length * length for length in lengths), trains=True)


def _width_of_heads(layer: PreTrainedConfig) -> int:
    """Query heads x size of a head."""
    num_heads: int = getattr(layer, "num_attention_heads", 0)
    return num_heads * (getattr(layer, "head_dim", None) or (layer.hidden_size // num_heads if num_heads else 0))
