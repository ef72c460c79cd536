"""A tiny model, versions of its weights that differ clearly, and plain forward passes to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import LoraConfig
from asyncrl.generation.engine import Generated
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import version_dir, write_version

V0, V1, V2, V3 = (WeightVersion(1, v) for v in range(4))
MAX_POSITIONS = 1024
EXACT = 1e-5  # largest difference between logprobs of a server and of transformers with equal weights, in float32
_TELLING = 8  # least number of tokens whose mean logprobs always differ clearly between two versions


class WeightStore:
    """A model directory and its weight versions."""

    lora: LoraConfig | None = None  # versions are adapters

    def __init__(
        self,
        root: Path,
        architecture: str = "qwen2",
        hidden_size: int = 64,
        *,
        tied: bool = True,
        max_positions: int = MAX_POSITIONS,
        num_layers: int = 2,
    ) -> None:
        self.root, self._architecture = root, architecture
        self._sizes: dict[str, Any] = {
            "hidden_size": hidden_size,
            "max_positions": max_positions,
            "num_layers": num_layers,
            "tie_embeddings": tied,
        }
        self.model_path = root / "model"
        make_tiny_model(self.model_path, architecture, **self._sizes)
        self._models: dict[WeightVersion, torch.nn.Module] = {}
        for version in (V0, V1, V2, V3):
            self.write(version)

    def tensors(self, version: WeightVersion) -> dict[str, torch.Tensor]:
        model = make_tiny_model(None, self._architecture, seed=1 + version.version, **self._sizes)
        return {name: p.detach() for name, p in model.named_parameters()}  # a tied tensor appears once

    def write(self, version: WeightVersion, tensors: dict[str, torch.Tensor] | None = None, run: str = "run") -> Path:
        path = version_dir(self.root / run, "actor", version)
        given = self.tensors(version) if tensors is None else tensors
        write_version(path, given.items(), source_dir=self.model_path, version=version, fsync=False)
        return path

    def path(self, version: WeightVersion) -> Path:
        return version_dir(self.root / "run", "actor", version)

    def logprobs(
        self, version: WeightVersion, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Logprobs of the tokens after the prompt, from a plain forward pass."""
        rows = torch.log_softmax(self._logits(version, [*prompt, *tokens])[len(prompt) - 1 : -1] / temperature, dim=-1)
        return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    def greedy(self, version: WeightVersion, prompt: Sequence[int], count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count and 0 not in tokens:
            tokens.append(int(self._logits(version, [*prompt, *tokens])[-1].argmax()))
        return tokens

    def _logits(self, version: WeightVersion, ids: list[int]) -> torch.Tensor:
        if version not in self._models:
            self._models[version] = AutoModelForCausalLM.from_pretrained(self.path(version), dtype=torch.float32)
        with torch.no_grad():
            logits: torch.Tensor = self._models[version](torch.tensor([ids])).logits[0]
        return logits

    def assert_versions_are_exact(self, prompt: Sequence[int], generated: Generated) -> set[str]:
        """Assert that each token's logprob matches the version that labels its span, and that no other version matches the span.
        Return the versions of the spans."""
        tokens, found = generated.token_ids, generated.logprobs
        assert [span.start for span in generated.spans] == [0, *(span.end for span in generated.spans[:-1])]
        assert generated.spans[-1].end == len(tokens) == len(found)
        by_version = {version: self.logprobs(version, prompt, tokens) for version in (V0, V1, V2, V3)}
        for span in generated.spans:
            labelled = WeightVersion.parse(span.version)
            for version, expected in by_version.items():
                worst = max(abs(found[i] - expected[i]) for i in range(span.start, span.end))
                mean = sum(abs(found[i] - expected[i]) for i in range(span.start, span.end)) / (span.end - span.start)
                if version == labelled:
                    assert worst < EXACT, (span, worst)
                else:
                    assert worst > 10 * EXACT, (span, version, worst)
                    assert mean > 0.05 or span.end - span.start < _TELLING, (span, version, mean)
        return {span.version for span in generated.spans}
