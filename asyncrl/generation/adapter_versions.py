"""Several versions of an adapter in the embedded engine (generation.interrupt=finish).

The layers have the matrices of the newest version. Those of older versions, under which requests still run, are here. A pass packs
tokens of several requests into one row. `of_pass` says which of its tokens are of which version; each layer then computes the
matrices of each version on that version's tokens only. The keys of the prefix cache name the version (`name_versions`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.architectures.adapters import A, Adapters, B
from asyncrl.generation.states import Row
from asyncrl.protocol.versions import WeightVersion

Matrices = dict[nn.Module, tuple[Tensor, Tensor]]  # A and B of each layer
_SIZE = 0.5  # of the adapters of the self-check: their output relative to that of a layer


class NewAdapter:
    """The tensors of a version that is being read, by the names of the model's parameters. The engine computes without them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


class AdapterVersions:
    """Changed between two passes only. `of_pass` and `of_text` belong to the thread that computes."""

    def __init__(self, model: nn.Module, adapters: Adapters) -> None:
        self.adapters = adapters
        self._parameters = {name: model.get_parameter(name) for name in adapters.shapes}
        self._layers = {name: model.get_submodule(name) for name in adapters.layers}
        self._newest: WeightVersion | None = None
        self._older: dict[WeightVersion, Matrices] = {}
        self._groups: list[tuple[WeightVersion, Tensor]] = []  # of the current pass: its rows by version
        self._num_tokens = 0  # of the current pass
        adapters.low_rank = self._low_rank

    def empty(self) -> NewAdapter:
        """Tensors for a new version, without its values."""
        return NewAdapter({name: torch.zeros_like(parameter.data) for name, parameter in self._parameters.items()})

    def install(self, new: NewAdapter, version: WeightVersion, *, keeps: bool) -> None:
        """Make this the newest version. keeps: the version that was the newest stays."""
        self._older.pop(version, None)
        if keeps and self._newest not in (None, version):
            self._older[self._newest] = self._of_layers()
        for name, tensor in new.tensors.items():
            self._parameters[name].data = tensor
        self._newest = version

    def unload(self, version: WeightVersion) -> None:
        self._older.pop(version, None)

    def begin_check(self) -> list[WeightVersion]:
        """Install two random adapters that change every layer's output much, for the self-check."""
        versions = [WeightVersion(0, 0), WeightVersion(0, 1)]
        lora = self.adapters.lora
        for version in versions:
            new, generator = self.empty(), torch.Generator().manual_seed(version.version)
            for name, tensor in new.tensors.items():
                value = torch.randn(tensor.shape, generator=generator)
                # A x has entries as large as those of x, and B A x _SIZE times as large
                size = tensor.shape[1] ** -0.5 * (1.0 if name.endswith(A) else _SIZE * lora.rank / lora.alpha)
                tensor.copy_(value * size)
            self.install(new, version, keeps=True)
        return versions

    def end_check(self) -> None:
        self.install(self.empty(), WeightVersion(0, 0), keeps=False)
        self._older.clear()
        self._newest = None

    @contextlib.contextmanager
    def of_pass(self, rows: Sequence[Row], num_tokens: int) -> Iterator[None]:
        """Compute a pass over these tokens, in this order, each with its row's version. num_tokens: with padding."""
        starts = [0, *accumulate(row.length for row in rows)]
        places: dict[WeightVersion, list[Tensor]] = {}
        for row, start in zip(rows, starts, strict=False):
            if row.version is None:
                raise ValueError(f"request {row.key} has no weight version")
            places.setdefault(row.version, []).append(torch.arange(start, start + row.length))
        with self._computing({version: torch.cat(parts) for version, parts in places.items()}, num_tokens):
            yield

    @contextlib.contextmanager
    def of_text(self, version: WeightVersion | None, num_tokens: int) -> Iterator[None]:
        """Compute one text with this version; None: the newest."""
        with self._computing({} if version is None else {version: torch.arange(num_tokens)}, num_tokens):
            yield

    @contextlib.contextmanager
    def _computing(self, rows: Mapping[WeightVersion, Tensor], num_tokens: int) -> Iterator[None]:
        if lacking := rows.keys() - self._older.keys() - {self._newest}:
            raise ValueError(f"weight version {min(lacking)} is not loaded")
        if rows.keys() - {self._newest}:
            device = next(iter(self._parameters.values())).device
            self._groups = [(version, places.to(device)) for version, places in rows.items()]
            self._num_tokens = num_tokens
        try:
            yield
        finally:
            self._groups = []

    def _of_layers(self) -> Matrices:
        return {
            layer: (self._parameters[f"{name}.{A}"].data, self._parameters[f"{name}.{B}"].data)
            for name, layer in self._layers.items()
        }

    def _low_rank(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        """As Adapters.low_rank. inputs: [..., H], all tokens of the pass in their order."""
        if not self._groups:
            return self.adapters.own_low_rank(layer, inputs)
        tokens_TH = inputs.flatten(0, -2)
        if len(tokens_TH) != self._num_tokens:
            raise ValueError(
                f"a layer with an adapter computes {len(tokens_TH)} of the {self._num_tokens} tokens of a pass, so their versions "
                "are not known (generation.interrupt=finish)"
            )
        own = layer.get_parameter(A), layer.get_parameter(B)
        output_TH = inputs.new_zeros(self._num_tokens, len(own[1]))
        for version, places in self._groups:
            matrices = own if version == self._newest else self._older[version][layer]
            output_TH[places] = self.adapters.of_matrices(layer, tokens_TH[places], *matrices)
        return output_TH.view(*inputs.shape[:-1], -1)


class _Named(list[int]):
    """The tokens of a request. Those of each page are read with the version before them, and so are part of the page's key."""

    def __init__(self, tokens: Sequence[int], version: WeightVersion) -> None:
        super().__init__(tokens)
        self._name = [version.attempt, version.version]

    def __getitem__(self, part: Any) -> Any:
        return [*self._name, *super().__getitem__(part)]


def name_versions(cache: Any, version_of: Callable[[str], WeightVersion]) -> None:
    """Make the keys of transformers' prefix cache name the version, so that a request finds pages of its own version only.
    version_of: by the key of a request."""
    search = cache.search_prefix_match
    cache.search_prefix_match = lambda key, tokens: search(key, _Named(tokens, version_of(key)))
    for allocator in cache.cache_allocators.values():
        _name_marked(allocator, version_of)


def _name_marked(allocator: Any, version_of: Callable[[str], WeightVersion]) -> None:
    mark = allocator.mark_complete_blocks
    allocator.mark_complete_blocks = lambda key, tokens, count: mark(key, _Named(tokens, version_of(key)), count)
