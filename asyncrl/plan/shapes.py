"""The sizes of a model, by arithmetic on its config.json: parameters, bytes of the KV cache, FLOPs. Pure except `ModelShape.of`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.schema import ConfigError
from asyncrl.data.model_folder import read_object, text_config
from asyncrl.data.model_limits import UNLIMITED
from asyncrl.data.state_layers import StateLayer, layers_with_attention
from asyncrl.launch.checks.model_files import count_parameters
from asyncrl.plan.result import PlanError
from asyncrl.protocol.model_flops import ModelFlops, delta_rule_flops
from asyncrl.weights.adapter import ALL_LINEAR


@dataclass(frozen=True)
class _Family:
    """What distinguishes the layers of a model_type, as far as config.json does not say it."""

    qkv_bias: bool = False
    output_bias: bool = True  # where queries, keys and values have a bias, the output has one, too
    qk_norm: Literal["", "head", "all"] = ""  # over the values of a head, or of all heads
    gate: Literal["", "head", "value"] = (
        ""  # attention's output is gated by one value of each head, or by one of each of its own
    )
    norms: int = 2  # of a layer, over its hidden units
    is_hybrid: bool = False  # some layers have a state in place of attention
    interval: int = 0  # every so many layers, one has attention, unless config.json says which; 0: all


_DENSE = _Family(output_bias=False)
_QWEN3 = _Family(qk_norm="head")
_GATED = _Family(qk_norm="head", gate="value", is_hybrid=True, interval=4)
_LFM2 = _Family(qk_norm="head", is_hybrid=True)
_FAMILIES = {  # by model_type
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": _Family(qk_norm="head", gate="head", norms=4, is_hybrid=True),
    "llama": _Family(),
    "mistral": _DENSE,
    "mixtral": _DENSE,
    "olmo_hybrid": _Family(qk_norm="all", is_hybrid=True, interval=4),
    "qwen2": _Family(qkv_bias=True, output_bias=False),
    "qwen2_moe": _Family(qkv_bias=True, output_bias=False),
    "qwen3": _QWEN3,
    "qwen3_5_moe_text": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_moe": _QWEN3,
    "qwen3_next": _GATED,
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs. Counts are of parameters, unless a name says otherwise.

    experts: MLPs of a layer, of which each token uses experts_per_token; 1 and 1: a dense model.
    """

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int  # of one expert, if the layers have experts
    vocab: int
    tied: bool  # the output layer is the embedding
    max_length: int  # tokens of a sequence
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: int = 0  # of the norms of queries and keys in a layer
    gate: int = 0  # values of a token that gate the output of attention in a layer
    norms: int = 2  # of a layer, over its hidden units
    experts: int = 1
    experts_per_token: int = 1
    dense_layers: int = 0  # layers without experts, of a model with experts
    dense_width: int = 0  # width of their MLPs
    shared_width: int = 0  # width of the expert that every token uses, with a gate; 0: none
    state_layers: int = 0  # layers that have `state` in place of attention
    state: StateLayer | None = None
    stored: int = 0  # parameters in the safetensors files; 0: unknown

    @classmethod
    @functools.cache
    def of(cls, model_path: str) -> ModelShape:
        """Read a model's folder: config.json and, if there are any, the headers of its safetensors files. Raises PlanError."""
        try:
            config = read_object(Path(model_path).expanduser() / "config.json")
            shape = cls.from_config(config)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"model_path={model_path!r}: its config.json does not give the model's sizes: {error!r}; copy the model again"
            ) from error
        try:
            # The files of a hybrid have further parts, which a run does not load: layers that predict tokens ahead, images
            stored = count_parameters(model_path) if shape.state is None else 0
        except (OSError, ConfigError):  # a plan needs no weights
            stored = 0
        return cls(**{**shape.__dict__, "stored": stored})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the values of a config.json. Raises PlanError for a family that this arithmetic does not cover."""
        text = text_config(config)
        name = text.get("model_type")
        if name not in _FAMILIES:
            raise PlanError(f"model_type={name!r}: its sizes are not known; use one of {', '.join(sorted(_FAMILIES))}")
        family = _FAMILIES[name]
        hidden, heads, layers = (int(text[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        kv_heads = int(text.get("num_key_value_heads") or heads)
        head_dim = int(text.get("head_dim") or hidden // heads)
        bias = bool(text.get("attention_bias", family.qkv_bias))
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 1)
        width = _mlp_width(text, is_sparse=experts > 1)
        dense = int(text.get("num_dense_layers") or 0)
        if experts > 1 and "num_dense_layers" not in text:
            every, kept_dense = int(text.get("decoder_sparse_step") or 1), text.get("mlp_only_layers") or []
            dense = sum(layer in kept_dense or (layer + 1) % every != 0 for layer in range(layers))
        state_layers = _layers_with_state(text, family)
        return cls(
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_width=int(text.get("moe_intermediate_size") or width) if experts > 1 else width,
            vocab=int(text["vocab_size"]),
            tied=bool(
                config.get("tie_word_embeddings", text.get("tie_word_embeddings", text.get("tie_embedding", False)))
            ),
            max_length=int(text.get("max_position_embeddings") or UNLIMITED),
            qkv_bias=bias,
            output_bias=bias and family.output_bias,
            mlp_bias=bool(text.get("mlp_bias", False)),
            qk_norm={"": 0, "head": 2, "all": heads + kv_heads}[family.qk_norm] * head_dim,
            gate={"": 0, "head": heads, "value": heads * head_dim}[family.gate],
            norms=family.norms,
            experts=experts,
            experts_per_token=int(text.get("num_experts_per_tok") or 1) if experts > 1 else 1,
            dense_layers=dense,
            dense_width=width if dense else 0,
            shared_width=int(text.get("shared_expert_intermediate_size") or 0) if experts > 1 else 0,
            state_layers=state_layers,
            state=StateLayer.of(text) if state_layers else None,
        )

    @property
    def attention_layers(self) -> int:
        return self.num_layers - self.state_layers

    @property
    def parameters(self) -> int:
        """All parameters: as in the files, or else by the shapes."""
        return self.stored or self._count(self.experts)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses."""
        return self.parameters - self._count(self.experts) + self._count(self.experts_per_token)

    @property
    def layer_parameters(self) -> int:
        """The parameters of the largest layer (of those with experts, if there are any)."""
        mixer = max(self._attention, self.state.parameters if self.state is not None else 0)
        return mixer + self.norms * self.hidden + self._mlp(self.experts)

    @property
    def layer_experts(self) -> int:
        """The parameters of the experts of a layer that has some."""
        return self._mlp(self.experts) - self._mlp(0) if self.experts > 1 else 0

    @property
    def sparse_layers(self) -> int:
        return self.num_layers - self.dense_layers if self.experts > 1 else 0

    @property
    def largest_tensor(self) -> int:
        """The parameters of the largest tensor of a checkpoint. The projections of a layer with a state count as one."""
        rows = self.hidden * max(self.vocab, self.mlp_width, self.dense_width, self.heads * self.head_dim + self.gate)
        return max(rows, self.state.parameters if self.state is not None else 0)

    @property
    def replicated_parameters(self) -> int:
        """The parameters that every tensor rank holds whole: norms, biases behind row-parallel layers, routers."""
        norms = self.num_layers * self.norms * self.hidden + self.attention_layers * self.qk_norm + self.hidden
        biases = self.hidden * (self.attention_layers * self.output_bias + self.num_layers * self.mlp_bias)
        sparse = self.num_layers - self.dense_layers
        routers = sparse * self.hidden * (self.experts + bool(self.shared_width)) if self.experts > 1 else 0
        return norms + biases + routers

    def parameters_of_rank(self, tensor: int) -> int:
        """The parameters of a tensor rank. With more ranks than heads of keys and values, ranks hold copies of these heads."""
        copies = max(tensor // self.kv_heads, 1) if tensor > self.kv_heads else 1
        keys = self.attention_layers * 2 * self.kv_heads * self.head_dim * (self.hidden + self.qkv_bias)
        split = self.parameters - self.replicated_parameters - keys
        return self.replicated_parameters + -(-(split + keys * copies) // tensor)

    def adapter_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """The parameters of an adapter of these layers (train.lora.targets, by the last part of their names). Layers with a state
        and fused experts have none."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layers = [  # names, inputs and outputs together, how many
            (("q_proj",), self.hidden + queries + self.gate, self.attention_layers),
            (("k_proj",), self.hidden + keys, self.attention_layers),
            (("v_proj",), self.hidden + keys, self.attention_layers),
            (("o_proj", "out_proj"), queries + self.hidden, self.attention_layers),
        ]
        mlps = [(self.mlp_width, self.num_layers)]
        if self.experts > 1:
            mlps = [(self.dense_width, self.dense_layers), (self.shared_width, self.sparse_layers)]
        for width, count in mlps:
            for names in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                layers.append((names, self.hidden + width, count if width else 0))
        wanted = {target.rpartition(".")[2] for target in targets}
        chosen = [row for row in layers if ALL_LINEAR in wanted or wanted & {*row[0]}]
        return rank * sum(size * count for _, size, count in chosen)

    def serves_on(self, tensor: int) -> bool:
        """Whether SGLang can divide the heads among these tensor ranks. Ranks may hold copies of heads of keys and values."""
        kv_heads, of_states = self.kv_heads, self.state.key_heads if self.state is not None else 0
        return self.heads % tensor == 0 == of_states % tensor and (kv_heads % tensor == 0 or tensor % kv_heads == 0)

    def kv_values_per_token(self, tensor: int = 1) -> int:
        """Values that one token needs in the KV cache of a tensor rank, all layers with attention together."""
        return 2 * self.attention_layers * max(-(-self.kv_heads // tensor), 1) * self.head_dim

    def state_bytes(self, value: int, tensor: int = 1) -> int:
        """Bytes that one request needs on a tensor rank for the states of its layers. value: bytes of a value of the model."""
        return -(-self.state_layers * self.state.state_bytes(value) // tensor) if self.state is not None else 0

    @property
    def state_parameters(self) -> int:
        """The parameters of all layers with a state, beside their norms and MLPs. Tensor ranks of training do not split them."""
        return self.state_layers * self.state.parameters if self.state is not None else 0

    @property
    def state_flops(self) -> int:
        """FLOPs of a token in all layers with a state, forward."""
        return 2 * self.state_parameters + self.state_layers * self._rule_flops

    def forward_flops(self, tokens: int, length: int) -> float:
        """FLOPs of one forward pass over whole sequences of `length` tokens, `tokens` in all (ModelFlops, without windows). The
        lookup of the embedding costs none."""
        lookup = 0 if self.tied else self.vocab * self.hidden
        flops = ModelFlops(
            num_parameters=self.active_parameters - lookup,
            widths=[(0, 0, self.attention_layers * self.heads * self.head_dim)],
            of_states=self.state_layers * self._rule_flops,
        )
        return tokens * flops.of_batch([length]) / length

    @property
    def _rule_flops(self) -> int:
        state = self.state
        return delta_rule_flops(state.heads, state.key_width, state.value_width) if state is not None else 0

    @property
    def _attention(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * (queries + keys) + self.gate) + self.qkv_bias * (queries + self.gate + 2 * keys)
        return weights + self.output_bias * self.hidden + self.qk_norm

    def _mlp(self, experts: int) -> int:
        width = self.mlp_width
        each = 3 * self.hidden * width + self.mlp_bias * (2 * width + self.hidden)
        if self.experts == 1:
            return each
        gate = self.hidden if self.shared_width else 0
        return experts * each + self.hidden * self.experts + 3 * self.hidden * self.shared_width + gate

    def _count(self, experts: int) -> int:
        sparse = self.num_layers - self.dense_layers
        layers = (
            self.attention_layers * self._attention + self.state_parameters + self.num_layers * self.norms * self.hidden
        )
        mlps = sparse * self._mlp(experts) + self.dense_layers * 3 * self.hidden * self.dense_width
        return layers + mlps + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)


def _mlp_width(text: Mapping[str, Any], *, is_sparse: bool) -> int:
    """Width of a dense MLP; 0: a model with experts that has none. LFM2 adjusts the width of its config (transformers' Lfm2MLP)."""
    given = text.get("block_ff_dim") or text.get("intermediate_size")
    if given is None and not is_sparse:
        raise KeyError("intermediate_size")
    width, factor = int(given or 0), text.get("block_ffn_dim_multiplier")
    if text.get("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if factor is not None:
            multiple = int(text.get("block_multiple_of") or 256)
            width = -(-int(factor * width) // multiple) * multiple
    return width


def _layers_with_state(text: Mapping[str, Any], family: _Family) -> int:
    if not family.is_hybrid:
        return 0
    if not (family.interval or text.get("layer_types") or text.get("full_attn_idxs")):
        raise KeyError("layer_types")
    return int(text["num_hidden_layers"]) - layers_with_attention(text, family.interval)
