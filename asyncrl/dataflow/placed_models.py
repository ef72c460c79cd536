"""The models of a run: where each is placed, and its config in the processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.config.processes import ModelConfig, PlacedMFC
from asyncrl.config.schema import (
    CRITIC,
    EMA,
    REF,
    CriticConfig,
    LoraConfig,
    ModelSettings,
    RewardModelConfig,
    RoleConfig,
    TrainConfig,
    model_settings,
)
from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.dataflow.topology import Allocation, ModelPlacement
from asyncrl.protocol.names import ACTOR


def place(allocation: Allocation, graph: DataflowGraph) -> tuple[list[ModelPlacement], list[PlacedMFC]]:
    placements, model_of = allocation.place(graph)
    return placements, [mfc.placed(model_of[name]) for name, mfc in graph.mfcs.items()]


def models_of(
    placements: Sequence[ModelPlacement], mfcs: Sequence[PlacedMFC], train: TrainConfig, model_path: str
) -> list[ModelConfig]:
    """Return the configs of all models: the placed ones, and the actor's moving average, which is laid out like the actor.
    placements: the actor's is the first one."""
    models = [_model(placement, mfcs, train, model_path) for placement in placements]
    if models and train.lora is not None:
        models = with_adapters(models, train.lora)
    if models and train.ema is not None:
        models.append(replace(models[0], name=EMA, trainable=False, offload=False, float32=True))
    return models


def _model(placement: ModelPlacement, mfcs: Sequence[PlacedMFC], train: TrainConfig, model_path: str) -> ModelConfig:
    """Return the config of a placed model. Its role determines the folder of its weights, the kind of its output and the
    optimizer."""
    role = placement.role
    _, settings = model_settings(train).get(role, ("", None))
    return ModelConfig(
        name=placement.name,
        path=(settings.path if settings else "") or model_path,
        grid=str(placement.grid),
        workers=list(placement.workers),
        kind="none" if placement.grid.on_cpu else _kind(settings),
        trainable=placement.name == role and any(mfc.role == role and mfc.kind == "train_step" for mfc in mfcs),
        optimizer=settings.optimizer if isinstance(settings, CriticConfig | RoleConfig) else train.optimizer,
        offload=role in train.offload,
    )


def with_adapters(models: Sequence[ModelConfig], lora: LoraConfig) -> list[ModelConfig]:
    """Give all models of actor and critic adapters. A reference on the workers of the actor, the first model, that begins with its
    weights is its base, with the adapters off."""
    actor = replace(models[0], lora=lora)
    of_critic = replace(lora, start="")  # train.lora.start is an adapter of the actor

    def is_base(model: ModelConfig) -> bool:
        return model.name == REF and (model.path, model.grid, model.workers) == (actor.path, actor.grid, actor.workers)

    def with_its_own(model: ModelConfig) -> ModelConfig:
        own = {ACTOR: lora, CRITIC: of_critic}.get(ModelPlacement.of(model).role)
        return replace(model, lora=own, base_of=actor.name if is_base(model) else "")

    return [actor, *map(with_its_own, models[1:])]


def _kind(settings: ModelSettings | None) -> str:
    if isinstance(settings, RoleConfig):
        return settings.kind
    return {CriticConfig: "value", RewardModelConfig: "reward"}.get(type(settings), "lm")
