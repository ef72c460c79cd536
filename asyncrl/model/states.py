"""Layers that carry a state from token to token, over a packed row: every sequence begins with an empty state.

Convolutions, linear attention and state space models compute a token from the tokens before it in their row. `keep_apart` replaces
the forward pass of such a module. Sequences of similar length become the rows of a rectangle, padded behind their ends, as in
attention.py, and the module computes each rectangle as a batch. A causal module reads no padding behind a sequence, so each row is
what the module computes for its sequence alone. The layer around the module must pass the segments of the row on to it, or the
self-check (self_check.py) refuses the model. A shared prefix is a row of its own, without padding. The sequences behind it go on
from copies of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from asyncrl.architectures.states import States, cache_argument, modules_with_state
from asyncrl.model.attention import Rectangle, Segments, in_rectangles


def keep_apart(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Make each module with a state compute the sequences of a packed row separately. Returns these modules by name."""
    modules = modules_with_state(model)
    for module in modules.values():
        module.forward = partial(_separately, module.forward, cache_argument(module))
    return modules


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the rectangles differ from pass to pass, and so would the code
def _separately(
    forward: Callable[..., Tensor],
    argument: str,
    hidden_states: Tensor,
    *args: Any,
    segments: Segments | None = None,
    **options: Any,
) -> Tensor:
    """forward: of the module. argument: its name for a cache. hidden_states: [1, T', H], the sequences and then padding, whose
    outputs are zeros. With context ranks: this rank's part of them; each rank computes the row, and returns the outputs of its
    part."""
    if segments is None or not segments.rectangles:
        return forward(hidden_states, *args, **options)
    context = segments.context
    if context is not None:
        hidden_states = context.gather(hidden_states)
    num_tokens, num_all = segments.num_tokens, hidden_states.shape[1]
    prefixes: dict[int, States] = {}  # behind the prefixes of so many tokens

    def compute(rectangle: Rectangle, rows_BWH: Tensor) -> Tensor:
        if rectangle.parents is not None:
            forked = prefixes[rectangle.prefix].at(rectangle.parents)
            # Behind a state, one token would take the path of decoding, which changes states in place
            rows_BWH = pad(rows_BWH, (0, 0, 0, int(rectangle.width == 1)))
            return forward(rows_BWH, *args, **options | {argument: forked})[:, : rectangle.width]
        if rectangle.is_prefix:
            prefixes[rectangle.width] = states = States()
            return forward(rows_BWH, *args, **options | {argument: states})
        return forward(rows_BWH, *args, **options)

    output_TH = in_rectangles(compute, [hidden_states[0, :num_tokens]], segments)
    output = pad(output_TH, (0, 0, 0, num_all - num_tokens))[None]
    return output if context is None else context.own(output)
