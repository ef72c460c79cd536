"""Layers that carry a state from token to token: convolutions, linear attention and state space models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from asyncrl.architectures.attention import backbone_of


def modules_with_state(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, the modules of the backbone that carry a state. A module counts as one if it has a convolution of its own, as all of
    transformers' have, and the number of its layer, which its state is cached by. An encoder of audio has no such number."""
    return {
        name: module
        for name, module in backbone_of(model).named_modules()
        if hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())
    }


def cache_argument(module: nn.Module) -> str:
    """A module's name for a cache."""
    return "past_key_values" if "past_key_values" in signature(module.forward).parameters else "cache_params"


# Types of these modules that do not go on from a state with several tokens, and why
_STARTS_ANEW = {"ZambaMambaMixer": "its scan of several tokens begins with an empty state"}


def why_states_stay(modules: Iterable[nn.Module]) -> str:
    """Why one of these modules with a state cannot go on from that of a prefix; "": all can."""
    names = (type(module).__name__ for module in modules)
    return next((f"{name}: {_STARTS_ANEW[name]}" for name in names if name in _STARTS_ANEW), "")


class States:
    """The states of a batch behind its tokens so far. A module gets it in place of transformers' cache.

    For several tokens it changes no tensor in place, so gradients flow from tokens that go on from a state to those before them.
    """

    def __init__(self, conv: Mapping[int, Tensor] | None = None, recurrent: Mapping[int, Tensor] | None = None) -> None:
        """conv, recurrent: as the module makes them, [B, ...], by its numbers for them."""
        self._conv, self._recurrent = dict(conv or {}), dict(recurrent or {})

    def at(self, rows: Tensor) -> States:
        """Copies of these rows of the batch. rows: int64."""
        conv, recurrent = (
            {number: state.index_select(0, rows) for number, state in of_kind.items()}
            for of_kind in (self._conv, self._recurrent)
        )
        return States(conv, recurrent)

    # The methods of transformers' Cache that these modules call

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._recurrent.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        """conv_states: the inputs of a convolution, [B, C, W]. Returns them behind those before."""
        before = self._conv.get(state_idx)
        inputs = conv_states if before is None else torch.cat([before, conv_states], -1)
        self._conv[state_idx] = pad(inputs, (max(conv_kernel_size - inputs.shape[-1], 0), 0))[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._recurrent[state_idx] = recurrent_states
        return recurrent_states
