"""The sizes of layers that carry a state from token to token in place of attention, by a model's config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FLOAT = 4  # bytes
_WITHOUT_ATTENTION = ("conv", "linear_attention", "mamba", "moe")  # of layer_types


@dataclass(frozen=True)
class StateLayer:
    """One layer: a gated delta rule (linear attention), or a short convolution, which has no heads."""

    parameters: int  # beside norms and MLP
    conv_values: int  # of a request's state, in the dtype of the model
    heads: int = 0  # of values
    key_heads: int = 0
    key_width: int = 0
    value_width: int = 0

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> StateLayer | None:
        """text: a config's part about text. None: no layers of these kinds. Raises KeyError, TypeError, ValueError."""
        if "conv_L_cache" in text:  # LFM2, LFM3: between two gates
            hidden, kernel = int(text["hidden_size"]), int(text["conv_L_cache"])
            return cls(hidden * (4 * hidden + kernel) + bool(text.get("conv_bias")) * 5 * hidden, hidden * kernel)
        if "linear_num_value_heads" not in text:
            return None
        # Qwen3-Next, Qwen3.5, OLMo hybrid: queries, keys, values, a gate of the output, and two gates of each head
        heads, key_heads = int(text["linear_num_value_heads"]), int(text["linear_num_key_heads"])
        key_width, width = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
        hidden, kernel = int(text["hidden_size"]), int(text.get("linear_conv_kernel_dim") or 4)
        keys, values = key_heads * key_width, heads * width
        projections = hidden * (2 * keys + 3 * values + 2 * heads)
        conv_values = kernel * (2 * keys + values)
        return cls(projections + conv_values + 2 * heads + width, conv_values, heads, key_heads, key_width, width)

    def state_bytes(self, value: int) -> int:
        """Bytes of a request's state. value: bytes of a value of the model; the state of the delta rule is in float32."""
        return self.conv_values * value + self.heads * self.key_width * self.value_width * _FLOAT


def layers_with_attention(text: Mapping[str, Any], interval: int = 0) -> int:
    """How many layers keep keys and values, by a config's part about text. interval: of every so many layers the last one has
    attention, unless the config says it; 0: all have."""
    kinds, listed = text.get("layer_types"), text.get("full_attn_idxs")
    if kinds or listed:
        return sum(kind not in _WITHOUT_ATTENTION for kind in kinds) if kinds else len(listed or ())
    return int(text.get("num_hidden_layers", 0)) // int(text.get("full_attention_interval") or interval or 1)
