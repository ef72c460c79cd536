"""All MFCs on real engines: a critic that learns, a step of it against a plain loop, and agreement of pipeline and tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import (
    CriticConfig,
    OptimizerConfig,
    PPOConfig,
    RewardModelConfig,
    TeacherConfig,
    TrainConfig,
)
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import NORMS, SAMPLES, ParallelGrid
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model.engine import TrainEngine
from asyncrl.model.interfaces import make_interface
from asyncrl.model.mesh import ModelMesh
from asyncrl.testing.tiny import make_tiny_model
from tests.support.rank_processes import RankProcesses

KINDS = {"actor": "lm", "ref": "lm", "teacher": "lm", "critic": "value", "reward": "reward"}
OPTIMIZER = OptimizerConfig(lr=2e-3, warmup_steps=0, schedule="constant", grad_clip=1.0, eps=1e-4)
TRAIN = TrainConfig(
    critic=CriticConfig(optimizer=OPTIMIZER, minibatches=2, value_norm=True),
    reward_model=RewardModelConfig(scale=0.5),
    ppo=PPOConfig(advantage_norm="batch", kl_coef=0.1, gae_lambda=0.9, temperature=1.0, minibatches=2),
    max_tokens_per_mb=64,
)

# Also several passes, an entropy bonus that acts from the second step on, and a teacher
EVERYTHING = replace(
    TRAIN,
    ppo=replace(TRAIN.ppo, epochs=2, entropy_target=5.0, entropy_step=0.2),
    teacher=TeacherConfig(coef=0.5),
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reward model and a language model. Critics start from the language model too."""
    path: Path = tmp_path_factory.mktemp("tiny")
    make_tiny_model(path / "lm", hidden_size=32, intermediate_size=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reward = AutoModelForSequenceClassification.from_pretrained(path / "lm", num_labels=1)
        reward.score.weight.data.normal_(0.0, 0.2)
    reward.save_pretrained(path / "reward")
    return path


def model_config(path: Path, role: str, grid: str = "d1p1m1", workers: Sequence[int] = (0,)) -> ModelConfig:
    trainable = role in ("actor", "critic")
    folder = path / ("reward" if role == "reward" else "lm")
    return ModelConfig(role, str(folder), grid, list(workers), KINDS[role], trainable, OPTIMIZER)


def make_batch(seed: int, num_groups: int = 6, size: int = 3) -> SequenceSample:
    """The reward depends only on the prompt's last digit, so that the value of a state is known: 1 for even, 0 for odd."""
    random = np.random.default_rng(seed)
    groups = []
    for _ in range(num_groups):
        prompt = random.integers(1, 11, int(random.integers(1, 4))).tolist()
        lengths = [int(random.integers(1, 7)) for _ in range(size)]
        masks = [[False] * len(prompt) + [True] * n for n in lengths]
        groups.append(
            {
                "packed_input_ids": [prompt + random.integers(11, 40, n).tolist() for n in lengths],
                "packed_logprobs": [[-4.1 if on else 0.0 for on in mask] for mask in masks],
                "prompt_mask": [[not on for on in mask] for mask in masks],
                "loss_mask": masks,
                "seq_no_eos_mask": [False] * size,
                "rewards": [float(prompt[-1] % 2 == 0)] * size,
            }
        )
    return SequenceSample.from_groups([f"{seed}-{g}" for g in range(num_groups)], groups)


def run_step(
    train: TrainConfig, engines: Mapping[str, TrainEngine], batch: SequenceSample, interfaces: Mapping, version: int
) -> tuple[SequenceSample, dict[str, float]]:
    graph, stats = build_dataflow(train), {}
    for name in graph.order:
        mfc = graph.mfcs[name]
        reads = batch.select_keys(mfc.input_keys)
        made, mfc_stats = interfaces[name].run(
            engines[mfc.role], reads, batch_ids=batch.ids, step=interfaces[name].begin(version)
        )
        stats |= mfc_stats
        batch = batch.update(made) if made is not None else batch
    return batch, stats


def test_a_critic_learns_what_is_to_come(tiny: Path) -> None:
    train = replace(
        TRAIN,
        reward_model=None,
        ppo=replace(TRAIN.ppo, kl_coef=0.0, gae_lambda=1.0, use_decoupled_loss=False),
    )
    engines = {role: TrainEngine(model_config(tiny, role), train) for role in ("actor", "critic")}
    graph = build_dataflow(train)
    interfaces = {name: make_interface(graph.mfcs[name], train) for name in graph.order if name != "actor_train"}
    explained = []
    for version in range(40):
        batch = make_batch(version, num_groups=16)
        for name in interfaces:
            mfc = graph.mfcs[name]
            made, stats = interfaces[name].run(
                engines[mfc.role], batch, batch_ids=batch.ids, step=interfaces[name].begin(version)
            )
            batch = batch.update(made) if made is not None else batch
            explained += [stats[key] for key in ("critic/explained_variance",) if key in stats]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)  # its output layer begins with zeros
    assert np.mean(explained[-3:]) > 0.8


def test_a_critic_step_is_that_of_a_loop_by_hand(tiny: Path) -> None:
    """The loop processes one sequence at a time, with transformers' own model and torch's AdamW."""
    train = replace(TRAIN, critic=replace(TRAIN.critic, value_norm=False))
    engines = {role: TrainEngine(model_config(tiny, role), train) for role in KINDS}
    graph = build_dataflow(train)
    interfaces = {name: make_interface(graph.mfcs[name], train, seed=3) for name in graph.order}
    model = AutoModelForTokenClassification.from_pretrained(tiny / "lm", num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    torch.nn.init.zeros_(model.score.bias)
    optimizer = torch.optim.AdamW(model.parameters(), OPTIMIZER.lr, (0.9, 0.95), OPTIMIZER.eps, weight_decay=0.0)
    for version in range(2):
        batch = make_batch(version)
        whole, stats = run_step(train, engines, batch, interfaces, version)
        assert stats["critic/optimizer_steps"] == 2
        minibatches = [sample.ids for sample in shuffled(whole, seed=3, version=version)]
        for ids in minibatches:
            part = whole.select_ids(ids)
            num_states = int(part.data["value_mask"].sum())
            for tokens, mask, old, returns in sequences(part, "packed_input_ids", "value_mask", "values", "returns"):
                values = model(input_ids=tokens[None], use_cache=False).logits[0, :, 0]
                within = old + (values - old).clamp(-0.2, 0.2)
                losses = torch.maximum((values - returns) ** 2, (within - returns) ** 2) / 2
                (losses[mask].sum() / num_states).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(model.named_parameters())
    found = engines["critic"].named_parameters()
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=0, atol=1e-5, msg=name)
    start = AutoModelForCausalLM.from_pretrained(tiny / "lm").get_input_embeddings().weight
    assert not torch.equal(found["model.embed_tokens.weight"], start)


@pytest.mark.parametrize(
    "ppo",
    [
        {},
        {"use_decoupled_loss": False, "recompute_logprob": True},
        {"importance_level": "sequence", "behav_imp_weight_mode": "clamp", "behav_imp_weight_cap": 1.2},
        {"policy_loss": "cispo", "behav_imp_weight_floor": 0.5, "entropy_coef": 0.1},
        {"early_stop_imp_ratio": 1.01, "early_stop_kl": 0.01, "c_clip": 3.0},
    ],
    ids=lambda ppo: ",".join(ppo) or "decoupled",
)
def test_one_update_is_the_same_with_and_without_a_proximal_pass(tiny: Path, ppo: dict[str, object]) -> None:
    """The proximal logprobs are those of the policy that the loss computes with, so a pass of its own finds nothing else."""
    loss = PPOConfig(minibatches=1, advantage_norm="batch", temperature=0.7, **ppo)
    train = TrainConfig(ppo=loss, max_tokens_per_mb=64, optimizer=OPTIMIZER)
    results = []
    for proximal_pass in ("auto", "always"):
        config = replace(train, ppo=replace(loss, proximal_pass=proximal_pass))
        graph, engine = build_dataflow(config), TrainEngine(model_config(tiny, "actor"), config)
        assert ("actor_inf" in graph.mfcs) == (proximal_pass == "always")
        interfaces = {name: make_interface(graph.mfcs[name], config) for name in graph.order}
        stats = [run_step(config, {"actor": engine}, make_batch(v), interfaces, v)[1] for v in range(3)]
        results.append((engine.named_parameters(), stats))
    (found, stats), (expected, expected_stats) = results
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-6, msg=name)
    for ours, theirs in zip(stats, expected_stats, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert all(step["actor/approx_kl"] == 0.0 and step["actor/importance_weight"] == 1.0 for step in stats)


def test_several_updates_never_take_the_current_policy_for_the_proximal_one(tiny: Path) -> None:
    graph = build_dataflow(TrainConfig(ppo=PPOConfig(minibatches=1, temperature=1.0)))
    for ppo in (PPOConfig(minibatches=2, temperature=1.0), PPOConfig(minibatches=1, epochs=2, temperature=1.0)):
        with pytest.raises(ValueError, match=r"'actor_train' needs the input keys \['proximal_logprobs'\]"):
            make_interface(graph.mfcs["actor_train"], TrainConfig(ppo=ppo))
    naive = PPOConfig(minibatches=1, temperature=1.0, use_decoupled_loss=False)
    assert make_interface(graph.mfcs["actor_train"], TrainConfig(ppo=naive)).keys.count("packed_logprobs") == 1


def shuffled(sample: SequenceSample, *, seed: int, version: int) -> list[SequenceSample]:
    """The two minibatches of a step, shuffled as the interfaces do: by the seed and the version."""
    order = np.random.default_rng([seed, version]).permutation(sample.num_ids)
    return [sample.select_ids([sample.ids[i] for i in sorted(part)]) for part in np.array_split(order, 2)]


def sequences(sample: SequenceSample, *keys: str) -> list[list[torch.Tensor]]:
    by_key = [[torch.tensor(run) for group in sample.slices(key) for run in group] for key in keys]
    return [list(runs) for runs in zip(*by_key, strict=True)]


# ------------------------------------------------------------------------------------------------------------ several ranks


def run_in_layout(
    rank: int, path: str, grid: str, steps: int
) -> tuple[dict[str, np.ndarray], list[dict[str, float]], dict[str, float]]:
    """Run all MFCs with all models in one layout. Heads return the results for the last batch, and the statistics of each step.
    Every rank returns the state of the actor's interface."""
    parsed = ParallelGrid.parse(grid)
    workers = list(range(parsed.size))
    meshes = {role: ModelMesh.make(ModelPlacement(role, parsed, tuple(workers)), "cpu") for role in KINDS}
    mesh, graph, all_stats = meshes["actor"], build_dataflow(EVERYTHING), []
    if mesh is None:
        return {}, [], {}
    engines = {
        role: TrainEngine(model_config(Path(path), role, grid, workers), EVERYTHING, mesh=meshes[role])
        for role in KINDS
    }
    interfaces = {name: make_interface(graph.mfcs[name], EVERYTHING, seed=3) for name in graph.order}
    made_here: dict[str, np.ndarray] = {}
    for version in range(steps):
        batch = make_batch(version, num_groups=3, size=5)
        here = batch.ids[mesh.parts[SAMPLES] :: parsed.num_replicas]
        sample = batch.select_ids(here) if here else None
        stats: dict[str, float] = {}
        for name in graph.order:
            mfc = graph.mfcs[name]
            reads = sample.select_keys(mfc.input_keys) if sample is not None else None
            made, mfc_stats = interfaces[name].run(
                engines[mfc.role], reads, batch_ids=batch.ids, step=interfaces[name].begin(version)
            )
            stats |= mfc_stats
            given: list[SequenceSample | None] = [None] * parsed.size  # a data manager would move these
            dist.all_gather_object(given, made, group=mesh.group_that_sums(NORMS))
            found = given[mesh.placement.heads[mesh.parts[SAMPLES]]]
            assert (found is None) == (sample is None or not mfc.output_keys)
            sample = sample.update(found) if sample is not None and found is not None else sample
        all_stats.append(stats)
        if sample is not None and mesh.is_head:
            made_here = {
                f"{i} {key}": s.data[key] for i, s in zip(sample.ids, sample.unpack(), strict=True) for key in s.keys
            }
    return made_here, all_stats if mesh.is_head else [], interfaces["actor_train"].state()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(4, limit_s=120.0) as ranks:
        yield ranks


@pytest.mark.parametrize("grid", ["p2", "m2", "d2", "d4", "d2p2"])
def test_all_mfcs_in_any_layout(grid: str, tiny: Path, ranks: RankProcesses) -> None:
    (expected, expected_stats, state), *_ = ranks.run(run_in_layout, str(tiny), "d1", 2)
    results = ranks.run(run_in_layout, str(tiny), grid, 2)
    found = {key: array for made, _, _ in results for key, array in made.items()}
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, atol=2e-4, err_msg=key)
    heads = [stats for _, stats, _ in results if stats]
    assert len(heads) == ParallelGrid.parse(grid).num_replicas
    for stats in heads:
        for step, expected_step in zip(stats, expected_stats, strict=True):
            # Rounding decides whether an unchanged value is just inside or just outside the clip range. One state of 51 differs.
            assert step.pop("critic/clip_share") == pytest.approx(expected_step["critic/clip_share"], abs=0.05)
            assert step == pytest.approx({name: expected_step[name] for name in step}, rel=1e-3, abs=1e-4)
            assert len(step) == len(expected_step) - 1
        assert (stats[0]["actor/entropy_coef"], stats[1]["actor/entropy_coef"]) == (0, 0.2)
        assert stats[0]["actor/optimizer_steps"] == 4
        assert stats[1]["distillation/token_mean"] != 0
    assert state == {"entropy_coef": 0.4, "entropy_is_on": 1.0}
    assert all(found == state for _, stats, found in results[: ParallelGrid.parse(grid).size])
