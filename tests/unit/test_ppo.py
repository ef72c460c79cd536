"""The policy losses: by hand, against loops over tokens, their gradients, and any split into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.kl import kl_estimate
from asyncrl.algorithms.packed import count_per_sequence
from asyncrl.algorithms.ppo import (
    TERMS,
    PPOLoss,
    anchor_key,
    check_ppo_config,
    cispo_loss,
    clamped_weights,
    clip_loss,
    loss_denominator,
    loss_keys,
    masked_weights,
    policy_token_loss,
    sum_loss,
    terms_of,
    token_ratios,
)
from asyncrl.config.presets import ALGORITHMS
from asyncrl.config.schema import PPOConfig

torch.set_num_threads(1)

CONFIGS = {
    "decoupled": PPOConfig(),
    "naive": PPOConfig(use_decoupled_loss=False),
    "recomputed": PPOConfig(use_decoupled_loss=False, recompute_logprob=True),
    "no cap": PPOConfig(behav_imp_weight_cap=None),
    "low cap": PPOConfig(behav_imp_weight_cap=1.1),
    "clamp": PPOConfig(behav_imp_weight_cap=1.1, behav_imp_weight_mode="clamp"),
    "icepop": PPOConfig(behav_imp_weight_cap=1.2, behav_imp_weight_floor=0.8),
    "clamp on both sides": PPOConfig(
        behav_imp_weight_cap=1.1, behav_imp_weight_floor=0.9, behav_imp_weight_mode="clamp"
    ),
    "floor alone": PPOConfig(behav_imp_weight_cap=None, behav_imp_weight_floor=0.9),
    "clip higher": PPOConfig(eps_clip_higher=0.28),
    "dual clip": PPOConfig(c_clip=1.5, eps_clip_higher=2.0),
    "everything, sequences": PPOConfig(
        c_clip=1.5, eps_clip_higher=0.4, behav_imp_weight_cap=1.2, loss_normalization="sequence"
    ),
    "kl in the loss": PPOConfig(kl_coef=0.1, kl_in="loss", kl_estimator="k3", loss_normalization="sequence"),
    "gspo, decoupled": PPOConfig(
        importance_level="sequence", loss_normalization="sequence", behav_imp_weight_cap=1.05, eps_clip=0.1
    ),
    "entropy": PPOConfig(entropy_coef=0.1),
    "kl and entropy, sequences": PPOConfig(
        kl_coef=0.1, kl_in="loss", kl_estimator="k3", entropy_coef=0.3, loss_normalization="sequence"
    ),
    "cispo, both bounds": PPOConfig(policy_loss="cispo", eps_clip=0.2, eps_clip_higher=0.3),
    "cispo of sequences": PPOConfig(policy_loss="cispo", importance_level="sequence", eps_clip=0.1),
    **{
        f"preset {name}": PPOConfig(
            **{key: 16 if key.endswith("_length") else value for key, value in preset["train"]["ppo"].items()}
        )
        for name, preset in ALGORITHMS.items()
    },
}


def reference(
    data: Mapping[str, list[float]], mask: list[bool], lengths: list[int], config: PPOConfig
) -> tuple[float, dict[str, float]]:
    """Compute one minibatch with loops over tokens: the loss, and sums of statistics."""
    eps_high = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    decoupled = config.use_decoupled_loss
    floor = -math.inf if config.behav_imp_weight_floor is None else config.behav_imp_weight_floor
    cap = math.inf if config.behav_imp_weight_cap is None else config.behav_imp_weight_cap
    anchors = data["proximal_logprobs" if decoupled or config.recompute_logprob else "packed_logprobs"]
    sequences, start, sums = [], 0, dict.fromkeys(["clip_share", "dual_clip_share", "cap_share", "approx_kl"], 0.0)
    for length in lengths:
        losses = []
        tokens = [t for t in range(start, start + length) if mask[t]]

        def ratio_of(above: list[float], below: list[float], t: int, tokens: list[int] = tokens) -> float:
            if config.importance_level == "token":
                return math.exp(above[t] - below[t])
            return math.prod(math.exp(above[u] - below[u]) for u in tokens) ** (1 / len(tokens))

        for t in tokens:
            ratio, advantage = ratio_of(data["current"], anchors, t), data["advantages"][t]
            clipped = min(max(ratio, 1 - config.eps_clip), 1 + eps_high)
            if config.policy_loss == "cispo":
                loss = -clipped * advantage * data["current"][t]
                sums["clip_share"] += clipped != ratio
            else:
                loss = max(-advantage * ratio, -advantage * clipped)
                sums["clip_share"] += loss > -advantage * ratio
            sums["approx_kl"] += anchors[t] - data["current"][t]
            if config.c_clip is not None and loss > config.c_clip * abs(advantage):
                loss = config.c_clip * abs(advantage)
                sums["dual_clip_share"] += 1
            if decoupled:
                weight = ratio_of(anchors, data["packed_logprobs"], t)
                if not floor <= weight <= cap:
                    weight = min(max(weight, floor), cap) if config.behav_imp_weight_mode == "clamp" else 0.0
                    sums["cap_share"] += 1
                loss *= weight
            if config.kl_coef > 0 and config.kl_in == "loss":
                d = data["current"][t] - data["packed_ref_logprobs"][t]
                loss += config.kl_coef * (math.exp(-d) - 1 + d)
            loss -= config.entropy_coef * data["entropy"][t]
            losses.append(loss)
        start += length
        if losses:
            sequences.append(losses)
    if config.loss_normalization == "token":
        return sum(map(sum, sequences)) / sum(map(len, sequences)), sums
    if config.loss_normalization == "constant":
        return sum(map(sum, sequences)) / len(sequences) / config.loss_length, sums
    return sum(sum(losses) / len(losses) for losses in sequences) / len(sequences), sums


def random_batch(seed: int) -> tuple[dict[str, Tensor], list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 0, 9, 4]
    total = sum(lengths)
    mask = torch.rand(total, generator=random) < 0.8
    mask[-4:] = False  # a sequence without trained tokens
    behaviour = -3 * torch.rand(total, generator=random)
    data = {
        "packed_logprobs": behaviour,
        "proximal_logprobs": behaviour + 0.3 * torch.randn(total, generator=random),
        "packed_ref_logprobs": behaviour + 0.3 * torch.randn(total, generator=random),
        "advantages": torch.randn(total, generator=random),
        "loss_mask": mask,
    }
    data["current"] = data["proximal_logprobs"] + 0.4 * torch.randn(total, generator=random)
    data["entropy"] = 2 * torch.rand(total, generator=random)
    return data, lengths


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def outputs(logprobs: Tensor, entropy: Tensor | None = None) -> dict[str, Tensor]:
    return {"logprobs": logprobs, "entropy": torch.zeros(len(logprobs)) if entropy is None else entropy}


def denominator(mask: Tensor, lengths: list[int], config: PPOConfig) -> float:
    counts = count_per_sequence(mask, packed(lengths))
    return loss_denominator(config, float(counts.sum()), float((counts > 0).sum()))


# ---------------------------------------------------------------------------------------------------------- by hand

ON = torch.tensor([True])


def one_token(config: PPOConfig, advantage: float = 2.0, current: float = -1.0) -> float:
    """Return the loss of a token. Logprobs: current -1.0 by default, proximal -1.2, behaviour -1.5."""
    proximal, behaviour = torch.tensor([-1.2]), torch.tensor([-1.5])
    anchor, weight_from = (proximal, behaviour) if config.use_decoupled_loss else (behaviour, None)
    token = policy_token_loss(
        torch.tensor([current]), anchor, weight_from, torch.tensor([advantage]), ON, packed([1]), config
    )
    return float(token.loss_T)


def test_decoupled_by_hand() -> None:
    """r = e^0.2 = 1.2214, clipped to 1.2. w = e^0.3 = 1.3499. The loss is -2 * 1.2 * 1.3499."""
    assert one_token(PPOConfig(behav_imp_weight_cap=None)) == pytest.approx(-3.2397, abs=1e-4)
    assert one_token(PPOConfig(behav_imp_weight_cap=5.0)) == pytest.approx(-3.2397, abs=1e-4)
    assert one_token(PPOConfig(behav_imp_weight_cap=1.3)) == 0.0
    clamp = PPOConfig(behav_imp_weight_cap=1.3, behav_imp_weight_mode="clamp")
    assert one_token(clamp) == pytest.approx(-2 * 1.2 * 1.3, abs=1e-4)


def test_naive_by_hand() -> None:
    """r = e^0.5 = 1.6487. It is clipped to 1.2 if A > 0. If A < 0, only the dual clip limits it, to 1.5."""
    assert one_token(PPOConfig(use_decoupled_loss=False)) == pytest.approx(-2.4)
    assert one_token(PPOConfig(use_decoupled_loss=False, eps_clip_higher=0.28)) == pytest.approx(-2.56)
    assert one_token(PPOConfig(use_decoupled_loss=False), advantage=-2.0) == pytest.approx(2 * math.exp(0.5))
    assert one_token(PPOConfig(use_decoupled_loss=False, c_clip=1.5), advantage=-2.0) == pytest.approx(3.0)
    # r = e^-1 = 0.3679 is clipped to 0.8 if A < 0. eps_clip_higher does not change the lower bound
    assert one_token(PPOConfig(use_decoupled_loss=False, eps_clip_higher=0.28), -2.0, -2.5) == pytest.approx(1.6)
    assert one_token(PPOConfig(use_decoupled_loss=False), 2.0, -2.5) == pytest.approx(-2 * math.exp(-1))


def test_clip_by_hand() -> None:
    """DAPO's range: the ratio is clipped to at least 0.8 if A < 0, and to at most 1.28 if A > 0. The other bound does not apply."""
    ratio, advantages = torch.tensor([0.5, 0.5, 2.0, 2.0, 1.25]), torch.tensor([1.0, -1.0, 1.0, -1.0, 3.0])
    loss, clipped, dual = clip_loss(ratio, advantages, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -1.28, 2.0, -3.75])
    assert clipped.tolist() == [False, True, True, False, False]
    assert not dual.any()
    loss, _, dual = clip_loss(ratio, advantages, 0.2, 0.28, c_clip=1.5)
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -1.28, 1.5, -3.75])
    assert dual.tolist() == [False, False, False, True, False]


def test_cispo_by_hand() -> None:
    """Ratios 3, 8 and 0.1 are limited to 5, without a lower bound. Loss -w A log pi, gradient -w A, for either sign of A."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -2.0], requires_grad=True)
    ratio, advantages = torch.tensor([3.0, 8.0, 0.1, 8.0]), torch.tensor([1.0, 2.0, -1.0, -2.0])
    loss, cut = cispo_loss(logprobs, ratio, advantages, 1.0, 4.0)
    assert loss.tolist() == pytest.approx([3.0, 20.0, -0.3, -20.0])
    assert cut.tolist() == [False, True, False, True]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-3.0, -10.0, 0.1, 10.0])


def test_cispo_keeps_the_gradient_that_the_clip_removes() -> None:
    """A rare token with A > 0 has become 3 times as likely. PPO's gradient is 0, CISPO's is not."""
    grads = {}
    for policy_loss in ("clip", "cispo"):
        current = torch.tensor([math.log(0.03)], requires_grad=True)
        config = PPOConfig(use_decoupled_loss=False, policy_loss=policy_loss)
        data = {"packed_logprobs": torch.tensor([math.log(0.01)]), "advantages": torch.ones(1), "loss_mask": ON}
        PPOLoss(config, 1.0)(outputs(current), data, packed([1]))[0].backward()
        assert current.grad is not None
        grads[policy_loss] = float(current.grad)
    assert grads == {"clip": 0.0, "cispo": pytest.approx(-1.2)}


def test_gspo_ratio_by_hand() -> None:
    """The log ratio is the mean over unmasked tokens: (0.1 + 0.5) / 2 = 0.3 in one sequence, -0.2 in the other."""
    current = torch.tensor([9.0, -1.0, -1.0, 9.0, -2.0], requires_grad=True)
    anchor = torch.tensor([math.nan, -1.1, -1.5, 0.0, -1.8])
    mask = torch.tensor([False, True, True, False, True])
    ratio = token_ratios(current, anchor, mask, packed([3, 2]), "sequence")
    assert ratio.tolist() == pytest.approx([0, math.exp(0.3), math.exp(0.3), 0, math.exp(-0.2)])
    ratio[1].backward()  # all tokens of the sequence share the ratio
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([0, math.exp(0.3) / 2, math.exp(0.3) / 2, 0, 0])
    with pytest.raises(ValueError, match="'word'; use token or sequence"):
        token_ratios(current, anchor, mask, packed([3, 2]), "word")


def test_gspo_clips_whole_sequences() -> None:
    """Token ratios 2 and 1/2 cancel: PPO would clip one of them, but GSPO's ratio is 1. A sequence with ratio 1.5 is clipped."""
    logs = torch.tensor([math.log(2.0), -math.log(2.0), math.log(1.5), math.log(1.5)])
    data = {"packed_logprobs": torch.zeros(4), "advantages": torch.ones(4), "loss_mask": torch.ones(4).bool()}
    config = PPOConfig(use_decoupled_loss=False, importance_level="sequence", loss_normalization="sequence")
    loss, stats = PPOLoss(config, 2.0)(outputs(logs), data, packed([2, 2]))
    assert float(loss) == pytest.approx(-(1.0 + 1.2) / 2)
    assert stats["clip_share"] == 2


def test_corrections_by_hand() -> None:
    """IcePop's range of 0.5 to 5, truncated importance sampling with a cap of 2, and the cap of the decoupled loss."""
    weights = torch.tensor([0.4, 0.5, 1.0, 2.0, 5.0, 6.0])
    assert masked_weights(weights, 5.0, 0.5).tolist() == [0.0, 0.5, 1.0, 2.0, 5.0, 0.0]
    assert clamped_weights(weights, 2.0, None).tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 2.0, 2.0])
    assert masked_weights(weights, 5.0, None).tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 5.0, 0.0])
    assert clamped_weights(weights, 2.0, 0.5).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert torch.equal(masked_weights(weights, None, None), weights)
    assert torch.equal(clamped_weights(weights, None, None), weights)


def test_a_capped_behaviour_weight_masks_the_whole_sequence() -> None:
    """Weights e^0.1 and e^0.5 of one response give e^0.3, which is above the cap of 1.3. The other response is kept."""
    data = {
        "packed_logprobs": torch.tensor([-1.1, -1.5, -1.0]),
        "proximal_logprobs": torch.tensor([-1.0, -1.0, -1.0]),
        "advantages": torch.ones(3),
        "loss_mask": torch.ones(3).bool(),
    }
    config = PPOConfig(importance_level="sequence", loss_normalization="sequence", behav_imp_weight_cap=1.3)
    loss, stats = PPOLoss(config, 2.0)(outputs(data["proximal_logprobs"]), data, packed([2, 1]))
    assert float(loss) == pytest.approx(-0.5)
    assert stats["cap_share"] == 2


def test_kl_in_the_loss_by_hand() -> None:
    """k3 with d = 0.5 is e^-0.5 - 0.5 = 0.1065, times 0.2, added to -A r = -1. It also counts for tokens with a masked weight."""
    data = {
        "packed_logprobs": torch.tensor([-1.0, -9.0]),
        "proximal_logprobs": torch.tensor([-1.0, -1.0]),
        "packed_ref_logprobs": torch.tensor([-1.5, -1.5]),
        "advantages": torch.ones(2),
        "loss_mask": torch.ones(2).bool(),
    }
    config = PPOConfig(kl_coef=0.2, kl_in="loss", kl_estimator="k3")
    loss, stats = PPOLoss(config, 2.0)(outputs(torch.tensor([-1.0, -1.0])), data, packed([2]))
    kl = math.exp(-0.5) - 0.5
    assert float(loss) == pytest.approx((-1 + 2 * 0.2 * kl) / 2)
    assert float(stats["kl_loss"]) == pytest.approx(2 * kl)
    in_reward = PPOConfig(kl_coef=0.2, kl_estimator="k3")
    loss, stats = PPOLoss(in_reward, 2.0)(outputs(torch.tensor([-1.0, -1.0])), data, packed([2]))
    assert float(loss) == -0.5
    assert "kl_loss" not in stats


def test_a_capped_token_stays_in_the_denominator() -> None:
    """Of two equal tokens, the cap masks the one that was unlikely under the behaviour policy. The loss is half of the other's."""
    data = {
        "packed_logprobs": torch.tensor([-1.2, -1.5]),
        "proximal_logprobs": torch.tensor([-1.2, -1.2]),
        "advantages": torch.tensor([2.0, 2.0]),
        "loss_mask": torch.tensor([True, True]),
    }
    loss_fn = PPOLoss(PPOConfig(behav_imp_weight_cap=1.3), denominator=2.0)
    loss, stats = loss_fn(outputs(torch.tensor([-1.0, -1.0])), data, packed([2]))
    assert float(loss) == pytest.approx(-2 * 1.2 / 2)
    assert stats["cap_share"] == 1
    assert float(stats["behav_weight_max"]) == pytest.approx(math.exp(0.3))
    assert float(stats["behav_weight"]) == pytest.approx(1 + math.exp(0.3))


def test_normalisations_by_hand() -> None:
    """A response of 3 tokens with loss 1 each, and a response of 1 token with loss 5. The maximum length is 4."""
    loss, mask = torch.tensor([0.0, 1, 1, 1, 0, 5]), torch.tensor([False, True, True, True, False, True])
    for normalization, expected in (("token", 2.0), ("sequence", 3.0), ("constant", 1.0)):
        config = PPOConfig(loss_normalization=normalization, loss_length=4)
        total = sum_loss(loss, mask, packed([4, 2]), normalization, loss_denominator(config, 4.0, 2.0))
        assert float(total) == pytest.approx(expected), normalization
    with pytest.raises(ValueError, match="'word'; use token, sequence or constant"):
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
    current = data["current"]
    loss, stats = loss_fn(outputs(current, data["entropy"]), data, packed(lengths))
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert stats["num_tokens"] == data["loss_mask"].sum()
    assert float(stats["entropy"]) == pytest.approx(float(data["entropy"][data["loss_mask"]].sum()), abs=1e-5)
    for key in sums.keys() & stats.keys():
        assert float(stats[key]) == pytest.approx(sums[key], abs=1e-5), key
    assert ("behav_weight_max" in stats) is config.use_decoupled_loss


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_add_up(name: str) -> None:
    """Any split of the sequences gives the same loss, gradient and statistics. Empty parts are allowed."""
    config, (data, lengths) = CONFIGS[name], random_batch(7)
    loss_fn = PPOLoss(config, denominator(data["loss_mask"], lengths, config))
    results = []
    for cuts in ([0, 5], [0, 2, 5], [0, 0, 1, 2, 3, 4, 5]):
        current = data["current"].clone().requires_grad_()
        total, stats = torch.zeros(()), {"behav_weight_max": 0.0}
        for first, last in pairwise(cuts):
            here = slice(sum(lengths[:first]), sum(lengths[:last]))
            part = {key: value[here] for key, value in data.items()}
            loss, part_stats = loss_fn(
                outputs(current[here], current[here].detach()), part, packed(lengths[first:last])
            )
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


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.policy_loss == "clip"])
def test_gradient_against_finite_differences(name: str) -> None:
    """CISPO is left out because its gradient is not that of its value. Tests above check it by hand."""
    config, (data, lengths) = CONFIGS[name], random_batch(3)
    data = {key: value.double() if value.is_floating_point() else value for key, value in data.items()}
    loss_fn = PPOLoss(config, 10.0)

    def loss_of(current: Tensor) -> Tensor:
        return loss_fn(outputs(current), data, packed(lengths))[0]

    assert torch.autograd.gradcheck(loss_of, data["current"].clone().requires_grad_(), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.kl_coef == 0])
def test_the_gradient_on_policy_is_the_policy_gradient(name: str) -> None:
    """If the three policies are equal, the gradient of every loss is -A / n per token, apart from its normalisation.

    Both tokens have the same advantage, as with a reward for the whole response. So this also holds for GSPO.
    """
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    data = {
        "packed_logprobs": logprobs.detach(),
        "proximal_logprobs": logprobs.detach(),
        "advantages": torch.tensor([3.0, 3.0]),
        "loss_mask": torch.tensor([True, True]),
    }
    config = CONFIGS[name]
    scale = loss_denominator(config, 2.0, 1.0) * (2 if config.loss_normalization == "sequence" else 1)
    PPOLoss(config, loss_denominator(config, 2.0, 1.0))(outputs(logprobs), data, packed([2]))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-3 / scale] * 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_outside_the_mask_do_not_matter(name: str) -> None:
    config, (data, lengths) = CONFIGS[name], random_batch(5)
    loss_fn = PPOLoss(config, 10.0)
    garbage = {
        key: value if key == "loss_mask" else value.masked_fill(~data["loss_mask"], float("nan"))
        for key, value in data.items()
    }
    results = []
    for source in (data, garbage):
        current = source["current"].clone().requires_grad_()
        loss, stats = loss_fn(outputs(current, source["current"]), source, packed(lengths))
        loss.backward()
        results.append((loss.detach(), current.grad, stats))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("current", [-1000.0, 0.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_losses_with_extreme_ratios_are_finite(name: str, current: float, advantage: float) -> None:
    logprobs = torch.tensor([current], requires_grad=True)
    data = {
        "packed_logprobs": torch.tensor([-1500.0]),
        "proximal_logprobs": torch.tensor([-500.0]),
        "packed_ref_logprobs": torch.tensor([-1.0]),
        "advantages": torch.tensor([advantage]),
        "loss_mask": ON,
    }
    loss, stats = PPOLoss(CONFIGS[name], 1.0)(outputs(logprobs), data, packed([1]))
    loss.backward()
    assert logprobs.grad is not None
    assert math.isfinite(float(loss.detach()))
    assert math.isfinite(float(logprobs.grad))
    assert all(math.isfinite(float(value)) for value in stats.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_tokens(name: str) -> None:
    """An engine passes no tokens on a rank without samples. The result is a zero loss with a graph, and all statistics by name."""
    empty = torch.zeros(0)
    keys = ["packed_logprobs", "proximal_logprobs", "packed_ref_logprobs", "advantages"]
    data = dict.fromkeys(keys, empty) | {"loss_mask": empty.bool()}
    current = torch.zeros(0, requires_grad=True)
    loss, stats = PPOLoss(CONFIGS[name], 5.0)(outputs(current, empty), data, packed([]))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert {float(value) for value in stats.values()} == {0.0}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_reads_only_the_keys_that_it_names(name: str) -> None:
    config, (data, lengths) = CONFIGS[name], random_batch(2)
    named = {key: data[key] for key in loss_keys(config)}
    PPOLoss(config, 1.0)(outputs(data["current"]), named, packed(lengths))


# --------------------------------------------------------------------------------------------------------------- terms


def test_terms_by_hand() -> None:
    """Two trained tokens with ratios 1, logprobs of -1 and -2, advantages of 3 and -1, d of 0.5 and -0.5, entropies of 0.7 and 1.1.

    Policy: (-3 + 1) / 2. KL (k2): 0.1 * (0.125 + 0.125) / 2. Entropy: -0.2 * (0.7 + 1.1) / 2. The third token is not trained.
    """
    logprobs = torch.tensor([-1.0, -2.0, -9.0], requires_grad=True)
    entropy = torch.tensor([0.7, 1.1, 5.0], requires_grad=True)
    data = {
        "packed_logprobs": logprobs.detach(),
        "proximal_logprobs": logprobs.detach(),
        "packed_ref_logprobs": torch.tensor([-1.5, -1.5, 0.0]),
        "advantages": torch.tensor([3.0, -1.0, 7.0]),
        "loss_mask": torch.tensor([True, True, False]),
    }
    config = PPOConfig(kl_coef=0.1, kl_in="loss", kl_estimator="k2", entropy_coef=0.2)
    assert terms_of(config) == [TERMS["policy"], TERMS["kl"], TERMS["entropy"]]
    of_term = {
        name: term.compute(outputs(logprobs, entropy), data, packed([3]), config) for name, term in TERMS.items()
    }
    assert of_term["policy"].loss_T.tolist() == [-3, 1, 0]
    assert of_term["kl"].loss_T.tolist() == pytest.approx([0.0125, 0.0125, 0])
    assert of_term["entropy"].loss_T.tolist() == pytest.approx([-0.14, -0.22, 0])
    loss, stats = PPOLoss(config, 2.0)(outputs(logprobs, entropy), data, packed([3]))
    assert float(loss.detach()) == pytest.approx(-1 + 0.0125 - 0.18)
    assert float(stats["policy_loss"]) == -2
    assert float(stats["kl_loss"]) == pytest.approx(0.25)
    assert float(stats["entropy"]) == pytest.approx(1.8)
    loss.backward()
    assert logprobs.grad is not None
    assert entropy.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([(-3 + 0.1 * 0.5) / 2, (1 - 0.1 * 0.5) / 2, 0])
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.1, 0])


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.entropy_coef == 0])
@pytest.mark.parametrize("seed", range(3))
def test_without_entropy_the_loss_is_bit_equal_to_the_single_expression(name: str, seed: int) -> None:
    """The expression from which the terms were separated."""
    config, (data, lengths) = CONFIGS[name], random_batch(seed)
    mask, anchor = data["loss_mask"], data[anchor_key(config)]
    behaviour = data["packed_logprobs"] if config.use_decoupled_loss else None
    results = []
    for is_whole in (True, False):
        current = data["current"].clone().requires_grad_()
        if is_whole:
            entropy = data["entropy"].clone().requires_grad_()
            loss, _ = PPOLoss(config, 10.0)(outputs(current, entropy), data, packed(lengths))
        else:
            cu_seqlens = packed(lengths)
            token = policy_token_loss(current, anchor, behaviour, data["advantages"], mask, cu_seqlens, config)
            loss_T = token.loss_T
            if config.kl_coef > 0 and config.kl_in == "loss":
                ref = data["packed_ref_logprobs"].masked_fill(~mask, 0.0)
                kl = kl_estimate(current.masked_fill(~mask, 0.0), ref, config.kl_estimator)
                loss_T = loss_T + config.kl_coef * kl
            loss = sum_loss(loss_T, mask, cu_seqlens, config.loss_normalization, 10.0)
        loss.backward()
        results.append((loss.detach(), current.grad))
    assert entropy.grad is None
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------- early stop


@pytest.mark.parametrize(
    ("fields", "ratio", "kl", "reason"),
    [
        ({}, 100.0, 100.0, ""),
        ({"early_stop_imp_ratio": 5.0}, 5.0, 100.0, ""),
        (
            {"early_stop_imp_ratio": 5.0},
            5.1,
            0.0,
            "mean importance ratio 5.1 is above train.ppo.early_stop_imp_ratio=5",
        ),
        ({"early_stop_kl": 0.1}, 100.0, 0.1, ""),
        (
            {"early_stop_kl": 0.1},
            1.0,
            0.25,
            "mean KL to the anchor policy 0.25 is above train.ppo.early_stop_kl=0.1",
        ),
        ({"early_stop_kl": 0.1}, 1.0, -0.25, ""),
        ({"early_stop_imp_ratio": 2.0, "early_stop_kl": 0.1}, math.nan, math.nan, ""),
    ],
)
def test_early_stop_by_hand(fields: dict[str, float], ratio: float, kl: float, reason: str) -> None:
    """Sums over 8 tokens, as the engine reduces them. Non-finite values are no reason to stop: the engine skips such steps."""
    stats = {"num_tokens": 8.0, "importance_weight": 8 * ratio, "approx_kl": 8 * kl}
    assert PPOLoss(PPOConfig(**fields), 3.0).stop_reason(stats) == reason  # type: ignore[arg-type]


def test_early_stop_by_the_statistics_of_the_loss() -> None:
    """If all tokens became e times as likely, the ratio is e and k1 is -1. If they became less likely by a factor e, k1 is 1."""
    data = {
        "packed_logprobs": torch.full((4,), -2.0),
        "advantages": torch.ones(4),
        "loss_mask": torch.tensor([True, True, True, False]),
    }
    loss_fn = PPOLoss(PPOConfig(use_decoupled_loss=False, early_stop_imp_ratio=2.5, early_stop_kl=0.9), 3.0)
    reasons = []
    for current in (-2.0, -1.0, -3.0):
        _, stats = loss_fn(outputs(torch.full((4,), current)), data, packed([4]))
        reasons.append(loss_fn.stop_reason({name: float(value) for name, value in stats.items()}))
    assert reasons[0] == ""
    assert reasons[1].startswith("mean importance ratio 2.718")
    assert reasons[2].startswith("mean KL to the anchor policy 1 ")


# -------------------------------------------------------------------------------------------------------------- config


def test_the_anchor_of_each_loss() -> None:
    assert anchor_key(CONFIGS["decoupled"]) == "proximal_logprobs"
    assert anchor_key(CONFIGS["recomputed"]) == "proximal_logprobs"
    assert anchor_key(CONFIGS["naive"]) == "packed_logprobs"


@pytest.mark.parametrize("name", CONFIGS)
def test_accepted_configs(name: str) -> None:
    check_ppo_config(CONFIGS[name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eps_clip": 0.0}, "eps_clip is 0.0"),
        ({"eps_clip": 1.5}, "eps_clip is 1.5; must be above 0 and at most 1"),
        ({"eps_clip_higher": -0.1}, "eps_clip_higher is -0.1; must be above 0, or null for eps_clip"),
        ({"c_clip": 1.0}, "c_clip is 1.0; must be above 1"),
        ({"c_clip": 3.0, "policy_loss": "cispo"}, "c_clip is 3.0; applies to policy_loss=clip only"),
        ({"behav_imp_weight_cap": 0.0}, "behav_imp_weight_cap is 0.0"),
        ({"behav_imp_weight_floor": 0.0}, "behav_imp_weight_floor is 0.0"),
        ({"behav_imp_weight_floor": 5.0}, "behav_imp_weight_floor is 5.0; must be below behav_imp_weight_cap=5"),
        ({"behav_imp_weight_mode": "truncate"}, "behav_imp_weight_mode is 'truncate'"),
        ({"early_stop_imp_ratio": 1.0}, "early_stop_imp_ratio is 1.0; must be above 1"),
        ({"early_stop_kl": 0.0}, "early_stop_kl is 0.0"),
        ({"policy_loss": "cisp"}, "policy_loss is 'cisp'; did you mean 'cispo'"),
        ({"importance_level": "word"}, "importance_level is 'word'"),
        ({"loss_normalization": "word"}, "loss_normalization is 'word'"),
        ({"loss_normalization": "constant"}, "loss_length is 0"),
        ({"baseline": "mean"}, "baseline is 'mean'; did you mean 'group_mean'"),
        ({"advantage_norm": "rank"}, "advantage_norm is 'rank'"),
        ({"overlong_penalty": 1.0}, "overlong_length is 0"),
        ({"overlong_penalty": -1.0}, "overlong_penalty is -1.0"),
        ({"overlong_buffer": 0.0}, "overlong_buffer is 0.0"),
        ({"kl_in": "rewards"}, "kl_in is 'rewards'; did you mean 'reward'"),
        ({"kl_in": "loss", "kl_adaptive": True}, "kl_adaptive is True; applies to kl_in=reward only"),
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4'"),
        ({"minibatches": 0}, "minibatches is 0"),
        ({"entropy_target": 0.0}, "entropy_target is 0.0; must be above 0, or null for a fixed entropy_coef"),
        ({"recompute_logprob": True}, "recompute_logprob is True; applies to the naive loss only"),
    ],
)
def test_refused_configs(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r"train\.ppo\.") as error:
        check_ppo_config(PPOConfig(**fields))  # type: ignore[arg-type]
    assert f"train.ppo.{message}" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
