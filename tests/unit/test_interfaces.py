"""Interfaces of MFCs on a fake engine: one rank, and ranks that are threads and meet at a barrier in every collective call.

The fake's model is a table of logits by token (no context), trained by plain SGD: enough to see whether two updates are the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch

from asyncrl.algorithms.kl import AdaptiveKLController
from asyncrl.algorithms.ppo import PPOLoss
from asyncrl.config import MFCConfig, PPOConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow import MFCDef, build_dataflow
from asyncrl.model.interfaces import Interface, LossFn, make_interface, split_minibatches

VOCABULARY = 11
torch.set_num_threads(1)


class FakeEngine:
    """The documented engine API. Each rank has its own copy of the model; `exchange` gives what all ranks brought."""

    def __init__(
        self, dp_rank: int = 0, dp_size: int = 1, exchange: Callable[[str, object], list[object]] | None = None
    ) -> None:
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self._exchange = exchange or (lambda _, value: [value])
        self.logits = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float32).requires_grad_()
        self.calls: list[str] = []  # collective calls, in order
        self.batches: list[tuple[str, ...]] = []  # ids of each train_step
        self.losses: list[PPOLoss] = []

    def _all(self, what: str, value: object) -> list[object]:
        self.calls.append(what)
        return self._exchange(what, value)

    def _logprobs(self, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        return (self.logits / temperature).log_softmax(0)[tokens]

    def logprobs(self, sample: SequenceSample, *, temperature: float) -> np.ndarray:
        with torch.no_grad():
            return self._logprobs(torch.tensor(sample.data["packed_input_ids"]), temperature).numpy()

    def all_reduce_sum(self, values: list[float]) -> np.ndarray:
        return np.sum(self._all(f"all_reduce_sum of {len(values)}", np.array(values, np.float64)), axis=0)

    def train_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, lr_step: int
    ) -> dict[str, float]:
        assert sample is None or sample.num_ids > 0
        self.batches.append(sample.ids if sample is not None else ())
        assert isinstance(loss_fn, PPOLoss)
        self.losses.append(loss_fn)
        grad, stats = torch.zeros(VOCABULARY), {}
        if sample is not None:
            for part in sample.unpack():  # a micro-batch a group
                data = {key: torch.tensor(array) for key, array in part.data.items()}
                logprobs = self._logprobs(data["packed_input_ids"], temperature)
                loss, part_stats = loss_fn(logprobs, -logprobs.detach(), data, torch.tensor(part.cu_seqlens()))
                grad += torch.autograd.grad(loss, self.logits)[0]
                _add(stats, {key: float(value) for key, value in part_stats.items()})
        gathered = self._all(f"train_step {lr_step}", (grad, stats))
        total, total_stats = torch.zeros(VOCABULARY), {}
        for rank_grad, rank_stats in gathered:
            total += rank_grad
            _add(total_stats, rank_stats)
        with torch.no_grad():
            self.logits -= 0.5 * total
        return total_stats | {"grad_norm": float(total.norm()), "lr": 0.5, "skipped_steps": 0.0}


def _add(total: dict[str, float], stats: dict[str, float]) -> None:
    for key, value in stats.items():
        total[key] = max(total.get(key, 0.0), value) if key.endswith("_max") else total.get(key, 0.0) + value


def fake_ranks(n: int) -> list[FakeEngine]:
    """Ranks that are threads: they must make the same collective calls, or it fails here."""
    barrier, slots = Barrier(n, timeout=10), [("", None)] * n

    def make(rank: int) -> FakeEngine:
        def exchange(what: str, value: object) -> list[object]:
            slots[rank] = (what, value)
            barrier.wait()
            names, values = {name for name, _ in slots}, [value for _, value in slots]
            barrier.wait()
            assert len(names) == 1, f"ranks are in different collective calls: {names}"
            return values

        return FakeEngine(rank, n, exchange)

    return [make(rank) for rank in range(n)]


def make_batch(num_groups: int = 7, seed: int = 0) -> SequenceSample:
    """Groups of 1 to 5 responses with all keys; some truncated, one with a gap in its loss mask, one with an empty response."""
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
                "values": [random.normal(0, 1, len(mask)).tolist() for mask in masks],
                "dense_rewards": [random.normal(0, 0.1, len(mask)).tolist() for mask in masks],
            }
        )
    return SequenceSample.from_groups([f"ticket{g}" for g in range(num_groups)], groups)


def train_config(**ppo: object) -> TrainConfig:
    return TrainConfig(ppo=PPOConfig(**({"temperature": 1.0} | ppo)))  # type: ignore[arg-type]


def interfaces(train: TrainConfig, extra_keys: Sequence[str] = (), seed: int = 5) -> dict[str, Interface]:
    graph = build_dataflow(train)
    actor = graph.mfcs["actor_train"]
    mfcs = graph.mfcs | {
        "actor_train": dataclasses.replace(actor, input_keys=(*actor.input_keys, *extra_keys)),
    }
    return {name: make_interface(mfc, train, seed=seed) for name, mfc in mfcs.items()}


def run_step(
    train: TrainConfig,
    batch: SequenceSample,
    layout: Sequence[Sequence[int]],
    extra_keys: Sequence[str] = (),
    steps: int = 2,
) -> tuple[list[FakeEngine], list[list[dict[str, float]]]]:
    """Train steps with the groups spread over ranks as `layout` says; engines and, by rank, the statistics of each step."""

    def run_rank(engine: FakeEngine) -> list[dict[str, float]]:
        mfcs = interfaces(train, extra_keys)
        here = [batch.ids[g] for g in layout[engine.dp_rank]]
        result = []
        for version in range(steps):
            sample = batch.select_ids(here) if here else None
            if "actor_inf" in mfcs:
                proximal, _ = mfcs["actor_inf"].run(engine, sample, batch_ids=batch.ids, version=version)
                assert (proximal is None) is (sample is None)
                sample = sample.update(proximal) if sample is not None and proximal is not None else None
            made, stats = mfcs["actor_train"].run(engine, sample, batch_ids=batch.ids, version=version)
            assert made is None
            result.append(stats)
        return result

    engines = fake_ranks(len(layout))
    with ThreadPoolExecutor(len(engines)) as pool:
        return engines, list(pool.map(run_rank, engines))


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
    "critic": {"advantage_norm": "batch", "gae_lambda": 0.95},
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
    extra = ("values", "dense_rewards") if name == "critic" else ()
    (single,), (expected,) = run_step(train, batch, [range(7)], extra)
    assert expected[0]["actor/grad_norm"] > 0
    for layout in LAYOUTS:
        engines, stats = run_step(train, batch, layout, extra)
        assert len({tuple(call for call in engine.calls if "train" in call) for engine in [single, *engines]}) == 1
        for engine, rank_stats in zip(engines, stats, strict=True):
            torch.testing.assert_close(engine.logits, single.logits, rtol=0, atol=1e-6)
            for rank_step, step in zip(rank_stats, expected, strict=True):
                assert rank_step == pytest.approx(step, abs=1e-5)


def test_fewer_groups_than_minibatches_and_ranks() -> None:
    train, batch = train_config(minibatches=4), make_batch(2)
    (single,), _ = run_step(train, batch, [range(2)])
    engines, _ = run_step(train, batch, [[], [0, 1], []])
    assert len(single.batches) == 2 * 2
    assert engines[0].batches == [()] * 4
    torch.testing.assert_close(engines[0].logits, single.logits, rtol=0, atol=1e-6)


def test_a_batch_without_trained_tokens_steps_nowhere() -> None:
    batch = make_batch()
    truncated = SequenceSample(
        batch.ids, batch.seqlens, batch.data | {"seq_no_eos_mask": np.ones_like(batch.data["seq_no_eos_mask"])}
    )
    (engine,), ((stats, _),) = run_step(train_config(mask_too_long=True, advantage_norm="batch"), truncated, [range(7)])
    assert engine.batches == []
    assert stats["actor/empty_minibatches"] == 4
    assert stats["length/truncated_share"] == 1.0
    assert stats["advantages/max"] == stats["advantages/min"] == stats["batch/num_trained_tokens"] == 0.0


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


def test_denominators_are_of_the_minibatch() -> None:
    train, batch = train_config(minibatches=3), make_batch()
    (engine,), _ = run_step(train, batch, [range(7)], steps=1)
    for ids, loss_fn in zip(engine.batches, engine.losses, strict=True):
        assert loss_fn.denominator == batch.select_ids(ids).data["loss_mask"].sum()
    train = train_config(minibatches=3, loss_normalization="sequence")
    (engine,), _ = run_step(train, batch, [range(7)], steps=1)
    for ids, loss_fn in zip(engine.batches, engine.losses, strict=True):
        masks = [mask for group in batch.select_ids(ids).slices("loss_mask") for mask in group]
        assert loss_fn.denominator == sum(mask.any() for mask in masks)


# ------------------------------------------------------------------------------------------------ advantages, by hand


def tiny_batch() -> SequenceSample:
    """Two groups of two: prompt of 1, responses of 2 and 1 tokens. Rewards 1, 0 and 1, 1."""
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


class Recorder(FakeEngine):
    """Keeps what it is given to train on."""

    def train_step(
        self, sample: SequenceSample | None, loss_fn: LossFn, *, temperature: float, lr_step: int
    ) -> dict[str, float]:
        self.sample, self.temperature = sample, temperature
        return super().train_step(sample, loss_fn, temperature=temperature, lr_step=lr_step)


def trained_on(**ppo: object) -> tuple[SequenceSample, dict[str, float]]:
    engine = Recorder()
    train = train_config(minibatches=1, **ppo)
    _, stats = interfaces(train)["actor_train"].run(engine, tiny_batch(), batch_ids=("a", "b"), version=0)
    assert engine.sample is not None
    return engine.sample, stats


def test_group_advantages() -> None:
    sample, stats = trained_on()
    assert sample.data["advantages"].tolist() == pytest.approx([0, 1, 1, 0, -1, 0, 0, 0, 0, 0], abs=1e-5)
    assert sample.keys == ("packed_input_ids", "packed_logprobs", "proximal_logprobs", "advantages", "loss_mask")
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
    """Per token 1, 1, 0, 1, 1, 1: mean 5/6, std sqrt(5)/6."""
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


def test_kl_is_charged_from_a_token_on_backwards() -> None:
    """k1 of the proximal policy to the reference: 0.5 and 0; 0.2. In group mode beside the normalised reward, else before."""
    sample, stats = trained_on(kl_coef=0.1, advantage_norm="none")
    assert sample.data["advantages"][:5].tolist() == pytest.approx([0, 0.95, 1, 0, -0.02], abs=1e-6)
    assert stats["kl/coef"] == 0.1
    assert stats["kl/sequence_mean"] == pytest.approx(0.35)
    assert stats["kl/token_mean"] == pytest.approx(1.4 / 6)
    sample, _ = trained_on(kl_coef=0.1)
    assert sample.data["advantages"].tolist() == pytest.approx([0, 0.95, 1, 0, -1.02, 0, -0.05, 0, 0, -0.02], abs=1e-5)


def test_adaptive_kl_moves_once_a_step() -> None:
    train = train_config(minibatches=2, kl_coef=0.1, kl_adaptive=True, kl_horizon=40.0)
    interface = interfaces(train)["actor_train"]
    _, stats = interface.run(FakeEngine(), tiny_batch(), batch_ids=("a", "b"), version=0)
    assert stats["kl/coef"] == 0.1
    assert isinstance(interface.kl, AdaptiveKLController)  # type: ignore[attr-defined]
    _, stats = interface.run(FakeEngine(), tiny_batch(), batch_ids=("a", "b"), version=1)
    assert stats["kl/coef"] == pytest.approx(0.1 * (1 - 0.2 * 4 / 40))


def test_learns() -> None:
    """Rewarded for token 2 only, the fake comes to prefer it."""
    engine, train = FakeEngine(), train_config(minibatches=1, advantage_norm="batch", temperature=1.0)
    mfcs = interfaces(train)
    random = np.random.default_rng(0)
    rewards = []
    for version in range(60):
        probabilities = engine.logits.detach().softmax(0).double().numpy()
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
        proximal, _ = mfcs["actor_inf"].run(engine, batch, batch_ids=batch.ids, version=version)
        assert proximal is not None
        _, stats = mfcs["actor_train"].run(engine, batch.update(proximal), batch_ids=batch.ids, version=version)
        rewards.append(stats["reward/mean"])
    assert rewards[0] < 0.2
    assert np.mean(rewards[-5:]) > 0.9


# ------------------------------------------------------------------------------------------------------- inference


def test_logprobs_interfaces() -> None:
    mfcs = interfaces(train_config(kl_coef=0.1, temperature=0.5))
    engine, batch = FakeEngine(), make_batch()
    expected = (engine.logits.detach() / 0.5).log_softmax(0)[batch.data["packed_input_ids"]].tolist()
    for name, key in (("actor_inf", "proximal_logprobs"), ("ref_inf", "packed_ref_logprobs")):
        made, stats = mfcs[name].run(engine, batch, batch_ids=batch.ids, version=0)
        assert made is not None
        assert made.ids == batch.ids
        assert made.keys == (key,)
        assert made.data[key].tolist() == pytest.approx(expected)
        assert stats == {}
        assert mfcs[name].run(engine, None, batch_ids=batch.ids, version=0) == (None, {})


def shout(engine: FakeEngine, sample: SequenceSample, train: TrainConfig) -> SequenceSample:
    """An MFC of a user: one value a sequence."""
    sizes = [len(lengths) for lengths in sample.seqlens["packed_input_ids"]]
    return SequenceSample(
        sample.ids,
        {"loudness": [[1] * n for n in sizes]},
        {"loudness": np.full(sum(sizes), train.batch_size, np.float32)},
    )


def whisper(engine: FakeEngine, sample: SequenceSample, train: TrainConfig) -> SequenceSample:
    return sample


SEEN: list[SequenceSample | None] = []


def learn(engine: FakeEngine, sample: SequenceSample | None, train: TrainConfig) -> None:
    SEEN.append(sample)


def extra(function: str, **fields: object) -> Interface:
    mfc = MFCConfig(interface=f"{__name__}:{function}", input_keys=["packed_input_ids"], **fields)  # type: ignore[arg-type]
    train = dataclasses.replace(train_config(), extra_mfcs={"extra": mfc}, batch_size=3)
    return make_interface(build_dataflow(train).mfcs["extra"], train)


def test_a_function_by_config() -> None:
    batch = make_batch()
    interface = extra("shout", output_keys=["loudness"])
    made, _ = interface.run(FakeEngine(), batch, batch_ids=batch.ids, version=0)
    assert made is not None
    assert set(made.data["loudness"]) == {3.0}
    assert (
        batch.update(made).select_ids(["ticket1"]).data["loudness"].size
        == batch.select_ids(["ticket1"]).num_sequences()
    )
    assert interface.run(FakeEngine(), None, batch_ids=batch.ids, version=0) == (None, {})
    with pytest.raises(ValueError, match=r"'extra'.*:whisper must return .* missing \['loudness'\]"):
        extra("whisper", output_keys=["loudness"]).run(FakeEngine(), batch, batch_ids=batch.ids, version=0)


def test_a_train_step_by_config_runs_on_an_empty_rank() -> None:
    SEEN.clear()
    batch = make_batch()
    for sample in (batch, None):
        assert extra("learn", kind="train_step").run(FakeEngine(), sample, batch_ids=batch.ids, version=0) == (None, {})
    assert [batch, None] == SEEN


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("ppo_actr", "use actor_logprobs, ref_logprobs, ppo_actor or package.module:function"),
        ("no.such.module:function", "cannot be imported: No module named 'no'"),
        ("math:no_such_function", "cannot be imported"),
        ("math:pi", "is not a function"),
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
    with pytest.raises(ValueError, match="uses no values"):
        interfaces(train_config(), ["values"])
    naive = build_dataflow(train_config(use_decoupled_loss=False)).mfcs["actor_train"]
    with pytest.raises(ValueError, match=r"needs the input keys \['proximal_logprobs'\]"):
        make_interface(naive, train_config())


def test_refused_samples() -> None:
    interface, batch = interfaces(train_config())["actor_train"], tiny_batch()
    with pytest.raises(ValueError, match=r"lacks the keys \['proximal_logprobs'\]"):
        interface.run(FakeEngine(), make_batch(), batch_ids=make_batch().ids, version=0)
    bad = SequenceSample(batch.ids, batch.seqlens, batch.data | {"rewards": np.array([0, 1, np.nan, 0], np.float32)})
    with pytest.raises(ValueError, match=r"rewards of the groups \['b'\] are not finite"):
        interface.run(FakeEngine(), bad, batch_ids=batch.ids, version=0)
    with pytest.raises(ValueError, match=r"ids \['b'\] are not in the batch"):
        interface.run(FakeEngine(), batch, batch_ids=["a"], version=0)
