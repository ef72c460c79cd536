"""Layers that carry a state from token to token, over a packed row: every sequence begins with an empty state.

Convolutions, linear attention and state space models compute a token from the tokens before it in their row. `keep_apart` replaces
the forward pass of such a module. Sequences of similar length become the rows of a rectangle, padded behind their ends, as in
attention.py, and the module computes each rectangle as a batch. A causal module reads no padding behind a sequence, so each row is
what the module computes for its sequence alone. The layer around the module must pass the segments of the row on to it, or the
self-check (self_check.py) refuses the model. Sequences that share a prefix are computed in full, each with the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from asyncrl.architectures.states import modules_with_state
from asyncrl.model.attention import Segments, in_rectangles


def keep_apart(model: PreTrainedModel) -> list[str]:
    """Make each module with a state compute the sequences of a packed row separately. Returns the names of these modules."""
    modules = modules_with_state(model)
    for module in modules.values():
        module.forward = partial(_separately, module.forward)
    return list(modules)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the rectangles differ from pass to pass, and so would the code
def _separately(
    forward: Callable[..., Tensor], hidden_states: Tensor, *args: Any, segments: Segments | None = None, **options: Any
) -> Tensor:
    """forward: of the module. hidden_states: [1, T', H], the sequences and then padding, whose outputs are zeros. With context
    ranks: this rank's part of them; each rank computes the row, and returns the outputs of its part."""
    if segments is None or not segments.rectangles:
        return forward(hidden_states, *args, **options)
    context = segments.context
    if context is not None:
        hidden_states = context.gather(hidden_states)
    num_tokens, num_all = segments.num_tokens, hidden_states.shape[1]
    row = [hidden_states[0, :num_tokens]]

    def compute(*packed: Any) -> Tensor:
        *values, layout = packed
        return in_rectangles(lambda rows_BWH: forward(rows_BWH, *args, **options), values, layout)

    output_TH = segments.shared.written_out(compute, row) if segments.shared is not None else compute(*row, segments)
    output = pad(output_TH, (0, 0, 0, num_all - num_tokens))[None]
    return output if context is None else context.own(output)
