"""Small models that read images beside text, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from asyncrl.architectures.small_copy import small_config
from asyncrl.testing.tiny import make_char_tokenizer
from tests.support.family_table import default_config

SINGLE = "model.safetensors"


def make_vision_model(
    path: Path, family: str, *, dtype: torch.dtype = torch.bfloat16, depth: int | None = None
) -> dict[str, Tensor]:
    """Write a checkpoint and a tokenizer. Its head that predicts several tokens (mtp) belongs to no class of transformers, as that
    of Qwen3.5. depth: layers of the tower, in Qwen's families. Returns the tensors of the checkpoint."""
    config: Any = small_config(default_config(family))
    if depth is not None:
        config.vision_config.depth = depth
    tokenizer = make_char_tokenizer(path)
    config.get_text_config().eos_token_id = config.eos_token_id = tokenizer.eos_token_id
    config.get_text_config().bos_token_id = config.bos_token_id = None
    config.get_text_config().pad_token_id = config.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        make: Any = AutoModelForImageTextToText.from_config
        model: PreTrainedModel = make(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.to(dtype).save_pretrained(path)  # type: ignore[arg-type]
        tensors = {**load_file(path / SINGLE), "mtp.norm.weight": torch.randn(16).to(dtype)}
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    return tensors


def is_of_text(name: str) -> bool:
    """Whether a tensor of a checkpoint of Gemma or Qwen is of the language model."""
    return not any(part.startswith(("visual", "vision", "multi_modal", "mtp")) for part in name.split("."))


def bits_of(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (one.dtype, one.contiguous().view(torch.uint8).numpy().tobytes()) for name, one in tensors.items()}
