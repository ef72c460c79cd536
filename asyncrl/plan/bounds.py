"""The time of a train step at the peaks of the data sheet, from FLOPs and bytes (pure). It is a lower bound for batches whose
responses are as long as assumed.

A step takes at least as long as its slowest rank computes, at the GPU's peak, or receives, at the peak of its links. Kernels,
launches, waits for other ranks and for data are not counted. batches.py has the lengths of the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from asyncrl.config.schema import ExperimentConfig
from asyncrl.config.sharing import is_worth_sharing, may_share
from asyncrl.dataflow.axes import PEERS, ParallelGrid
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.plan.batches import load_of, prompt_tokens, sequence_tokens, shared_tokens
from asyncrl.plan.devices import GPUS_PER_HOST, Device
from asyncrl.plan.generation import ServerPlan
from asyncrl.plan.result import Collective, ModelStep, RankPlan
from asyncrl.plan.shapes import ModelShape
from asyncrl.plan.speeds import reached

_SHARED_OUT = ("all_gather", "reduce_scatter", "all_to_all")  # a rank receives all of the payload but its own part
_ALL_MEMBERS = (*_SHARED_OUT, "all_reduce")  # every rank of the group sends and receives


class TimeBound(msgspec.Struct, frozen=True):
    """Lower bounds of one train step whose responses have `response_tokens` tokens on average, in seconds."""

    training_s: float  # all MFCs of the rank that needs longest
    receiving_s: float  # of that rank: receiving, at the same time as computing
    generation_s: float  # the responses of one batch, by all servers; 0: the run has no servers
    step_s: float  # both at the same time, or one after the other (eta = 0, shared devices)
    mfu: float  # upper bound: model FLOPs of train steps / (training_s * peak FLOP/s of all model workers)
    # The times that are expected if the bounds are reached as far as speeds.py says
    expected_training_s: float
    expected_generation_s: float
    expected_step_s: float
    response_tokens: int
    running: int  # requests of a server at the same time, at their mean length: the prompt and half of the response; 0: no servers

    @property
    def bottleneck(self) -> str:
        """The side that is expected to take longer."""
        return "generation" if self.expected_generation_s > self.expected_training_s else "training"


class Sharing(msgspec.Struct, frozen=True):
    """What train.share_prefix saves in a train step, or would save, if micro-batches divide no group."""

    is_on: bool
    prompt_tokens: int
    group_size: int
    tokens: float  # share of a batch's tokens
    flops: float  # share of the FLOPs


@dataclass(frozen=True)
class Placed:
    """A model's grid, and the number of hosts that its ranks are on."""

    grid: ParallelGrid
    num_hosts: int = 1


def time_bound(
    config: ExperimentConfig,
    ranks: Sequence[RankPlan],
    placed: Mapping[str, Placed],
    shape: ModelShape,
    server: ServerPlan | None,
    device: Device,
    *,
    in_turns: bool,
    mean_response: int = 0,
) -> TimeBound:
    """Bound a step. placed: by the model's name. shape: of the served model. in_turns: generation waits for training.
    mean_response: tokens of the mean response; 0: all have the maximum, as in the plans of the ranks.
    """
    response = mean_response or config.rollout.sampling.max_new_tokens
    of_flops, of_tokens = _shares_of_full_length(config, shape, response)
    mfcs = build_dataflow(config.train, config.mode).mfcs
    of_ranks = []
    for rank in ranks:
        times = []
        for step in rank.steps:
            grid = placed[step.model].grid
            load = load_of(config, mfcs[step.mfc], grid)
            computes, receives = step_times(step, placed[step.model], load.micro_batches, device)
            times.append((computes * of_flops, receives * (of_tokens if load.full else 1.0)))
        of_ranks.append((sum(map(max, times)), sum(receives for _, receives in times)))
    training, receiving = max(of_ranks, default=(0.0, 0.0))
    # Inference takes time, too, but what it computes is not part of the MFU's definition
    model_flops = of_flops * sum(
        step.model_flops * len(rank.stands_for)
        for rank in ranks
        for step in rank.steps
        if mfcs[step.mfc].kind == "train_step"
    )
    peak = device.flops * sum(len(rank.stands_for) for rank in ranks)
    generation = generation_time(config, shape, server, device, response) if server is not None else 0.0
    shares = reached(device.name)
    expected = training / shares.training, generation / shares.generation

    def together(training: float, generation: float) -> float:
        return training + generation if in_turns else max(training, generation)

    return TimeBound(
        training_s=training,
        receiving_s=receiving,
        generation_s=generation,
        step_s=together(training, generation),
        mfu=model_flops / (training * peak) if training else 0.0,
        expected_training_s=expected[0],
        expected_generation_s=expected[1],
        expected_step_s=together(*expected),
        response_tokens=response,
        running=server.running(_mean_tokens(config, response)) if server is not None else 0,
    )


def _shares_of_full_length(config: ExperimentConfig, shape: ModelShape, response: int) -> tuple[float, float]:
    """FLOPs and tokens of a group whose responses have so many tokens, each as a share of those of the longest ones."""
    (flops, tokens), (most, most_tokens) = (
        _group(config, shape, new) for new in (response, config.rollout.sampling.max_new_tokens)
    )
    return flops / most, tokens / most_tokens


def _group(config: ExperimentConfig, shape: ModelShape, response: int) -> tuple[float, int]:
    """Forward FLOPs and tokens of a group whose responses have so many tokens."""
    length, size = sequence_tokens(config, response), config.rollout.group_size
    saved = _saved_by_sharing(config, shape)
    flops, tokens = saved if _shares(config, saved[1], size * length) else (0.0, 0)
    return shape.forward_flops(size * length, length) - flops, size * length - tokens


def _saved_by_sharing(config: ExperimentConfig, shape: ModelShape) -> tuple[float, int]:
    """Forward FLOPs and tokens of a group's prompt but for the first time."""
    prefix = shared_tokens(config)
    tokens = (config.rollout.group_size - 1) * prefix
    return shape.forward_flops(tokens, prefix) if tokens else 0.0, tokens


def _shares(config: ExperimentConfig, copies: int, tokens: int) -> bool:
    """Whether the actor shares the copies among so many tokens."""
    train = config.train
    return may_share(train, has_routes=train.routes != "off") and is_worth_sharing(train, copies, tokens)


def sharing_of(config: ExperimentConfig, shape: ModelShape, response: int) -> Sharing | None:
    """None: no sequences have a prompt in common. response: tokens of the mean response; 0: all have the maximum."""
    flops, tokens = _saved_by_sharing(config, shape)
    if not tokens:
        return None
    length = sequence_tokens(config, response or config.rollout.sampling.max_new_tokens)
    size = config.rollout.group_size
    whole = shape.forward_flops(size * length, length)
    is_on = _shares(config, tokens, size * length)
    return Sharing(is_on, shared_tokens(config), size, tokens / (size * length), flops / whole)


def _mean_tokens(config: ExperimentConfig, response: int) -> int:
    """Tokens of a request in the KV cache, on average over the time in which it is generated."""
    return prompt_tokens(config) + math.ceil(response / 2)


def step_times(step: ModelStep, placed: Placed, micro_batches: int, device: Device) -> tuple[float, float]:
    """Seconds in which a rank computes and receives in one MFC, each with the time in which the pipeline fills and empties."""
    factor = (micro_batches + placed.grid.num_stages - 1) / micro_batches
    receives = sum(receive_time(name, calls, placed, device) for name, calls in step.collectives.items())
    return step.flops / device.flops * factor, receives * factor


def receive_time(name: str, calls: Collective, placed: Placed, device: Device) -> float:
    """Seconds in which a rank receives the bytes of a collective, over the links of its host and over its share of the network.

    name: as in result.collective_name.
    """
    group, _, operation = name.rpartition(" ")
    if operation == "send":  # it receives nothing
        return 0.0
    members, within = _size_of(group, placed.grid)
    share = (members - 1) / members if operation in _SHARED_OUT else min(members - 1, 1)
    time = calls.bytes * share / device.link
    hosts = min(members, math.ceil(members * within / GPUS_PER_HOST))
    if members * within == placed.grid.size:
        hosts = max(hosts, min(members, placed.num_hosts))
    if operation in _ALL_MEMBERS and hosts > 1:
        # Each of the groups of a host receives the parts of other hosts once, through the adapters of all its GPUs
        elsewhere = calls.bytes * ((hosts - 1) / hosts if operation in _SHARED_OUT else 1.0)
        groups, adapters = min(within, GPUS_PER_HOST), min(GPUS_PER_HOST, placed.grid.size)
        time = max(time, elsewhere * groups / (adapters * device.network))
    return time


def _size_of(group: str, grid: ParallelGrid) -> tuple[int, int]:
    """The number of ranks of a group, and of successive ranks between two of them. Ranks are numbered by the axes' orders."""
    sizes = {axis.name: size for axis, size in sorted(grid.ranked, key=lambda entry: -entry[0].order)}
    names = {*sizes} if group == "model" else set(group.split("_"))
    for axis, size in grid.inside:
        if names & {axis.name, PEERS}:  # in place of the axes that it is inside of
            there = {axis.name: size, PEERS: grid.num_shards // size}
            sizes = dict(
                entry for one in sizes.items() for entry in (there.items() if one[0] in grid.sharding else [one])
            )
    members = within = 1
    for name, size in sizes.items():
        if name in names:
            members *= size
        elif members == 1:
            within *= size
    return members, within


def generation_time(
    config: ExperimentConfig, shape: ModelShape, server: ServerPlan, device: Device, response: int
) -> float:
    """Seconds in which the servers generate one batch, with so many tokens in a response. Each decoding step reads the
    weights and the KV cache of its requests, and reads and writes their states. The prompt of a group is computed once if the
    engine shares prefixes."""
    requests = math.ceil(config.train.batch_size * config.rollout.group_size / server.count)
    new, prompt = response, prompt_tokens(config)
    steps = new * max(requests / server.running(_mean_tokens(config, response)), 1.0)
    active = server.weights * shape.active_parameters / shape.parameters
    moved = steps * active + requests * new * ((prompt + new / 2) * server.kv_token + 2 * server.request_state)
    tokens = requests * new + requests * prompt / (config.rollout.group_size if server.shares_prefixes else 1)
    flops = shape.forward_flops(1, prompt + new) * tokens / server.gpus
    return max(moved / device.memory_bandwidth, flops / device.flops)
