"""MFC interfaces on fake engines, with one rank and with several. Ranks are threads and meet at a barrier in every collective call.

A fake's model is a table of logits, values or scores by token (no context). Plain SGD trains it. That suffices to show whether two
updates are equal. tests/processes/test_mfcs_on_engines.py tests real engines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import distillation_advantages
from asyncrl.algorithms.kl import AdaptiveKLController
from asyncrl.algorithms.ppo import PPOLoss
from asyncrl.config.schema import (
    CriticConfig,
    PPOConfig,
    RewardModelConfig,
    TaskAlgorithmConfig,
    TeacherConfig,
    TrainConfig,
)
from asyncrl.data.sequence import KEY_SPECS, SequenceSample, spec_of
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.mfc import mfc as declare_mfc
from asyncrl.dataflow.statistics import merge_stats
from asyncrl.model.interfaces import (
    AdvantagesInterface,
    Interface,
    LossFn,
    StepTotals,
    make_interface,
    split_minibatches,
)

VOCABULARY = 11
torch.set_num_threads(1)

Exchange = Callable[[str, Any], list[Any]]


class FakeEngine:
    """Implements the documented engine API. Each rank has its own copy of the model. `exchange` returns the values of all ranks."""

    def __init__(
        self,
        kind: str = "lm",
        replica: int = 0,
        num_replicas: int = 1,
        exchange: Exchange | None = None,
        is_last_stage: bool = True,
    ) -> None:
        self.kind, self.replica, self.num_replicas, self.is_head = kind, replica, num_replicas, is_last_stage
        self._exchange = exchange or (lambda _, value: [value])
        self.table = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float32).requires_grad_()
        self.calls: list[str] = []  # collective calls, in order
        self.batches: list[tuple[str, ...]] = []  # ids of each train_step
        self.losses: list[Any] = []
        self.trained: SequenceSample | None = None  # the sample of the last train_step
        self.temperature = 0.0

    def _all(self, what: str, value: object) -> list[Any]:
        self.calls.append(what)
        return self._exchange(what, value)

    def _outputs(self, tokens: torch.Tensor, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        if self.kind != "lm":
            return {"values": self.table[tokens]}
        all_logprobs = (self.table / temperature).log_softmax(0)
        entropy = -(all_logprobs.exp() * all_logprobs).sum()
        return {"logprobs": all_logprobs[tokens], "entropy": entropy.expand(len(tokens))}

    def _infer(self, what: str, sample: SequenceSample | None, temperature: float = 1.0) -> np.ndarray | None:
        self._all(what, None)
        if sample is None or not self.is_head:
            return None
        with torch.no_grad():
            outputs = self._outputs(torch.tensor(sample.data["packed_input_ids"]), temperature)
            return outputs["logprobs" if self.kind == "lm" else "values"].numpy()

    def logprobs(self, sample: SequenceSample | None, *, temperature: float) -> np.ndarray | None:
        assert self.kind == "lm"
        return self._infer(f"logprobs at {temperature}", sample, temperature)

    def values(self, sample: SequenceSample | None) -> np.ndarray | None:
        assert self.kind == "value"
        return self._infer("values", sample)

    def scores(self, sample: SequenceSample | None) -> np.ndarray | None:
        assert self.kind == "reward"
        by_token = self._infer("scores", sample)
        return None if by_token is None or sample is None else by_token[sample.cu_seqlens()[1:] - 1]

    def all_reduce_sum(self, values: list[float]) -> np.ndarray:
        return np.sum(self._all(f"all_reduce_sum of {len(values)}", np.array(values, np.float64)), axis=0)

    def mean_over_ranks(self, value: float | None) -> float:
        values = [value for value in self._all("mean_over_ranks", value) if value is not None]
        return sum(values) / len(values) if values else math.nan

    def accumulate(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, begins: bool
    ) -> dict[str, float]:
        grad, stats = self._gradient("accumulate", sample, loss_fn, temperature)
        self.accumulated = grad if begins else self.accumulated + grad
        return stats if self.is_head else {}

    def step(self, stats: Mapping[str, float], loss_fn: LossFn, *, lr_step: int, divisor: float) -> dict[str, float]:
        total = {name: value / divisor if name == "loss" else value for name, value in stats.items()}
        stop_reason = getattr(loss_fn, "stop_reason", lambda stats: "")
        stopped = any(self._all(f"step {lr_step}", self.is_head and bool(stop_reason(total))))
        grad = self.accumulated / divisor
        with torch.no_grad():
            self.table -= 0.0 if stopped else 0.5 * grad
        engine_stats = {
            "grad_norm": float(grad.norm()),
            "lr": 0.5,
            "skipped_steps": 0.0,
            "stopped_steps": float(stopped),
        }
        return total | engine_stats if self.is_head else {}

    def _gradient(
        self, what: str, sample: SequenceSample | None, loss_fn: LossFn, temperature: float
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The gradient and the statistics, summed over all ranks."""
        assert sample is None or sample.num_ids > 0
        self.trained, self.temperature = sample, temperature
        self.batches.append(sample.ids if sample is not None else ())
        self.losses.append(loss_fn)
        grad, stats = torch.zeros(VOCABULARY), {}
        if sample is not None:
            for part in sample.unpack():  # one micro-batch per group
                data = {key: torch.tensor(array) for key, array in part.data.items()}
                outputs = self._outputs(data["packed_input_ids"], temperature)
                loss, part_stats = loss_fn(outputs, data, torch.tensor(part.cu_seqlens()))
                grad += torch.autograd.grad(loss, self.table)[0]
                _add(stats, {key: float(value) for key, value in part_stats.items()})
        gathered = self._all(what, (grad, stats))
        total, total_stats = torch.zeros(VOCABULARY), {}
        for rank_grad, rank_stats in gathered:
            total += rank_grad
            _add(total_stats, rank_stats)
        return total, total_stats


def _add(total: dict[str, float], stats: Mapping[str, float]) -> None:
    for key, value in stats.items():
        total[key] = max(total.get(key, 0.0), value) if key.endswith("_max") else total.get(key, 0.0) + value


KINDS = {"actor": "lm", "ref": "lm", "teacher": "lm", "critic": "value", "reward": "reward"}
Engines = dict[str, FakeEngine]  # by role


def fake_ranks(n: int) -> list[Engines]:
    """Return ranks that are threads. If they make different collective calls, an assertion here fails."""
    barrier, slots = Barrier(n, timeout=60), [("", None)] * n

    def make(rank: int) -> Engines:
        def exchange(what: str, value: Any) -> list[Any]:
            slots[rank] = (what, value)
            barrier.wait()
            names, values = {name for name, _ in slots}, [value for _, value in slots]
            barrier.wait()
            assert len(names) == 1, f"ranks are in different collective calls: {names}"
            return values

        return {role: FakeEngine(kind, rank, n, exchange) for role, kind in KINDS.items()}

    return [make(rank) for rank in range(n)]


def make_batch(num_groups: int = 7, seed: int = 0) -> SequenceSample:
    """Return groups of 1 to 5 responses with all keys. Some are truncated, one loss mask has a gap, and one response is empty."""
    random = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        size, prompt_length = 1 + (g + 2) % 5, int(random.integers(1, 4))
        prompt = random.integers(0, VOCABULARY, prompt_length).tolist()
        lengths = [int(random.integers(1, 6)) for _ in range(size)]
        if g == 3:
            lengths[0] = 0
        masks = [[False] * prompt_length + [True] * n for n in lengths]
        if g == 1:
            lengths[0], masks[0] = 4, [False] * prompt_length + [True, False, False, True]
        behaviour = [[-2.4 + float(random.normal(0, 0.3)) if on else 0.0 for on in mask] for mask in masks]
        groups.append(
            {
                "packed_input_ids": [prompt + random.integers(0, VOCABULARY, n).tolist() for n in lengths],
                "packed_logprobs": behaviour,
                "prompt_mask": [[True] * prompt_length + [False] * n for n in lengths],
                "loss_mask": masks,
                "seq_no_eos_mask": (random.random(size) < 0.3).tolist(),
                "rewards": (random.random(size) < 0.5).astype(float).tolist() if g != 4 else [1.0] * size,
                "versions": [[7 if on else -1 for on in mask] for mask in masks],
                "packed_ref_logprobs": [[-2.3 if on else 0.0 for on in mask] for mask in masks],
                "task_ids": g % 3,
                "values": [random.normal(0, 1, len(mask)).tolist() for mask in masks],
                "dense_rewards": [random.normal(0, 0.1, len(mask)).tolist() for mask in masks],
            }
        )
    return SequenceSample.from_groups([f"ticket{g}" for g in range(num_groups)], groups)


def train_config(**ppo: object) -> TrainConfig:
    """Build a TrainConfig. Names that are fields of TrainConfig are set there, all others in its ppo."""
    own = {name: ppo.pop(name) for name in list(ppo) if name in TrainConfig.__dataclass_fields__}
    return TrainConfig(ppo=PPOConfig(**({"temperature": 1.0} | ppo)), **own)  # type: ignore[arg-type]


def interfaces(train: TrainConfig, extra_keys: Sequence[str] = (), seed: int = 5) -> dict[str, Interface]:
    """Return the interfaces by MFC, in the order of the graph. extra_keys: keys that `advantages` reads besides its own."""
    graph = build_dataflow(train)
    advantages = graph.mfcs["advantages"]
    mfcs = graph.mfcs | {
        "advantages": dataclasses.replace(advantages, input_keys=(*advantages.input_keys, *extra_keys))
    }
    return {name: make_interface(mfcs[name], train, seed=seed) for name in graph.order}


def run_mfcs(
    mfcs: Mapping[str, Interface],
    train: TrainConfig,
    engines: Engines,
    sample: SequenceSample | None,
    batch_ids: Sequence[str],
    version: int = 0,
) -> tuple[SequenceSample | None, dict[str, float]]:
    """Run all MFCs on one rank. Return the rank's sample afterwards, and the statistics of the step."""
    graph, stats = build_dataflow(train), {}
    for name, interface in mfcs.items():
        made, mfc_stats = interface.run(
            engines[graph.mfcs[name].role], sample, batch_ids=batch_ids, step=interface.begin(version)
        )
        stats |= mfc_stats
        outputs = graph.mfcs[name].output_keys
        assert (made is None) == (sample is None or not outputs)
        if made is not None and sample is not None:
            assert set(made.keys) == set(outputs)
            sample = sample.update(made)
    return sample, stats


def run_step(
    train: TrainConfig,
    batch: SequenceSample,
    layout: Sequence[Sequence[int]],
    extra_keys: Sequence[str] = (),
    steps: int = 2,
) -> tuple[list[Engines], list[list[dict[str, float]]]]:
    """Run train steps with the groups placed on ranks as in `layout`.

    Returns the engines and, by rank, the statistics of each step.
    """

    def run_rank(rank: int) -> list[dict[str, float]]:
        mfcs = interfaces(train, extra_keys)
        here = [batch.ids[g] for g in layout[rank]]
        sample = batch.select_ids(here) if here else None
        return [run_mfcs(mfcs, train, engines[rank], sample, batch.ids, version)[1] for version in range(steps)]

    engines = fake_ranks(len(layout))
    with ThreadPoolExecutor(len(engines)) as pool:
        return engines, list(pool.map(run_rank, range(len(engines))))


# ------------------------------------------------------------------------------------------------ layout independence

CONFIGS = {
    "decoupled, group": {},
    "decoupled, batch": {"advantage_norm": "batch"},
    "no normalisation, sequences": {"advantage_norm": "none", "loss_normalization": "sequence", "c_clip": 2.0},
    "naive": {"use_decoupled_loss": False},
    "recomputed": {"use_decoupled_loss": False, "recompute_logprob": True},
    "masks": {"mask_too_long": True, "mask_no_eos_with_zero": True, "loss_normalization": "sequence"},
    "kl": {"kl_coef": 0.1, "kl_adaptive": True, "kl_horizon": 100.0, "kl_estimator": "k3"},
    "kl, batch": {"kl_coef": 0.1, "advantage_norm": "batch", "discount": 0.9, "gae_lambda": 0.8},
    "values and dense rewards of others": {"advantage_norm": "batch", "gae_lambda": 0.95},
    "critic": {
        "advantage_norm": "batch",
        "gae_lambda": 0.9,
        "discount": 0.95,
        "kl_coef": 0.1,
        "critic": CriticConfig(value_norm=True, value_norm_beta=0.5, minibatches=3),
        "reward_model": RewardModelConfig(scale=0.5),
        "mask_too_long": True,
    },
    "critic without clip and norm": {"advantage_norm": "none", "critic": CriticConfig(eps_clip=0.0), "epochs": 2},
    "reward model, group": {
        "reward_model": RewardModelConfig(scale=2.0),
        "loss_normalization": "constant",
        "loss_length": 5,
    },
    "kl in the loss": {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"},
    "three passes": {"epochs": 3, "minibatches": 2, "kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"},
    "entropy, sequences": {"entropy_coef": 0.5, "loss_normalization": "sequence"},
    "entropy target": {"entropy_coef": 0.1, "entropy_target": 2.4, "entropy_step": 0.05, "epochs": 2},
    "teacher": {"teacher": TeacherConfig(coef=0.5), "kl_coef": 0.1},
    "teacher, naive, batch": {"teacher": TeacherConfig(), "use_decoupled_loss": False, "advantage_norm": "batch"},
    "tasks": {
        "teacher": TeacherConfig(coef=0.5),
        "kl_coef": 0.1,
        "tasks": {
            "a": TaskAlgorithmConfig(baseline="leave_one_out", advantage_norm="none"),
            "b": TaskAlgorithmConfig(teacher_coef=0.0, mask_too_long=True),
            "c": TaskAlgorithmConfig(advantage_norm="none", discount=0.9, overlong_penalty=1.0, overlong_length=4),
        },
    },
    "leave one out, sequences": {"baseline": "leave_one_out", "advantage_norm": "none", "importance_level": "sequence"},
}
LAYOUTS = [
    [[0, 2, 4, 6], [1, 3, 5]],
    [[0, 1, 2, 3, 4, 5, 6], []],
    [[], [6], [0, 1, 2, 3, 4, 5]],
    [[3], [0, 4], [1, 2, 5, 6]],
]


@pytest.mark.parametrize("name", CONFIGS)
def test_same_update_in_any_layout(name: str) -> None:
    train, batch = train_config(**CONFIGS[name]), make_batch()
    extra = ("values", "dense_rewards") if "of others" in name else ()
    (single,), (expected,) = run_step(train, batch, [range(7)], extra)
    assert expected[1]["actor/grad_norm"] > 0
    expected_calls = {role: [call.split(" of ")[0] for call in engine.calls] for role, engine in single.items()}
    for layout in LAYOUTS:
        engines, stats = run_step(train, batch, layout, extra)
        for rank_engines, rank_stats in zip(engines, stats, strict=True):
            for role, engine in rank_engines.items():
                assert [call.split(" of ")[0] for call in engine.calls] == expected_calls[role]
                torch.testing.assert_close(engine.table, single[role].table, rtol=0, atol=1e-6)
            for rank_step, step in zip(rank_stats, expected, strict=True):
                assert rank_step == pytest.approx(step, abs=1e-5)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if "of others" not in name])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -7.5])
def test_data_of_tokens_that_the_policy_did_not_sample_changes_nothing(name: str, value: float) -> None:
    """Every key of such tokens but the dense rewards, which an environment may give for its own tokens. Their ids are changed if
    only the actor reads them: this engine's model reads no context."""
    train, batch = train_config(**CONFIGS[name]), make_batch()
    changed = dict(batch.data)
    outside = ~batch.data["loss_mask"]
    for key in ("packed_logprobs", "packed_ref_logprobs"):
        changed[key] = np.where(outside, np.float32(value), batch.data[key])
    changed["versions"] = np.where(outside, 3, batch.data["versions"])
    if train.critic is None and train.reward_model is None:
        changed["packed_input_ids"] = np.where(outside, 9, batch.data["packed_input_ids"])
    results = []
    for data in (batch.data, changed):
        (engines,), (stats,) = run_step(train, SequenceSample(batch.ids, batch.seqlens, data), [range(7)])
        results.append(([engines[role].table.detach() for role in sorted(engines)], stats))
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)


def test_fewer_groups_than_minibatches_and_ranks() -> None:
    train, batch = train_config(minibatches=4), make_batch(2)
    (single,), _ = run_step(train, batch, [range(2)])
    engines, _ = run_step(train, batch, [[], [0, 1], []])
    assert len(single["actor"].batches) == 2 * 2
    assert engines[0]["actor"].batches == [()] * 4
    torch.testing.assert_close(engines[0]["actor"].table, single["actor"].table, rtol=0, atol=1e-6)


def test_a_batch_without_trained_tokens_causes_no_optimizer_step() -> None:
    batch = make_batch()
    truncated = SequenceSample(
        batch.ids, batch.seqlens, batch.data | {"seq_no_eos_mask": np.ones_like(batch.data["seq_no_eos_mask"])}
    )
    train = train_config(mask_too_long=True, advantage_norm="batch", critic=CriticConfig(value_norm=True))
    (engines,), ((stats, again),) = run_step(train, truncated, [range(7)])
    assert engines["actor"].batches == engines["critic"].batches == []
    assert stats["actor/empty_minibatches"] == stats["critic/empty_minibatches"] == 4
    assert stats["length/truncated_share"] == 1.0
    assert stats["advantages/max"] == stats["advantages/min"] == stats["batch/num_trained_tokens"] == 0.0
    assert (again["critic/norm_mean"], again["critic/norm_std"], stats["critic/explained_variance"]) == (0, 1, 0)


def test_ranks_before_the_last_stage_take_part_and_return_no_outputs() -> None:
    """They make the same calls with the same sample. Only the last stage returns results that depend on the engine's outputs."""
    train = train_config(critic=CriticConfig(value_norm=True), advantage_norm="batch", kl_coef=0.1)
    mfcs, graph = interfaces(train), build_dataflow(train)
    last = {role: FakeEngine(kind) for role, kind in KINDS.items()}
    first = {role: FakeEngine(kind, is_last_stage=False) for role, kind in KINDS.items()}
    batch = make_batch()
    whole, _ = run_mfcs(mfcs, train, last, batch, batch.ids)
    assert whole is not None
    for name, interface in interfaces(train).items():
        engine = first[graph.mfcs[name].role]
        made, stats = interface.run(engine, whole, batch_ids=batch.ids, step=interface.begin(0))
        if name.endswith("_inf"):
            assert made is None
        if name.endswith("_train"):
            assert stats == {
                f"{graph.mfcs[name].role}/optimizer_steps": 4,
                f"{graph.mfcs[name].role}/empty_minibatches": 0,
            }
    for role in graph.roles:
        assert first[role].calls == last[role].calls
        torch.testing.assert_close(first[role].table, last[role].table, rtol=0, atol=0)


def test_all_stages_of_a_pipeline_have_the_same_entropy_coefficient() -> None:
    """Only the last stage measures the entropy. The state of all ranks is in checkpoints."""
    train, batch = train_config(entropy_target=5.0, entropy_step=0.1), make_batch()
    whole, _ = run_mfcs(interfaces(train), train, {"actor": FakeEngine()}, batch, batch.ids)
    ranks = fake_ranks(2)
    ranks[0]["actor"].is_head = False  # the first stage: train_step returns no statistics of the loss

    def run_rank(rank: int) -> list[Mapping[str, float]]:
        interface, states = interfaces(train)["actor_train"], []
        for version in range(2):
            interface.run(
                ranks[rank]["actor"], whole if rank else None, batch_ids=batch.ids, step=interface.begin(version)
            )
            states.append(interface.state())
        return states

    with ThreadPoolExecutor(2) as pool:
        first, last = pool.map(run_rank, range(2))
    assert first == last == [{"entropy_coef": c, "entropy_is_on": 1.0} for c in (0.1, 0.2)]


# --------------------------------------------------------------------------------------------------------- minibatches


def test_minibatches_cover_the_batch_once_in_sizes_that_differ_by_one() -> None:
    ids = [f"t{i:02d}" for i in range(11)]
    parts = split_minibatches(ids, 4, seed=1, version=3)
    assert sorted(group_id for part in parts for group_id in part) == ids
    assert sorted(map(len, parts)) == [2, 3, 3, 3]
    assert all(part == sorted(part) for part in parts)
    assert parts == split_minibatches(ids, 4, seed=1, version=3)
    assert parts != split_minibatches(ids, 4, seed=1, version=4)
    assert parts != split_minibatches(ids, 4, seed=2, version=3)
    assert sorted(map(len, split_minibatches(ids[:3], 4, seed=1, version=3))) == [1, 1, 1]
    assert split_minibatches(ids, 1, seed=1, version=3) == [ids]
    assert split_minibatches([], 4, seed=1, version=0) == []


def test_each_pass_over_the_batch_is_shuffled_anew() -> None:
    ids = [f"t{i:02d}" for i in range(11)]
    passes = [split_minibatches(ids, 4, seed=1, version=3, epoch=epoch) for epoch in range(3)]
    assert passes[0] == split_minibatches(ids, 4, seed=1, version=3)
    assert all(sorted(group_id for part in parts for group_id in part) == ids for parts in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    order = np.random.default_rng([1, 3]).permutation(11)  # as before there were several passes
    assert passes[0] == [sorted(ids[i] for i in part) for part in np.array_split(order, 4)]


def test_each_pass_trains_every_group_once() -> None:
    train, batch = train_config(epochs=3, minibatches=2), make_batch()
    (engines,), ((stats, again),) = run_step(train, batch, [range(7)])
    batches = engines["actor"].batches
    assert len(batches) == 2 * 3 * 2
    for first in range(0, len(batches), 2):
        assert sorted(batches[first] + batches[first + 1]) == sorted(batch.ids)
    assert batches[0] != batches[2] != batches[4]
    assert batches[2] != batches[8]  # the second pass of the next step
    assert stats["actor/optimizer_steps"] == again["actor/optimizer_steps"] == 6
    assert stats["actor/behav_weight"] == pytest.approx(  # a mean over the tokens of all passes
        run_step(train_config(minibatches=2), batch, [range(7)])[1][0][0]["actor/behav_weight"], rel=1e-5
    )


def test_the_early_stop_applies_to_each_pass() -> None:
    """The first pass takes its step. By the second pass the policy has moved away from the proximal one."""
    train, batch = train_config(early_stop_kl=1e-3, minibatches=1, epochs=3), make_batch(seed=3)
    (engines,), ((stats,),) = run_step(train, batch, [range(7)], steps=1)
    assert (stats["actor/optimizer_steps"], stats["actor/stopped_steps"]) == (3, 2)
    once = run_step(train_config(minibatches=1), batch, [range(7)], steps=1)[0][0]
    torch.testing.assert_close(engines["actor"].table, once["actor"].table, rtol=0, atol=0)


def test_denominators_are_counted_over_the_minibatch() -> None:
    train, batch = train_config(minibatches=3), make_batch()
    ((engine, *_),) = [list(rank.values()) for rank in run_step(train, batch, [range(7)], steps=1)[0]]
    for ids, loss_fn in zip(engine.batches, engine.losses, strict=True):
        assert loss_fn.denominator == batch.select_ids(ids).data["loss_mask"].sum()
    train = train_config(minibatches=3, loss_normalization="sequence")
    ((engine, *_),) = [list(rank.values()) for rank in run_step(train, batch, [range(7)], steps=1)[0]]
    for ids, loss_fn in zip(engine.batches, engine.losses, strict=True):
        masks = [mask for group in batch.select_ids(ids).slices("loss_mask") for mask in group]
        assert loss_fn.denominator == sum(mask.any() for mask in masks)


# ------------------------------------------------------------------------------------------------ advantages, by hand


def tiny_batch() -> SequenceSample:
    """Two groups of two sequences. Prompts have 1 token, responses 2 and 1. The rewards are 1, 0 and 1, 1."""
    groups = [
        {
            "packed_input_ids": [[1, 2, 3], [1, 4]],
            "packed_logprobs": [[0.0, -1.0, -2.0], [0.0, -3.0]],
            "proximal_logprobs": [[0.0, -1.1, -2.0], [0.0, -3.0]],
            "packed_ref_logprobs": [[0.0, -1.6, -2.0], [0.0, -3.2]],
            "prompt_mask": [[True, False, False], [True, False]],
            "loss_mask": [[False, True, True], [False, True]],
            "seq_no_eos_mask": [False, True],
            "rewards": rewards,
        }
        for rewards in ([1.0, 0.0], [1.0, 1.0])
    ]
    return SequenceSample.from_groups(["a", "b"], groups)


def trained_on(**ppo: object) -> tuple[SequenceSample, dict[str, float]]:
    """Train in one minibatch. Return the sample that the engine received, and the statistics of the step."""
    engines, train = {"actor": FakeEngine()}, train_config(minibatches=1, **ppo)
    mfcs = {name: mfc for name, mfc in interfaces(train).items() if not name.endswith("_inf")}
    _, stats = run_mfcs(mfcs, train, engines, tiny_batch(), ("a", "b"))
    assert engines["actor"].trained is not None
    return engines["actor"].trained, stats


def test_group_advantages() -> None:
    sample, stats = trained_on(proximal_pass="always")
    assert sample.data["advantages"].tolist() == pytest.approx([0, 1, 1, 0, -1, 0, 0, 0, 0, 0], abs=1e-5)
    keys = {"packed_input_ids", "packed_logprobs", "proximal_logprobs", "advantages", "loss_mask"}
    assert set(sample.keys) == keys
    assert set(trained_on()[0].keys) == keys - {"proximal_logprobs"}
    assert stats["reward/mean"] == 0.75
    assert stats["reward/std"] == pytest.approx(math.sqrt(0.75 * 0.25))
    assert stats["reward/equal_group_share"] == 0.5
    assert stats["length/response_mean"] == 1.5
    assert stats["length/response_max"] == 2
    assert stats["length/prompt_mean"] == 1
    assert stats["length/truncated_share"] == 0.5
    assert stats["advantages/mean"] == pytest.approx(1 / 6, abs=1e-5)
    assert (stats["advantages/max"], stats["advantages/min"]) == pytest.approx((1, -1), abs=1e-5)
    assert stats["batch/num_tokens"] == 10
    assert stats["actor/behav_approx_kl"] == pytest.approx(0.2 / 6)
    assert stats["actor/behav_weight"] == pytest.approx((4 + 2 * math.exp(-0.1)) / 6)
    assert stats["actor/behav_weight_max"] == pytest.approx(1.0)
    assert not [name for name in stats if name.startswith("kl/")]


def test_batch_advantages() -> None:
    """The advantages per token are 1, 1, 0, 1, 1, 1: mean 5/6, standard deviation sqrt(5)/6."""
    sample, _ = trained_on(advantage_norm="batch")
    high, low = 1 / math.sqrt(5), -math.sqrt(5)
    assert sample.data["advantages"].tolist() == pytest.approx(
        [0, high, high, 0, low, 0, high, high, 0, high], abs=1e-4
    )


def test_shaped_rewards_and_masks() -> None:
    sample, stats = trained_on(
        advantage_norm="none", reward_scaling=2.0, reward_bias=0.25, max_reward_clip=1.0, mask_no_eos_with_zero=True
    )
    assert sample.data["advantages"].tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert stats["reward/shaped_mean"] == 0.5
    sample, stats = trained_on(advantage_norm="none", mask_too_long=True)
    assert sample.data["loss_mask"].tolist() == [bool(on) for on in (0, 1, 1, 0, 0, 0, 1, 1, 0, 0)]
    assert stats["batch/num_trained_tokens"] == 4


def test_the_kl_of_a_token_lowers_the_advantages_up_to_that_token() -> None:
    """k1 of the proximal policy to the reference is 0.5 and 0 in the first response, 0.2 in the second. With
    advantage_norm=group the KL penalty is added after the reward is normalised, otherwise before.
    """
    sample, stats = trained_on(kl_coef=0.1, advantage_norm="none")
    assert sample.data["advantages"][:5].tolist() == pytest.approx([0, 0.95, 1, 0, -0.02], abs=1e-6)
    assert stats["kl/coef"] == 0.1
    assert stats["kl/sequence_mean"] == pytest.approx(0.35)
    assert stats["kl/token_mean"] == pytest.approx(1.4 / 6)
    sample, _ = trained_on(kl_coef=0.1)
    assert sample.data["advantages"].tolist() == pytest.approx([0, 0.95, 1, 0, -1.02, 0, -0.05, 0, 0, -0.02], abs=1e-5)


def test_a_teacher_adds_its_logprob_less_the_policys_to_the_advantage_of_each_token() -> None:
    """coef is 0.5. The proximal policy's logprobs are -1.1, -2 and -3, the teacher's -0.1, -4 and -3.5. The advantages of rewards
    are 1, 1 and -1 in the first group, and 0 in the second. The estimates of the reverse KL are -1, 2 and 0.5."""
    train = train_config(minibatches=1, teacher=TeacherConfig(coef=0.5))
    teacher = np.array([9, -0.1, -4, 9, -3.5] * 2, np.float32)
    batch = tiny_batch().update(tiny_batch().derive({"packed_teacher_logprobs": teacher}))
    advantages = interfaces(train)["advantages"]
    made, stats = advantages.run(FakeEngine(), batch, batch_ids=batch.ids, step=advantages.begin(0))
    assert made is not None
    expected = [0, 1.5, 0, 0, -1.25, 0, 0.5, -1, 0, -0.25]
    assert made.data["advantages"].tolist() == pytest.approx(expected, abs=1e-5)
    assert stats["distillation/token_mean"] == pytest.approx(1.5 / 3)
    assert stats["advantages/max"] == pytest.approx(1.5, abs=1e-5)
    naive = train_config(minibatches=1, teacher=TeacherConfig(coef=0.5), use_decoupled_loss=False)
    advantages = interfaces(naive)["advantages"]
    made, stats = advantages.run(FakeEngine(), batch, batch_ids=batch.ids, step=advantages.begin(0))
    assert made is not None
    assert made.data["advantages"][1] == pytest.approx(1.45, abs=1e-5)  # the sampling policy's logprob is -1
    masked = train_config(minibatches=1, teacher=TeacherConfig(coef=0.5), mask_too_long=True)
    advantages = interfaces(masked)["advantages"]
    made, stats = advantages.run(FakeEngine(), batch, batch_ids=batch.ids, step=advantages.begin(0))
    assert made is not None
    assert made.data["advantages"][4] == 0  # truncated, so not trained
    assert stats["distillation/token_mean"] == pytest.approx(0.5)


def test_a_task_may_have_no_teacher_and_another_may_have_nothing_else() -> None:
    """The first group learns from its rewards 1 and 0, and the second one from the teacher. The estimates of the reverse KL are
    those of the test above, and the metric is their mean over the tokens of both."""
    tasks = {"judged": TaskAlgorithmConfig(teacher_coef=0.0), "taught": TaskAlgorithmConfig(reward_scaling=0.0)}
    train = train_config(minibatches=1, teacher=TeacherConfig(coef=0.5), advantage_norm="none", tasks=tasks)
    teacher = np.array([9, -0.1, -4, 9, -3.5] * 2, np.float32)
    batch = tiny_batch().update(tiny_batch().derive({"packed_teacher_logprobs": teacher}))
    batch = batch.update(SequenceSample(batch.ids, {"task_ids": [[1], [1]]}, {"task_ids": np.array([0, 1])}))
    advantages = interfaces(train)["advantages"]
    made, stats = advantages.run(FakeEngine(), batch, batch_ids=batch.ids, step=advantages.begin(0))
    assert made is not None
    assert made.data["advantages"].tolist() == pytest.approx([0, 1, 1, 0, 0, 0, 0.5, -1, 0, -0.25], abs=1e-5)
    assert stats["distillation/token_mean"] == pytest.approx(1.5 / 3)


def test_the_gradient_with_a_teacher_is_that_of_the_reverse_kl() -> None:
    """If all tokens are sampled in proportion to the policy, and rewards are 0, the gradient is coef * d KL(policy || teacher)."""
    table = torch.tensor([0.5, 0.25, 0.25]).log().requires_grad_()
    teacher = torch.tensor([0.2, 0.7, 0.1]).log()
    tokens = torch.tensor([0, 0, 1, 2])
    logprobs = table.log_softmax(0)[tokens]
    mask = torch.ones(4, dtype=torch.bool)
    advantages = distillation_advantages(logprobs.detach(), teacher[tokens], mask, 0.5)
    data = dict.fromkeys(["packed_logprobs", "proximal_logprobs"], logprobs.detach())
    data |= {"advantages": advantages, "loss_mask": mask}
    outputs = {"logprobs": logprobs, "entropy": torch.zeros(4)}
    loss, _ = PPOLoss(PPOConfig(), 4.0)(outputs, data, torch.tensor([0, 4]))
    (found,) = torch.autograd.grad(loss, table)
    policy = table.log_softmax(0)
    (expected,) = torch.autograd.grad(0.5 * (policy.exp() * (policy - teacher)).sum(), table)
    torch.testing.assert_close(found, expected)


def test_the_adaptive_kl_coefficient_changes_once_per_step_and_is_restored() -> None:
    train = train_config(kl_coef=0.1, kl_adaptive=True, kl_horizon=40.0)
    interface = interfaces(train)["advantages"]
    assert isinstance(interface, AdvantagesInterface)
    assert isinstance(interface.kl, AdaptiveKLController)
    _, stats = interface.run(FakeEngine(), tiny_batch(), batch_ids=("a", "b"), step=interface.begin(0))
    assert stats["kl/coef"] == 0.1
    after = interface.state()
    _, stats = interface.run(FakeEngine(), tiny_batch(), batch_ids=("a", "b"), step=interface.begin(1))
    assert stats["kl/coef"] == pytest.approx(0.1 * (1 - 0.2 * 4 / 40))
    again = interfaces(train)["advantages"]
    again.restore(after)
    assert again.run(FakeEngine(), tiny_batch(), batch_ids=("a", "b"), step=again.begin(1))[1] == stats


def test_a_dense_reward_counts_at_its_token_and_earlier() -> None:
    batch = tiny_batch()
    dense = np.array([0, 0.25, 0, 0, 0.5, 0, 0, 0, 0, 0], np.float32)
    batch = batch.update(batch.derive({"dense_rewards": dense}))
    interface = interfaces(train_config(advantage_norm="none"), ["dense_rewards"])["advantages"]
    made, _ = interface.run(FakeEngine(), batch, batch_ids=batch.ids, step=interface.begin(0))
    assert made is not None
    assert made.data["advantages"].tolist() == pytest.approx([0, 1.25, 1, 0, 0.5, 0, 1, 1, 0, 1])


def test_groups_are_equal_only_if_dense_rewards_are_equal_too() -> None:
    """The rewards of the second group are 1 and 1."""
    interface = interfaces(train_config(advantage_norm="none"), ["dense_rewards"])["advantages"]
    shares = []
    for last in (0.0, 0.5):
        dense = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, last], np.float32)
        batch = tiny_batch()
        batch = batch.update(batch.derive({"dense_rewards": dense}))
        shares.append(
            interface.run(FakeEngine(), batch, batch_ids=batch.ids, step=interface.begin(0))[1][
                "reward/equal_group_share"
            ]
        )
    assert shares == [0.5, 0.0]


@pytest.mark.parametrize(("seats", "share"), [([0, 0, 0, 0], 0.5), ([0, 1, 0, 0], 1.0)])
def test_groups_are_equal_if_each_seat_is(seats: list[int], share: float) -> None:
    """The rewards of the first group are 1 and 0."""
    interface = interfaces(dataclasses.replace(train_config(), branches=True))["advantages"]
    batch = tiny_batch()
    batch = batch.update(
        batch.derive(
            {"sessions": np.array([0, seats[1] == 0, 0, 1], np.int64), "seats": np.array(seats)}, like="rewards"
        )
    )
    _, stats = interface.run(FakeEngine(), batch, batch_ids=batch.ids, step=interface.begin(0))
    assert stats["reward/equal_group_share"] == share


def test_dense_rewards_of_trajectories_are_part_of_the_mean_reward() -> None:
    """The rewards of the four responses are 1, 0, 1, 1, their dense rewards add up to 0.25, 0.5, 0, 0."""
    batch = tiny_batch()
    dense = np.array([0, 0.25, 0, 0, 0.5, 0, 0, 0, 0, 0], np.float32)
    batch = batch.update(batch.derive({"dense_rewards": dense}))
    interface = interfaces(train_config(advantage_norm="none", dense_rewards=True))["advantages"]
    made, stats = interface.run(FakeEngine(), batch, batch_ids=batch.ids, step=interface.begin(0))
    assert made is not None
    assert made.data["advantages"].tolist() == pytest.approx([0, 1.25, 1, 0, 0.5, 0, 1, 1, 0, 1])
    assert stats["reward/dense_mean"] == pytest.approx(0.75 / 4)
    assert stats["reward/mean"] == pytest.approx(3.75 / 4)
    assert stats["reward/shaped_mean"] == pytest.approx(3.75 / 4)


# ------------------------------------------------------------------------------------- a critic and a reward model, by hand


def judged(train: TrainConfig, steps: int = 1, **keys: list[float]) -> tuple[SequenceSample, dict[str, float]]:
    """Run `advantages` `steps` times on the tiny batch with these additional keys. Return the last result."""
    batch = tiny_batch()
    for key, values in keys.items():
        lengths = [[1, 1], [1, 1]] if spec_of(key).layout == "sequence" else batch.seqlens["packed_input_ids"]
        batch = batch.update(SequenceSample(batch.ids, {key: lengths}, {key: np.array(values, np.float32)}))
    interface = interfaces(train)["advantages"]
    for version in range(steps):
        made, stats = interface.run(FakeEngine(), batch, batch_ids=batch.ids, step=interface.begin(version))
    assert made is not None
    return made, stats


def test_scores_of_several_reward_models_are_added_with_their_scales() -> None:
    """The rewards 1, 0, 1, 1 become 1 + 0.5 * 2 - 2 * 1, 0 + 0.5 * 4, 1 - 2 * 0.5 and 1 + 0.5 * -2."""
    models = {"good": RewardModelConfig(scale=0.5), "long": RewardModelConfig(scale=-2.0)}
    train = train_config(reward_models=models, advantage_norm="none")
    made, stats = judged(train, model_rewards_good=[2, 4, 0, -2], model_rewards_long=[1, 0, 0.5, 0])
    assert made.data["advantages"].tolist() == pytest.approx([0, 0, 0, 0, 2, 0, 0, 0, 0, 0])
    assert (stats["reward/mean"], stats["reward/shaped_mean"]) == (0.75, 0.5)
    assert (stats["reward/model_mean_good"], stats["reward/model_mean_long"]) == (1.0, 0.375)
    assert "reward/model_mean" not in stats


def test_scores_of_a_reward_model_are_added_to_the_rewards() -> None:
    """The rewards before shaping are 1, 0, 1, 1 plus 0.5 * scores. Shaping halves them, clips them at 0.75 and sets those
    of truncated responses to 0.
    """
    model = RewardModelConfig(scale=0.5)
    shape = {"reward_scaling": 0.5, "max_reward_clip": 0.75, "mask_no_eos_with_zero": True}
    train = train_config(reward_model=model, advantage_norm="none", **shape)
    made, stats = judged(train, model_rewards=[0.5, -2.0, 3.0, 4.0])
    assert made.data["advantages"].tolist() == pytest.approx([0, 0.625, 0.625, 0, 0, 0, 0.75, 0.75, 0, 0])
    assert stats["reward/mean"] == 0.75  # of the reward functions alone, as without a reward model
    assert stats["reward/model_mean"] == pytest.approx(5.5 / 4)
    assert stats["reward/shaped_mean"] == pytest.approx((0.625 + 0.75) / 4)


VALUES = [0.5, 0.25, 9.0, 0.125, 0.75, 0.0, 0.5, 9.0, 0.25, 1.0]


def test_returns_are_stored_at_the_positions_of_their_values() -> None:
    """GAE by hand, for 'prompt, a, b' with a reward at b, and for the truncated 'prompt, a', which bootstraps from the
    value after a.
    """
    train = train_config(critic=CriticConfig(), advantage_norm="none", discount=0.5, gae_lambda=0.5)
    made, stats = judged(train, values=VALUES)
    b, a = 1 - 0.25, 0 + 0.5 * 0.25 - 0.5  # deltas
    b2, a2 = 1 - 0.5, 0 + 0.5 * 0.5 - 0.0
    first, second = 0 + 0.5 * 0.75 - 0.125, 1 + 0.5 * 1.0 - 0.25
    advantages = [0, a + 0.25 * b, b, 0, first, 0, a2 + 0.25 * b2, b2, 0, second]
    assert made.data["advantages"].tolist() == pytest.approx(advantages)
    assert made.data["value_mask"].tolist() == [bool(on) for on in (1, 1, 0, 1, 0, 1, 1, 0, 1, 0)]
    returns = [0.5 + advantages[1], 1.0, 0, 0.125 + first, 0, advantages[6], 1.0, 0, 0.25 + second, 0]
    assert made.data["returns"].tolist() == pytest.approx(returns)
    mask = made.data["value_mask"]
    there, values = np.array(returns)[mask], np.array(VALUES)[mask]
    assert stats["critic/returns_mean"] == pytest.approx(there.mean())
    assert stats["critic/returns_std"] == pytest.approx(there.std())
    assert stats["critic/values_mean"] == pytest.approx(values.mean())
    assert stats["critic/explained_variance"] == pytest.approx(1 - (there - values).var() / there.var(), abs=1e-5)


def test_value_norm_keeps_the_units_of_rewards_in_the_advantages() -> None:
    """In the second step, values are read in the units after the first step, and returns are written in the units after
    the second step.
    """
    plain = train_config(critic=CriticConfig(), advantage_norm="none", gae_lambda=0.5)
    norm = CriticConfig(value_norm=True, value_norm_beta=0.0)  # the units come from the last batch alone
    train = dataclasses.replace(plain, critic=norm)
    first, stats = judged(train, values=VALUES)  # no batch seen yet: values are in units of rewards
    in_rewards, _ = judged(plain, values=VALUES)
    assert first.data["advantages"].tolist() == in_rewards.data["advantages"].tolist()
    assert (stats["critic/norm_mean"], stats["critic/norm_std"]) == (0, 1)
    mask = first.data["value_mask"]
    returns = in_rewards.data["returns"][mask].astype(np.float64)
    mean, std = returns.mean(), returns.std()
    assert first.data["returns"][mask].tolist() == pytest.approx(((returns - mean) / std).tolist(), abs=1e-5)
    assert not first.data["returns"][~mask].any()

    second, stats = judged(train, steps=2, values=VALUES)
    assert (stats["critic/norm_mean"], stats["critic/norm_std"]) == pytest.approx((mean, std))
    expected, _ = judged(plain, values=[value * std + mean for value in VALUES])
    assert second.data["advantages"].tolist() == pytest.approx(expected.data["advantages"].tolist(), abs=1e-5)


def test_the_units_of_values_are_saved_and_restored() -> None:
    train = train_config(critic=CriticConfig(value_norm=True), advantage_norm="batch", kl_coef=0.1, kl_adaptive=True)
    batch, _ = run_mfcs(interfaces(train), train, fake_ranks(1)[0], make_batch(), make_batch().ids)
    one, other = interfaces(train)["advantages"], interfaces(train)["advantages"]
    one.run(FakeEngine(), batch, batch_ids=make_batch().ids, step=one.begin(0))
    assert one.state().keys() == {"kl_coef", "value_norm.mean", "value_norm.mean_square", "value_norm.weight"}
    assert one.state() != other.state()
    other.restore(one.state())
    ran = [mfc.run(FakeEngine(), batch, batch_ids=make_batch().ids, step=mfc.begin(1)) for mfc in (one, other)]
    assert ran[0] == ran[1]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("eps_clip", [0.0, 0.02])
def test_two_critic_passes_equal_hand_written_ones(eps_clip: float, epochs: int) -> None:
    """Two passes over the same groups: two train steps, or the two passes of one. By the second, the values have moved away from
    the old ones, so that the clip applies."""
    train = train_config(
        critic=CriticConfig(eps_clip=eps_clip, minibatches=1), advantage_norm="batch", epochs=epochs, minibatches=1
    )
    mfcs, batch, engine = interfaces(train), make_batch(), FakeEngine("value")
    whole, _ = run_mfcs(mfcs, train, fake_ranks(1)[0], batch, batch.ids)
    assert whole is not None
    tokens, mask, old, returns = (
        torch.tensor(whole.data[key]) for key in ("packed_input_ids", "value_mask", "values", "returns")
    )
    table, loss_of_pass, clipped_of_pass = engine.table.detach().clone().requires_grad_(), [], []
    for _ in range(2):
        values = table[tokens[mask]]
        losses = (values - returns[mask]) ** 2 / 2
        clipped = torch.zeros_like(mask[mask])
        if eps_clip:
            within = torch.minimum(torch.maximum(values, old[mask] - eps_clip), old[mask] + eps_clip)
            clipped = (within - returns[mask]) ** 2 / 2 > losses
            losses = torch.maximum(losses, (within - returns[mask]) ** 2 / 2)
        loss_of_pass.append(float(losses.detach().mean()))
        clipped_of_pass.append(float(clipped.float().mean()))
        (grad,) = torch.autograd.grad(losses.mean(), table)
        table = (table - 0.5 * grad).detach().requires_grad_()
    critic_train = mfcs["critic_train"]
    made = [
        critic_train.run(engine, whole, batch_ids=batch.ids, step=critic_train.begin(1 + v))[1]
        for v in range(2 // epochs)
    ]
    torch.testing.assert_close(engine.table, table, rtol=0, atol=1e-6)
    for stats, losses, clipped in zip(
        made, np.reshape(loss_of_pass, (-1, epochs)), np.reshape(clipped_of_pass, (-1, epochs)), strict=True
    ):
        assert stats["critic/loss"] == pytest.approx(losses.mean(), rel=1e-5)
        assert stats["critic/clip_share"] == pytest.approx(clipped.mean())
        assert stats["critic/optimizer_steps"] == epochs
    assert (clipped_of_pass[1] > 0) == (eps_clip > 0)


def test_a_policy_that_moved_too_far_makes_no_optimizer_step() -> None:
    """In the first step the policy equals the recorded proximal policy. In the second it does not."""
    train = train_config(early_stop_kl=1e-3, minibatches=1, proximal_pass="always")
    mfcs, batch, engine = interfaces(train), make_batch(seed=3), FakeEngine()
    whole, first = run_mfcs(mfcs, train, {"actor": engine}, batch, batch.ids)
    assert whole is not None
    assert (first["actor/stopped_steps"], first["actor/approx_kl"]) == (0, 0)
    moved = engine.table.detach().clone()
    assert not torch.equal(moved, FakeEngine().table)
    _, second = mfcs["actor_train"].run(engine, whole, batch_ids=batch.ids, step=mfcs["actor_train"].begin(1))
    assert second["actor/approx_kl"] > 1e-3
    assert second["actor/stopped_steps"] == second["actor/optimizer_steps"] == 1
    assert torch.equal(engine.table, moved)


def test_the_critic_learns_values() -> None:
    """The value of a token converges to the reward that follows it: 1 after the prompt 2, otherwise 0."""
    engines = {"actor": FakeEngine(), "critic": FakeEngine("value")}
    train = train_config(critic=CriticConfig(eps_clip=0.0), advantage_norm="none")
    mfcs, random = interfaces(train), np.random.default_rng(0)
    explained = []
    for version in range(20):
        prompts = random.integers(0, 4, (8, 1)).repeat(4, axis=1)
        groups = [
            {
                "packed_input_ids": [[int(prompt), 7] for prompt in group],
                "packed_logprobs": [[0.0, -2.4]] * 4,
                "prompt_mask": [[True, False]] * 4,
                "loss_mask": [[False, True]] * 4,
                "seq_no_eos_mask": [False] * 4,
                "rewards": [float(prompt == 2) for prompt in group],
            }
            for group in prompts
        ]
        batch = SequenceSample.from_groups([f"{version}-{i}" for i in range(8)], groups)
        _, stats = run_mfcs(mfcs, train, engines, batch, batch.ids, version)
        explained.append(stats["critic/explained_variance"])
    assert explained[0] < 0.5
    assert explained[-1] > 0.95
    assert engines["critic"].table[:4].tolist() == pytest.approx([0, 0, 1, 0], abs=0.1)


def test_the_actor_learns_a_rewarded_token() -> None:
    """Only token 2 is rewarded, and the fake learns to prefer it."""
    engine, train = FakeEngine(), train_config(minibatches=1, advantage_norm="batch", temperature=1.0)
    mfcs = interfaces(train)
    random = np.random.default_rng(0)
    rewards = []
    for version in range(60):
        probabilities = engine.table.detach().softmax(0).double().numpy()
        tokens = random.choice(VOCABULARY, 64, p=probabilities / probabilities.sum())
        groups = [
            {
                "packed_input_ids": [[0, int(token)] for token in group],
                "packed_logprobs": [[0.0, float(np.log(probabilities[token]))] for token in group],
                "prompt_mask": [[True, False]] * 8,
                "loss_mask": [[False, True]] * 8,
                "seq_no_eos_mask": [False] * 8,
                "rewards": [float(token == 2) for token in group],
            }
            for group in tokens.reshape(8, 8)
        ]
        batch = SequenceSample.from_groups([f"{version}-{i}" for i in range(8)], groups)
        _, stats = run_mfcs(mfcs, train, {"actor": engine}, batch, batch.ids, version)
        rewards.append(stats["reward/mean"])
    assert rewards[0] < 0.2
    assert np.mean(rewards[-5:]) > 0.9


def test_the_entropy_target_is_approached_from_below() -> None:
    """Token 2 is rewarded, so the entropy of the policy falls, with a target less far. The state is restored."""
    entropies = {}
    for target in (None, 1.5):
        engine = FakeEngine()
        train = train_config(
            minibatches=1, advantage_norm="batch", entropy_target=target, entropy_step=0.1, temperature=1.0
        )
        mfcs, random = interfaces(train), np.random.default_rng(0)
        for version in range(60):
            probabilities = engine.table.detach().softmax(0).double().numpy()
            tokens = random.choice(VOCABULARY, 64, p=probabilities / probabilities.sum())
            groups = [
                {
                    "packed_input_ids": [[0, int(token)] for token in group],
                    "packed_logprobs": [[0.0, float(np.log(probabilities[token]))] for token in group],
                    "prompt_mask": [[True, False]] * 8,
                    "loss_mask": [[False, True]] * 8,
                    "seq_no_eos_mask": [False] * 8,
                    "rewards": [float(token == 2) for token in group],
                }
                for group in tokens.reshape(8, 8)
            ]
            batch = SequenceSample.from_groups([f"{version}-{i}" for i in range(8)], groups)
            _, stats = run_mfcs(mfcs, train, {"actor": engine}, batch, batch.ids, version)
            assert ("actor/entropy_coef" in stats) == (target is not None)
        entropies[target] = stats["actor/entropy"]
        again = interfaces(train)["actor_train"]
        again.restore(mfcs["actor_train"].state())
        assert again.state() == mfcs["actor_train"].state()
        assert bool(again.state()) == (target is not None)
        again.restore({})  # a checkpoint of a run without a target
    assert entropies[None] < 0.8
    assert 1.2 < entropies[1.5] < 1.8, entropies


# ------------------------------------------------------------------------------------------------------- inference


def test_logprobs_interfaces() -> None:
    mfcs = interfaces(train_config(kl_coef=0.1, temperature=0.5, teacher=TeacherConfig()))
    engine, batch = FakeEngine(), make_batch()
    expected = (engine.table.detach() / 0.5).log_softmax(0)[batch.data["packed_input_ids"]].tolist()
    for name, key in (
        ("actor_inf", "proximal_logprobs"),
        ("ref_inf", "packed_ref_logprobs"),
        ("teacher_inf", "packed_teacher_logprobs"),
    ):
        made, stats = mfcs[name].run(engine, batch, batch_ids=batch.ids, step=mfcs[name].begin(0))
        assert made is not None
        assert made.ids == batch.ids
        assert made.keys == (key,)
        assert made.data[key].tolist() == pytest.approx(expected)
        assert stats == {}
        assert mfcs[name].run(engine, None, batch_ids=batch.ids, step=mfcs[name].begin(0)) == (None, {})


def test_values_and_scores() -> None:
    mfcs = interfaces(train_config(critic=CriticConfig(), reward_model=RewardModelConfig(), advantage_norm="none"))
    batch, critic, reward = make_batch(), FakeEngine("value"), FakeEngine("reward")
    tokens = batch.data["packed_input_ids"]
    made, stats = mfcs["critic_inf"].run(critic, batch, batch_ids=batch.ids, step=mfcs["critic_inf"].begin(0))
    assert made is not None
    assert (made.keys, stats) == (("values",), {})
    assert made.data["values"].tolist() == critic.table.detach()[tokens].tolist()
    made, stats = mfcs["rew_inf"].run(reward, batch, batch_ids=batch.ids, step=mfcs["rew_inf"].begin(0))
    assert made is not None
    assert (made.keys, stats) == (("model_rewards",), {})
    assert made.data["model_rewards"].tolist() == reward.table.detach()[tokens[batch.cu_seqlens()[1:] - 1]].tolist()
    assert batch.update(made).num_sequences("model_rewards") == batch.num_sequences()
    for name, engine in (("critic_inf", critic), ("rew_inf", reward)):
        before = list(engine.calls)
        assert mfcs[name].run(engine, None, batch_ids=batch.ids, step=mfcs[name].begin(0)) == (None, {})
        assert engine.calls == before * 2  # a rank without groups makes the same collective call


def shout(engine: FakeEngine, sample: SequenceSample, train: TrainConfig) -> SequenceSample:
    """A user's MFC that returns one value per sequence."""
    sizes = [len(lengths) for lengths in sample.seqlens["packed_input_ids"]]
    return SequenceSample(
        sample.ids,
        {"loudness": [[1] * n for n in sizes]},
        {"loudness": np.full(sum(sizes), train.batch_size, np.float32)},
    )


def whisper(engine: FakeEngine, sample: SequenceSample, train: TrainConfig) -> SequenceSample:
    return sample


def surprise(engine: FakeEngine, sample: SequenceSample, train: TrainConfig) -> SequenceSample | None:
    """A user's MFC that runs the model."""
    logprobs = engine.logprobs(sample, temperature=1.0)
    return None if logprobs is None else sample.derive({"surprise": -logprobs})


def counted(engine: FakeEngine, sample: SequenceSample, train: TrainConfig) -> tuple[SequenceSample, dict[str, float]]:
    (num,) = engine.all_reduce_sum([float(sample.num_ids)])
    return shout(engine, sample, train), {"mine/groups": num}


SEEN: list[SequenceSample] = []


def learn(engine: FakeEngine, sample: SequenceSample, train: TrainConfig) -> None:
    SEEN.append(sample)


def extra(function: str, **fields: object) -> Interface:
    declare_mfc(name="extra", **({"input_keys": ["packed_input_ids"]} | fields))(globals()[function])  # type: ignore[arg-type]
    train = dataclasses.replace(train_config(), mfcs=[f"{__name__}:{function}"], batch_size=3)
    return make_interface(build_dataflow(train).mfcs["extra"], train)


def test_a_user_function_named_in_the_config_is_an_interface() -> None:
    batch = make_batch()
    interface = extra("shout", output_keys=["loudness"])
    made, _ = interface.run(FakeEngine(), batch, batch_ids=batch.ids, step=interface.begin(0))
    assert made is not None
    assert set(made.data["loudness"]) == {3.0}
    assert (
        batch.update(made).select_ids(["ticket1"]).data["loudness"].size
        == batch.select_ids(["ticket1"]).num_sequences()
    )
    assert interface.run(FakeEngine(), None, batch_ids=batch.ids, step=interface.begin(0)) == (None, {})
    with pytest.raises(ValueError, match=r"'extra'.*:whisper must return .* missing \['loudness'\]"):
        extra("whisper", output_keys=["loudness"]).run(FakeEngine(), batch, batch_ids=batch.ids, step=StepTotals(0, {}))


def test_a_user_function_may_return_statistics() -> None:
    batch = make_batch()
    interface = extra("counted", output_keys=["loudness"])
    made, stats = interface.run(FakeEngine(), batch, batch_ids=batch.ids, step=interface.begin(0))
    assert made is not None
    assert made.keys == ("loudness",)
    assert stats == {"mine/groups": len(batch.ids)}
    assert interface.run(FakeEngine(), None, batch_ids=batch.ids, step=interface.begin(0)) == (
        None,
        {"mine/groups": 0.0},
    )


SEVERAL = {
    "ppo": {"kl_coef": 0.1, "kl_adaptive": True, "kl_horizon": 100.0, "minibatches": 1},
    "critic": {
        "critic": CriticConfig(minibatches=1),
        "advantage_norm": "none",
        "reward_model": RewardModelConfig(scale=0.5),
        "teacher": TeacherConfig(coef=0.5),
        "minibatches": 1,
    },
}


@pytest.mark.parametrize("name", SEVERAL)
def test_statistics_of_several_calls_in_a_step_are_those_of_the_batch(name: str) -> None:
    """`advantages` is called on chunks, which change ranks, and on a chunk again. Its statistics and KL coefficient are those of
    one call."""
    train, batch = train_config(**SEVERAL[name]), make_batch()
    chunks = [batch.ids[:2], batch.ids[2:5], batch.ids[5:], batch.ids[2:5]]

    def run_rank(rank: int) -> tuple[dict[str, float], dict[str, float]]:
        mfcs, graph, sample = interfaces(train), build_dataflow(train), batch
        for mfc in graph.order:
            if mfc.endswith("_inf"):
                sample = sample.update(
                    mfcs[mfc].run(alone[mfc], sample, batch_ids=batch.ids, step=mfcs[mfc].begin(0))[0]
                )
        advantages, stats = mfcs["advantages"], {}
        step = advantages.begin(0)
        for number, ids in enumerate(chunks):
            mine = ids[(rank + number) % 2 :: 2]
            here = sample.select_ids(mine) if mine else None
            _, stats = advantages.run(engines[rank]["actor"], here, batch_ids=ids, step=step)
        expected = interfaces(train)["advantages"]
        here = sample.select_ids(batch.ids[rank::2])
        _, of_one = expected.run(engines[rank]["actor"], here, batch_ids=batch.ids, step=expected.begin(0))
        assert advantages.state() == pytest.approx(expected.state())
        return stats, of_one

    engines = fake_ranks(2)
    alone = {name: FakeEngine(KINDS[mfc.role]) for name, mfc in build_dataflow(train).mfcs.items()}
    with ThreadPoolExecutor(2) as pool:
        for stats, expected in pool.map(run_rank, range(2)):
            assert stats == pytest.approx(expected)
            assert stats["batch/num_groups"] == 7
            assert all(value <= 1 for name, value in stats.items() if name.endswith("_share"))


def test_several_calls_that_train_add_up() -> None:
    """Counts add up, means are over the minibatches and tokens of all calls, and the entropy coefficient changes once."""
    train = train_config(entropy_coef=0.1, entropy_target=9.0, entropy_step=0.05, epochs=2, minibatches=1)
    mfcs, batch, engine = interfaces(train), make_batch(), FakeEngine()
    sample, _ = run_mfcs(
        {name: mfcs[name] for name in ("actor_inf", "advantages")}, train, {"actor": engine}, batch, batch.ids
    )
    assert sample is not None
    found, after_first, step = [], FakeEngine(), mfcs["actor_train"].begin(0)
    for ids in (batch.ids[:3], batch.ids[3:]):
        after_first.table.data.copy_(engine.table.data)
        part = sample.select_ids(ids)
        _, stats = mfcs["actor_train"].run(engine, part, batch_ids=ids, step=step)
        found.append(mfcs["actor_train"].stats_of_step(stats, batch_ids=ids, step=step))
    first, both = found
    assert (first["actor/optimizer_steps"], both["actor/optimizer_steps"]) == (2, 4)
    alone = interfaces(train)["actor_train"]
    ids = batch.ids[:3]
    assert first == alone.run(FakeEngine(), sample.select_ids(ids), batch_ids=ids, step=alone.begin(0))[1]
    assert mfcs["actor_train"].state() == alone.state()
    again = interfaces(train)["actor_train"]
    second = again.run(after_first, sample.select_ids(batch.ids[3:]), batch_ids=batch.ids[3:], step=again.begin(0))[1]
    assert both["actor/loss"] == pytest.approx((first["actor/loss"] + second["actor/loss"]) / 2)
    weights = [float(sample.select_ids(ids).data["trained_mask"].sum()) for ids in (batch.ids[:3], batch.ids[3:])]
    for key in ("actor/importance_weight", "actor/entropy"):
        assert both[key] == pytest.approx(np.average([first[key], second[key]], weights=weights))


def test_training_groups_again_in_a_step_is_the_plain_update_done_twice() -> None:
    """As a step function does with `again=True`: logprobs and advantages are made anew between the two calls."""
    train, batch = train_config(minibatches=1, recompute_logprob=True, use_decoupled_loss=False), make_batch()

    def update(mfcs: Mapping[str, Interface], engine: FakeEngine, steps: Mapping[str, StepTotals]) -> dict[str, float]:
        sample = batch
        for name, mfc in mfcs.items():
            made, stats = mfc.run(engine, sample, batch_ids=batch.ids, step=steps[name])
            sample = sample.update(made) if made is not None else sample
        return stats

    engine, plain, mfcs = FakeEngine(), FakeEngine(), interfaces(train)
    steps = {name: mfc.begin(0) for name, mfc in mfcs.items()}
    update(mfcs, engine, steps)
    once = engine.table.detach().clone()
    stats = update(mfcs, engine, steps)
    for _ in range(2):
        fresh = interfaces(train)
        update(fresh, plain, {name: mfc.begin(0) for name, mfc in fresh.items()})
    assert torch.equal(engine.table, plain.table)
    assert (engine.table - once).abs().max() > 1e-3
    assert stats["actor/optimizer_steps"] == 2


def test_statistics_of_users_functions_and_of_several_mfcs_are_merged() -> None:
    reports = [
        ({"judge/skipped_steps": 1.0, "judge/loss": 1.0, "judge/loss_max": 3.0, "mine/num_x": 2.0}, 1),
        ({"judge/skipped_steps": 2.0, "judge/loss": 4.0, "judge/loss_max": 2.0, "mine/num_x": 3.0, "mine/y": 7.0}, 2),
        ({}, 0),
    ]
    merged = {"judge/skipped_steps": 3, "judge/loss": 3, "judge/loss_max": 3, "mine/num_x": 5, "mine/y": 7}
    assert merge_stats(reports) == merged
    assert merge_stats([({"x": 1.0}, 0), ({"x": 2.0}, 0)]) == {"x": 2.0}
    interface = extra("counted", output_keys=["loudness"])
    for version in range(2):
        step = interface.begin(version)
        assert interface.stats_of_step({"mine/x": 1.0}, batch_ids=["a"], step=step) == {"mine/x": 1.0}
        for _ in range(2):  # a call is repeated
            assert interface.stats_of_step({"mine/x": 4.0}, batch_ids=["b", "c"], step=step) == {"mine/x": 3.0}


def test_a_function_that_runs_the_model_is_called_on_every_rank() -> None:
    batch = make_batch()
    engines = [FakeEngine(), FakeEngine(is_last_stage=False), FakeEngine()]
    interface = extra("surprise", output_keys=["surprise"])
    made = [
        interface.run(engine, sample, batch_ids=batch.ids, step=interface.begin(0))[0]
        for engine, sample in zip(engines, (batch, batch, None), strict=True)
    ]
    assert [engine.calls for engine in engines] == [["logprobs at 1.0"]] * 3
    assert made[0] is not None
    assert made[0].keys == ("surprise",)
    assert made[1:] == [None, None]


def test_a_function_on_a_rank_without_groups_receives_an_empty_sample() -> None:
    SEEN.clear()
    batch = make_batch()
    keys = ["packed_input_ids", "packed_prompts", "rewards", "birth_time", "of_a_user"]
    for sample in (batch, None):
        interface = extra("learn", kind="train_step")
        assert interface.run(FakeEngine(), sample, batch_ids=batch.ids, step=interface.begin(0)) == (None, {})
    declaration = MFCDef("m", "actor", "inference", f"{__name__}:learn", tuple(keys))
    make_interface(declaration, train_config()).run(FakeEngine(), None, batch_ids=batch.ids, step=StepTotals(0, {}))
    held, empty, of_all_layouts = SEEN
    assert held == batch
    assert (empty.ids, empty.keys) == ((), ("packed_input_ids",))
    assert of_all_layouts.keys == tuple(keys)
    for key in keys:
        assert len(of_all_layouts.data[key]) == 0
        assert key == "of_a_user" or of_all_layouts.data[key].dtype == KEY_SPECS[key].dtype


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("ppo_actor", "expected `package.module:name` or `path/to/file.py:name`"),
        ("no.such.module:function", "there is no module 'no.such.module'"),
        ("math:no_such_function", "math has no 'no_such_function'"),
        ("math:pi", "is neither a function nor an Interface"),
    ],
)
def test_refused_interfaces(interface: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_interface(MFCDef("m", "actor", "inference", interface, ("packed_input_ids",)), train_config())


def test_refused_configs() -> None:
    with pytest.raises(ValueError, match=r"train.ppo.temperature is 0.0; it must be above 0"):
        interfaces(train_config(temperature=0.0))
    with pytest.raises(ValueError, match=r"train.ppo.eps_clip is 2.0"):
        interfaces(train_config(eps_clip=2.0))
    for values in (
        {"critic": CriticConfig()},
        {"critic": CriticConfig(), "baseline": "group_mean", "advantage_norm": "none"},
    ):
        with pytest.raises(ValueError, match="uses no values; with a critic use advantage_norm batch or none"):
            interfaces(train_config(**values))
    with pytest.raises(ValueError, match="uses no values"):
        interfaces(train_config(), ["values"])
    with pytest.raises(ValueError, match=r"kl_adaptive is True; applies to kl_in=reward only"):
        interfaces(train_config(kl_coef=0.1, kl_adaptive=True, kl_in="loss"))
    naive = build_dataflow(train_config(use_decoupled_loss=False)).mfcs["actor_train"]
    with pytest.raises(ValueError, match=r"'actor_train' needs the input keys \['proximal_logprobs'\]"):
        make_interface(naive, train_config())
    with pytest.raises(ValueError, match=r"'c' trains a critic, but train.critic is null"):
        make_interface(
            MFCDef("c", "critic", "train_step", "asyncrl.model.interfaces:PPOCriticInterface", ()), train_config()
        )


@pytest.mark.parametrize("key", ["rewards", "model_rewards"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_makes_its_advantages_nan(key: str, value: float) -> None:
    """A NaN advantage makes the trainer skip the step. Clipping must not turn such a reward into a number, and other groups stay
    finite.
    """
    mfcs, batch = interfaces(train_config(kl_coef=0.1, reward_model=RewardModelConfig())), tiny_batch()
    scores = {
        "model_rewards": np.zeros(4, np.float32),
        "proximal_logprobs": batch.data["packed_logprobs"],
        "packed_ref_logprobs": batch.data["packed_logprobs"],
    }
    whole = batch.update(
        SequenceSample(batch.ids, {"model_rewards": [[1, 1], [1, 1]]}, {"model_rewards": scores.pop("model_rewards")})
    )
    whole = whole.update(batch.derive(scores))
    bad = SequenceSample(whole.ids, whole.seqlens, whole.data | {key: np.array([0, 1, value, 0], np.float32)})
    made, _ = mfcs["advantages"].run(FakeEngine(), bad, batch_ids=batch.ids, step=mfcs["advantages"].begin(0))
    assert made is not None
    sound, broken = (np.concatenate(runs) for runs in made.slices("advantages"))
    masks = [np.concatenate(runs) for runs in made.slices("trained_mask")]
    assert np.isfinite(sound[masks[0]]).all()
    assert np.isnan(broken[masks[1]]).all()


def test_refused_samples() -> None:
    mfcs, batch = interfaces(train_config(kl_coef=0.1, reward_model=RewardModelConfig())), tiny_batch()
    scores = {"model_rewards": np.zeros(4, np.float32)}
    whole = batch.update(SequenceSample(batch.ids, {"model_rewards": [[1, 1], [1, 1]]}, scores))
    interface = mfcs["advantages"]
    with pytest.raises(ValueError, match=r"lacks the keys \['proximal_logprobs', 'model_rewards'\]"):
        interface.run(FakeEngine(), make_batch(), batch_ids=make_batch().ids, step=interface.begin(0))
    for name, mfc in mfcs.items():
        engine = FakeEngine("reward" if name == "rew_inf" else "lm")
        with pytest.raises(ValueError, match=r"ids \['b'\] are not in the batch"):
            mfc.run(engine, whole, batch_ids=["a"], step=mfc.begin(0))
