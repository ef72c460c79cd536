"""Limits that a model sets for its sequences, read from config.json and generation_config.json in its folder. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.data.model_folder import read_object, text_config

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model."""

    vocab_size: int
    max_length: int  # tokens of a sequence, prompt and response
    eos_token_ids: frozenset[int] = frozenset()
    tied: bool = False  # the output layer is the embedding

    @classmethod
    def of(cls, model_path: str | Path) -> ModelLimits:
        """Read the limits from a model's folder. Raises ValueError if config.json lacks vocab_size."""
        folder = Path(model_path).expanduser()
        config = read_object(folder / "config.json")
        text = text_config(config)
        defaults: dict[str, Any] = {}
        if (folder / "generation_config.json").is_file():
            defaults = read_object(folder / "generation_config.json")
        eos: set[int] = set()
        for found in (config.get("eos_token_id"), text.get("eos_token_id"), defaults.get("eos_token_id")):
            eos.update([found] if isinstance(found, int) else found or [])
        if "vocab_size" not in text:
            raise ValueError(f"{folder / 'config.json'} has no vocab_size")
        return cls(
            vocab_size=int(text["vocab_size"]),
            max_length=int(text.get("max_position_embeddings") or UNLIMITED),
            eos_token_ids=frozenset(eos),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        )
