"""Prints which sequences of a bad batch make loss or gradient not finite: `python examples/bad_batch/examine.py RUN [STEP]`.

A train step whose loss or gradient is not finite is skipped, and its batch is kept in RUN/bad_batches. This script loads the batch
and the weights that the step began from. It computes each sequence's loss and gradient by itself, on the CPU. Nothing is trained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.algorithms.ppo import PPOLoss, loss_denominator
from asyncrl.config.processes import MasterWorkerConfig, ModelConfig
from asyncrl.config.schema import TrainConfig
from asyncrl.data.bad_batches import WEIGHTS, list_bad_batches
from asyncrl.data.sequence import Array, SequenceSample
from asyncrl.data.trajectories import list_recording, read_trajectory
from asyncrl.dataflow.graph import TRAIN_MFC, build_dataflow
from asyncrl.launch.program import load_process_config
from asyncrl.launch.rundir import configs_dir
from asyncrl.model.engine import TrainEngine
from asyncrl.model.interfaces import PPOActorInterface
from asyncrl.protocol.names import ACTOR
from asyncrl.weights.versions import read_manifest, version_dir
from asyncrl.weights.whole import write_whole


def examine(folder: Path, train: TrainConfig, weights: Path, *, seed: int) -> Iterator[str]:
    """One line per sequence: its ticket, prompt (epoch and position), member, and all its values that are not finite."""
    # Supervised texts are not part of the batch, so no tokenizer is needed
    train = replace(train, torch_threads=0, gradient_checkpointing=False, ptx=None)
    actor = PPOActorInterface(build_dataflow(train).mfcs[TRAIN_MFC], train, seed=seed)
    engine = TrainEngine(ModelConfig("actor", str(weights), "d1p1m1", [0], trainable=True), train)
    for name, parameter in engine.module.named_parameters():
        if not parameter.isfinite().all():
            yield f"weights {name}: NOT FINITE"
    for meta, values in sequences(folder):
        one = SequenceSample.from_groups(["one"], [{key: [values[key]] for key in actor.keys}])
        one = one.remap_keys({"trained_mask": "loss_mask"})
        denominator = loss_denominator(actor.ppo, max(1, int(values["trained_mask"].sum())), 1)
        loss_fn = PPOLoss(actor.ppo, denominator, anchor_is_current=actor.anchor_is_current)
        stats = engine.try_step(one, loss_fn, temperature=actor.temperature)
        bad = [*bad_keys(values), *(name for name in ("loss", "grad_norm") if not np.isfinite(stats[name]))]
        yield f"{meta}: NOT FINITE: {', '.join(bad)}" if bad else f"{meta}: finite"


def sequences(folder: Path) -> Iterator[tuple[str, dict[str, Array]]]:
    for file in list_recording(folder):
        trajectory = read_trajectory(file)
        meta, sample = trajectory.header.meta, trajectory.sample
        runs = {key: sample.slices(key)[0] for key in sample.keys}
        for member in range(sample.num_sequences()):
            name = f"{meta.ticket_id} e{meta.locator.epoch}-p{meta.locator.position} member {member}"
            yield name, {key: of_group[member] for key, of_group in runs.items() if member < len(of_group)}


def bad_keys(values: dict[str, Array]) -> Iterator[str]:
    """Keys with values that are not finite. Of values per token, only those of sampled tokens count."""
    sampled = values["loss_mask"]
    for key, array in values.items():
        if array.dtype.kind == "f":
            bad = ~np.isfinite(array) & (sampled if len(array) == len(sampled) else True)
            if bad.any():
                yield f"{key} {array[bad][0]} at token {np.flatnonzero(bad)[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("step", type=int, nargs="?", help="train step; default: the newest bad batch")
    arguments = parser.parse_args()
    batches = [batch for batch in list_bad_batches(arguments.run) if arguments.step in (None, batch.step)]
    if not batches:
        sys.exit(
            f"{arguments.run} has no such bad batch; steps with one: {[b.step for b in list_bad_batches(arguments.run)]}"
        )
    batch = batches[-1]
    config = load_process_config(configs_dir(arguments.run, batch.attempt) / "master_0.yaml")
    assert isinstance(config, MasterWorkerConfig)
    left = batch.path / WEIGHTS  # mode=sync writes no versions, so the step kept its weights here
    weights = left if left.is_dir() else version_dir(arguments.run, ACTOR, batch.weights)
    if not left.is_dir() and read_manifest(weights).kind == "delta":
        write_whole(weights, left)
        weights = left
    print(f"train step {batch.step} of attempt {batch.attempt}, weights {weights}", flush=True)
    for line in examine(batch.path, config.train, weights, seed=config.worker.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
