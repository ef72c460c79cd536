"""The states of layers that carry one from token to token, for the embedded engine: one for each running request.

transformers' continuous batching has a place for keys and values only. A pass packs tokens of several requests into one row.
`RequestStates` replaces the forward pass of each module with a state: it takes the row apart, lets requests with equally many
tokens run as one batch that goes on from their states, and keeps their new states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from asyncrl.architectures.states import cache_argument, modules_with_state
from asyncrl.protocol.versions import WeightVersion


@dataclass(frozen=True)
class Row:
    """The tokens of a request in a pass."""

    key: str  # of the request
    first: int  # position of the first of these tokens in the request
    length: int
    version: WeightVersion | None = None  # of the request's adapter, if the engine keeps several


@dataclass(frozen=True)
class _State:
    """What a module has of a request's tokens so far. The shapes are the module's own; None: it has no such state."""

    conv: Tensor | None
    recurrent: Tensor | None


class RequestStates:
    """Used on the generation thread only."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._states: dict[str, dict[str, _State]] = {}  # by request and module
        self._rows: Sequence[Row] = ()  # of the current pass; empty outside of one
        self.names = list(modules := modules_with_state(model))
        for name, module in modules.items():
            own, layer = cache_argument(module), int(module.layer_idx)  # type: ignore[arg-type]
            module.forward = partial(self._forward, name, layer, own, module.forward)

    @contextlib.contextmanager
    def of_pass(self, rows: Sequence[Row], known: Container[str]) -> Iterator[None]:
        """Compute a pass over these tokens, in this order. known: the keys of all requests that are not done; other states are
        dropped."""
        self._states = {key: states for key, states in self._states.items() if key in known}
        self._rows = rows
        try:
            yield
        finally:
            self._rows = ()

    def _forward(
        self,
        name: str,
        layer: int,
        argument: str,
        forward: Callable[..., Tensor],
        hidden_states: Tensor,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        """argument: the module's name for a cache. hidden_states: [1, T, H], the tokens of all rows and then padding, whose outputs
        are zeros."""
        if not self._rows:
            return forward(hidden_states, *args, **options)
        starts = [0, *accumulate(row.length for row in self._rows)]
        batches: dict[tuple[int, bool], list[tuple[Row, int]]] = {}
        for row, start in zip(self._rows, starts, strict=False):
            batches.setdefault((row.length, row.first == 0), []).append((row, start))
        output = torch.zeros_like(hidden_states)
        for (length, is_new), members in batches.items():
            own = LinearAttentionLayer()
            if not is_new:
                _go_on(own, [self._states[row.key][name] for row, _ in members])
            cache = Cache(layers=[own])
            cache.layers = {layer: own}  # type: ignore[assignment]  # it is looked up by the number of the layer
            rows_BWH = torch.stack([hidden_states[0, start : start + length] for _, start in members])
            outputs_BWH = forward(rows_BWH, **{argument: cache})
            for number, (row, start) in enumerate(members):
                output[0, start : start + length] = outputs_BWH[number]
                conv, recurrent = (kind[0] for kind in (own.conv_states, own.recurrent_states))
                self._states.setdefault(row.key, {})[name] = _State(
                    None if conv is None else conv[number], None if recurrent is None else recurrent[number]
                )
        return output


def _go_on(layer: LinearAttentionLayer, states: Sequence[_State]) -> None:
    """Give an empty layer of transformers' cache the states of a batch."""
    conv, recurrent = [state.conv for state in states], [state.recurrent for state in states]
    if conv[0] is not None:
        layer.conv_states[0], layer.is_conv_states_initialized[0] = torch.stack(conv), True  # type: ignore[arg-type]
        layer.conv_kernel_size[0] = conv[0].shape[-1]
    if recurrent[0] is not None:
        layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = torch.stack(recurrent), True  # type: ignore[arg-type]
    layer.has_previous_state[0] = True
