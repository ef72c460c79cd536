"""What a run with adapters (train.lora) cannot do: each feature with which LoRA is not proven, in one place (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ExperimentConfig, fetches_weights
from asyncrl.config.validation import Problem, problems_among
from asyncrl.dataflow.axes import MATRICES
from asyncrl.dataflow.topology import Allocation
from asyncrl.weights.adapter import ALL_LINEAR

_UNPROVEN = "is not proven with train.lora"


def problems_of_lora(config: ExperimentConfig, allocation: Allocation) -> Iterator[Problem]:
    train, lora, weights = config.train, config.train.lora, config.weights
    if lora is None:
        return
    mode, generates = mode_of(config.mode), allocation.traits
    yield from problems_among(
        config,
        (
            (
                ALL_LINEAR in lora.targets and len(lora.targets) > 1,
                "train.lora.targets",
                f"{ALL_LINEAR} stands alone; leave the other names out",
            ),
            (not lora.targets, "train.lora.targets", f"names no layer; use {ALL_LINEAR}"),
            (not mode.trains, "mode", "only samples, from model_path without adapters; leave train.lora out"),
            (
                mode.updates_servers and bool(generates.adapter_limit),
                "allocation",
                f"{generates.adapter_limit}; use transformers or vllm",
            ),
            (
                bool(generates.adapter_ranks) and lora.rank > max(generates.adapter_ranks, default=0),
                "train.lora.rank",
                f"the engine {allocation.engine} has room for {max(generates.adapter_ranks, default=0)} at most; use a lower one, "
                "or transformers",
            ),
            (
                generates.program is not None and weights.verify_logprobs is False,
                "weights.verify_logprobs",
                f"the engine {allocation.engine} is silent about tensors of an adapter that it does not use, and only this check "
                "notices; set it to true",
            ),
            (
                generates.program is not None and config.generation.interrupt == "in_place",
                "generation.interrupt",
                f"with the engine {allocation.engine} a request keeps the adapter with which it began; use abort, retract or wait",
            ),
            (
                generates.program is not None and bool(allocation.shared_workers or allocation.until),
                "allocation",
                f"shared devices or phases with the engine {allocation.engine} {_UNPROVEN}; use devices of their own and one phase",
            ),
            (
                generates.program is not None and allocation.generation.parts(MATRICES) > 1,
                "allocation",
                f"tensor ranks of the engine {allocation.engine} {_UNPROVEN}; use m1 for generation, or transformers",
            ),
            (
                generates.program is not None and fetches_weights(config),
                "weights.fetch",
                f"with the engine {allocation.engine} it {_UNPROVEN}; set it to off, with a folder that all hosts see, or use "
                "transformers",
            ),
            (
                weights.full_every > 1,
                "weights.full_every",
                "saves nothing: nearly every element of an adapter changes in a step; set it to 1",
            ),
            (train.routes != "off", "train.routes", f"{_UNPROVEN}; set it to off"),
            (train.compile == "on", "train.compile", f"{_UNPROVEN}; set it to off"),
            (
                train.ema is not None,
                "train.ema.decay",
                "the average of A times that of B is not the average of their products; leave train.ema out",
            ),
            (
                train.ref.update_interval > 0,
                "train.ref.update_interval",
                "the reference has no adapters, so it cannot become what the actor is; set it to 0",
            ),
        ),
    )
