"""Routes in SGLang's answers (pure): the experts of each layer and token, as base64 of int32 numbers.

SGLang has a row for every layer, dense ones too, and takes all layers of a Qwen3-MoE for layers with experts. So a model that also
has dense layers is refused, as are the families that have not been compared with the trainer.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncrl.config.schema import ConfigError
from asyncrl.data.model_folder import read_object, text_config
from asyncrl.data.routes import RouteLayout, Routes

_COMPARED = ("qwen3_moe",)


@dataclass(frozen=True)
class SGLangRoutes:
    layout: RouteLayout

    @classmethod
    def of(cls, model_path: str | Path) -> SGLangRoutes:
        """The routes of the model in this folder. Raises ConfigError if SGLang's have not been compared with the trainer's."""
        config = text_config(read_object(Path(model_path).expanduser() / "config.json"))
        found = {key: config.get(key) for key in ("model_type", "mlp_only_layers", "decoder_sparse_step")}
        if (
            found["model_type"] not in _COMPARED
            or found["mlp_only_layers"]
            or found["decoder_sparse_step"] not in (None, 1)
        ):
            raise ConfigError(
                f"train.routes: model_path={str(model_path)!r} has {found}; SGLang's experts were compared with the trainer's for "
                f"{', '.join(_COMPARED)} without dense layers only; use the embedded engine (allocation=transformers...), or set "
                "train.routes=off"
            )
        layers = range(int(config["num_hidden_layers"]))
        number = config.get("num_experts", config.get("num_local_experts"))  # transformers 5 writes the second name
        return cls(RouteLayout(tuple(layers), int(config["num_experts_per_tok"]), int(number)))

    def decode(self, encoded: str, *, num_tokens: int) -> Routes:
        """The routes of all tokens but the last. Raises ValueError for others."""
        layout = self.layout
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
        if len(numbers) != (num_tokens - 1) * layout.width:
            raise ValueError(f"{len(numbers)} experts of {num_tokens} tokens; {layout.width} are those of a token")
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < layout.num_experts:
            raise ValueError(f"experts {numbers.min()} to {numbers.max()}; the model has {layout.num_experts}")
        return Routes(layout, numbers.reshape(-1, layout.width).astype(layout.dtype))
