"""The sizes of a model, by arithmetic on its config.json: parameters, bytes of the KV cache, FLOPs. Pure except `ModelShape.of`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ConfigError
from asyncrl.data.model_folder import read_object, text_config
from asyncrl.data.model_limits import UNLIMITED
from asyncrl.launch.checks.model_files import count_parameters
from asyncrl.plan.result import PlanError
from asyncrl.protocol.model_flops import ModelFlops

# model_type -> whether its projections of queries, keys and values have a bias that config.json does not mention
_FAMILIES = {"llama": False, "mistral": False, "mixtral": False, "qwen2": True, "qwen2_moe": True} | {
    "qwen3": False,
    "qwen3_moe": False,
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
    qk_norm: bool = False
    experts: int = 1
    experts_per_token: int = 1
    dense_layers: int = 0  # layers without experts, of a model with experts
    dense_width: int = 0  # width of their MLPs
    shared_width: int = 0  # width of the expert that every token uses, with a gate; 0: none
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
            stored = count_parameters(model_path)
        except (OSError, ConfigError):  # a plan needs no weights
            stored = 0
        return cls(**{**shape.__dict__, "stored": stored})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the values of a config.json. Raises PlanError for a family that this arithmetic does not cover."""
        text = text_config(config)
        family = text.get("model_type")
        if family not in _FAMILIES:
            raise PlanError(
                f"model_type={family!r}: its sizes are not known; use one of {', '.join(sorted(_FAMILIES))}"
            )
        hidden, heads, layers = (
            int(text[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        bias = bool(text.get("attention_bias", _FAMILIES[family]))
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 1)
        width = int(text["intermediate_size"])
        dense = 0
        if experts > 1:
            every, kept_dense = int(text.get("decoder_sparse_step") or 1), text.get("mlp_only_layers") or []
            dense = sum(layer in kept_dense or (layer + 1) % every != 0 for layer in range(layers))
        return cls(
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            mlp_width=int(text.get("moe_intermediate_size") or width) if experts > 1 else width,
            vocab=int(text["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            max_length=int(text.get("max_position_embeddings") or UNLIMITED),
            qkv_bias=bias,
            output_bias=bias and family in ("llama", "qwen3", "qwen3_moe"),
            mlp_bias=bool(text.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            experts=experts,
            experts_per_token=int(text.get("num_experts_per_tok") or 1) if experts > 1 else 1,
            dense_layers=dense,
            dense_width=width if dense else 0,
            shared_width=int(text.get("shared_expert_intermediate_size") or 0) if experts > 1 else 0,
        )

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
        """The parameters of one layer (of a layer with experts, if there are any)."""
        return self._attention + 2 * self.hidden + self._mlp(self.experts)

    @property
    def largest_tensor(self) -> int:
        """The parameters of the largest tensor of a checkpoint."""
        return self.hidden * max(self.vocab, self.mlp_width, self.dense_width, self.heads * self.head_dim)

    @property
    def replicated_parameters(self) -> int:
        """The parameters that every tensor rank holds whole: norms, biases behind row-parallel layers, routers."""
        norms = self.num_layers * (2 * self.hidden + 2 * self.head_dim * self.qk_norm) + self.hidden
        biases = self.num_layers * self.hidden * (self.output_bias + self.mlp_bias)
        sparse = self.num_layers - self.dense_layers
        routers = sparse * self.hidden * (self.experts + bool(self.shared_width)) if self.experts > 1 else 0
        return norms + biases + routers

    def parameters_of_rank(self, tensor: int) -> int:
        """The parameters of a tensor rank. With more ranks than heads of keys and values, ranks hold copies of these heads."""
        copies = max(tensor // self.kv_heads, 1) if tensor > self.kv_heads else 1
        keys = self.num_layers * 2 * self.kv_heads * self.head_dim * (self.hidden + self.qkv_bias)
        split = self.parameters - self.replicated_parameters - keys
        return self.replicated_parameters + -(-(split + keys * copies) // tensor)

    def serves_on(self, tensor: int) -> bool:
        """Whether SGLang can divide the heads among these tensor ranks. Ranks may hold copies of heads of keys and values."""
        kv_heads = self.kv_heads
        return self.heads % tensor == 0 and (kv_heads % tensor == 0 or tensor % kv_heads == 0)

    def kv_values_per_token(self, tensor: int = 1) -> int:
        """Values that one token needs in the KV cache of a tensor rank, all layers together."""
        return 2 * self.num_layers * max(-(-self.kv_heads // tensor), 1) * self.head_dim

    def forward_flops(self, tokens: int, length: int) -> float:
        """FLOPs of one forward pass over whole sequences of `length` tokens, `tokens` in all (ModelFlops, without windows). The
        lookup of the embedding costs none."""
        lookup = 0 if self.tied else self.vocab * self.hidden
        widths = [(0, 0, self.num_layers * self.heads * self.head_dim)]
        flops = ModelFlops(num_parameters=self.active_parameters - lookup, widths=widths)
        return tokens * flops.of_batch([length]) / length

    @property
    def _attention(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 2 * self.hidden * (queries + keys) + self.qkv_bias * (queries + 2 * keys)
        return weights + self.output_bias * self.hidden + 2 * self.head_dim * self.qk_norm

    def _mlp(self, experts: int) -> int:
        width = self.mlp_width
        each = 3 * self.hidden * width + self.mlp_bias * (2 * width + self.hidden)
        if self.experts == 1:
            return each
        gate = self.hidden if self.shared_width else 0
        return experts * each + self.hidden * self.experts + 3 * self.hidden * self.shared_width + gate

    def _count(self, experts: int) -> int:
        sparse = self.num_layers - self.dense_layers
        layers = self.num_layers * (self._attention + 2 * self.hidden)
        mlps = sparse * self._mlp(experts) + self.dense_layers * 3 * self.hidden * self.dense_width
        return layers + mlps + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)
