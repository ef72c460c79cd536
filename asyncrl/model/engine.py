"""Training engine: one rank of one Hugging Face model, in any layout of data, context, tensor and pipeline ranks.

Interfaces (asyncrl/model/interfaces.py) define what to compute. The engine loads the model, runs forward and backward in
micro-batches within a token budget, sums gradients over ranks and steps the optimizer. sharding.py and pipeline.py split the model;
export.py exports its weights.

The update is the same in any layout. The loss of a micro-batch is a sum that is already divided by the global denominator, so
gradients add up over micro-batches and over ranks, however the batch is distributed. A rank without groups contributes zero: it
runs micro-batches of one token that predicts nothing, so that all ranks make the same collective calls.

Shapes: T tokens of the sequences of a micro-batch, packed; S sequences.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from asyncrl.architectures.adapters import Adapters, add_adapters
from asyncrl.architectures.agreement import architecture_errors, not_repeatable
from asyncrl.architectures.attention import backbone_name, backbone_of, read_attention
from asyncrl.architectures.states import why_states_stay
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import KEEP_ATTENTION, ConfigError, OptimizerConfig, TrainConfig
from asyncrl.config.sharing import is_worth_sharing, may_share
from asyncrl.data.routes import ROUTES
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import (
    EXPERTS,
    GRADIENTS,
    LAYERS,
    LOSSES,
    MATRICES,
    NORMS,
    PARTIALS,
    SAMPLES,
    TOKENS,
    problem_of_heads,
)
from asyncrl.dataflow.layout_checks import problem_of_losses
from asyncrl.model import sharding
from asyncrl.model.attention import keep_outputs, long_tokens_of, reasons_of
from asyncrl.model.experts import check_experts, split_experts
from asyncrl.model.flops import flops_of
from asyncrl.model.interfaces import LossFn
from asyncrl.model.kernels import uses_gpu_kernels
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.offload import HostMemory, Offloaded
from asyncrl.model.packing import (
    MicroBatch,
    Packed,
    SequenceBatch,
    cu_seqlens_of,
    plan_micro_batches,
    prefixes_of,
    run_indices,
)
from asyncrl.model.pipeline import (
    Logits,
    Outputs,
    Stage,
    cut_to_stage,
    run_micro_batches,
    train_micro_batches,
)
from asyncrl.model.router_loss import RouterLoss
from asyncrl.model.routes import RouteReplay
from asyncrl.model.row_ranks import ContextRanks
from asyncrl.model.sharding import local_tensor
from asyncrl.model.states import keep_apart
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.protocol.names import ACTOR

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OUTPUT_NAMES = {"lm": ("logprobs", "entropy"), "value": ("values",), "reward": ("scores",)}
_HEAD_CHECK_TOKENS = 4
_NUM_ROUTED = "num_routed_tokens"  # those of which the statistics of routes are sums


class TrainEngine:
    """A model that computes logprobs, values or scores and can be trained if trainable. All methods run on the compute thread.

    Computing methods are collective over all ranks of the model: every rank calls them in the same order, even without groups.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        *,
        mesh: ModelMesh | None = None,
        device: str | torch.device = "cpu",
        weights: sharding.WeightSource = sharding.CHECKPOINT,
    ) -> None:
        """mesh: of model.grid; None if this is the only rank. Collective. Raises ConfigError if model and grid do not fit.

        Trained weights are always float32. With train.dtype bfloat16 the computation and the exported weights are bfloat16, but the
        float32 weights keep small updates. A frozen model is loaded in train.dtype itself, except a moving average (model.float32).
        """
        self.train = train
        self._inference_tokens = train.max_tokens_per_mb  # per micro-batch; less once memory has run out
        self.optimizer_config = model.optimizer
        self.kind = model.kind
        self.trainable = model.trainable
        self.device = torch.device(device)
        self.dtype = DTYPES[train.dtype]
        self.mesh = mesh
        self._mesh = mesh if mesh is not None and mesh.placement.grid.size > 1 else None
        self.replica = self._mesh.parts[SAMPLES] if self._mesh is not None else 0
        self.num_replicas = self._mesh.placement.grid.num_replicas if self._mesh is not None else 1
        self.num_stages = self._mesh.placement.grid.num_stages if self._mesh is not None else 1
        self.num_tensor_ranks = self._mesh.placement.grid.parts(MATRICES) if self._mesh is not None else 1
        self.context: ContextRanks | None = None  # the ranks that share the rows of this one
        if self._mesh is not None and self._mesh.placement.grid.parts(TOKENS) > 1:
            self.context = ContextRanks(self._mesh.group_that_splits(TOKENS), self._mesh.parts[TOKENS])
        self.is_last_stage = self._mesh is None or self._mesh.is_last_stage
        self.is_head = self._mesh is None or self._mesh.is_head

        config = weights.load_config(model.path, model.kind)
        if model.trainable and (problem := problem_of_losses(config.to_dict())):
            raise ConfigError(f"model_path={model.path!r}: {problem}")
        self.config = copy.deepcopy(config)
        self.vocab_size: int = config.get_text_config().vocab_size
        self._slots: sharding.Slots  # (module, attribute) of each parameter of this rank
        self._split: set[str] = set()  # parameters that are split over tensor ranks
        # Of each layer's attention; "": it runs in the varlen kernel. Key: whether the sequences of a row are long
        self.why_rectangles: dict[bool, list[str]] = {}
        self.long_tokens = long_tokens_of(self.device, train)
        self.with_state: list[str] = []  # the modules that carry a state from token to token
        self.untrained: dict[str, Tensor] = {}  # of the checkpoint, not of the model; values on the first rank only
        is_actor = model.name.partition("@")[0] == ACTOR
        has_routes = train.routes != "off" and is_actor
        self.shares_prefixes = may_share(train, has_routes=has_routes)
        self._partial: set[str] = set()  # parameters with gradients that must still be summed over tensor ranks
        self._tied = ""  # name of the tied embedding if the last of several stages has a copy as its output layer
        self.adapters: Adapters | None = None
        self._float32 = (self.trainable and model.lora is None) or model.float32
        weights_dtype = torch.float32 if self._float32 else self.dtype
        if self._mesh is None:
            self.module = self._load_whole(model, config, weights_dtype, weights)
        else:
            self.module = self._load_shard(model, config, weights_dtype, self._mesh, weights)
        # The routers of an actor that has routes in its data
        self.routes: RouteReplay | None = None
        if has_routes:
            replays = train.routes == "replay"
            self.routes = RouteReplay(self.module, self.module.model, model.path, replays=replays, context=self.context)
            size = self.routes.layout.bytes_per_token
            logger.info("routes of %d layers: %d bytes of each token", len(self.routes.layout.layers), size)
        self.router_loss: RouterLoss | None = None
        if is_actor and model.trainable and train.router_aux_loss_coef:
            self.router_loss = RouterLoss(self.module, model.path, coef=train.router_aux_loss_coef, mesh=self._mesh)
        if self.adapters is not None and self.untrained:
            raise ConfigError(
                f"model_path={model.path!r} with train.lora: the checkpoint has parts that the trainer does not compute "
                f"({min(self.untrained)}), which is not proven with adapters; use another model, or train in full"
            )
        self.trained_flops = 0  # model FLOPs of training so far, on this replica's part of the batches
        self.num_tokens = 0  # of all sequences so far, in training and inference
        self.num_tokens_shared = 0  # of them, those that another sequence of their row has computed
        self.model: PreTrainedModel = self.module.model
        if not self.untrained or not self.config.architectures:  # this config is saved with exported models
            self.config.architectures = [type(self.model).__name__]
        self._total_steps = train.total_steps
        self.skipped_steps = 0
        self.optimizer: torch.optim.AdamW | None = None
        self._offloaded: Offloaded | None = None
        self._host_memory = HostMemory()  # for the bytes of an offloaded model
        if not self.trainable:
            self.model.requires_grad_(False)
            return
        if train.gradient_checkpointing:
            # The method's name changed within transformers 5; its first argument did not.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            keeps = {"context_fn": keep_outputs} if train.gradient_checkpointing == KEEP_ATTENTION else {}
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False, **keeps})
            self.model.train()  # transformers needs it for gradient checkpointing; it changes nothing else, as all dropout is 0
        if not self.own_parameters():
            raise ConfigError(
                f"train.lora.targets={model.lora.targets if model.lora else []}: a stage of {model.grid} has none of them; "
                "use more targets, or p1"
            )
        self.optimizer = _make_optimizer(
            self.own_parameters().values(), model.optimizer, fused=uses_gpu_kernels(self.device)
        )

    # ------------------------------------------------------------------------------------------------------------- loading

    def compile_layers(self, backend: str = "inductor") -> None:
        """Run each layer as compiled code from now on, made at its next calls."""
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile(backend=backend)

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """Dtype of the computation; None if it is the dtype of the weights."""
        return self.dtype if self._float32 and self.dtype != torch.float32 else None

    def _load_whole(
        self, model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype, weights: sharding.WeightSource
    ) -> Stage:
        whole = weights.load_whole(model.path, model.kind, config, dtype)
        if weights.has_values:
            whole.to(self.device)  # type: ignore[arg-type]
            self._read_attention(whole, model.path)
        self._read_untrained(whole, model, weights)
        self._keep_apart(whole, model.path)
        if model.lora is not None:
            self.adapters = add_adapters(whole, model.lora, model.path)
            start = self.adapters.start()
            with torch.no_grad():
                for name in self.adapters.shapes:
                    whole.get_parameter(name).copy_(start(name))
        self.flops = flops_of(whole)
        self._slots = sharding.slots(whole)
        stage = Stage(
            whole,
            model.kind,
            autocast=self._compute_dtype,
            hidden_dtype=self._compute_dtype or dtype,
            chunk_tokens=int(self.train.logprob_chunk_tokens),
        )
        if model.kind == "lm" and weights.has_values:
            with architecture_errors(model.path):
                stage.logits = _logits_of(stage, model.path, self.vocab_size)
        return stage

    def _read_untrained(self, whole: PreTrainedModel, model: ModelConfig, weights: sharding.WeightSource) -> None:
        """whole: the model before it is split."""
        if model.kind == "lm" and weights.has_values:
            is_first = self._mesh is None or self._mesh.rank == self._mesh.placement.workers[0]
            self.untrained = sharding.untrained_tensors(model.path, whole, with_values=is_first)

    def _read_attention(self, model: PreTrainedModel, path: str) -> None:
        layers = read_attention(model, path)
        if self.context is not None and self._mesh is not None:
            ranks, size = self.num_tensor_ranks, self.context.size
            heads = ((layer.num_heads // ranks, layer.num_key_heads // ranks) for layer in layers)
            if problem := next(filter(None, (problem_of_heads(*both, size) for both in heads)), ""):
                remedy = f"use another c in the grid of {self._mesh.placement.name!r} ({self._mesh.placement.grid})"
                raise ConfigError(f"model_path={path!r}: {problem}; {remedy}")
        self.why_rectangles = reasons_of(layers, self.device, self.dtype, long_tokens=self.long_tokens)

    def _keep_apart(self, model: PreTrainedModel, path: str) -> None:
        """model: all of its layers."""
        modules = keep_apart(model)
        self.with_state = list(modules)
        if why := why_states_stay(modules.values()):
            if self.train.share_prefix == "on":
                raise ConfigError(
                    f"train.share_prefix='on': {path!r} cannot go on from the state behind a shared prefix ({why}); use off"
                )
            self.shares_prefixes = False

    def _load_shard(
        self,
        model: ModelConfig,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        mesh: ModelMesh,
        weights: sharding.WeightSource,
    ) -> Stage:
        """Cut and shard the model while it has no weights, then read what this rank holds (sharding.open_weights)."""
        grid = mesh.placement.grid
        skeleton = sharding.Skeleton.of(config, model.kind, dtype)
        if weights.has_values:
            self._read_attention(skeleton.model, model.path)
        self._keep_apart(skeleton.model, model.path)
        if self.with_state and self.context is not None and grid.only(SAMPLES, TOKENS) != grid:
            raise ConfigError(
                f"model_path={model.path!r}: {self.with_state[0]} carries a state from token to token. Its updates with context "
                "and tensor ranks or stages are not shown to be equal; use d and c alone in the grid of "
                f"{mesh.placement.name!r} ({grid})"
            )
        read = weights.open_weights(model.path, skeleton, config, dtype)
        self._read_untrained(skeleton.model, model, weights)
        logits = _logits_without_weights(skeleton.model, model.path) if model.kind == "lm" else Logits()
        if model.lora is not None:
            self.adapters = skeleton.add_adapters(model.lora, model.path)
        elif grid.num_stages > 1 and (mesh.is_first_stage or mesh.is_last_stage):
            self._tied = skeleton.tied_name
        self.flops = flops_of(skeleton.model)
        tensor = sharding.apply_tensor_parallel(skeleton, mesh, model.path) if grid.parts(MATRICES) > 1 else None
        if grid.parts(EXPERTS) > 1:
            check_experts(skeleton.model, mesh, model.path)
        if grid.num_stages > 1:
            cut_to_stage(skeleton.model, mesh, model.path)
        by_fsdp = grid.uses_fsdp  # FSDP casts by itself
        if grid.parts(EXPERTS) > 1:
            split_experts(skeleton.model, mesh, self._compute_dtype, self._values_of)
        stage = Stage(
            skeleton.model,
            model.kind,
            is_first=mesh.is_first_stage,
            is_last=mesh.is_last_stage,
            autocast=None if by_fsdp else self._compute_dtype,
            tensor=tensor,
            hidden_dtype=self._compute_dtype or dtype,
            chunk_tokens=int(self.train.logprob_chunk_tokens),
        )
        stage.logits = logits
        sharding.fill_buffers(skeleton, read, device=self.device, path=model.path)
        if by_fsdp:
            for unit in sharding.shard_units(skeleton.model):
                sharding.apply_data_parallel(unit, mesh.submesh(GRADIENTS), self._compute_dtype)
            sharding.apply_data_parallel(stage, mesh.submesh(GRADIENTS), self._compute_dtype)
        self._slots = sharding.fill(stage, skeleton, read, dtype=dtype, device=self.device, path=model.path)
        self._split = skeleton.split
        if tensor is not None:
            self._partial = self.own_parameters().keys() - self._split
        return stage

    # ---------------------------------------------------------------------------------------------------------- inference

    def logprobs(self, sample: SequenceSample | None, *, temperature: float) -> npt.NDArray[np.float32] | None:
        """log p(token t | tokens before it), packed like packed_input_ids; 0 for the first token of each sequence.

        Collective. Every rank of the last stage of a replica that has a sample gets the result; all other ranks get None. The same
        holds for `values` and `scores`.
        """
        return self._infer("lm", sample, temperature)

    def values(self, sample: SequenceSample | None) -> npt.NDArray[np.float32] | None:
        """The value of the state after each token, packed like packed_input_ids."""
        return self._infer("value", sample)

    def scores(self, sample: SequenceSample | None) -> npt.NDArray[np.float32] | None:
        """One score per sequence, at its last token."""
        return self._infer("reward", sample)

    @torch.no_grad()
    def _infer(
        self, kind: str, sample: SequenceSample | None, temperature: float = 1.0
    ) -> npt.NDArray[np.float32] | None:
        if kind != self.kind:
            raise RuntimeError(f"a model of kind {self.kind!r} has no {OUTPUT_NAMES[kind][0]}")
        self.onload()
        forward = partial(self._forward, sample, temperature)
        done = forward() or forward(is_last_try=True)
        assert done is not None
        work, outputs = done
        self.module.micro_batches = ()
        self._reshard()
        if work.batch is None or not self.is_last_stage:
            return None
        lengths = np.ones(len(work.batch.lengths), np.int64) if kind == "reward" else np.array(work.batch.lengths)
        result = np.zeros(lengths.sum(), np.float32)
        for micro_batch, (found, *_) in zip(work.plan, outputs, strict=True):
            if micro_batch.sequences:
                places = run_indices(lengths, micro_batch.sequences)
                result[places] = self._values_of(found.float(), np.zeros(len(places), np.float32))
        return result

    def _forward(
        self, sample: SequenceSample | None, temperature: float, *, is_last_try: bool = False
    ) -> tuple[Work, list[Outputs]] | None:
        """Run forward on all micro-batches. None: memory ran out, and the next try, with half of the tokens, may fit. Results do
        not depend on the micro-batches. The other ranks of several would wait in a collective of this try: there it fails."""
        min_count = 0 if self._mesh is None else 1
        work = self._set_up(sample, min_count=min_count, temperature=temperature, budget=self._inference_tokens)
        try:
            return work, run_micro_batches(self.module, self._mesh)
        except torch.OutOfMemoryError as error:
            newest = work.plan[self.module.newest]
            if is_last_try or self._mesh is not None or len(newest.sequences) < 2:
                raise
            self._inference_tokens = newest.num_tokens // 2  # of later calls, too: only one of them loses time
            logger.warning(
                "%s: %s. Inference goes on with %d tokens per micro-batch; its results stay the same",
                self.where,
                error,
                self._inference_tokens,
            )
            return None  # the handler's end frees the tensors of this try

    # ------------------------------------------------------------------------------------------------------ micro-batches

    @property
    def where(self) -> str:
        """The micro-batch that this rank computes, for people; "" outside of one."""
        stage = self.module
        if not stage.micro_batches:
            return ""
        tokens, sequences = stage.micro_batches[stage.newest].num_tokens, len(stage.lengths[stage.newest])
        number = f"micro-batch {stage.newest + 1} of {len(stage.micro_batches)}"
        return f"{number} ({tokens:,} tokens in {sequences} sequence{'s' * (sequences > 1)})"

    def _set_up(
        self, sample: SequenceSample | None, *, min_count: int, temperature: float, budget: int | None = None
    ) -> Work:
        """Give the stage its micro-batches: the same number on all data ranks, and with a pipeline all of one length, which the
        context and tensor ranks divide evenly. budget: tokens of a micro-batch; None: train.max_tokens_per_mb."""
        batch = SequenceBatch.of(sample) if sample is not None and sample.num_ids else None
        lengths = batch.lengths if batch is not None else ()
        budget = budget or self.train.max_tokens_per_mb
        # A pipeline pads its micro-batches to the longest: there tokens are to be balanced
        cost = self.flops.of_batch if self.num_stages == 1 else sum
        costs = [cost([length]) for length in lengths]
        prefixes = prefixes_of(batch, cost) if batch is not None and self.shares_prefixes else []

        def planned(least: int) -> list[MicroBatch]:
            return plan_micro_batches(lengths, budget, costs=costs, min_count=least, prefixes=prefixes)

        plan = planned(min_count)
        if prefixes and not is_worth_sharing(self.train, _num_shared(plan), sum(lengths)):
            prefixes = []
            plan = planned(min_count)
        count = self._largest(len(plan))
        if count > len(plan):
            plan = planned(count)
        self.num_tokens += sum(lengths)
        self.num_tokens_shared += _num_shared(plan)
        longest = max(micro_batch.num_tokens for micro_batch in plan) if self.num_stages > 1 else 0
        parts = self.num_tensor_ranks * (1 if self.context is None else self.context.size)
        packed, of_sequences = [], []
        for micro_batch in plan:
            # An empty micro-batch is one token without a target, so every parameter gets a gradient of zero
            own = [lengths[i] for i in micro_batch.sequences] or [1]
            ids = np.zeros(1, np.int64)
            if batch is not None and micro_batch.sequences:
                ids = batch.select(micro_batch.sequences)["packed_input_ids"]
            pad_to = -(-max(longest, micro_batch.num_tokens, 1) // parts) * parts
            packed.append(
                Packed.of(
                    ids,
                    own,
                    pad_to=pad_to,
                    device=self.device,
                    long_tokens=self.long_tokens,
                    shared=micro_batch.shared,
                    context=self.context,
                )
            )
            of_sequences.append(own)
        self.module.micro_batches = packed
        self.module.lengths = of_sequences
        if self.routes is not None:
            padded = [micro_batch.input_ids.shape[1] for micro_batch in packed]
            self.routes.set_up(batch, [micro_batch.sequences for micro_batch in plan], padded)
        self.module.temperature, self.module.newest = temperature, 0
        return Work(batch, plan)

    def _largest(self, count: int) -> int:
        """Maximum over data ranks."""
        if self._mesh is None or self.num_replicas == 1:
            return count
        counts = torch.tensor([count], device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MAX, self._mesh.group_that_splits(SAMPLES))
        return int(self._values_of(counts, np.array([count]))[0])

    # ----------------------------------------------------------------------------------------------------------- training

    def train_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, lr_step: int
    ) -> dict[str, float]:
        """Take one optimizer step on this rank's part of a batch. Collective: every rank calls it, even without groups.

        consumes: the part and loss_fn.  produces: new parameters, equal in any layout, and statistics over all data ranks:
        those of loss_fn and `loss` on the last stage; `grad_norm`, `lr`, `skipped_steps` and `stopped_steps` everywhere.
        waits for: the other ranks in collectives, within the process group's timeout.  unblocked by: their arrival or the loss of
        their connection. If the loss or gradient is not finite, all ranks skip the step and count it. If loss_fn.stop_reason
        returns a text on some rank, no rank steps.
        """
        stats = self.accumulate(sample, loss_fn, temperature=temperature)
        return self.step(stats, loss_fn, lr_step=lr_step)

    def step(
        self, stats: Mapping[str, float], loss_fn: LossFn, *, lr_step: int, divisor: float = 1.0
    ) -> dict[str, float]:
        """Divide the accumulated gradients and take one optimizer step, unless loss_fn.stop_reason returns a text. Collective.

        stats: those of `accumulate`; those of several parts added up. divisor: the denominator of the whole batch, if the sums of
        its parts are not divided. Returns the statistics of train_step.
        """
        result = dict(stats)
        if divisor != 1.0:
            if "loss" in result:
                result["loss"] /= divisor
            grads = [local_tensor(p.grad) for p in self.named_parameters().values() if p.grad is not None]
            torch._foreach_div_(grads, divisor)
        stop = ""
        if self.is_last_stage and (stop_reason := getattr(loss_fn, "stop_reason", None)):
            stop = stop_reason(result)
        return result | self._step(result.get("loss", 0.0), stop, lr_step)

    def try_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, begins: bool = True
    ) -> dict[str, float]:
        """Return the loss statistics and gradient norm that train_step would report, without stepping. begins: as in accumulate.
        Collective."""
        result = self.accumulate(sample, loss_fn, temperature=temperature, begins=begins)
        grad_norm, _, _ = self._gradient(result.get("loss", 0.0), "")
        return result | {"grad_norm": grad_norm}

    def accumulate(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, begins: bool = True
    ) -> dict[str, float]:
        """Compute the gradients of one part of a batch, and add them to those of earlier parts unless `begins`. Collective.

        FSDP sums gradients over data ranks; `_finish_gradients` must still sum some over tensor ranks and stages. Returns the
        statistics of loss_fn over all data ranks, on the last stage only."""
        if self.optimizer is None:
            raise RuntimeError("train_step on a frozen model")
        self.onload()
        if begins:
            self.optimizer.zero_grad()
        work = self._set_up(sample, min_count=self.num_stages, temperature=temperature)
        if work.batch is not None:
            self.trained_flops += work.flops(self.flops, trains=True)
        local: dict[str, Tensor] = {"loss": torch.zeros((), device=self.device)}
        forward: Callable[[Tensor], Outputs] = self.module
        if self.router_loss is not None:
            self.router_loss.count(work.plan)
            forward = self.router_loss.forward

        def loss_of(outputs: Outputs, number: int) -> Tensor:
            sequences = work.plan[number].sequences
            connected = outputs[0].sum() * 0.0  # keeps a graph: a loss that masks all tokens may have no gradient
            if work.batch is None or not sequences:
                return connected
            named = dict(zip(OUTPUT_NAMES[self.kind], outputs, strict=True))
            data = {key: self._tensor(array) for key, array in work.batch.select(sequences).items() if key != ROUTES}
            cu_seqlens = self._tensor(cu_seqlens_of([work.batch.lengths[i] for i in sequences]))
            loss, stats = loss_fn(named, data, cu_seqlens)
            _accumulate(local, {"loss": loss, **stats})
            if self.routes is not None and ROUTES in work.batch.data:
                _accumulate(local, self.routes.take_other(data["loss_mask"]))
                _accumulate(local, {_NUM_ROUTED: data["loss_mask"].sum()})
            if self.router_loss is not None:
                of_routers = self.router_loss.of_micro_batch(number)
                _accumulate(local, {"loss": of_routers, "router_aux_loss": of_routers})
                loss = loss + of_routers
            return loss if loss.requires_grad else loss + connected

        if self._mesh is not None and self.num_stages > 1:
            train_micro_batches(self.module, self._mesh, loss_of)
        else:
            for i in range(len(work.plan)):
                if isinstance(self.module, FSDPModule):
                    is_last = i == len(work.plan) - 1  # every rank has the same number of micro-batches
                    self.module.set_requires_gradient_sync(is_last or not self.train.accumulate_unsharded)
                    self.module.set_requires_all_reduce(is_last)  # over copies: each sums its own micro-batches first
                loss_of(forward(torch.tensor([[i]])), i).backward()  # type: ignore[no-untyped-call]
        self.module.micro_batches = ()
        if not self.is_last_stage:
            return {}
        reduced = self._reduce_stats({name: float(value) for name, value in local.items()})
        num_routed = reduced.pop(_NUM_ROUTED, 0.0)
        return reduced if self.routes is None else self.routes.checked(reduced, num_routed)

    def _gradient(self, loss: float, stop: str) -> tuple[float, bool, bool]:
        """Return (norm of the summed gradient, whether it and the loss are finite, whether any rank stops the step). The result is
        equal on every rank."""
        grads = self._finish_gradients()
        squares = self._sum_of_squares(grads)
        summed = self._all_reduce_model([squares, 0.0 if math.isfinite(loss) else 1.0, 1.0 if stop else 0.0])
        grad_norm = math.sqrt(summed[0]) if summed[0] >= 0 else math.nan
        return grad_norm, math.isfinite(grad_norm) and summed[1] == 0, summed[2] > 0

    def _step(self, loss: float, stop: str, lr_step: int) -> dict[str, float]:
        """Clip the summed gradient and step. The decision to skip uses reduced values, so it is the same on every rank."""
        assert self.optimizer is not None
        grad_norm, finite, stopped = self._gradient(loss, stop)
        config = self.optimizer_config
        lr = learning_rate(config, lr_step, self._total_steps)
        if finite and not stopped:
            if 0 < config.grad_clip < grad_norm:
                grads = [local_tensor(p.grad) for p in self.named_parameters().values() if p.grad is not None]
                torch._foreach_mul_(grads, config.grad_clip / grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        elif not finite:
            self.skipped_steps += 1
            logger.warning("step skipped: loss %g, gradient norm %g (%d so far)", loss, grad_norm, self.skipped_steps)
        elif stop:
            logger.info("step stopped: %s", stop)
        return {
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped_steps": 0.0 if finite else 1.0,
            "stopped_steps": 1.0 if finite and stopped else 0.0,
        }

    @torch.no_grad()
    def _finish_gradients(self) -> dict[str, Tensor]:
        """Sum the gradients that backward leaves unsummed; return this rank's part of the summed gradient, by name."""
        grads: dict[str, Tensor] = {}
        for name, parameter in self.own_parameters().items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads[name] = local_tensor(parameter.grad)
        if self._mesh is not None and self._partial:
            parts = [grads[name] for name in sorted(self._partial)]
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=self._mesh.group_that_sums(PARTIALS))
            for part, summed in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
                part.copy_(summed.view_as(part))
        if self._mesh is not None and self._tied:
            self._add_other_copy(grads[self._tied], self._mesh)
        return grads

    def _add_other_copy(self, grad: Tensor, mesh: ModelMesh) -> None:
        """Sum a tied embedding's gradients over its copies on the first and last stage, so that the copies stay equal."""
        other = self.num_stages - 1 if mesh.is_first_stage else 0
        mine, theirs = grad.contiguous(), torch.empty_like(grad, memory_format=torch.contiguous_format)
        stages = mesh.group_that_splits(LAYERS)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=stages, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=stages, group_peer=other),
            ]
        ):
            work.wait()
        grad.add_(theirs)

    @torch.no_grad()
    def _sum_of_squares(self, grads: Mapping[str, Tensor]) -> float:
        """Return the sum of the squares of the gradients that this rank counts. If several ranks hold the same values, only the
        first of these ranks counts them."""
        counted = list(grads)
        if self._mesh is not None:
            if not self._mesh.is_first_copy:
                return 0.0
            if self._mesh.parts[MATRICES] > 0:
                counted = [name for name in counted if name in self._split]
            if not self._mesh.is_first_stage:
                counted = [name for name in counted if name != self._tied]
        if not counted:
            return 0.0
        norms = torch.stack(torch._foreach_norm([grads[name] for name in counted]))
        return float(norms.double().square().sum())

    # ---------------------------------------------------------------------------------------------------- between the ranks

    def all_reduce_sum(self, values: npt.NDArray[Any] | Sequence[float]) -> npt.NDArray[np.float64]:
        """Sums over the data ranks of this stage and tensor rank, in float64. Collective."""
        array = np.array(values, dtype=np.float64)
        if self._mesh is None or self.num_replicas == 1:
            return array
        tensor = self._tensor(array)
        dist.all_reduce(tensor, group=self._mesh.group_that_sums(LOSSES))
        return self._values_of(tensor, array)

    def _all_reduce_model(self, values: list[float]) -> list[float]:
        """Sums over all ranks of the model."""
        if self._mesh is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=self._mesh.group_that_sums(NORMS))
        summed: list[float] = self._values_of(tensor, np.array(values)).tolist()
        return summed

    def mean_over_ranks(self, value: float | None) -> float:
        """The mean over all ranks of the model that have a value; nan if none has. Collective."""
        total, count = self._all_reduce_model([0.0, 0.0] if value is None else [value, 1.0])
        return total / count if count else math.nan

    def _reduce_stats(self, local: dict[str, float]) -> dict[str, float]:
        """Reduce statistics over data ranks. Names travel with the values: a rank without groups does not know them."""
        if self._mesh is None or self.num_replicas == 1:
            return local
        group = self._mesh.group_that_splits(SAMPLES)
        payload = np.frombuffer(msgspec.msgpack.encode(local), np.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.num_replicas)]
        dist.all_gather(sizes, self._tensor(np.array([len(payload)])), group=group)
        lengths = self._values_of(torch.cat(sizes), np.full(self.num_replicas, len(payload))).tolist()
        longest = max(lengths)
        padded = np.zeros(longest, np.uint8)
        padded[: len(payload)] = payload
        payloads = [torch.zeros(longest, dtype=torch.uint8, device=self.device) for _ in range(self.num_replicas)]
        dist.all_gather(payloads, self._tensor(padded), group=group)
        result: dict[str, float] = {}
        for length, buffer in zip(lengths, payloads, strict=True):
            encoded = self._values_of(buffer, padded)[:length].tobytes()
            stats = msgspec.msgpack.decode(encoded, type=dict[str, float])
            for name, value in stats.items():
                both = (result[name], value) if name in result else (value,)
                result[name] = max(both) if name.endswith("_max") else math.fsum(both)
        return result

    # ------------------------------------------------------------------------------------------------------------- weights

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's parameters by their names in the whole model's Hugging Face checkpoint; DTensors if split over ranks.

        A tied parameter is listed once, under its embedding's name. In a pipeline the last stage lists its own copy of it, too.
        """
        return {name: getattr(module, attribute) for name, (module, attribute) in self._slots.items()}

    def own_parameters(self) -> dict[str, Tensor]:
        """Those of them that training changes and a checkpoint holds: all, or those of the adapters and of a value model's output
        layer."""
        parameters = self.named_parameters()
        if self.adapters is None:
            return parameters
        return {name: parameters[name] for name in self.adapters.names if name in parameters}

    # -------------------------------------------------------------------------------------------------------------- memory

    def offload(self, *, folder: Path | None = None) -> None:
        """Move weights and optimizer state off the device until `onload`, and drop the gradients.

        From a GPU they move to pinned CPU memory, which the engine keeps. From the CPU they move to a file in `folder`; without a
        folder they stay.
        """
        on_cpu = self.device.type == "cpu"
        if self._offloaded is not None or (on_cpu and folder is None):
            return
        for parameter in self.named_parameters().values():
            if on_cpu and not parameter.untyped_storage().resizable():  # the memory of a model file
                parameter.data = parameter.data.clone()
        tensors = [local_tensor(parameter.detach()) for parameter in self.named_parameters().values()]
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            tensors += [local_tensor(value) for value in states if isinstance(value, Tensor)]
        there = [tensor for tensor in tensors if tensor.device.type == self.device.type]
        self._offloaded = Offloaded(there, self._host_memory, folder=folder if on_cpu else None)
        if not on_cpu:
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Inverse of offload. Every method that needs the weights calls it first."""
        if self._offloaded is not None:
            self._offloaded.restore()
        self._offloaded = None

    def _reshard(self) -> None:
        """Free the gathered parameters that FSDP's root keeps after a forward pass without a backward pass. They would be stale
        after the next step."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(array, device=self.device)

    def _values_of(self, tensor: Tensor, planned: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values of a tensor that control flow or shapes depend on. planned: values of the same shape for a plan, whose tensors
        have none (asyncrl/plan)."""
        values: npt.NDArray[Any] = tensor.cpu().numpy()
        return values


class _BaseEngine:
    """The base of a model with adapters, as an engine that computes logprobs. It has no weights of its own: it is the same module,
    with the adapters off. The model's own engine counts what both compute."""

    trained_flops = num_tokens = num_tokens_shared = 0

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logprobs(self, sample: SequenceSample | None, *, temperature: float) -> npt.NDArray[np.float32] | None:
        """As TrainEngine.logprobs."""
        assert self._engine.adapters is not None
        with self._engine.adapters.disabled():
            return self._engine.logprobs(sample, temperature=temperature)

    def offload(self, *, folder: Path | None = None) -> None:
        """The weights stay: they are those of the model that trains."""


def base_engine(engine: TrainEngine) -> TrainEngine:
    """The base of a model with adapters, which computes logprobs bit for bit as an engine of the base model."""
    return cast(TrainEngine, _BaseEngine(engine))


@dataclass(frozen=True)
class Work:
    """A sample split into micro-batches."""

    batch: SequenceBatch | None  # None: this data rank has no groups
    plan: list[MicroBatch]

    def flops(self, flops: ModelFlops, *, trains: bool) -> int:
        """Model FLOPs of the sequences. A prefix that a micro-batch shares counts once there."""
        lengths = self.batch.lengths if self.batch is not None else ()
        copies = [tokens for micro_batch in self.plan for tokens in micro_batch.copies]
        return flops.of_batch(lengths, trains=trains) - flops.of_batch(copies, trains=trains)


def _num_shared(plan: Iterable[MicroBatch]) -> int:
    """Tokens that micro-batches do not compute because another of their sequences has computed them."""
    return sum(sum(micro_batch.copies) for micro_batch in plan)


def learning_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up over warmup_steps, then linear or cosine decay to min_lr_ratio * lr at total_steps; step counts from 0."""
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant" or total_steps <= optimizer.warmup_steps:
        return optimizer.lr
    done = min(1.0, (step - optimizer.warmup_steps) / (total_steps - optimizer.warmup_steps))
    if optimizer.schedule == "linear":
        left = 1.0 - done
    elif optimizer.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        raise ValueError(f"train.optimizer.schedule is {optimizer.schedule!r}; choose linear, cosine or constant")
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * left)


class _AdamW(torch.optim.AdamW):
    """Steps on this rank's local part of each parameter: the update is elementwise, and DTensors of several meshes do not mix."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex = bool(super()._init_group(group, *lists))  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex


def _make_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig, *, fused: bool) -> torch.optim.AdamW:
    """Return an AdamW optimizer, without weight decay for vectors (norms and biases)."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return _AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
    )


def _accumulate(total: dict[str, Tensor], stats: Mapping[str, Tensor]) -> None:
    for name, value in stats.items():
        value = value.detach().double()
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if name.endswith("_max") else total[name] + value


# ------------------------------------------------------------------------------------------------------------------ checks


@torch.no_grad()
def _logits_of(stage: Stage, path: str, vocab_size: int) -> Logits:
    """How the model makes logits from the outputs of its output layer. Raises ConfigError if logprobs in blocks cannot do that."""
    model = stage.model
    input_ids = torch.arange(_HEAD_CHECK_TOKENS, device=stage.device)[None] % vocab_size
    with stage.autocast():
        expected = model(input_ids=input_ids, use_cache=False).logits.float()
        hidden = backbone_of(model)(input_ids=input_ids, use_cache=False).last_hidden_state
        found = model.get_output_embeddings()(hidden).float()  # type: ignore[no-untyped-call]
    if expected.isnan().any():
        raise ConfigError(f"model_path={path!r}: its weights are broken: their logits are NaN; copy them again")
    logits = Logits.of(found, expected, model.config)
    if logits is None:
        with stage.autocast():
            again = model(input_ids=input_ids, use_cache=False).logits.float()
        if not torch.equal(again, expected):
            gap = float((again - expected).abs().max())
            raise ConfigError(f"model_path={path!r}: {not_repeatable(type(model).__name__, gap)}")
        raise _changed_logits(path, model)
    return logits


@torch.no_grad()
def _logits_without_weights(model: PreTrainedModel, path: str) -> Logits:
    """The same for a model without weights, with a stand-in backbone and output layer."""
    hidden = torch.arange(12.0).reshape(1, 3, 4) - 6.0

    class Output(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            """Other outputs that the architecture reads (router logits, cross-attentions) are None."""

    class Backbone(nn.Module):
        def forward(self, *_: object, **__: object) -> Output:
            return Output(last_hidden_state=hidden)

    name, backbone, output_layer = backbone_name(model), backbone_of(model), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    stand_in = nn.Linear(4, 5, bias=False)
    stand_in.weight.copy_(torch.arange(20.0).reshape(5, 4) * 10.0)
    setattr(model, name, Backbone())
    model.set_output_embeddings(stand_in)  # type: ignore[no-untyped-call]
    try:
        found = model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False).logits
    finally:
        setattr(model, name, backbone)
        model.set_output_embeddings(output_layer)  # type: ignore[no-untyped-call]
    logits = Logits.of(stand_in(hidden), found, model.config)
    if logits is None:
        raise _changed_logits(path, model)
    return logits


def _changed_logits(path: str, model: PreTrainedModel) -> ConfigError:
    return ConfigError(
        f"model_path={path!r}: architecture {model.config.model_type!r} changes its logits after the output layer, in a way that "
        "logprobs in blocks (model/logprobs.py) do not compute. Use another model"
    )
