"""What a run with adapters (train.lora) cannot do: each feature with which LoRA is not proven, in one place (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import REF, ExperimentConfig, fetches_weights
from asyncrl.config.transports import FILES
from asyncrl.config.validation import Problem, problems_among
from asyncrl.dataflow.axes import EXPERTS, TOKENS
from asyncrl.dataflow.topology import Allocation, ModelPlacement
from asyncrl.protocol.names import ACTOR
from asyncrl.weights.adapter import ALL_LINEAR

_UNPROVEN = "is not proven with train.lora"


def problems_of_lora(
    config: ExperimentConfig, allocation: Allocation, placements: Sequence[ModelPlacement]
) -> Iterator[Problem]:
    train, lora, weights = config.train, config.train.lora, config.weights
    if lora is None:
        return
    mode, generates = mode_of(config.mode), allocation.traits
    others = [one.name for one in placements if one.role == ACTOR and one.name != ACTOR]
    yield from problems_among(
        config,
        (
            (
                ALL_LINEAR in lora.targets and len(lora.targets) > 1,
                "train.lora.targets",
                f"{ALL_LINEAR} stands alone; leave the other names out",
            ),
            (not lora.targets, "train.lora.targets", f"names no layer; use {ALL_LINEAR}"),
            (not mode.updates_servers, "mode", f"{_UNPROVEN}; use async, or leave train.lora out"),
            (
                mode.updates_servers and not generates.is_embedded,
                "allocation",
                f"the engine {allocation.engine} loads no adapters here yet; use transformers",
            ),
            (
                bool(allocation.shared_workers),
                "allocation",
                f"an engine that shares devices {_UNPROVEN}; leave the devices out",
            ),
            (bool(allocation.until), "allocation", f"a run in phases {_UNPROVEN}; use one phase"),
            (
                bool(others),
                "allocation",
                f"actor_inf on its own workers {_UNPROVEN}: they would need each version of the adapter; leave it out",
            ),
            (
                weights.transport != FILES,
                "weights.transport",
                f"adapters travel as files, and another transport {_UNPROVEN}; use {FILES}",
            ),
            (
                weights.full_every > 1,
                "weights.full_every",
                "saves nothing: nearly every element of an adapter changes in a step; set it to 1",
            ),
            (fetches_weights(config), "weights.fetch", f"{_UNPROVEN}; set it to off, with a folder that all hosts see"),
            (train.streaming, "train.streaming", f"{_UNPROVEN}; set it to false"),
            (train.arriving_inference, "train.arriving_inference", f"{_UNPROVEN}; set it to false"),
            (train.share_prefix == "on", "train.share_prefix", f"{_UNPROVEN}; set it to off"),
            (
                any(one.role == ACTOR and one.grid.parts(TOKENS) > 1 for one in placements),
                "allocation",
                f"context ranks (c) {_UNPROVEN}; use c1",
            ),
            (
                any(one.role == ACTOR and one.grid.parts(EXPERTS) > 1 for one in placements),
                "allocation",
                f"experts split over ranks (e) {_UNPROVEN}; leave e out",
            ),
            (train.routes != "off", "train.routes", f"{_UNPROVEN}; set it to off"),
            (train.compile == "on", "train.compile", f"{_UNPROVEN}; set it to off"),
            (train.ema is not None, "train.ema.decay", f"{_UNPROVEN}; leave train.ema out"),
            (
                train.ref.update_interval > 0,
                "train.ref.update_interval",
                "the reference is the base with the adapters off, which never moves; set it to 0",
            ),
            (REF in train.offload, "train.offload", "the reference has no weights of its own; leave ref out"),
            (bool(train.step), "train.step", f"{_UNPROVEN}; leave it empty"),
            (bool(train.mfcs), "train.mfcs", f"{_UNPROVEN}; leave it empty"),
        ),
    )
