"""Train steps on parts of a batch (train.streaming), on the fake engines of test_interfaces.py."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_interfaces import Engines, fake_ranks, interfaces, make_batch, run_step, train_config

from asyncrl.config.schema import CriticConfig, RewardModelConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import build_dataflow

STREAMED = {
    "token": {},
    "sequence": {"advantage_norm": "none", "loss_normalization": "sequence", "c_clip": 2.0},
    "constant": {"loss_normalization": "constant", "loss_length": 5},
    "masks": {"mask_too_long": True, "mask_no_eos_with_zero": True},
    "naive": {"use_decoupled_loss": False},
    "adaptive kl": {"kl_coef": 0.1, "kl_adaptive": True, "kl_horizon": 100.0, "kl_estimator": "k3"},
    "kl in the loss": {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"},
    "early stop": {"early_stop_imp_ratio": 1.0 + 1e-6, "use_decoupled_loss": False},
    "critic": {
        "advantage_norm": "none",
        "gae_lambda": 0.9,
        "kl_coef": 0.1,
        "critic": CriticConfig(minibatches=1),
        "reward_model": RewardModelConfig(scale=0.5),
    },
}
PARTS = [
    [[0, 1, 2, 3, 4, 5, 6]],
    [[4, 2], [0], [6, 1, 3, 5]],
    [[0], [1], [2], [3], [4], [5], [6]],
    [[5, 1], [0, 2, 3, 4, 6], []],
]


def run_in_parts(
    train: TrainConfig, batch: SequenceSample, parts: Sequence[Sequence[int]], num_ranks: int, steps: int = 2
) -> tuple[list[Engines], list[list[dict[str, float]]]]:
    """Like run_step, with the groups of a step in parts. Each part is dealt to the ranks in turn."""

    def run_rank(rank: int) -> list[dict[str, float]]:
        mfcs, graph, results = interfaces(train), build_dataflow(train), []
        for version in range(steps):
            stats: dict[str, float] = {}
            begun = {name: interface.begin(version) for name, interface in mfcs.items()}
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                ids = [batch.ids[g] for g in sorted(part)]
                here = ids[rank::num_ranks]
                sample = batch.select_ids(here) if here else None
                for name, interface in mfcs.items():
                    engine = engines[rank][graph.mfcs[name].role]
                    step, step.ends = begun[name], last
                    made, found = interface.run(engine, sample, batch_ids=ids, step=step)
                    stats |= interface.stats_of_step(found, batch_ids=ids, step=step)
                    sample = sample.update(made) if made is not None and sample is not None else sample
            results.append(stats)
        return results

    engines = fake_ranks(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return engines, list(pool.map(run_rank, range(num_ranks)))


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(str(len(part)) for part in parts))
@pytest.mark.parametrize("name", STREAMED)
def test_parts_of_a_batch_give_the_update_of_the_whole(name: str, parts: list[list[int]]) -> None:
    """Two steps: the second one shows that nothing of the first remains, and that the KL coefficient was adapted once."""
    train, batch = train_config(minibatches=1, **STREAMED[name]), make_batch()
    (whole,), (expected,) = run_step(train, batch, [range(7)])
    assert expected[1]["actor/grad_norm"] > 0
    assert expected[1]["actor/stopped_steps"] == (1.0 if name == "early stop" else 0.0)
    for num_ranks in (1, 2):
        engines, stats = run_in_parts(train, batch, parts, num_ranks)
        for rank_engines, rank_stats in zip(engines, stats, strict=True):
            for role, engine in rank_engines.items():
                torch.testing.assert_close(engine.table, whole[role].table, rtol=1e-5, atol=1e-6)
            for rank_step, step in zip(rank_stats, expected, strict=True):
                assert rank_step == pytest.approx(step, rel=1e-5, abs=1e-5)


def test_parts_without_trained_tokens_cause_no_step() -> None:
    batch = make_batch()
    all_true = np.ones_like(batch.data["seq_no_eos_mask"])
    truncated = SequenceSample(batch.ids, batch.seqlens, batch.data | {"seq_no_eos_mask": all_true})
    train = train_config(minibatches=1, mask_too_long=True)
    (engines,), ((stats, _),) = run_in_parts(train, truncated, PARTS[1], 1)
    assert engines["actor"].batches == []
    assert (stats["actor/empty_minibatches"], stats["actor/optimizer_steps"]) == (1.0, 0.0)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("lost_in", [0, 1, 2])
def test_a_reference_that_goes_missing_between_two_parts(kl_in: str, lost_in: int) -> None:
    """The step is that of a whole batch whose groups of that part have no KL term, and nothing of it remains in the next step.

    In the whole batch the reference agrees with the policy on these groups, so that their KL term has no value and no gradient.
    """
    train = train_config(minibatches=1, advantage_norm="none", kl_coef=0.5, kl_in=kl_in, kl_estimator="k3")
    parts = [["ticket0", "ticket1"], ["ticket2", "ticket3", "ticket4"], ["ticket5", "ticket6"]]
    batch, missing = make_batch(), {"packed_ref_logprobs"}
    ref = batch.data["packed_ref_logprobs"]
    (engines,), (expected,) = fake_ranks(1), fake_ranks(1)
    in_parts, whole = interfaces(train), interfaces(train)
    for version in range(3):
        lost = parts[lost_in] if version < 2 else []
        begun = {name: interface.begin(version) for name, interface in in_parts.items()}
        for number, ids in enumerate(parts):
            sample = batch.select_ids(ids).update(  # also those of the reference, which are not read if it is missing
                in_parts["actor_inf"].run(
                    engines["actor"], batch.select_ids(ids), batch_ids=ids, step=in_parts["actor_inf"].begin(version)
                )[0]
            )
            if ids == lost:
                sample = sample.select_keys([key for key in sample.keys if key not in missing])
            for name in ("advantages", "actor_train"):
                interface = in_parts[name].without(missing) if ids == lost else in_parts[name]
                step, step.ends = begun[name], number == len(parts) - 1
                made, stats = interface.run(engines["actor"], sample, batch_ids=ids, step=step)
                sample = sample.update(made) if made is not None else sample
                if name == "advantages":
                    seen = stats
        made = whole["actor_inf"].run(
            expected["actor"], batch, batch_ids=batch.ids, step=whole["actor_inf"].begin(version)
        )[0]
        is_lost = np.concatenate([np.full(batch.select_ids([i]).total_tokens(), i in lost) for i in batch.ids])
        agreeing = np.where(is_lost, made.data["proximal_logprobs"], ref).astype(np.float32)
        reference = batch.update(made).update(batch.derive({"packed_ref_logprobs": agreeing}))
        for name in ("advantages", "actor_train"):
            made, stats = whole[name].run(
                expected["actor"], reference, batch_ids=batch.ids, step=whole[name].begin(version)
            )
            reference = reference.update(made) if made is not None else reference
            if name == "advantages":  # the mean over the sequences for which there is a reference
                num_lost = batch.select_ids(lost).num_sequences() if lost else 0
                share = 1 - num_lost / stats["batch/num_sequences"]
                assert seen.pop("kl/sequence_mean") * share == pytest.approx(stats.pop("kl/sequence_mean"))
                del seen["kl/token_mean"], stats["kl/token_mean"]
                assert seen == pytest.approx(stats, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(engines["actor"].table, expected["actor"].table, rtol=1e-5, atol=1e-6)
