"""Samples from the weights in training with transformers' generate: a KV cache, prompts padded on the left.

    TrainEngine -- all weights, gathered over data ranks --> a model of the same architecture -- generate --> tokens

The second model has no weights of its own. While it samples it borrows the engine's tensors, or, if those are sharded or of another
dtype, uses copies in train.dtype. It exists so that decoding can use other attention than the engine's packed rows. Once it has its
weights, each data rank samples independently: ranks need not make the same number of forward passes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from asyncrl.architectures.adapters import add_adapters
from asyncrl.architectures.auto_class import auto_class
from asyncrl.architectures.towers import drop_towers
from asyncrl.config.schema import SamplingConfig
from asyncrl.model.engine import TrainEngine

_UNLIMITED = 1 << 30


class Sampler:
    """Samples responses from an engine's weights, token by token."""

    def __init__(
        self, engine: TrainEngine, *, eos_token_ids: Sequence[int], max_sequences: int, max_tokens: int
    ) -> None:
        """max_sequences, max_tokens: the most that are sampled at the same time; tokens of prompts and responses, with padding."""
        if engine.num_stages > 1:
            raise ValueError("generation needs the whole model on each worker, not a pipeline stage")
        self.eos_token_ids = list(eos_token_ids)
        self._engine = engine
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self.max_length = int(getattr(engine.config.get_text_config(), "max_position_embeddings", 0) or _UNLIMITED)
        self._model = _shape_of(engine)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        self._places = [
            (module, attribute, names[id(parameter)], parameter)
            for module in self._model.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        ]

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Use the engine's current weights inside the `with` block. Collective over the engine's ranks; `sample`, which is called
        in the block, is not collective."""
        engine = self._engine
        engine.onload()
        whole: dict[str, nn.Parameter] = {}
        with torch.no_grad():
            for name, parameter in engine.named_parameters().items():
                tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
                whole[name] = nn.Parameter(tensor.to(engine.dtype), requires_grad=False)
        for module, attribute, name, _ in self._places:
            module._parameters[attribute] = whole[name]
        try:
            yield
        finally:
            for module, attribute, _, shape in self._places:
                module._parameters[attribute] = shape

    def sample(
        self, prompts: Sequence[Sequence[int]], num_each: int, sampling: SamplingConfig, *, seed: Sequence[int]
    ) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield (index of a prompt, its responses) as soon as they are complete. A sampled end token is kept.

        Prompts of similar length are sampled together. Each prompt must be shorter than max_length.
        """
        rows = [at for at in sorted(range(len(prompts)), key=lambda at: -len(prompts[at])) for _ in range(num_each)]
        found: dict[int, list[list[int]]] = {}
        for number, batch in enumerate(self._batches([len(prompts[at]) for at in rows], sampling.max_new_tokens)):
            mine = [rows[row] for row in batch]
            for at, response in zip(
                mine, self._sample_batch([prompts[at] for at in mine], sampling, [*seed, number]), strict=True
            ):
                found.setdefault(at, []).append(response)
            for at in dict.fromkeys(mine):
                if len(found[at]) == num_each:
                    yield at, found.pop(at)

    def _batches(self, lengths: Sequence[int], max_new_tokens: int) -> Iterator[range]:
        """Yield ranges of consecutive rows within the limits on sequences and tokens, but at least one row each. lengths: longest
        first."""
        start = 0
        while start < len(lengths):
            width = lengths[start] + max_new_tokens
            count = max(1, min(self._max_sequences, self._max_tokens // width))
            yield range(start, min(start + count, len(lengths)))
            start += count

    def _sample_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seed: Sequence[int]
    ) -> list[list[int]]:
        device, width = self._engine.device, max(map(len, prompts))
        pad = self.eos_token_ids[0]
        input_ids_BW = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
        mask_BW = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        (state,) = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int(state >> np.uint64(1)))
            output_BL = self._model.generate(  # type: ignore[operator]
                input_ids_BW,
                attention_mask=mask_BW,
                generation_config=_generation_config(
                    sampling, min(sampling.max_new_tokens, self.max_length - width), self.eos_token_ids, pad
                ),
            )
        return [self._cut(row) for row in output_BL[:, width:].tolist()]

    def _cut(self, row: list[int]) -> list[int]:
        """Cut the row after its first end token."""
        ends = [at for at, token in enumerate(row) if token in self.eos_token_ids]
        return row[: ends[0] + 1] if ends else row


def _shape_of(engine: TrainEngine) -> PreTrainedModel:
    """Return a model without weights, with the engine's buffers and the attention that transformers chooses for it."""
    with torch.device("meta"):
        config = copy.deepcopy(engine.config)
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=engine.dtype)
    drop_towers(model)
    model.eval()  # type: ignore[no-untyped-call]
    if engine.adapters is not None:
        add_adapters(model, engine.adapters.lora, engine.adapters.base)
    for name, buffer in engine.model.named_buffers():
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module)._buffers[attribute] = buffer
    return model


def _generation_config(
    sampling: SamplingConfig, max_new_tokens: int, eos_token_ids: Sequence[int], pad_token_id: int
) -> GenerationConfig:
    """Set every field that generate would otherwise take from the model's own defaults."""
    ends = {"eos_token_id": list(eos_token_ids), "pad_token_id": pad_token_id}
    if sampling.greedy:
        return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, **ends)  # type: ignore[no-untyped-call]
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),  # 0: all
        **ends,
    )
