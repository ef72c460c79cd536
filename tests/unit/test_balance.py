"""Data ranks that wait for each other get about the same FLOPs: those of a minibatch, and their micro-batches at the same time."""

from itertools import chain

import numpy as np
import pytest

from asyncrl.architectures.attention import Pattern, read_attention
from asyncrl.config.schema import PPOConfig, TrainConfig
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.minibatches import split_minibatches
from asyncrl.master.balance import Balance
from asyncrl.model.flops import flops_of
from asyncrl.model.packing import plan_micro_batches
from asyncrl.protocol.model_flops import ModelFlops
from asyncrl.testing.tiny import make_tiny_model
from tests.support.families import make_family
from tests.support.master import make_meta

SMALL = ModelFlops(num_parameters=1_544_000_000, widths=[(0, 0, 28 * 12 * 128)])  # as of Qwen2.5-1.5B
TOKENS = ModelFlops()


def metas_of(groups):
    return [make_meta(i, f"t{i}", seqlens=lengths) for i, lengths in enumerate(groups)]


def ranks_of(groups, num_ranks, counted, *, minibatches=1, version=None):
    """The lengths of each rank, by minibatch."""
    mfcs, metas = [MFCDef("train", "actor", "train_step", "x:y", (), model="actor")], metas_of(groups)
    balance = Balance(mfcs, TrainConfig(ppo=PPOConfig(minibatches=minibatches)), seed=1)
    balance.flops["actor"] = counted
    parts = balance.deal("actor", metas, num_ranks, {}, drawn_for=version)
    ids = [meta.ticket_id for meta in metas]
    assert sorted(group for part in parts for group in part) == sorted(ids)
    assert all(part == [group for group in ids if group in part] for part in parts)
    lengths = dict(zip(ids, groups, strict=True))
    drawn = split_minibatches(ids, minibatches, seed=1, version=version or 0)
    return [[[n for group in part if group in some for n in lengths[group]] for part in parts] for some in drawn]


def fullest(ranks):
    """FLOPs of the fullest rank, and their mean."""
    flops = [SMALL.of_batch(lengths) for lengths in ranks]
    return max(flops), sum(flops) / len(flops)


def waits(ranks, counted, max_tokens):
    """The FLOPs for which all ranks wait: in each micro-batch those of the slowest rank."""
    plans, count = [], 1
    for _ in range(2):  # the second time with the largest number of micro-batches
        plans = [
            plan_micro_batches(lengths, max_tokens, costs=[counted.of_batch([n]) for n in lengths], min_count=count)
            for lengths in ranks
        ]
        count = max(map(len, plans))
    flops = [
        [SMALL.of_batch([lengths[i] for i in micro_batch.sequences]) for micro_batch in plan]
        for lengths, plan in zip(ranks, plans, strict=True)
    ]
    return sum(max(at_once) for at_once in zip(*flops, strict=True))


def skewed(num_groups, rng):
    """Groups of 8 responses; the lengths of a group are similar, those of two groups differ by up to 30 times."""
    return [
        np.exp(rng.normal(rng.uniform(6, 9), 0.5, 8)).clip(64, 16384).astype(int).tolist() for _ in range(num_groups)
    ]


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (3, 0), (0, 4), (2, 4), (20, 20)])
def test_attention_costs_the_pairs_that_its_pattern_shows(window, chunk):
    flops = ModelFlops(num_parameters=5, widths=[(window, chunk, 7)])
    for length in range(12):
        at = np.arange(length)
        pairs = int(Pattern(window, chunk).shows(at[:, None], at[None]).sum())
        assert flops.of_batch([length]) == 2 * 5 * length + 4 * 7 * pairs
    assert flops.of_batch([4, 9], trains=True) == 3 * (flops.of_batch([4]) + flops.of_batch([9]))


def test_a_models_windows_are_read_from_the_model():
    model = make_family(None, "qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert flops_of(model).widths == [(0, 0, 2 * 4 * 16)]
    read_attention(model, "m")
    assert flops_of(model).widths == [(0, 0, 4 * 16), (16, 0, 4 * 16)]


def test_layers_with_a_state_have_no_pairs_of_tokens():
    model = make_tiny_model(None, "qwen3_5_text", num_layers=3)
    read_attention(model, "m")
    assert flops_of(model).widths == [(0, 0, 4 * 16)]  # of the second layer


def test_one_long_sequence_among_many_short_ones_counts_by_its_flops():
    rng = np.random.default_rng(0)
    groups = [[16384] + [400] * 7] + [rng.integers(200, 800, 8).tolist() for _ in range(127)]
    (by_tokens,), (by_flops,) = ranks_of(groups, 8, TOKENS), ranks_of(groups, 8, SMALL)
    (before, mean), (after, same_mean) = fullest(by_tokens), fullest(by_flops)
    assert mean == same_mean
    assert before / mean > 1.08 > 1.03 > after / mean


def test_ranks_wait_less_for_each_others_micro_batches():
    groups = skewed(128, np.random.default_rng(0))
    (by_tokens,), (by_flops,) = ranks_of(groups, 8, TOKENS), ranks_of(groups, 8, SMALL)
    _, mean = fullest(by_tokens)
    assert waits(by_tokens, TOKENS, 16384) / mean > 1.08 > 1.04 > waits(by_flops, SMALL, 16384) / mean


def test_each_minibatch_is_balanced_by_itself():
    """A rank's share of the batch may be the mean, and its share of a minibatch twice the mean."""
    groups = skewed(128, np.random.default_rng(0))
    for version in range(3):
        drawn = ranks_of(groups, 8, SMALL, minibatches=4, version=version)
        assert len(drawn) == 4
        assert all(most < 1.1 * mean for most, mean in map(fullest, drawn))
        most, mean = fullest([list(chain(*of_rank)) for of_rank in zip(*drawn, strict=True)])
        assert most < 1.03 * mean  # for the passes over the whole batch


def test_the_ranks_take_turns_where_minibatches_have_few_groups():
    groups = [[100 * (1 + i)] for i in range(24)]
    drawn = ranks_of(groups, 8, TOKENS, minibatches=8, version=0)
    assert all(sorted(map(len, ranks)) == [0] * 5 + [1] * 3 for ranks in drawn)
    tokens = [sum(map(sum, of_rank)) for of_rank in zip(*drawn, strict=True)]
    assert max(tokens) < 1.4 * sum(tokens) / 8
