"""Model FLOPs of a train step: those that the update needs. Recomputed activations do not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of training on sequences. A mixture of experts counts all its experts, not only those that a token uses."""

    num_parameters: int  # of the whole model, tied ones once
    attention_width: int  # layers x query heads x size of a head

    @classmethod
    def of(cls, config: PreTrainedConfig, num_parameters: int) -> ModelFlops:
        text = config.get_text_config()
        num_heads = getattr(text, "num_attention_heads", 0)
        head_size = getattr(text, "head_dim", None) or (text.hidden_size // num_heads if num_heads else 0)
        return cls(num_parameters, text.num_hidden_layers * num_heads * head_size)

    def of_training(self, lengths: Sequence[int]) -> int:
        """FLOPs of forward and backward pass over sequences of these lengths (tokens).

        A token of a sequence of T tokens needs 6 FLOPs for each parameter, and 6 * attention_width * T for causal attention.
        """
        return 6 * (self.num_parameters * sum(lengths) + self.attention_width * sum(n * n for n in lengths))
