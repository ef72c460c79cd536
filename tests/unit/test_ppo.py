"""The PPO losses, by hand and against loops over tokens; gradients; any split into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.ppo import PPOLoss, anchor_key, check_ppo_config, count_per_sequence, ppo_token_loss, sum_loss
from asyncrl.config import PPOConfig

torch.set_num_threads(1)

CONFIGS = {
    "decoupled": PPOConfig(),
    "naive": PPOConfig(use_decoupled_loss=False),
    "recomputed": PPOConfig(use_decoupled_loss=False, recompute_logprob=True),
    "no cap": PPOConfig(behav_imp_weight_cap=None),
    "low cap": PPOConfig(behav_imp_weight_cap=1.1),
    "clamp": PPOConfig(behav_imp_weight_cap=1.1, behav_imp_weight_mode="clamp"),
    "clip higher": PPOConfig(eps_clip_higher=0.28),
    "dual clip": PPOConfig(c_clip=1.5, eps_clip_higher=2.0),
    "everything, sequences": PPOConfig(
        c_clip=1.5, eps_clip_higher=0.4, behav_imp_weight_cap=1.2, loss_normalization="sequence"
    ),
}


def reference(
    data: Mapping[str, list[float]], mask: list[bool], lengths: list[int], config: PPOConfig
) -> tuple[float, dict[str, float]]:
    """One minibatch, the slow and obvious way: loss, and sums of statistics."""
    eps_high = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    decoupled = config.use_decoupled_loss
    sequences, start, sums = [], 0, dict.fromkeys(["clip_share", "dual_clip_share", "cap_share", "approx_kl"], 0.0)
    for length in lengths:
        losses = []
        for t in range(start, start + length):
            if not mask[t]:
                continue
            anchor = data["proximal_logprobs" if decoupled or config.recompute_logprob else "packed_logprobs"][t]
            ratio, advantage = math.exp(data["current"][t] - anchor), data["advantages"][t]
            clipped = min(max(ratio, 1 - config.eps_clip), 1 + eps_high)
            loss = max(-advantage * ratio, -advantage * clipped)
            sums["clip_share"] += loss > -advantage * ratio
            sums["approx_kl"] += anchor - data["current"][t]
            if config.c_clip is not None and loss > config.c_clip * abs(advantage):
                loss = config.c_clip * abs(advantage)
                sums["dual_clip_share"] += 1
            if decoupled:
                weight = math.exp(anchor - data["packed_logprobs"][t])
                if config.behav_imp_weight_cap is not None and weight > config.behav_imp_weight_cap:
                    weight = config.behav_imp_weight_cap if config.behav_imp_weight_mode == "clamp" else 0.0
                    sums["cap_share"] += 1
                loss *= weight
            losses.append(loss)
        start += length
        if losses:
            sequences.append(losses)
    if config.loss_normalization == "token":
        return sum(map(sum, sequences)) / sum(map(len, sequences)), sums
    return sum(sum(losses) / len(losses) for losses in sequences) / len(sequences), sums


def random_batch(seed: int) -> tuple[dict[str, Tensor], list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 0, 9, 4]
    total = sum(lengths)
    mask = torch.rand(total, generator=random) < 0.8
    mask[-4:] = False  # a sequence in which nothing is trained
    behaviour = -3 * torch.rand(total, generator=random)
    data = {
        "packed_logprobs": behaviour,
        "proximal_logprobs": behaviour + 0.3 * torch.randn(total, generator=random),
        "advantages": torch.randn(total, generator=random),
        "loss_mask": mask,
    }
    data["current"] = data["proximal_logprobs"] + 0.4 * torch.randn(total, generator=random)
    return data, lengths


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def denominator(mask: Tensor, lengths: list[int], config: PPOConfig) -> float:
    counts = count_per_sequence(mask, packed(lengths))
    return float(counts.sum() if config.loss_normalization == "token" else (counts > 0).sum())


# ---------------------------------------------------------------------------------------------------------- by hand

ON = torch.tensor([True])


def one_token(config: PPOConfig, advantage: float = 2.0, current: float = -1.0) -> float:
    """Current -1.0, proximal -1.2, behaviour -1.5."""
    proximal, behaviour = torch.tensor([-1.2]), torch.tensor([-1.5])
    anchor, weight_from = (proximal, behaviour) if config.use_decoupled_loss else (behaviour, None)
    token = ppo_token_loss(torch.tensor([current]), anchor, weight_from, torch.tensor([advantage]), ON, config)
    return float(token.loss_T)


def test_decoupled_by_hand() -> None:
    """r = e^0.2 = 1.2214, clipped to 1.2; w = e^0.3 = 1.3499: -2 * 1.2 * 1.3499."""
    assert one_token(PPOConfig(behav_imp_weight_cap=None)) == pytest.approx(-3.2397, abs=1e-4)
    assert one_token(PPOConfig(behav_imp_weight_cap=5.0)) == pytest.approx(-3.2397, abs=1e-4)
    assert one_token(PPOConfig(behav_imp_weight_cap=1.3)) == 0.0
    clamp = PPOConfig(behav_imp_weight_cap=1.3, behav_imp_weight_mode="clamp")
    assert one_token(clamp) == pytest.approx(-2 * 1.2 * 1.3, abs=1e-4)


def test_naive_by_hand() -> None:
    """r = e^0.5 = 1.6487: clipped to 1.2 where A > 0, not where A < 0, and by dual clip from 1.5 on."""
    assert one_token(PPOConfig(use_decoupled_loss=False)) == pytest.approx(-2.4)
    assert one_token(PPOConfig(use_decoupled_loss=False, eps_clip_higher=0.28)) == pytest.approx(-2.56)
    assert one_token(PPOConfig(use_decoupled_loss=False), advantage=-2.0) == pytest.approx(2 * math.exp(0.5))
    assert one_token(PPOConfig(use_decoupled_loss=False, c_clip=1.5), advantage=-2.0) == pytest.approx(3.0)
    # r = e^-1 = 0.3679: clipped to 0.8 where A < 0; the higher clip has no say below.
    assert one_token(PPOConfig(use_decoupled_loss=False, eps_clip_higher=0.28), -2.0, -2.5) == pytest.approx(1.6)
    assert one_token(PPOConfig(use_decoupled_loss=False), 2.0, -2.5) == pytest.approx(-2 * math.exp(-1))


def test_a_capped_token_stays_in_the_denominator() -> None:
    """Two equal tokens, of which the cap takes out the one that the behaviour policy found unlikely: half of the other's loss."""
    data = {
        "packed_logprobs": torch.tensor([-1.2, -1.5]),
        "proximal_logprobs": torch.tensor([-1.2, -1.2]),
        "advantages": torch.tensor([2.0, 2.0]),
        "loss_mask": torch.tensor([True, True]),
    }
    loss_fn = PPOLoss(PPOConfig(behav_imp_weight_cap=1.3), denominator=2.0)
    loss, stats = loss_fn(torch.tensor([-1.0, -1.0]), torch.zeros(2), data, packed([2]))
    assert float(loss) == pytest.approx(-2 * 1.2 / 2)
    assert stats["cap_share"] == 1
    assert float(stats["behav_weight_max"]) == pytest.approx(math.exp(0.3))
    assert float(stats["behav_weight"]) == pytest.approx(1 + math.exp(0.3))


def test_token_and_sequence_normalisation_by_hand() -> None:
    """Responses of 3 tokens with loss 1 and of 1 token with loss 5."""
    loss, mask = torch.tensor([0.0, 1, 1, 1, 0, 5]), torch.tensor([False, True, True, True, False, True])
    assert float(sum_loss(loss, mask, packed([4, 2]), "token", 4.0)) == 2.0
    assert float(sum_loss(loss, mask, packed([4, 2]), "sequence", 2.0)) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="'word'; use token or sequence"):
        sum_loss(loss, mask, packed([4, 2]), "word", 1.0)


# ------------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_against_the_reference(name: str, seed: int) -> None:
    config, (data, lengths) = CONFIGS[name], random_batch(seed)
    expected, sums = reference(
        {key: value.double().tolist() for key, value in data.items()}, data["loss_mask"].tolist(), lengths, config
    )
    loss_fn = PPOLoss(config, denominator(data["loss_mask"], lengths, config))
    loss, stats = loss_fn(data["current"], torch.ones(len(data["current"])), data, packed(lengths))
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert stats["entropy"] == data["loss_mask"].sum()
    for key in sums.keys() & stats.keys():
        assert float(stats[key]) == pytest.approx(sums[key], abs=1e-5), key
    assert ("behav_weight_max" in stats) is config.use_decoupled_loss


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_add_up(name: str) -> None:
    """Any split of the sequences gives the same loss, gradient and statistics; an empty part is fine."""
    config, (data, lengths) = CONFIGS[name], random_batch(7)
    loss_fn = PPOLoss(config, denominator(data["loss_mask"], lengths, config))
    results = []
    for cuts in ([0, 5], [0, 2, 5], [0, 0, 1, 2, 3, 4, 5]):
        current = data["current"].clone().requires_grad_()
        total, stats = torch.zeros(()), {"behav_weight_max": 0.0}
        for first, last in pairwise(cuts):
            here = slice(sum(lengths[:first]), sum(lengths[:last]))
            part = {key: value[here] for key, value in data.items()}
            loss, part_stats = loss_fn(current[here], current[here].detach(), part, packed(lengths[first:last]))
            total = total + loss
            for key, value in part_stats.items():
                stats[key] = (
                    max(stats[key], float(value)) if key.endswith("_max") else stats.get(key, 0.0) + float(value)
                )
        total.backward()
        results.append((float(total.detach()), current.grad, stats))
    for loss, grad, stats in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        torch.testing.assert_close(grad, results[0][1])
        assert stats == pytest.approx(results[0][2], abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_against_finite_differences(name: str) -> None:
    config, (data, lengths) = CONFIGS[name], random_batch(3)
    data = {key: value.double() if value.is_floating_point() else value for key, value in data.items()}
    loss_fn = PPOLoss(config, 10.0)

    def loss_of(current: Tensor) -> Tensor:
        return loss_fn(current, torch.zeros_like(current), data, packed(lengths))[0]

    assert torch.autograd.gradcheck(loss_of, data["current"].clone().requires_grad_(), eps=1e-7, atol=1e-5)


def test_gradient_on_policy_is_that_of_the_policy_gradient() -> None:
    """Where the three policies are one: d loss / d logprob = -A / n."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    data = {
        "packed_logprobs": logprobs.detach(),
        "proximal_logprobs": logprobs.detach(),
        "advantages": torch.tensor([3.0, -4.0]),
        "loss_mask": torch.tensor([True, True]),
    }
    PPOLoss(PPOConfig(), 2.0)(logprobs, torch.zeros(2), data, packed([2]))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.5, 2.0])


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_outside_of_the_mask_matters(name: str) -> None:
    config, (data, lengths) = CONFIGS[name], random_batch(5)
    loss_fn = PPOLoss(config, 10.0)
    garbage = {
        key: value if key == "loss_mask" else value.masked_fill(~data["loss_mask"], float("nan"))
        for key, value in data.items()
    }
    results = []
    for source in (data, garbage):
        current = source["current"].clone().requires_grad_()
        loss, stats = loss_fn(current, source["current"], source, packed(lengths))
        loss.backward()
        results.append((loss.detach(), current.grad, stats))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("current", [-1000.0, 0.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_wild_ratios_stay_finite(name: str, current: float, advantage: float) -> None:
    logprobs = torch.tensor([current], requires_grad=True)
    data = {
        "packed_logprobs": torch.tensor([-1500.0]),
        "proximal_logprobs": torch.tensor([-500.0]),
        "advantages": torch.tensor([advantage]),
        "loss_mask": ON,
    }
    loss, stats = PPOLoss(CONFIGS[name], 1.0)(logprobs, torch.zeros(1), data, packed([1]))
    loss.backward()
    assert logprobs.grad is not None
    assert math.isfinite(float(loss.detach()))
    assert math.isfinite(float(logprobs.grad))
    assert all(math.isfinite(float(value)) for value in stats.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_no_tokens(name: str) -> None:
    """What an engine passes on a rank without samples: a zero loss with a graph, and all statistics by name."""
    empty = torch.zeros(0)
    data = dict.fromkeys(["packed_logprobs", "proximal_logprobs", "advantages"], empty) | {"loss_mask": empty.bool()}
    current = torch.zeros(0, requires_grad=True)
    loss, stats = PPOLoss(CONFIGS[name], 5.0)(current, empty, data, packed([]))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert {float(value) for value in stats.values()} == {0.0}


# -------------------------------------------------------------------------------------------------------------- config


def test_anchor() -> None:
    assert anchor_key(CONFIGS["decoupled"]) == "proximal_logprobs"
    assert anchor_key(CONFIGS["recomputed"]) == "proximal_logprobs"
    assert anchor_key(CONFIGS["naive"]) == "packed_logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eps_clip", 0.0),
        ("eps_clip", 1.0),
        ("eps_clip_higher", -0.1),
        ("c_clip", 1.0),
        ("behav_imp_weight_cap", 0.0),
        ("behav_imp_weight_mode", "truncate"),
        ("loss_normalization", "word"),
        ("advantage_norm", "rank"),
        ("kl_estimator", "k4"),
        ("minibatches", 0),
    ],
)
def test_refused_values(field: str, value: object) -> None:
    check_ppo_config(PPOConfig())
    with pytest.raises(ValueError, match=f"train.ppo.{field} is "):
        check_ppo_config(PPOConfig(**{field: value}))  # type: ignore[arg-type]
