"""A closed-form estimate of the plans of model workers, in a millisecond. The search of layouts uses it to choose which to plan.

Memory of a layer's activations and of a block of logits is counted roughly. All ranks of a set of workers are taken as equal.
"""

from __future__ import annotations

import math
from collections import Counter

from asyncrl.config.processes import ModelConfig, PlacedMFC
from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.axes import MATRICES, ParallelGrid
from asyncrl.dataflow.graph import ADVANTAGES_MFC, build_dataflow
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.placed_models import models_of, place
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.checks.memory import DTYPE_BYTES, resident_bytes
from asyncrl.plan.batches import load_of
from asyncrl.plan.result import Collective, ModelStep, RankPlan
from asyncrl.plan.shapes import ModelShape

_FLOAT = 4  # bytes
_LOGIT_BYTES = 10  # of one logit in the loss: two float32 copies and one in train.dtype
# Values that the backward pass of a layer needs of a token, per hidden unit and per unit of the MLP
_SAVED_HIDDEN, _SAVED_MLP = 12, 4


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
        held = ModelShape.of(model.path).parameters // ParallelGrid.parse(model.grid).size
        if model.trainable or not model.offload:
            resident.update({kind: each * held for kind, each in resident_bytes(model, config.train.dtype).items()})
    steps = [_step(config, models[mfc.model], mfc, value) for mfc in mfcs]
    fullest = max((step.at_peak for step in steps), key=lambda parts: sum(parts.values()), default={})
    at_peak = {**resident, **fullest}
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
    )


def _step(config: ExperimentConfig, model: ModelConfig, mfc: PlacedMFC, value: int) -> ModelStep:
    """One MFC: its FLOPs, traffic, and memory beside what is resident."""
    train, shape, grid = config.train, ModelShape.of(model.path), ParallelGrid.parse(model.grid)
    split, trains = grid.parts(MATRICES), mfc.kind == "train_step"
    load = load_of(config, MFCDef.of(mfc), grid)
    micro_batches, length = load.minibatches * load.micro_batches, load.lengths[0]
    budget = math.ceil(sum(load.lengths) / (1 if load.full else load.micro_batches))
    forward = shape.forward_flops(load.tokens, length) / grid.replica_size
    layers = math.ceil(shape.num_layers / grid.num_stages)
    whole = shape.parameters // grid.replica_size  # parameters, gathered from the data ranks
    collectives = {}
    if grid.num_replicas > 1:
        gathers = 2 if trains else 1
        calls = micro_batches * layers
        collectives["all_gather"] = Collective(gathers * calls, gathers * micro_batches * whole * value)
        if trains:
            collectives["reduce_scatter"] = Collective(calls, micro_batches * whole * _FLOAT)
    if split > 1:
        passes = 2 * (3 if train.gradient_checkpointing and trains else 2 if trains else 1)
        payload = passes * layers * load.tokens * shape.hidden * value
        collectives["all_reduce"] = Collective(passes * layers * micro_batches, payload)
    if grid.num_stages > 1:
        collectives["recv"] = Collective(micro_batches, (1 + trains) * load.tokens * shape.hidden * value)
    of_layer = budget * value * (_SAVED_HIDDEN * shape.hidden + _SAVED_MLP * shape.mlp_width * shape.experts_per_token)
    of_layer //= split
    entries = budget * shape.hidden * value
    kept = layers * (entries if train.gradient_checkpointing else of_layer) * grid.num_stages
    unsharded = grid.num_replicas > 1 and (train.accumulate_unsharded or grid.num_stages > 1)
    parts = {
        "activations": kept * trains + of_layer,
        "logits": min(train.logprob_chunk_tokens, budget) * shape.vocab * _LOGIT_BYTES // split,
        "gathered": 2
        * value
        * (shape.layer_parameters + shape.vocab * shape.hidden)
        // split
        * (grid.num_replicas > 1),
        "other": _FLOAT * whole * (trains and unsharded),
    }
    return ModelStep(
        model=model.name,
        mfc=mfc.name,
        peak=sum(parts.values()),
        at_peak=parts,
        kinds=parts,
        flops=int(forward * ((4 if train.gradient_checkpointing else 3) if trains else 1)),
        collectives=collectives,
        model_flops=int(forward * (3 if trains else 1)),
        tokens=load.tokens,
    )
