"""The run that only evaluates a model (mode=eval_only), from the config of a training run (pure).

It has the generation servers, the rollout workers, the prompts of evaluations and the limits of that config. What concerns training
is left out, so that a config evaluates whatever it trains.
"""

from __future__ import annotations

from dataclasses import replace

from asyncrl.config.modes import EVAL_ONLY
from asyncrl.config.schema import (
    TRACKERS,
    ExperimentConfig,
    RecordConfig,
    ReplayConfig,
    TrainConfig,
    evaluation_sets,
)
from asyncrl.config.transports import FILES
from asyncrl.dataflow.phases import first_allocation
from asyncrl.dataflow.topology import Allocation


def to_evaluate(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config of a run that evaluates model_path once on all evaluation sets, and has no other work.

    Of `train` it keeps the fields on which rollouts depend. The generation servers are those of the first phase. An allocation that
    cannot be read stays, for the check of the config to report.
    """
    train, sets = config.train, evaluation_sets(config.eval)
    kept = TrainConfig(
        batch_size=train.batch_size,  # with eta: the number of concurrent rollouts
        dense_rewards=train.dense_rewards,
        branches=train.branches,
        words=train.words,
        max_words_bytes=train.max_words_bytes,
        call_timeout_s=train.call_timeout_s,
        torch_threads=train.torch_threads,
    )
    return replace(
        config,
        mode=EVAL_ONLY,
        recover="auto",
        allocation=_of_servers(config.allocation),
        # No prompt is trained; the evaluated ones are there in any case
        prompts=next((chosen.prompts for chosen in sets.values() if chosen.prompts is not None), config.prompts),
        train=kept,
        manager=replace(config.manager, eval_share=1.0),
        weights=replace(config.weights, transport=FILES, full_every=1, verify_logprobs=None),
        record=RecordConfig(),
        replay=ReplayConfig(),
        tensorboard=False,
        **{name: replace(getattr(config, name), mode="disabled") for name in TRACKERS},
    )


def _of_servers(text: str) -> str:
    try:
        allocation = Allocation.parse(first_allocation(text))
    except ValueError:
        return text
    return f"{allocation.engine}.{allocation.generation}+d1"
