"""Tiny models of further families of transformers, with random weights. Their windows are shorter than the tests' sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.testing.tiny import make_char_tokenizer

WINDOW = 8
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
# Each with the spelling of its window that its real models use
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3_moe": _EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmo3": _MIXED,
    "gpt_neox": {},
    "llama": {},
    "gemma": {},
    "gemma2": _MIXED | {"query_pre_attn_scalar": 16},
    "gemma3_text": _MIXED | {"query_pre_attn_scalar": 16},
    "cohere2": _MIXED,
    "gpt_oss": _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": WINDOW,
        "num_local_experts": 4,
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 0],
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "apertus": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}


def make_family(path: Path | None, family: str, **changes: Any) -> PreTrainedModel:
    """A causal language model of this family, saved to path with a tokenizer."""
    tokenizer = make_char_tokenizer(path)
    shape = {"num_key_value_heads": 2, "head_dim": 16} if family != "gpt_neox" else {}
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": None,
            "dtype": "float32",
            **shape,
            **FAMILIES[family],
            **changes,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "bias" in name or "sinks" in name:  # zero in a new model
                    parameter.normal_()
    if path is not None:
        model.save_pretrained(path)
    model.eval()  # type: ignore[no-untyped-call]
    return model
