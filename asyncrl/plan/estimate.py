"""A closed-form estimate of the plans of model workers, in a millisecond. The search of layouts uses it to choose which to plan.

Memory of a layer's activations and of a block of logits is counted roughly. Adapters are not counted. All ranks of a set of
workers are taken as equal.
"""

from __future__ import annotations

import math
from collections import Counter

from asyncrl.config.processes import ModelConfig, PlacedMFC
from asyncrl.config.schema import KEEP_ATTENTION, ExperimentConfig
from asyncrl.dataflow.axes import EXPERTS, LAYERS, MATRICES, PEERS, TOKENS, ParallelGrid
from asyncrl.dataflow.graph import ADVANTAGES_MFC, build_dataflow
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.placed_models import models_of, place
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.checks.memory import DTYPE_BYTES, resident_bytes
from asyncrl.plan.batches import load_of
from asyncrl.plan.result import Collective, ModelStep, RankPlan, collective_name
from asyncrl.plan.shapes import ModelShape
from asyncrl.protocol.names import ACTOR

_FLOAT = 4  # bytes
_LOGIT_BYTES = 10  # of one logit in the loss: two float32 copies and one in train.dtype
_BLOCK_LOGITS = 1 << 26  # the most at a time on a GPU, as in model/logprobs.py
# Values that the backward pass of a layer needs of a token, per hidden unit and per unit of the MLP
_SAVED_HIDDEN, _SAVED_MLP = 12, 4
# Values in float32 that it needs of a token and head in transformers' gated delta rule: per unit of a key, per unit of a value,
# and others.
# From plans with keys and values of 64 and 128 units
_SAVED_KEY, _SAVED_VALUE, _SAVED_CHUNK = 15, 11, 280


def estimate_ranks(config: ExperimentConfig) -> list[RankPlan]:
    """Estimate the plan of each set of workers. config: without `auto`. A RankPlanner."""
    allocation = allocation_of(config)
    placements, mfcs = place(allocation, build_dataflow(config.train, config.mode))
    models = models_of(placements, mfcs, config.train, config.model_path)
    ranks, first = [], 0
    for devices in allocation.training:
        members = range(first, first + devices.size)
        first += devices.size
        if devices.on_cpu:
            continue
        held = {model.name: model for model in models if set(model.workers) & set(members)}
        own = [mfc for mfc in mfcs if mfc.model in held and mfc.name != ADVANTAGES_MFC]
        ranks.append(_rank(config, list(members), held, own))
    return ranks


def _rank(
    config: ExperimentConfig, members: list[int], models: dict[str, ModelConfig], mfcs: list[PlacedMFC]
) -> RankPlan:
    value, resident = DTYPE_BYTES[config.train.dtype], Counter[str]()
    for model in models.values():
        grid = ParallelGrid.parse(model.grid)
        shape = ModelShape.of(model.path)
        whole_on_each = shape.state_parameters * (grid.parts(MATRICES) - 1)  # tensor ranks do not split them
        held = (shape.parameters + whole_on_each) * grid.num_copies // grid.size
        if model.trainable or not model.offload:
            resident.update({kind: each * held for kind, each in resident_bytes(model, config.train.dtype).items()})
    steps = [_step(config, models[mfc.model], mfc, value) for mfc in mfcs]
    fullest = max(steps, key=lambda step: step.peak, default=None)
    at_peak = {**resident, **(fullest.at_peak if fullest is not None else {})}
    return RankPlan(
        worker=members[0],
        shards=sorted(models),
        stands_for=members,
        peak=sum(at_peak.values()),
        at_peak=at_peak,
        kinds=at_peak,
        steps=steps,
        load_peak=0,
        export_peak=0,
        peak_in=fullest.mfc if fullest is not None else "",
    )


def _step(config: ExperimentConfig, model: ModelConfig, mfc: PlacedMFC, value: int) -> ModelStep:
    """One MFC: its FLOPs, traffic, and memory beside what is resident."""
    train, shape, grid = config.train, ModelShape.of(model.path), ParallelGrid.parse(model.grid)
    split, context, trains = grid.parts(MATRICES), grid.parts(TOKENS), mfc.kind == "train_step"
    # Beside adapters the weights have no gradients, and the backward pass computes none of them
    all_trained = trains and model.lora is None
    load = load_of(config, MFCDef.of(mfc), grid)
    micro_batches, length = load.minibatches * load.micro_batches, load.lengths[0]
    budget = math.ceil(load.row_tokens / (1 if load.full else load.micro_batches) / context)
    row_tokens, prefix = (load.tokens - load.shared) // context, load.prefix or 1
    needed = shape.forward_flops(load.tokens, length) - shape.forward_flops(load.shared, prefix)
    # Tensor ranks do not split layers with a state
    of_states = shape.state_flops * (load.tokens - load.shared)
    forward = (needed - of_states) / grid.replica_size + of_states / (grid.num_stages * context)
    layers = math.ceil(shape.num_layers / grid.num_stages)
    # Parameters, gathered from the ranks that share them out
    whole = (shape.parameters + shape.state_parameters * (split - 1)) // (grid.num_stages * split)
    traffic: dict[str, dict[str, Collective]] = {}  # by the axes' names
    of_gradients = _FLOAT * whole * load.minibatches * all_trained
    # With e the experts of a rank are gathered from fewer ranks than all other weights
    experts, sparse = grid.parts(EXPERTS), math.ceil(shape.sparse_layers / grid.num_stages)
    of_experts = sparse * shape.layer_experts if experts > 1 else 0
    counts_choices = trains and mfc.role == ACTOR and train.router_aux_loss_coef > 0  # in a forward pass of their own
    passes = 1 + trains * (1 + bool(train.gradient_checkpointing)) + counts_choices  # through each layer
    if grid.num_shards > 1:
        calls, gathers = micro_batches * layers, 1 + trains + counts_choices
        for name, number, gathered in (
            ("_".join(grid.sharding), calls, whole - of_experts),
            (PEERS, micro_batches * sparse, of_experts // experts if grid.num_shards > experts else 0),
        ):
            moved = {"all_gather": Collective(gathers * number, gathers * micro_batches * gathered * value)}
            scattered = {"reduce_scatter": Collective(number, micro_batches * gathered * _FLOAT)} if all_trained else {}
            traffic |= {name: moved | scattered} if gathered else {}
    for axis, size in zip(grid.axes, grid.sizes, strict=True):
        if size == 1:
            continue
        if axis.copies:
            shard = of_gradients // grid.num_shards
            traffic[axis.name] = {"all_reduce": Collective(load.minibatches * layers, shard)} if all_trained else {}
        elif axis.splits == TOKENS:
            heads = 2 * (shape.heads + max(shape.kv_heads, size * split)) // split  # queries, outputs, keys and values
            of_token = heads * shape.head_dim * value
            exchanged = Collective(2 * passes * layers * micro_batches, passes * layers * row_tokens * of_token)
            traffic[axis.name] = {"all_to_all": exchanged}
        elif axis.splits == EXPERTS:  # to the experts of each token, and back
            of_token = 2 * shape.experts_per_token * shape.hidden * value
            exchanged = Collective(2 * passes * sparse * micro_batches, passes * sparse * row_tokens * of_token)
            traffic[axis.name] = {"all_to_all": exchanged}
        elif axis.splits == MATRICES:
            rows = Collective(
                2 * passes * layers * micro_batches, 2 * passes * layers * row_tokens * shape.hidden * value
            )
            traffic[axis.name] = {"all_gather": rows, "reduce_scatter": rows}
        elif axis.splits == LAYERS:
            received = (1 + trains) * row_tokens * shape.hidden * value // split
            traffic[axis.name] = {"recv": Collective(micro_batches, received)}
    collectives = {
        collective_name(axis, operation): calls for axis, each in traffic.items() for operation, calls in each.items()
    }
    of_layer = budget * value * (_SAVED_HIDDEN * shape.hidden + _SAVED_MLP * shape.mlp_width * shape.experts_per_token)
    of_layer //= split
    entries = budget * shape.hidden * value // split
    if train.gradient_checkpointing == KEEP_ATTENTION:
        of_attention = shape.heads * shape.head_dim * shape.attention_layers // shape.num_layers
        entries += budget * of_attention * value // split
    of_state, state = 0, shape.state
    if state is not None:
        of_head = _SAVED_KEY * state.key_width + _SAVED_VALUE * state.value_width + _SAVED_CHUNK
        of_state = budget * _FLOAT * state.heads * of_head
    of_layers = layers * of_layer + layers * shape.state_layers // shape.num_layers * of_state
    kept = (layers * entries if train.gradient_checkpointing else of_layers) * grid.num_stages
    logits = min(int(train.logprob_chunk_tokens), budget) * shape.vocab // split
    of_largest = shape.layer_parameters - shape.layer_experts * (experts - 1) // experts
    unsharded = grid.uses_fsdp and (train.accumulate_unsharded or grid.num_stages > 1)
    parts = {
        "activations": kept * trains + of_layer + of_state,
        "logits": _LOGIT_BYTES * min(logits, _BLOCK_LOGITS),
        "gathered": 2 * value * (of_largest + shape.vocab * shape.hidden) // split * grid.uses_fsdp,
        "other": _FLOAT * whole * (all_trained and unsharded),
    }
    return ModelStep(
        model=model.name,
        mfc=mfc.name,
        peak=sum(parts.values()),
        at_peak=parts,
        kinds=parts,
        flops=int(forward * (passes + all_trained)),
        collectives=collectives,
        model_flops=int(needed / grid.replica_size * (2 + all_trained if trains else 1)),
        tokens=load.tokens,
        shared=load.shared,
    )
