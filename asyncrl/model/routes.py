"""Router replay: the trainer's mixture of experts sends each token to the experts that the sampler has chosen for it.

A small difference between sampler and trainer, such as rounding, changes the choice of some routers, and so the logprobs of most
tokens. With train.routes=replay the experts are the sampler's, and their scores are the trainer's own, so the router is trained.
With train.routes=compare the experts are the trainer's own, and only counted.

Shapes: T tokens of a micro-batch, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.architectures.routes import replaced, routers_of
from asyncrl.data.routes import ROUTES, Routes
from asyncrl.model.packing import SequenceBatch, run_indices
from asyncrl.model.row_ranks import ContextRanks
from asyncrl.protocol.errors import RunEndedError

# Share of a layer's choices that may differ in the first trained batch. Rounding changes a tenth of them; the choices of another
# layer, or numbers that no router has chosen, differ in most
MAX_OTHER = 0.5
_OF_LAYER = "other_experts_of_layer/"


class RouteError(RunEndedError):
    """The routes of the data are not those of the model in training."""


class RouteReplay:
    """The routers of a model in training, and the sampler's choices for the current micro-batches."""

    def __init__(
        self, stage: nn.Module, model: nn.Module, path: str, *, replays: bool, context: ContextRanks | None = None
    ) -> None:
        """stage: it is called with the number of a micro-batch, and has all layers. context: the ranks that share the rows; each
        routes its own tokens. Raises ConfigError if the model's routers are not known."""
        self.layout, routers = routers_of(model, path)
        self._path, self._replays, self._context = path, replays, context
        self._micro_batches: list[Tensor | None] = []  # [T, L * K] int64; None: no routes
        self._current: Tensor | None = None
        self._counts = False  # a forward pass runs; the backward pass may compute layers again
        # Of the newest forward pass and this rank's tokens: the choices differ; 0 where no route is known
        self._other_TL: Tensor | None = None
        self._is_checked = False
        stage.register_forward_pre_hook(self._begin)
        stage.register_forward_hook(self._end)
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._route, number))

    def set_up(self, batch: SequenceBatch | None, plan: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Take the routes of the micro-batches. plan: the sequences of each. lengths: its tokens, with padding. Raises RouteError
        for routes of other layers, in another order, or of another model."""
        self._micro_batches = [None] * len(plan)
        if batch is None or ROUTES not in batch.data:
            return
        runs = batch.key_lengths[ROUTES]
        for i, (sequences, length) in enumerate(zip(plan, lengths, strict=True)):
            if not sequences:
                continue
            rows = [self._rows(batch.data[ROUTES][run_indices(runs, [at])], batch.lengths[at]) for at in sequences]
            known = np.concatenate(rows).astype(np.int64)
            padded = np.full((length, self.layout.width), self.layout.unknown, np.int64)
            padded[: len(known)] = known
            self._micro_batches[i] = torch.from_numpy(padded)

    def _rows(self, run: Any, length: int) -> Any:
        try:
            routes = Routes.decode(run)
        except ValueError as error:
            raise RouteError(f"train.routes: {error}") from error
        if routes.layout != self.layout or len(routes) != length:
            raise RouteError(
                f"train.routes: model_path={self._path!r} has {self.layout}, and {length} tokens came with {len(routes)} routes of "
                f"{routes.layout}: generation servers and trainer compute different models"
            )
        return routes.rows

    def take_other(self, predicted_T: Tensor) -> dict[str, Tensor]:
        """Sums over these tokens, after their forward pass: those of which a layer has chosen other experts than the sampler, and
        the share of layers that have. predicted_T: bool; a token was predicted at the position before it. Collective over context
        ranks."""
        assert self._other_TL is not None
        row_TL = self._other_TL.float()
        if self._context is not None:
            row_TL = self._context.gather_results(row_TL[None])[0]
        # roll: the first token of a row is never predicted
        other_TL = row_TL.roll(1, dims=0)[: len(predicted_T)][predicted_T]
        return {
            "other_experts_token_share": other_TL.amax(1).sum() if len(other_TL) else other_TL.sum(),
            "other_experts_share": other_TL.mean(1).sum() if len(other_TL) else other_TL.sum(),
        } | ({} if self._is_checked else {f"{_OF_LAYER}{at}": sum_ for at, sum_ in enumerate(other_TL.sum(0))})

    def checked(self, stats: dict[str, float], num_tokens: float) -> dict[str, float]:
        """Return the statistics without those of single layers. Raises RouteError before the first update if most choices of a
        layer differ in the first batch. stats: over all ranks."""
        others = {name: value for name, value in stats.items() if name.startswith(_OF_LAYER)}
        if others and num_tokens:
            self._is_checked = True
            worst = max(others, key=lambda name: others[name])
            if (share := others[worst] / num_tokens) > MAX_OTHER:
                layer = self.layout.layers[int(worst.removeprefix(_OF_LAYER))]
                raise RouteError(
                    f"train.routes: {share:.0%} of the choices of layer {layer} differ from the sampler's in the first step "
                    f"(allowed: {MAX_OTHER:.0%}). The routes are those of other layers, of another order, or of another model"
                )
        return {name: value for name, value in stats.items() if name not in others}

    def _begin(self, stage: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        routes = self._micro_batches[int(inputs[0])]
        if routes is not None:
            routes = routes.to(next(stage.parameters()).device)
            routes = routes if self._context is None else self._context.own(routes[None])[0]
        self._current = routes
        self._counts = True
        self._other_TL = None

    def _end(self, stage: nn.Module, inputs: Any, outputs: Any) -> None:
        self._counts = False

    def _route(self, number: int, router: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> Any:
        if self._current is None:
            return output
        top_k = self.layout.top_k
        sampled_TK = self._current[:, number * top_k : (number + 1) * top_k]
        known_T = sampled_TK[:, 0] != self.layout.unknown
        if self._counts:
            if self._other_TL is None:
                self._other_TL = torch.zeros(
                    len(known_T), len(self.layout.layers), dtype=torch.bool, device=known_T.device
                )
            differ_T = (output[2].sort(-1).values != sampled_TK.sort(-1).values).any(-1)
            self._other_TL[:, number] = differ_T & known_T
        return replaced(router, output, sampled_TK, known_T) if self._replays else output
