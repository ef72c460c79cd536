"""A small copy of an architecture: the same code paths, with few and narrow layers and random weights.

The self-check of a model runs on such a copy where the model itself would take too long. The copy computes a text within
milliseconds, and its windows end within a short text. It keeps each kind of layer, each switch and each pattern of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.auto_class import auto_class

WINDOW = 8  # tokens: the longest attention window of a small copy
_POSITIONS = 256  # of a small copy; its texts are shorter
_VOCABULARY = 128
_MAX_LAYERS = 12
_HEADS = 4
_WIDTH = 16  # of a head
_HIDDEN = _HEADS * _WIDTH
_SPREAD = 1.5  # standard deviation of a small copy's logprobs

# Values of a small copy by the field of its config. A field that is not listed keeps its value.
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "depth",
)
_HEAD_FIELDS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
    "swa_num_attention_heads",
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "n_kv_heads", "num_query_groups")
_SIZES = (
    (
        _HIDDEN,
        "hidden_size hidden_size_global out_hidden_size text_hidden_size d_model n_embd emb_dim embedding_size embed_dim"
        " word_embed_proj_dim embedding_dim adapter_in_dim adapter_out_dim adapter_input_size",
    ),
    (
        2 * _HIDDEN,
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim"
        " shared_intermediate_size intermediate_size_mlp ffn_hidden_size expert_ffn_hidden_size dense_intermediate_size n_inner"
        " dff dim_ff d_inner moe_shared_expert_intermediate_size shared_experts_intermediate_size feed_forward_size mamba_d_ssm"
        " attention_hidden_size",
    ),
    (
        _WIDTH,
        "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim dim_head kv_channels swa_head_dim global_head_dim d_head"
        " attention_head_size rotary_dim mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_value_head_dim"
        " linear_head_dim",
    ),
    (2 * _WIDTH, "qk_head_dim kv_lora_rank q_lora_rank attention_head_dim"),
    (2 * _HEADS, "mamba_n_heads mamba_num_heads"),
    (_HEADS, "linear_num_key_heads linear_num_value_heads linear_num_heads"),
    (
        _VOCABULARY,
        "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab",
    ),
    (
        _POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length max_source_positions"
        " max_target_positions original_max_position_embeddings",
    ),
)
_SIZE_OF = {field: size for size, fields in _SIZES for field in fields.split()}
# These values only become smaller.
_WINDOWS = (
    "sliding_window",
    "attention_chunk_size",
    "window_size",
    "sliding_window_size",
    "attention_window_size",
    "local_attention",
    "keep_window_size",
    "floor_scale",
)
_LIMITS = (
    (2 * _HEADS, "n_mamba_heads"),
    (16, "chunk_size mamba_chunk_size"),  # tokens that a layer with a state computes at once
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_k n_group num_expert_group n_groups mamba_n_groups mamba_ngroups",
    ),
    (1, "topk_group n_shared_experts expand"),
)
_LIMIT_OF = {field: limit for limit, fields in _LIMITS for field in fields.split()} | dict.fromkeys(_WINDOWS, WINDOW)


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a small copy. An architecture may refuse it with an error of any class."""
    values = copy.deepcopy(config.to_dict())
    _shrink(values)
    values["dtype"] = "float32"
    return type(config).from_dict(values)


def longest_window(config: PreTrainedConfig) -> int:
    """Tokens of the longest attention window that the config names; 0: none."""
    text = config.get_text_config()
    sizes = [size for field in _WINDOWS if isinstance(size := getattr(text, field, None), int)]
    return max(sizes, default=0)


def save_small_copy(config: PreTrainedConfig, path: Path) -> None:
    """Write a small copy of the architecture in Hugging Face format, in float32. The same config gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = auto_class(config).from_config(small_config(config), dtype=torch.float32)
        spread_weights(model)
    model.save_pretrained(path)


@torch.no_grad()
def spread_weights(model: PreTrainedModel) -> None:
    """Give a model weights under which each token changes the logprobs of the tokens behind it visibly. Weights as they are drawn
    before a training give almost the same logprob to all tokens, and so would hide a fault."""
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise * (_SPREAD / parameter.shape[-1] ** 0.5))
    model.eval()  # type: ignore[no-untyped-call]
    logits = model(input_ids=torch.arange(1, 17)[None], use_cache=False).logits
    spread = float(torch.log_softmax(logits.float(), -1).std())
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if output is not None and 0 < spread < _SPREAD / 2:  # the architecture scales its logits down
        output.weight.mul_(_SPREAD / spread)


def _shrink(values: dict[str, Any]) -> None:
    original = dict(values)
    layers = next((number for name in _LAYERS if isinstance(number := values.get(name), int)), 0)
    heads = next((number for name in _HEAD_FIELDS if isinstance(number := values.get(name), int)), 0)
    kept = _num_layers(values, layers)
    if values.get("num_kv_shared_layers"):  # the last layers share the keys of earlier ones: keep both kinds
        values["num_kv_shared_layers"], kept = kept, 2 * kept
    for name, value in values.items():
        if name in _LAYERS and isinstance(value, int):
            values[name] = min(kept, value)
        elif isinstance(value, list) and layers and len(value) == layers:
            values[name] = value[:kept]
        elif name == "per_layer_config" and isinstance(value, dict):
            values[name] = {key: one for key, one in value.items() if int(key) < kept}
        elif name == "rope_parameters" and isinstance(value, dict):
            _shrink_rope(value)
        elif isinstance(value, dict) and "model_type" in value:
            _shrink(value)
        elif name.endswith(("_token_id", "_token_index")):
            values[name] = _ids_within(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            values[name] = _small(name, value, heads)
    values |= _head(original, values)
    for layer in (values.get("per_layer_config") or {}).values():
        _shrink_layer(layer, original, values)


def _shrink_layer(layer: dict[str, Any], original: Mapping[str, Any], small: Mapping[str, Any]) -> None:
    """Shrink the sizes of one layer in the proportion in which those of all layers were shrunk."""
    whole = {**original, **layer}
    for name, value in layer.items():
        if type(value) is int and small.get(name):
            layer[name] = max(1, value * small[name] // original[name])
    layer |= _head(whole, {**small, **layer})


def _head(original: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, int]:
    """The width of a head that was as wide as its parts together: it stays so."""
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")
    is_sum = "head_dim" in original and original["head_dim"] == sum(original.get(part) or 0 for part in parts)
    return {"head_dim": sum(small[part] for part in parts)} if is_sum else {}


def _small(name: str, value: int, heads: int) -> int:
    if name in _KEY_HEADS:
        return _HEADS if value == heads else min(value, _HEADS // 2)
    if name in _HEAD_FIELDS:
        return _HEADS
    return min(value, _LIMIT_OF[name]) if name in _LIMIT_OF else _SIZE_OF.get(name, value)


def _num_layers(values: Mapping[str, Any], number: int) -> int:
    """The least number of first layers that has each kind of layer; at least 2."""
    patterns = [value for value in values.values() if isinstance(value, list) and number and len(value) == number]
    special = values.get("per_layer_config")
    if isinstance(special, dict):
        patterns.append([special.get(layer, special.get(str(layer))) for layer in range(number)])
    kept = min(2, number)
    while kept < min(number, _MAX_LAYERS) and any(
        {repr(kind) for kind in pattern[:kept]} != {repr(kind) for kind in pattern} for pattern in patterns
    ):
        kept += 1
    # Hybrid layers share their weights: keep two of them
    sharing = [layer for pattern in patterns for layer, kind in enumerate(pattern) if kind == "hybrid"]
    if len(sharing) > 1 and sharing[1] < _MAX_LAYERS:
        kept = max(kept, sharing[1] + 1)
    return kept


def _shrink_rope(rope: dict[str, Any]) -> None:
    if any(isinstance(value, dict) for value in rope.values()):  # parameters by the kind of layer
        for value in rope.values():
            if isinstance(value, dict):
                _shrink_rope(value)
        return
    if isinstance(rope.get("original_max_position_embeddings"), int):
        rope["original_max_position_embeddings"] = _POSITIONS
    rotated = int(_WIDTH * float(rope.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            rope[name] = (rope[name] + [1.0] * rotated)[:rotated]
    if sections := rope.get("mrope_section"):  # how many frequencies time, height and width have
        shares = [rotated * section // sum(sections) for section in sections]
        alone = next((i for i, section in enumerate(sections) if sections.count(section) == 1), 0)  # equal ones stay so
        shares[alone] += rotated - sum(shares)
        rope["mrope_section"] = shares


def _ids_within(value: Any) -> Any:
    if isinstance(value, list):
        return sorted({_ids_within(one) for one in value})
    return value % _VOCABULARY if isinstance(value, int) else value
