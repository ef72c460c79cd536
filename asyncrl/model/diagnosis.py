"""Which sequences of a batch make a train step not finite: actor_inf and the loss of actor_train once more, in one process.

Starts from the weights that the step began from. First what was saved is looked at, then the weights, then the logprobs are
computed again; then loss and gradient of each minibatch, and of each sequence of those that are not finite. Nothing is stepped on:
so the minibatches after the first are looked at before the steps that came before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct
from safetensors import safe_open

from asyncrl.algorithms.ppo import PPOLoss, anchor_key, loss_denominator, token_ratios
from asyncrl.config import ModelConfig, TrainConfig
from asyncrl.data.sequence import KEY_SPECS, Array, SequenceSample
from asyncrl.data.trajectories import Trajectory
from asyncrl.dataflow import TRAIN_MFC, build_dataflow
from asyncrl.model.engine import TrainEngine
from asyncrl.model.interfaces import split_minibatches
from asyncrl.model.interfaces.actor import PPOActorInterface
from asyncrl.weights import tensor_files


class BadValues(Struct, frozen=True, kw_only=True):
    """Values of one kind of a sequence that are not finite."""

    what: str  # a key, or: recomputed logprobs, ratio, behaviour weight, loss, gradient
    count: int
    of: int
    first: int  # token of the sequence, prompt included; -1: of the sequence as a whole
    value: str  # of the first: nan, inf, -inf


class BadSequence(Struct, frozen=True, kw_only=True):
    """A sequence with such values."""

    ticket: str
    prompt: str  # e{epoch}-p{position}
    member: int  # of the group
    tokens: int
    bad: list[BadValues]
    cause: str  # the first of them on the way from trajectory to gradient
    spread: bool  # that came from others of its batch: of its own, nothing before the advantages is bad


class Minibatch(Struct, frozen=True, kw_only=True):
    """One optimizer step of the train step, as it comes out here. None: not finite."""

    index: int
    groups: int
    tokens: int
    loss: float | None
    grad_norm: float | None


class Diagnosis(Struct, frozen=True, kw_only=True):
    """What `asyncrl-launch replay` shows, and prints with --json."""

    weights: str
    bad_weights: list[str]  # tensors that are not finite; with any, nothing is computed
    groups: int
    batch: int  # groups that the step had; fewer are here where a file was lost
    sequences: int
    minibatches: list[Minibatch]
    bad: list[BadSequence]  # those that are themselves at fault first
    max_logprob_difference: float | None  # between the proximal logprobs recorded and those computed here
    notes: list[str]

    @property
    def finite(self) -> bool:
        return not self.bad_weights and not self.bad and all(part.grad_norm is not None for part in self.minibatches)


@dataclass(frozen=True)
class _One:
    """A sequence by itself."""

    trajectory: Trajectory
    member: int

    def values(self, key: str) -> Array | None:
        """This member's values of a key; None where it has none."""
        data = self.trajectory.sample.data
        if key not in data:
            return None
        runs = self.trajectory.sample.slices(key)[0]
        return runs[self.member] if self.member < len(runs) else None

    def sample(self, keys: Sequence[str]) -> SequenceSample:
        name = f"{self.trajectory.header.meta.ticket_id}#{self.member}"
        return SequenceSample.from_groups([name], [{key: [self.values(key)] for key in keys}])


def diagnose(
    batch: Sequence[Trajectory],
    train: TrainConfig,
    weights: Path,
    *,
    seed: int,
    says: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """batch: of one step, in canonical order, with the keys of actor_train. seed: of the run. says: how far it has come."""
    header = batch[0].header
    train = replace(train, torch_threads=0, gradient_checkpointing=False)
    mfc = build_dataflow(train).mfcs[TRAIN_MFC]
    actor = PPOActorInterface(mfc, train, seed)
    ones = [_One(trajectory, member) for trajectory in batch for member in range(trajectory.sample.num_sequences())]
    found: dict[int, list[BadValues]] = {index: _recorded(one) for index, one in enumerate(ones)}
    notes = _notes(batch, train)
    says("looking for weights that are not finite")
    bad_weights = _bad_tensors(weights)
    minibatches: list[Minibatch] = []
    difference: float | None = None
    if not bad_weights:
        says(f"loading {weights}")
        engine = TrainEngine(ModelConfig("actor", str(weights), "d1p1m1", [0], trainable=True), train)
        says(f"computing the logprobs of {len(ones)} sequences")
        difference = _compare_logprobs(engine, ones, actor.temperature, found)
        ids = [trajectory.header.meta.ticket_id for trajectory in batch]
        parts = split_minibatches(ids, train.ppo.minibatches, seed=seed, version=header.step)
        for index, part in enumerate(parts):
            says(f"loss and gradient of minibatch {index + 1} of {len(parts)}")
            minibatches.append(_try_minibatch(engine, actor, index, set(part), ones, found, says))
    bad = [_bad_sequence(one, found[index]) for index, one in enumerate(ones) if found[index]]
    return Diagnosis(
        weights=str(weights),
        bad_weights=bad_weights,
        groups=len(batch),
        batch=header.batch,
        sequences=len(ones),
        minibatches=minibatches,
        bad=sorted(bad, key=lambda sequence: sequence.spread),
        max_logprob_difference=difference,
        notes=notes,
    )


def _notes(batch: Sequence[Trajectory], train: TrainConfig) -> list[str]:
    notes = []
    if len(batch) < batch[0].header.batch:
        notes.append(f"only {len(batch)} of the batch's {batch[0].header.batch} groups are there")
    if train.dtype != "float32":
        notes.append(
            f"the trainer's own weights are float32; these were handed out in {train.dtype}, and are rounded to it"
        )
    if train.ppo.minibatches > 1:
        notes.append(
            "minibatches after the first are looked at without the optimizer steps of those before them, which moved the weights"
        )
    return notes


# ------------------------------------------------------------------------------------------------------- what is there


def _order(key: str) -> int:
    """Of causes: what comes with the trajectory, what MFCs make of it, advantages, loss."""
    late = ("advantages", "returns", "recomputed logprobs", "ratio", "behaviour weight", "loss", "gradient")
    made = ("proximal_logprobs", "packed_ref_logprobs", "values", "model_rewards", "dense_rewards")
    return 2 + late.index(key) if key in late else int(key in made or key not in KEY_SPECS)


def _recorded(one: _One) -> list[BadValues]:
    """Of everything that was saved; per token only where the policy sampled, elsewhere nothing has a say."""
    bad = []
    for key, array in one.trajectory.sample.data.items():
        values = one.values(key)
        if array.dtype.kind != "f" or values is None:
            continue
        spec = KEY_SPECS.get(key)
        mask = one.values("loss_mask") if spec is not None and spec.layout == "token" else None
        bad += _bad_values(key, values, mask, whole=spec is not None and spec.layout != "token")
    return bad


def _bad_values(what: str, values: Array, mask: Array | None = None, *, whole: bool = False) -> list[BadValues]:
    bad = ~np.isfinite(values)
    if mask is not None:
        bad &= mask
    places = np.flatnonzero(bad)
    if not len(places):
        return []
    first = int(places[0])
    of = int(mask.sum()) if mask is not None else len(values)
    value = str(float(values[first]))
    return [BadValues(what=what, count=len(places), of=of, first=-1 if whole else first, value=value)]


def _bad_tensors(weights: Path) -> list[str]:
    bad = []
    for file in tensor_files(weights):
        with safe_open(file, framework="pt") as tensors:
            bad += [name for name in tensors.keys() if not tensors.get_tensor(name).isfinite().all()]  # noqa: SIM118
    return bad


def _bad_sequence(one: _One, bad: list[BadValues]) -> BadSequence:
    bad = sorted(bad, key=lambda values: _order(values.what))
    meta = one.trajectory.header.meta
    own = [values for values in bad if values.what not in ("advantages", "returns", "loss", "gradient")]
    return BadSequence(
        ticket=meta.ticket_id,
        prompt=f"e{meta.locator.epoch}-p{meta.locator.position}",
        member=one.member,
        tokens=meta.seqlens[one.member],
        bad=bad,
        cause=bad[0].what,
        spread=not own,
    )


# --------------------------------------------------------------------------------------------------- what is computed


def _compare_logprobs(
    engine: TrainEngine, ones: Sequence[_One], temperature: float, found: Mapping[int, list[BadValues]]
) -> float | None:
    """Logprobs as actor_inf makes them; the largest difference to those recorded, if there are any."""
    largest: float | None = None
    for index, one in enumerate(ones):
        logprobs = engine.logprobs(one.sample(["packed_input_ids"]), temperature=temperature)
        mask, recorded = one.values("loss_mask"), one.values("proximal_logprobs")
        assert logprobs is not None
        assert mask is not None
        found[index].extend(_bad_values("recomputed logprobs", logprobs, mask))
        if recorded is not None and mask.any():
            difference = np.abs(logprobs - recorded)[mask]
            difference = difference[np.isfinite(difference)]
            largest = max(largest or 0.0, float(difference.max(initial=0.0)))
    return largest


def _try_minibatch(
    engine: TrainEngine,
    actor: PPOActorInterface,
    index: int,
    ids: set[str],
    ones: Sequence[_One],
    found: Mapping[int, list[BadValues]],
    says: Callable[[str], None],
) -> Minibatch:
    """All of it together, and where that is not finite each of its sequences."""
    mine = [at for at, one in enumerate(ones) if one.trajectory.header.meta.ticket_id in ids]
    masks = [_count(ones[at]) for at in mine]
    num_tokens, num_sequences = sum(masks), sum(count > 0 for count in masks)
    if not num_tokens:
        return Minibatch(index=index, groups=len(ids), tokens=0, loss=0.0, grad_norm=0.0)
    loss_fn = PPOLoss(actor.ppo, loss_denominator(actor.ppo, num_tokens, num_sequences))
    stats = engine.try_step(_loss_sample(actor, [ones[at] for at in mine]), loss_fn, temperature=actor.temperature)
    loss, grad_norm = _finite(stats["loss"]), _finite(stats["grad_norm"])
    if loss is None or grad_norm is None:
        for number, at in enumerate(mine):
            says(f"minibatch {index + 1} is not finite: sequence {number + 1} of {len(mine)}")
            found[at].extend(_try_one(engine, actor, ones[at], loss_fn))
    return Minibatch(index=index, groups=len(ids), tokens=num_tokens, loss=loss, grad_norm=grad_norm)


def _count(one: _One) -> int:
    mask = one.values("trained_mask")
    assert mask is not None
    return int(mask.sum())


def _loss_sample(actor: PPOActorInterface, ones: Sequence[_One]) -> SequenceSample:
    """As actor_train gives it to the engine."""
    return SequenceSample.gather([one.sample(actor.keys) for one in ones]).remap_keys({"trained_mask": "loss_mask"})


def _try_one(engine: TrainEngine, actor: PPOActorInterface, one: _One, loss_fn: PPOLoss) -> list[BadValues]:
    """Ratios, loss and gradient of a sequence by itself."""
    sample = _loss_sample(actor, [one])
    if not sample.data["loss_mask"].any():
        return []
    bad: list[BadValues] = []

    def watched(
        outputs: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor], cu_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask, level = data["loss_mask"].bool(), actor.ppo.importance_level
        anchor = data[anchor_key(actor.ppo)]
        ratio = token_ratios(outputs["logprobs"].detach(), anchor, mask, cu_seqlens, level)
        weight = token_ratios(anchor, data["packed_logprobs"], mask, cu_seqlens, level)
        for what, values in (("ratio", ratio), ("behaviour weight", weight)):
            bad.extend(_bad_values(what, values.numpy(), mask.numpy()))
        return loss_fn(outputs, data, cu_seqlens)

    stats = engine.try_step(sample, watched, temperature=actor.temperature)
    for what, name in (("loss", "loss"), ("gradient", "grad_norm")):
        bad.extend(_bad_values(what, np.array([stats[name]]), whole=True))
    return bad


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
