"""The routes of running requests, for the embedded engine: each pass records which experts each layer chose for each token."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.architectures.routes import routers_of
from asyncrl.data.routes import Routes
from asyncrl.generation.states import Row


class RequestRoutes:
    """Used on the generation thread, and on the control thread while that stands still. Its memory is bounded: routes of a request
    are dropped when they are taken, or when a pass begins after the request's end."""

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        """Raises ConfigError if the model's routers are not known."""
        self._layout, routers = routers_of(model, path)
        self._chosen: list[Tensor] = []  # of the current pass, by layer: [T, K]
        self._is_pass = False
        self._rows: dict[str, list[Any]] = {}  # by request: [tokens of a pass, layout.width] of each pass
        self._counts: dict[str, int] = {}  # tokens in _rows
        for router in routers:
            router.register_forward_hook(self._record)

    def _record(self, router: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        if self._is_pass:
            self._chosen.append(output[2])

    @contextmanager
    def of_pass(self, rows: Sequence[Row], known: Container[str]) -> Iterator[None]:
        """Record a pass over these tokens, in this order. known: as in RequestStates.of_pass."""
        self._rows = {key: kept for key, kept in self._rows.items() if key in known}
        self._counts = {key: self._counts[key] for key in self._rows}
        self._chosen, self._is_pass = [], True
        try:
            yield
        finally:
            self._is_pass = False
        if len(self._chosen) != len(self._layout.layers):
            raise ValueError(
                f"{len(self._chosen)} routers have chosen; layers with experts: {len(self._layout.layers)}"
            )
        chosen: Any = torch.cat(self._chosen, dim=1).cpu().numpy().astype(self._layout.dtype)
        end = 0
        for row in rows:
            end += row.length
            count = self._counts.get(row.key, 0)
            if row.first > count:
                raise ValueError(f"routes from token {row.first} on do not continue {count}")
            # A request that the cache had no room for computes its first tokens again: they keep their first routes
            if (new := row.first + row.length - count) > 0:
                self._rows.setdefault(row.key, []).append(chosen[end - new : end].copy())
                self._counts[row.key] = count + new

    def take(self, key: str) -> Routes | None:
        """The routes of a request that ends. None: no pass has computed one of its tokens."""
        rows = self._rows.pop(key, None)
        return None if rows is None else Routes(self._layout, np.concatenate(rows))
