"""A tiny model with versions that are adapters of it, and plain forward passes by peft to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.architectures.adapters import Adapters, add_adapters
from asyncrl.config.schema import LoraConfig
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.adapter import ABOUT, about
from asyncrl.weights.versions import ScoredText, commit_version, version_dir, write_part
from tests.support.weight_store import WeightStore

TEXT = [1 + i * i % 63 for i in range(40)]  # that the logprob check scores


class AdapterStore(WeightStore):
    lora = LoraConfig(rank=4, alpha=8.0)

    def __init__(self, root: Path, **sizes: Any) -> None:
        self._adapters: Adapters | None = None
        super().__init__(root, **sizes)

    @property
    def adapters(self) -> Adapters:
        if self._adapters is None:
            base = AutoModelForCausalLM.from_pretrained(self.model_path)
            self._adapters = add_adapters(base, self.lora, self.model_path)
        return self._adapters

    def tensors(self, version: WeightVersion) -> dict[str, torch.Tensor]:
        """Random values, by peft's names: no matrix is zero, so each of them counts."""
        generator = torch.Generator().manual_seed(version.version)
        adapters = self.adapters
        return {
            adapters.names[name]: 0.1 * torch.randn(shape, generator=generator)
            for name, shape in adapters.shapes.items()
        }

    def write(self, version: WeightVersion, tensors: dict[str, torch.Tensor] | None = None, run: str = "run") -> Path:
        path = version_dir(self.root / run, "actor", version)
        given = self.tensors(version) if tensors is None else tensors
        sides = {ABOUT: about(self.lora, str(self.model_path), self.adapters.layers)}
        text = None
        if run == "run":  # written twice: its own logprobs belong into its manifest
            self._commit(self.path(version), given, sides, version, None)
            text = ScoredText(TEXT, self.logprobs(version, TEXT[:1], TEXT[1:]))
        self._commit(path, given, sides, version, text)
        return path

    def _commit(
        self,
        path: Path,
        tensors: dict[str, torch.Tensor],
        sides: dict[str, bytes],
        version: WeightVersion,
        text: ScoredText | None,
    ) -> None:
        files = write_part(path, tensors.items(), fsync=False)
        commit_version(path, files, sides=sides, version=version, fsync=False, scored_text=text, replace=True)
