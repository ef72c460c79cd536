"""Model FLOPs: those that the mathematics of a model needs, without recomputation. Papers count them so for MFU."""

from __future__ import annotations

import msgspec
from transformers import PreTrainedConfig

from asyncrl.model.sharding import Skeleton


class ModelSize(msgspec.Struct, frozen=True):
    """The sizes of a model that its FLOPs depend on."""

    num_parameters: int  # that one token uses: of a mixture of experts, its share of the experts
    num_layers: int
    num_heads: int
    head_width: int

    @classmethod
    def of(cls, skeleton: Skeleton, config: PreTrainedConfig) -> ModelSize:
        """skeleton: of the whole model."""
        text = config.get_text_config()
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
        chosen = getattr(text, "num_experts_per_tok", None) or experts
        num_parameters = 0
        for name, parameter in skeleton.model.named_parameters():
            share = chosen / experts if ".experts." in name else 1.0
            num_parameters += round(parameter.numel() * share)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(num_parameters, text.num_hidden_layers, text.num_attention_heads, width)

    def flops(self, num_tokens: int, squared_lengths: int, *, trains: bool) -> int:
        """6 FLOPs a parameter and token (forward 2), and causal attention: 6 * L * H * D * T a token of a sequence of T tokens
        (forward 2). squared_lengths: the sum of T * T over the sequences."""
        attention = self.num_layers * self.num_heads * self.head_width * squared_lengths
        return (6 if trains else 2) * (self.num_parameters * num_tokens + attention)
