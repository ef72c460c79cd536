"""Properties of the algorithms on any batch: how they relate to each other, and that splitting a batch changes no update."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.advantages import (
    compute_advantages,
    distillation_advantages,
    distillation_keys,
    group_advantages,
    leave_one_out_advantages,
    mean_baseline_advantages,
    overlong_penalties,
    returns_of,
)
from asyncrl.algorithms.packed import count_per_sequence
from asyncrl.algorithms.ppo import PPOLoss, clamped_weights, loss_denominator, loss_keys, masked_weights, token_ratios
from asyncrl.algorithms.value import ValueLoss
from asyncrl.config.presets import ALGORITHMS, CORRECTIONS
from asyncrl.config.schema import PPOConfig

torch.set_num_threads(1)

quickly = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31)
group_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=5)
rewards = st.floats(-10, 10, allow_subnormal=False)


def config_of(name: str, **fields: object) -> PPOConfig:
    """Return the PPOConfig of a preset, with responses of at most 16 tokens."""
    preset = (ALGORITHMS | CORRECTIONS)[name]["train"]["ppo"]
    return PPOConfig(**{key: 16 if key.endswith("_length") else value for key, value in preset.items()} | fields)


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def batch(seed: int, lengths: list[int], spread: float = 0.4) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    data = {"packed_logprobs": -3 * torch.rand(total, generator=random)}
    data["proximal_logprobs"] = data["packed_logprobs"] + spread * torch.randn(total, generator=random)
    data["current"] = data["proximal_logprobs"] + spread * torch.randn(total, generator=random)
    data["advantages"] = torch.randn(total, generator=random)
    data["loss_mask"] = torch.rand(total, generator=random) < 0.7
    return data


def loss_and_gradient(
    config: PPOConfig, data: dict[str, Tensor], lengths: list[int], denominator: float
) -> tuple[Tensor, Tensor]:
    current = data["current"].clone().requires_grad_()
    outputs = {"logprobs": current, "entropy": torch.zeros(len(current))}
    loss, _ = PPOLoss(config, denominator)(outputs, data, packed(lengths))
    loss.backward()
    assert current.grad is not None
    return loss.detach(), current.grad


# ------------------------------------------------------------------------------------------------------------ advantages


@quickly
@given(group_sizes, st.data())
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(sizes: list[int], draw: st.DataObject) -> None:
    rewards_S = torch.tensor(draw.draw(st.lists(rewards, min_size=sum(sizes), max_size=sum(sizes))))
    factors = torch.cat([torch.full((n,), n / (n - 1) if n > 1 else 1.0) for n in sizes])
    torch.testing.assert_close(
        leave_one_out_advantages(rewards_S, sizes),
        factors * mean_baseline_advantages(rewards_S, sizes),
        rtol=1e-5,
        atol=1e-5,
    )
    start = 0
    for n in sizes:  # compare with the definition
        for s in range(start, start + n if n > 1 else start):
            others = [float(rewards_S[u]) for u in range(start, start + n) if u != s]
            expected = float(rewards_S[s]) - sum(others) / len(others)
            assert float(leave_one_out_advantages(rewards_S, sizes)[s]) == pytest.approx(expected, abs=1e-4)
        start += n


@quickly
@given(seeds, group_sizes, st.floats(0.1, 10), st.floats(-10, 10))
def test_grpo_is_invariant_to_the_units_of_rewards(seed: int, sizes: list[int], scale: float, shift: float) -> None:
    """Positive scaling and shifting of the rewards, or a baseline before, do not change the result. Negated rewards negate it."""
    rewards_S = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
    expected = group_advantages(rewards_S, sizes)
    close = {"rtol": 1e-3, "atol": 1e-3}  # eps is added to the std: a relative error of up to 1e-6 / 1e-3
    assume(all(n == 1 or float(part.std()) > 1e-2 for n, part in zip(sizes, rewards_S.split(sizes), strict=True)))
    torch.testing.assert_close(group_advantages(scale * rewards_S + shift, sizes), expected, **close)
    torch.testing.assert_close(group_advantages(-rewards_S, sizes), -expected, **close)
    torch.testing.assert_close(group_advantages(leave_one_out_advantages(rewards_S, sizes), sizes), expected, **close)


@quickly
@given(seeds, group_sizes)
def test_advantages_of_a_group_sum_to_zero(seed: int, sizes: list[int]) -> None:
    rewards_S = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
    for of_group in (group_advantages, mean_baseline_advantages, leave_one_out_advantages):
        for part in of_group(rewards_S, sizes).split(sizes):
            assert abs(float(part.sum())) < 1e-4


@quickly
@given(
    st.lists(st.integers(0, 300), min_size=1),
    st.integers(1, 200),
    st.floats(0.01, 1.0),
    st.floats(0.0, 5.0),
)
def test_a_longer_response_never_has_a_smaller_penalty(
    lengths: list[int], length: int, buffer: float, penalty: float
) -> None:
    lengths_S = torch.tensor(sorted(lengths))
    penalties = overlong_penalties(lengths_S, length=length, buffer=buffer, penalty=penalty)
    assert (penalties.diff() <= 0).all()
    assert (penalties <= 0).all()
    assert (penalties >= -penalty * (1 + 1e-6)).all()
    assert (penalties[lengths_S >= length] + penalty).abs().sum() < 1e-4
    assert not penalties[lengths_S <= (1 - buffer) * length - 1e-3].any()


@pytest.mark.parametrize("name", ALGORITHMS)
@quickly
@given(seed=seeds, sizes=group_sizes)
def test_advantages_of_a_group_do_not_depend_on_other_groups(name: str, seed: int, sizes: list[int]) -> None:
    """A rank with some of the groups computes the same as a rank with all. test_normalisation.py covers the batch norm."""
    config = config_of(name)
    if config.advantage_norm == "batch":
        config = config_of(name, advantage_norm="none")
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 20, (sum(sizes),), generator=random).tolist()
    data = {
        "rewards": torch.randn(sum(sizes), generator=random),
        "seq_no_eos_mask": torch.rand(sum(sizes), generator=random) < 0.3,
        "loss_mask": torch.rand(sum(lengths), generator=random) < 0.7,
    }
    whole = compute_advantages(data, packed(lengths), sizes, config, kl_coef=0.0)
    parts, first = [], 0
    for n in sizes:
        of_group = lengths[first : first + n]
        tokens = slice(sum(lengths[:first]), sum(lengths[: first + n]))
        part = {key: value[tokens] if key == "loss_mask" else value[first : first + n] for key, value in data.items()}
        parts.append(compute_advantages(part, packed(of_group), [n], config, kl_coef=0.0))
        first += n
    torch.testing.assert_close(torch.cat([part.advantages_T for part in parts]), whole.advantages_T)
    torch.testing.assert_close(torch.cat([part.returns_T for part in parts]), whole.returns_T)
    assert torch.cat([part.states_T for part in parts]).equal(whole.states_T)


# ---------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("name", [*ALGORITHMS, *CORRECTIONS])
@quickly
@given(seed=seeds, lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8), draw=st.data())
def test_splitting_into_micro_batches_does_not_change_the_update(
    name: str, seed: int, lengths: list[int], draw: st.DataObject
) -> None:
    """Splits between sequences, at any place: the sum of losses over the global denominator and every gradient are the same."""
    config, data = config_of(name), batch(seed, lengths)
    counts = count_per_sequence(data["loss_mask"], packed(lengths))
    denominator = max(loss_denominator(config, float(counts.sum()), float((counts > 0).sum())), 1.0)
    loss, gradient = loss_and_gradient(config, data, lengths, denominator)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    total, found = torch.zeros(()), torch.zeros_like(gradient)
    for first, last in pairwise([0, *cuts, len(lengths)]):
        here = slice(sum(lengths[:first]), sum(lengths[:last]))
        part = {key: value[here] for key, value in data.items()}
        part_loss, found[here] = loss_and_gradient(config, part, lengths[first:last], denominator)
        total = total + part_loss
    torch.testing.assert_close(total, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*ALGORITHMS, *CORRECTIONS])
@quickly
@given(seed=seeds, n=st.integers(1, 8))
def test_importance_levels_agree_for_sequences_of_one_token(name: str, seed: int, n: int) -> None:
    """GSPO equals PPO there, corrections included."""
    data = batch(seed, [1] * n, spread=1.0)
    results = [
        loss_and_gradient(config_of(name, importance_level=level), data, [1] * n, 3.0)
        for level in ("token", "sequence")
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@quickly
@given(seed=seeds, lengths=st.lists(st.integers(1, 10), min_size=1, max_size=4))
def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens(seed: int, lengths: list[int]) -> None:
    data, cu_seqlens = batch(seed, lengths), packed(lengths)
    mask_T = data["loss_mask"]
    arguments = data["current"], data["proximal_logprobs"], mask_T, cu_seqlens
    of_tokens, of_sequences = token_ratios(*arguments, "token"), token_ratios(*arguments, "sequence")
    for first, last in pairwise(cu_seqlens.tolist()):
        here = mask_T[first:last]
        expected = of_tokens[first:last][here].log().mean().exp()
        torch.testing.assert_close(of_sequences[first:last][here], expected.expand(int(here.sum())))


@quickly
@given(seed=seeds, lengths=st.lists(st.integers(1, 10), min_size=1, max_size=4))
def test_within_the_clip_range_ppo_and_cispo_have_the_same_gradient(seed: int, lengths: list[int]) -> None:
    """d(r A) = r A d log pi: they differ only in how they treat ratios outside the range."""
    data = batch(seed, lengths, spread=0.01)
    gradients = [
        loss_and_gradient(PPOConfig(policy_loss=policy_loss), data, lengths, 5.0)[1]
        for policy_loss in ("clip", "cispo")
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


@quickly
@given(
    st.lists(st.floats(0.01, 100), min_size=1),
    st.sampled_from([None, 1.0, 2.0, 5.0]),
    st.sampled_from([None, 0.25, 0.5]),
)
def test_corrections_keep_weights_within_bounds_and_limit_the_rest(
    weights: list[float], cap: float | None, floor: float | None
) -> None:
    weight_T = torch.tensor(weights)
    masked, clamped = masked_weights(weight_T, cap, floor), clamped_weights(weight_T, cap, floor)
    for weight, by_mask, by_clamp in zip(weight_T.tolist(), masked.tolist(), clamped.tolist(), strict=True):
        within = (cap is None or weight <= cap) and (floor is None or weight >= floor)
        assert by_mask == (weight if within else 0.0)
        assert by_clamp == pytest.approx(min(max(weight, floor or 0.0), cap or math.inf))


# ------------------------------------------------------------------------------------------- data that must not matter

TERM_SETS = {
    "policy": {},
    "kl": {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"},
    "entropy": {"entropy_coef": 0.2},
    "all": {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k2", "entropy_coef": 0.2},
    "kl in the reward": {"kl_coef": 0.1, "kl_in": "reward"},
    "naive": {"use_decoupled_loss": False},
}
GARBAGE = [math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0]


@pytest.mark.parametrize("terms", TERM_SETS)
@pytest.mark.parametrize("name", [*ALGORITHMS, *CORRECTIONS])
@settings(max_examples=10, deadline=None)
@given(seed=seeds, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), draw=st.data())
def test_data_of_masked_tokens_changes_no_loss_and_no_gradient(
    name: str, terms: str, seed: int, sizes: list[int], draw: st.DataObject
) -> None:
    """From trajectories to the gradients of actor and critic, with a teacher. Every key gets other values where the policy sampled
    no token: numbers, infinities and NaN. A value counts one token earlier, at the state in which a token was sampled."""
    config = config_of(name, **TERM_SETS[terms])
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (sum(sizes),), generator=random).tolist()
    data, cu_seqlens, total = batch(seed, lengths), packed(lengths), sum(lengths)
    for key in ("packed_ref_logprobs", "packed_teacher_logprobs", "values", "new values", "entropy"):
        data[key] = torch.randn(total, generator=random)
    data["rewards"] = torch.randn(len(lengths), generator=random)
    data["seq_no_eos_mask"] = torch.rand(len(lengths), generator=random) < 0.3
    sampled_T = data["loss_mask"]
    states_T = returns_of(torch.zeros(total), torch.zeros(total), sampled_T, cu_seqlens)[1]
    changed = dict(data)
    for key, x_T in data.items():
        counts_T = sampled_T | states_T if key == "values" else states_T if key == "new values" else sampled_T
        if len(x_T) == total and x_T.is_floating_point() and key not in ("rewards", "advantages"):
            values = draw.draw(st.lists(st.sampled_from(GARBAGE), min_size=total, max_size=total))
            changed[key] = torch.where(counts_T, x_T, torch.tensor(values))

    def results(data: dict[str, Tensor]) -> list[Tensor]:
        made = compute_advantages(data, cu_seqlens, sizes, config, kl_coef=config.kl_coef)
        policy_T, teacher_T = (data[key] for key in distillation_keys(config))
        advantages_T = made.advantages_T + distillation_advantages(policy_T, teacher_T, made.mask_T, 0.5)
        inputs = {key: data[key].clone().requires_grad_() for key in ("current", "entropy", "new values")}
        # What the advantages leave outside the mask must not matter either.
        of_actor = {key: data[key] for key in loss_keys(config) if key in data}
        of_actor |= {"advantages": torch.where(made.mask_T, advantages_T, data["current"]), "loss_mask": made.mask_T}
        outputs = {"logprobs": inputs["current"], "entropy": inputs["entropy"]}
        loss, stats = PPOLoss(config, 7.0)(outputs, of_actor, cu_seqlens)
        returns_T = torch.where(made.states_T, made.returns_T, data["current"])
        of_critic = {"values": data["values"], "returns": returns_T, "loss_mask": made.states_T}
        critic_loss, critic_stats = ValueLoss(0.2, 7.0)({"values": inputs["new values"]}, of_critic, cu_seqlens)
        grads = torch.autograd.grad(loss + critic_loss, list(inputs.values()), allow_unused=True)
        grads = [torch.zeros(total) if grad is None else grad for grad in grads]
        return [advantages_T, loss.detach(), critic_loss.detach(), *grads, *stats.values(), *critic_stats.values()]

    before = results(data)
    assert all(x.isfinite().all() for x in before)
    for found, expected in zip(results(changed), before, strict=True):
        assert torch.equal(found, expected)


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize("correction", ["mask", "tis", "icepop"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns(name: str, correction: str) -> None:
    """The policy is one distribution over 4 tokens; the reward is the share of token 3 in responses of 1 to 6 tokens.

    The sampling policy lags one step behind. Groups have 8 responses, and a step has two minibatches.
    """
    fields = {key: 6 if key.endswith("_length") else value for key, value in ALGORITHMS[name]["train"]["ppo"].items()}
    config = PPOConfig(**fields | CORRECTIONS[correction]["train"]["ppo"] | {"overlong_penalty": 0.0})
    random = torch.Generator().manual_seed(1)
    logits = torch.zeros(4, requires_grad=True)
    served = [logits.detach().clone()] * 2  # samples come from the version before the newest one
    # Optimizer: Adam, because the losses differ in scale. One step leaves GSPO's range, so its second minibatch often does nothing.
    optimizer = torch.optim.Adam([logits], lr=0.05)
    shares = []
    for _ in range(30):
        lengths = torch.randint(1, 7, (32,), generator=random).tolist()
        tokens = torch.multinomial(served[0].softmax(0), sum(lengths), replacement=True, generator=random)
        cu_seqlens, sizes = packed(lengths), [8] * 4
        rewards_S = torch.stack([(part == 3).float().mean() for part in tokens.split(lengths)])
        shares.append(float(rewards_S.mean()))
        data = {
            "rewards": rewards_S,
            "seq_no_eos_mask": torch.zeros(32, dtype=torch.bool),
            "loss_mask": torch.ones(len(tokens), dtype=torch.bool),
            "packed_logprobs": served[0].log_softmax(0)[tokens],
            "proximal_logprobs": logits.detach().log_softmax(0)[tokens],
        }
        data["advantages"] = compute_advantages(data, cu_seqlens, sizes, config, kl_coef=0.0).advantages_T
        for first in (0, 16):
            here = slice(int(cu_seqlens[first]), int(cu_seqlens[first + 16]))
            part = {key: data[key][here] for key in loss_keys(config)}
            logprobs = logits.log_softmax(0)[tokens[here]]
            loss_fn = PPOLoss(config, loss_denominator(config, float(len(logprobs)), 16.0))
            outputs = {"logprobs": logprobs, "entropy": torch.zeros(len(logprobs))}
            loss, _ = loss_fn(outputs, part, packed(lengths[first : first + 16]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        served = [served[1], logits.detach().clone()]
    assert sum(shares[:3]) / 3 < 0.4
    assert sum(shares[-3:]) / 3 > 0.6, shares
