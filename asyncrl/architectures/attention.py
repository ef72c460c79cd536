"""What an architecture's attention computes, read from the architecture itself, and the attention that both engines share.

The trainer and the embedded engine give transformers their own attention functions. transformers hands such a function no mask, and
a config spells windows in many ways (sliding_window, layer_types, use_sliding_window, max_window_layers, attention_chunk_size). So
`read_attention` runs the backbone once on two tokens with stand-ins for attention and masks. The stand-ins see the mask that
transformers would apply in each layer, and the arguments that the layer gives to its attention function. Each attention module
then carries its Pattern. A layer's own argument `sliding_window` counts only without a pattern: some layers pass a window that
their mask does not have.

Shapes: B sequences, H query heads, K key heads, Q queries, N keys, D key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from asyncrl.config.schema import ConfigError

_STAND_IN = "asyncrl_stand_in"
_ATTRIBUTE = "asyncrl_pattern"  # of an attention module
_MARK = object()  # passed to the backbone; it must arrive at every attention function


@dataclass(frozen=True)
class Pattern:
    """Which tokens a token attends to: itself and, of the tokens before it, all, or the last window - 1, or those of its chunk."""

    window: int = 0
    chunk: int = 0

    def shows(self, query_at: Any, key_at: Any) -> Any:
        """Whether the query at this position attends to the key at that one. Arrays or tensors of positions, which broadcast."""
        shown = key_at <= query_at
        if self.window:
            shown = shown & (key_at > query_at - self.window)
        if self.chunk:
            shown = shown & (key_at // self.chunk == query_at // self.chunk)
        return shown

    def num_seen(self, before: int) -> int:
        """How many of the last of so many tokens some token behind them may attend to. Chunks are counted in full."""
        return min(before, self.window - 1) if self.window and not self.chunk else before

    def limits(self, length: int) -> bool:
        """Whether some token of a sequence of this length does not attend to all tokens before it."""
        return 0 < self.window < length or 0 < self.chunk < length


CAUSAL = Pattern()


def pattern_of(module: nn.Module, sliding_window: int | None) -> Pattern:
    """The pattern that read_attention found for this attention module; for another module the layer's own argument counts."""
    found: Pattern | None = getattr(module, _ATTRIBUTE, None)
    return found if found is not None else Pattern(window=sliding_window or 0)


def patterns_in(model: nn.Module) -> list[Pattern]:
    """The patterns that read_attention found for the attention modules of a model, in their order; empty before it has read it."""
    return [getattr(module, _ATTRIBUTE) for module in model.modules() if hasattr(module, _ATTRIBUTE)]


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer, and what its key-value cache must hold."""

    layer: int
    pattern: Pattern
    num_heads: int
    num_key_heads: int
    key_width: int
    value_width: int
    has_softcap: bool
    has_sinks: bool

    @property
    def needs_eager(self) -> bool:
        """Whether transformers' sdpa cannot compute it."""
        return self.has_softcap or self.has_sinks


def backbone_name(model: PreTrainedModel) -> str:
    """The attribute of a model that has all of it but its output layer. Llama 4 has another than it states."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer."""
    backbone: nn.Module = getattr(model, backbone_name(model))
    return backbone


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of the language model, in their order; none if it keeps them under another name."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    layers: Any = getattr(model.base_model, "layers", None) or getattr(decoder, "layers", ())
    return list(layers)


def read_attention(model: PreTrainedModel, path: object) -> list[LayerAttention]:
    """Find each attention module's pattern and store it in the module. Returns the layers' attention, in the order of the calls.

    The model may be on the meta device. Raises ConfigError if attention masks its tokens in another way, or does not get the
    arguments that asyncrl passes to the model.
    """
    what = f"model_path={str(path)!r}: architecture {model.config.model_type!r}"
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {"input_ids": torch.zeros((1, 2), dtype=torch.int64, device=device)}
    if device.type == "meta":  # transformers looks at the values of a mask; without one, at those of the positions
        inputs["attention_mask"] = torch.ones((1, 2), dtype=torch.int64)
    calls: list[LayerAttention] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        segments: object = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        if segments is not _MARK:
            raise ConfigError(
                f"{what} does not pass the model's arguments on to attention: packed sequences could not be kept apart. Support"
                " would take a forward pass of this architecture that passes its keyword arguments to every layer"
            )
        if attention_mask is not None and not isinstance(attention_mask, _Mask):
            raise _unknown_mask(what, "it makes its own mask")
        pattern = attention_mask.pattern(what) if attention_mask is not None else CAUSAL
        setattr(module, _ATTRIBUTE, pattern)
        calls.append(
            LayerAttention(
                layer=int(getattr(module, "layer_idx", None) or 0),
                pattern=pattern,
                num_heads=query.shape[1],
                num_key_heads=key.shape[1],
                key_width=key.shape[3],
                value_width=value.shape[3],
                has_softcap=softcap is not None,
                has_sinks=s_aux is not None,
            )
        )
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None

    AttentionInterface.register(_STAND_IN, attend)
    AttentionMaskInterface.register(_STAND_IN, _Mask)
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation(_STAND_IN)
    if device.type == "meta":
        model.set_experts_implementation("batched_mm")  # the only one whose shapes do not depend on values
    try:
        with torch.no_grad():
            backbone_of(model)(**inputs, use_cache=False, segments=_MARK)
    except (AttributeError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise _unknown_mask(what, f"asyncrl cannot see its masks: {type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)
    return calls


class _Mask:
    """Stands for the mask that transformers would make."""

    def __init__(
        self,
        *,
        mask_function: Callable[..., Tensor],
        config: Any,
        device: torch.device,
        local_size: int | None = None,
        **_: object,
    ) -> None:
        self._function, self._size = mask_function, local_size
        # The starts of chunks depend on tensors, which have no values on the meta device
        self._is_unseen_chunk = device.type == "meta" and local_size == getattr(config, "attention_chunk_size", None)

    def pattern(self, what: str) -> Pattern:
        """Compare the mask with each pattern at all positions around the first three borders of windows or chunks."""
        if self._size and self._is_unseen_chunk:
            return Pattern(chunk=self._size)
        size = self._size or 2
        at = torch.tensor(sorted({max(0, border + i) for border in (0, size, 2 * size, 3 * size) for i in (-1, 0, 1)}))
        query, key = torch.meshgrid(at, at, indexing="ij")
        zero = torch.zeros_like(query)
        try:
            shown = self._function(zero, zero, query, key).expand(query.shape)
        except (RuntimeError, IndexError, NotImplementedError) as error:
            raise _unknown_mask(what, f"{type(error).__name__}: {error}") from error
        candidates = [CAUSAL, Pattern(window=size), Pattern(chunk=size)] if self._size else [CAUSAL]
        for pattern in candidates:
            if torch.equal(shown, pattern.shows(query, key)):
                return pattern
        raise _unknown_mask(what, "tokens attend neither to all tokens before them, nor to a window or chunk of them")


def _unknown_mask(what: str, why: str) -> ConfigError:
    return ConfigError(
        f"{what} masks attention in a way that asyncrl does not compute ({why}). Support would take a further Pattern in"
        " asyncrl/architectures/attention.py, which both attention functions apply; until then use another model"
    )


def attend(
    query: Tensor,  # [B, H, Q, D]
    key: Tensor,  # [B, K, N, D]
    value: Tensor,  # [B, K, N, V]
    *,
    shown: Tensor | None,  # [B or 1, Q, N]: bool; None: query i attends to the keys up to i
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:
    """Attention, [B, H, Q, V]. Query heads h * H / K to (h + 1) * H / K - 1 share key head h.

    softcap: logits are softcap * tanh(logits / softcap). sinks: a further logit of each head, whose probability attends to nothing.
    Both need the matrix of all logits in memory; without them torch's fused attention is used.
    """
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    group = num_heads // num_key_heads
    if softcap is None and sinks is None:
        if shown is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=group > 1)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=shown[:, None], scale=scaling, enable_gqa=group > 1
        )
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    query = query.reshape(len(query), num_key_heads, group, *query.shape[2:])
    logits: Tensor = query @ key[:, :, None].transpose(-1, -2) * scaling  # [B, K, H / K, Q, N]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if shown is None:
        shown = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()[None]
    logits = logits.masked_fill(~shown[:, None, None], torch.finfo(logits.dtype).min)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, num_key_heads, group, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    shares = logits.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    output: Tensor = (shares @ value[:, :, None]).flatten(1, 2)
    return output
