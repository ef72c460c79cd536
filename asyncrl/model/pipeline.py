"""Stages of a model: what a rank runs on a micro-batch, and how the stages of a pipeline pass micro-batches on.

Without a pipeline there is one stage, from token ids to outputs. With a pipeline the first stage embeds, each stage has a slice of
the layers, and the last has the final norm and the output layer. Layers keep their numbers, so parameters keep their names.

A stage gets the number of a micro-batch and, unless it is the first, the hidden states of the previous stage. All ranks of a
replica know the rest of the micro-batch. All micro-batches of a pipeline's step are padded to the same length.

Shapes: T tokens of a micro-batch, packed; T' with padding; L tokens of its sequences (packing.py `Packed`); N tokens that are
predicted; S sequences; H hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.attention import backbone_of
from asyncrl.architectures.routes import keep_router_dtypes
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.axes import LAYERS
from asyncrl.model.logprobs import token_logprobs
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.packing import Packed
from asyncrl.model.sharding import TensorRanks, local_tensor

Outputs = tuple[Tensor, ...]  # lm: (logprobs_L, entropy_L); value: (values_L,); reward: (scores_S,)
_PARTS = ("embed_tokens", "layers", "norm")  # parts of a backbone, by their names in transformers' base_model_pp_plan


@dataclass(frozen=True)
class Logits:
    """How an architecture makes logits from the outputs of its output layer: scale * outputs, or cap * tanh(outputs / cap)."""

    scale: float = 1.0
    cap: float = 0.0  # 0: none

    @classmethod
    def of(cls, found: Tensor, expected: Tensor, config: PreTrainedConfig) -> Logits | None:
        """Find, by the fields of the config that architectures use for it, how `found`, the outputs of the output layer, became
        `expected`. None: in another way."""
        text = config.get_text_config()
        scales = [getattr(text, name, None) for name in ("logit_scale", "logits_scaling")]
        factors = [factor for scale in scales if scale for factor in (float(scale), 1.0 / float(scale))]
        cap = float(getattr(text, "final_logit_softcapping", None) or 0.0)
        candidates = [cls(), *map(cls, factors), *([cls(cap=cap)] if cap else [])]
        made = [logits(found) for logits in candidates]
        # Broken weights may make infinite logits, which equal themselves
        distances = [float((one - expected).abs().where(one != expected, 0.0).max()) for one in made]
        best = min(range(len(candidates)), key=distances.__getitem__)
        return candidates[best] if distances[best] <= 1e-2 * float(expected.abs().max()) else None

    def __call__(self, outputs: Tensor) -> Tensor:
        return self.cap * (outputs / self.cap).tanh() if self.cap else outputs * self.scale


class Stage(nn.Module):
    """This rank's whole forward pass. As FSDP's root module it owns embedding, norm and output layer."""

    def __init__(
        self,
        model: PreTrainedModel,
        kind: str,
        *,
        is_first: bool = True,
        is_last: bool = True,
        autocast: torch.dtype | None = None,
        tensor: TensorRanks | None = None,
        hidden_dtype: torch.dtype,
        chunk_tokens: int,
    ) -> None:
        """tensor: the tensor ranks; None: this rank has whole rows and all words. autocast: dtype of the computation, None: no
        autocast. hidden_dtype: of the hidden states between layers and between stages. With autocast the embedding is cast to it,
        since autocast leaves embeddings in the dtype of the weights: the residual stream is the same as with FSDP, and as large.
        """
        super().__init__()
        self.model = model
        self.kind = kind
        self.is_first = is_first
        self.is_last = is_last
        self.tensor = tensor
        self.hidden_dtype = hidden_dtype
        self.hidden_size: int = model.config.get_text_config().hidden_size
        self._autocast = autocast
        if autocast is not None:
            keep_router_dtypes(model, autocast)
        if autocast is not None and is_first:
            model.get_input_embeddings().register_forward_hook(lambda _, __, embedded: embedded.to(hidden_dtype))
        self._chunk_tokens = chunk_tokens
        self.micro_batches: Sequence[Packed] = ()  # of the current step
        self.lengths: Sequence[Sequence[int]] = ()  # of the sequences of each micro-batch
        self.newest = 0  # the micro-batch whose forward pass began last
        self.temperature = 1.0
        self.logits = Logits()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: Tensor, number: Tensor | None = None) -> Tensor | Outputs:
        """x: on the first stage the number of the micro-batch, [1, 1]; on other stages the previous stage's hidden states [1, T',
        H], and `number` is the number of the micro-batch. Returns outputs on the last stage, else hidden states. With c context and
        m tensor ranks, hidden states are those of the rank's own T' / (c * m) tokens, also between stages."""
        number = x if number is None else number
        self.newest = int(number)
        packed = self.micro_batches[self.newest]
        context = packed.segments.context
        ids, positions = packed.input_ids, packed.position_ids
        if context is not None:
            ids, positions = context.own(ids), context.own(positions)
        with self.autocast():
            inputs = {"input_ids": ids} if self.is_first else {"inputs_embeds": x}
            hidden_1TH: Tensor = backbone_of(self.model)(
                **inputs, position_ids=positions, segments=packed.segments, use_cache=False
            ).last_hidden_state
            if not self.is_last:
                return hidden_1TH.to(self.hidden_dtype)
            if self.kind == "lm":
                return self._logprobs(self.tensor.gather(hidden_1TH)[0] if self.tensor else hidden_1TH[0], packed)
        scores_1T = self._scores(hidden_1TH)
        for ranks in filter(None, (self.tensor, context)):
            scores_1T = ranks.gather_results(scores_1T)
        scores_T = scores_1T[0]
        scores_L = scores_T[: packed.num_tokens] if packed.places is None else scores_T.index_select(0, packed.places)
        ends = torch.tensor(self.lengths[int(number)]).cumsum(0) - 1
        return (scores_L if self.kind == "value" else scores_L[ends],)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self._autocast)

    def _logprobs(self, hidden_TH: Tensor, packed: Packed) -> Outputs:
        """Compute logprobs and entropy so that position t describes token t. Both are 0 for the first token of each sequence. A
        token of a shared prefix is computed once."""
        layer = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        own = packed.own or packed
        results = token_logprobs(
            hidden_TH[own.predictors],
            local_tensor(layer.weight),
            packed.input_ids[0, own.predicted],
            temperature=self.temperature / self.logits.scale,
            cap=self.logits.cap,
            chunk_tokens=self._chunk_tokens,
            bias=None if layer.bias is None else local_tensor(layer.bias),
            tensor_group=None if self.tensor is None else self.tensor.group,
            vocab_start=0 if self.tensor is None else self.tensor.vocab_start,
        )
        if packed.own is not None and packed.segments.context is not None:
            logprobs_N, entropy_N = packed.own.gather(results, packed.segments.context)
        else:
            logprobs_N, entropy_N = results
        zeros_T = logprobs_N.new_zeros(packed.num_tokens)
        rows = (zeros_T.index_put((packed.predicted,), each_N) for each_N in (logprobs_N, entropy_N))
        return tuple(row_T if packed.places is None else row_T.index_select(0, packed.places) for row_T in rows)

    def _scores(self, hidden_1TH: Tensor) -> Tensor:
        """Compute one number per position, in float32: this layer is cheap, and learning from its output needs the precision."""
        layer: nn.Linear = self.model.score  # type: ignore[assignment]
        scores_1T = hidden_1TH.float() @ layer.weight[0].float()
        return scores_1T if layer.bias is None else scores_1T + layer.bias.float()


# ------------------------------------------------------------------------------------------------------------------ stages


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """Return the numbers of a stage's layers. Stages have equally many. If that does not divide, the first stages have one more,
    because the last one also has the output layer."""
    each, more = divmod(num_layers, num_stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def cut_to_stage(model: PreTrainedModel, mesh: ModelMesh, path: str | Path) -> None:
    """Remove the layers of other stages. Afterwards the model has its own copy of the config."""
    backbone: Any = backbone_of(model)
    grid = mesh.placement.grid
    what = f"model_path={str(path)!r}: architecture {model.config.model_type!r}"
    remedy = f"use p1 in the grid of {mesh.placement.name!r} ({grid})"
    plan = backbone.config.base_model_pp_plan or {}
    if set(plan) != set(_PARTS) or not isinstance(backbone.layers, nn.ModuleList):
        raise ConfigError(f"{what} has no plan for pipeline stages in a supported form; {remedy}")
    num_layers = len(backbone.layers)
    if num_layers < grid.num_stages:
        raise ConfigError(f"{what} has {num_layers} layers, fewer than the stages of {grid}; use at most p{num_layers}")
    own = layers_of_stage(num_layers, grid.num_stages, mesh.parts[LAYERS])
    _own_config(model, own)
    if not mesh.is_first_stage:
        _check_that_embeddings_pass(model, what, remedy)
        backbone.embed_tokens = None
    for i in set(range(num_layers)) - set(own):
        del backbone.layers._modules[str(i)]  # `del layers[i]` would renumber the others
    if not mesh.is_last_stage:
        backbone.norm = nn.Identity()
        for name in ("lm_head", "score"):
            if hasattr(model, name):
                setattr(model, name, None)


def _own_config(model: PreTrainedModel, layers: range) -> None:
    """Give the model a config of its own, with only these layers: a backbone looks up the type of a layer by the layer's index in
    the backbone's list."""
    config: PreTrainedConfig = copy.deepcopy(model.config)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        text.layer_types = [kinds[i] for i in layers]
    text.num_hidden_layers = len(layers)
    model.config = config
    model.base_model.config = config  # type: ignore[assignment]


class _First(nn.Module):
    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x


def _check_that_embeddings_pass(model: PreTrainedModel, what: str, remedy: str) -> None:
    """Check that a backbone without layers returns embeddings unchanged: later stages pass hidden states in their place."""
    backbone: Any = backbone_of(model)
    layers, norm, rotary = backbone.layers, backbone.norm, getattr(backbone, "rotary_emb", None)
    backbone.layers, backbone.norm, backbone.rotary_emb = nn.ModuleList(), nn.Identity(), _First()
    hidden = torch.arange(8.0).reshape(1, 2, 4)
    try:
        found = backbone(inputs_embeds=hidden, position_ids=torch.arange(2)[None], use_cache=False).last_hidden_state
    finally:
        backbone.layers, backbone.norm, backbone.rotary_emb = layers, norm, rotary
    if not torch.equal(found, hidden):
        raise ConfigError(f"{what} changes embeddings before its first layer: it cannot be cut into stages; {remedy}")


# ------------------------------------------------------------------------------------------------------------------ running


def train_micro_batches(stage: Stage, mesh: ModelMesh, loss_of: Callable[[Outputs, int], Tensor]) -> None:
    """Run forward and backward of all micro-batches, alternating one forward and one backward (1F1B). Collective over the stages.

    Every stage has the same micro-batches, at least as many as stages, padded to the same length. Afterwards the parameters hold
    gradients, reduced over data ranks and added to those that they held before. loss_of is called on the last stage, in order.
    """
    # Put gradients aside: torch clears those of FSDP's parameters when it prepares a schedule
    earlier = {parameter: parameter.grad for parameter in stage.parameters() if parameter.grad is not None}
    for parameter in earlier:
        parameter.grad = None
    count = len(stage.micro_batches)
    hidden = _hidden(stage, "meta").requires_grad_()
    number = torch.zeros(1, 1, dtype=torch.int64, device="meta")

    def lose(_: nn.Module, __: object, kwargs: Mapping[str, Tensor], outputs: Outputs) -> Tensor:
        return loss_of(outputs, int(kwargs["number"])).float()

    # torch 2.11 demands the same shape of the outputs of all micro-batches. The last stage's are as long as their tokens; its loss
    # is a number
    hook = stage.register_forward_hook(lose, with_kwargs=True) if stage.is_last else None
    schedule = Schedule1F1B(
        PipelineStage(
            stage,
            mesh.parts[LAYERS],
            mesh.placement.grid.num_stages,
            stage.device,
            input_args=number if stage.is_first else hidden,
            output_args=torch.empty((), device="meta") if stage.is_last else hidden,
            group=mesh.group_that_splits(LAYERS),
        ),
        count,
        loss_fn=lambda loss, target: loss,
        scale_grads=False,
    )
    numbers = torch.tensor([[number] for number in range(count)])
    try:
        if stage.is_first:
            schedule.step(numbers, return_outputs=False)
        else:
            schedule.step(number=numbers, target=numbers if stage.is_last else None, return_outputs=False)
    finally:
        if hook is not None:
            hook.remove()
    for parameter, grad in earlier.items():
        parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def run_micro_batches(stage: Stage, mesh: ModelMesh | None) -> list[Outputs]:
    """Run forward only. Returns the outputs of each micro-batch on the last stage, else nothing. Collective over the stages.

    A stage keeps the hidden states of one micro-batch beside those that it computes, however many micro-batches there are.
    """
    results: list[Outputs] = []
    stages, at = (mesh.group_that_splits(LAYERS), mesh.parts[LAYERS]) if mesh is not None else (None, 0)
    sending: tuple[dist.Work, Tensor] | None = None  # a tensor must stay alive until it is sent
    for i in range(len(stage.micro_batches)):
        number = torch.tensor([[i]])
        if mesh is None or stage.is_first:
            outputs = stage(number)
        else:
            hidden = _hidden(stage, stage.device)
            dist.recv(hidden, group=stages, group_src=at - 1)
            outputs = stage(hidden, number)
            del hidden
        if mesh is None or stage.is_last:
            results.append(outputs)
            continue
        if sending is not None:
            sending[0].wait()
        work = dist.isend(outputs, group=stages, group_dst=at + 1)
        assert work is not None
        sending = work, outputs
        del outputs
    if sending is not None:
        sending[0].wait()
    return results


def _hidden(stage: Stage, device: torch.device | str) -> Tensor:
    """Allocate a buffer for the previous stage's hidden states."""
    packed = stage.micro_batches[0]
    ranks = filter(None, (stage.tensor, packed.segments.context))
    length = packed.input_ids.shape[1] // math.prod(each.size for each in ranks)
    return torch.empty(1, length, stage.hidden_size, dtype=stage.hidden_dtype, device=device)
