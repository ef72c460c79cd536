"""The same batch gives the same update in any layout: PPO with critic and reference, through the real calls.

There are four trainer groups, one after the other: one for whole batches, one for batches split into micro-batches, one for
batches with supervised texts (train.ptx), and one in which the sequences of a group share their prompt (train.share_prefix). A
trainer group of eight model workers holds an actor and a critic in every layout. The master's executor runs the same trajectories
through each layout, over etcd, ZeroMQ and torch.distributed. The trajectories are pushed to the heads, moved to the workers that
need them, and trained on. The ranks that hold the weights export them. The result is compared with that of an engine in this
process without ranks.

The loss is the decoupled one, with a KL penalty to a reference, GAE from the critic's values, and advantages normalized over the
batch.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_model_worker import trajectory
from transformers import AutoModelForTokenClassification

from asyncrl.config.processes import ModelConfig, PlacedMFC
from asyncrl.config.schema import CriticConfig, OptimizerConfig, PPOConfig, PromptSourceConfig, PtxConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.graph import DataflowGraph, training_mfcs
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.interfaces import make_interface
from asyncrl.protocol.calls import CommitWeights, WriteWeights
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import tensor_files, verify_version
from tests.support.families import make_family
from tests.support.training_side import TrainingSide, training_side

pytestmark = [pytest.mark.timeout(300), pytest.mark.oracle]

LAYOUTS = ("d1", "d2", "d4", "m2", "p2", "d2m2", "d2p2", "p2m2", "d2p2m2", "c2", "d2c2", "c2m2", "c2p2", "c2r2")
BUDGETS = {
    "whole": 100_000,
    "micro-batched": 30,
    "supervised": 30,
    "shared": 40,
}  # tokens of a micro-batch; supervised: with train.ptx; shared: with train.share_prefix
BATCHES = {"seven": {"a": 3, "b": 2, "c": 2}, "two": {"d": 2}}  # groups and their sequences, of 6 to 23 tokens
CELLS = [(layout, budget, "seven") for layout in LAYOUTS for budget in ("whole", "micro-batched")]
# Fewer sequences than ranks, and fewer groups than data ranks
CELLS += [(layout, "whole", "two") for layout in ("d4", "d2m2", "d2p2m2", "d2c2")]
CELLS += [("d1", "supervised", "seven"), ("m2", "supervised", "seven"), ("p2", "supervised", "seven")]
CELLS += [(layout, "shared", "seven") for layout in (*LAYOUTS, "d2r2")]
CELLS += [("d2", "supervised", "seven"), ("d2p2m2", "supervised", "seven"), ("d4", "supervised", "two")]


@dataclass(frozen=True)
class Cell:
    """One update: a batch, and an actor and a critic in a layout."""

    layout: str
    budget: str
    batch: str

    def __str__(self) -> str:
        return f"{self.layout}-{self.budget}-{self.batch}"

    def model(self, role: str) -> str:
        return role if role == "ref" else f"{role}@{self}"


@dataclass(frozen=True)
class Update:
    """The result of an update."""

    stats: dict[str, float]
    weights: dict[str, dict[str, torch.Tensor]]  # by role


Found = Callable[[str], dict[tuple[str, str, str], Update]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by role. The reference differs from the actor, and the critic's output layer is not 0."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    for seed, role in enumerate(("actor", "ref")):
        torch.manual_seed(seed)
        make_tiny_model(folder / role, hidden_size=32, intermediate_size=64, num_layers=3)
    torch.manual_seed(2)
    critic = AutoModelForTokenClassification.from_pretrained(folder / "actor", num_labels=1)
    critic.score.weight.data.normal_(std=0.5)
    critic.save_pretrained(folder / "critic")
    texts = [{"prompt": f"{number}=", "answer": str(number + 1)} for number in range(9)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return {role: folder / role for role in ("actor", "ref", "critic")} | {"texts": folder / "texts.jsonl"}


@pytest.fixture(scope="module")
def train(paths: dict[str, Path]) -> TrainConfig:
    # eps: a gradient that is noise around 0 must not cause a full step
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0, eps=1e-5)
    ppo = PPOConfig(minibatches=2, temperature=1.0, kl_coef=0.05, advantage_norm="batch", gae_lambda=0.95)
    critic = CriticConfig(path=str(paths["critic"]), optimizer=optimizer, minibatches=2)
    return TrainConfig(
        batch_size=8,
        optimizer=optimizer,
        ppo=ppo,
        critic=critic,
        max_tokens_per_mb=BUDGETS["whole"],
        share_prefix="off",  # the expected update shares nothing
    )


def of_budget(budget: str, train: TrainConfig, paths: dict[str, Path]) -> TrainConfig:
    texts = PromptSourceConfig(path=str(paths["texts"]))
    ptx = PtxConfig(texts, coef=0.5, batch_size=5) if budget == "supervised" else None
    share = "on" if budget == "shared" else "off"
    return replace(train, max_tokens_per_mb=BUDGETS[budget], ptx=ptx, share_prefix=share)


def model_config(name: str, path: Path, train: TrainConfig, *, grid: str = "d1") -> ModelConfig:
    role = name.partition("@")[0]
    return ModelConfig(
        name,
        str(path),
        grid,
        list(range(ParallelGrid.parse(grid).size)),
        kind="value" if role == "critic" else "lm",
        trainable=role != "ref",
        optimizer=train.optimizer,
    )


def group(name: str, size: int, ticket: str, number: int) -> tuple[TrajectoryMeta, SequenceSample]:
    """The group of this name, with its own ticket and prompt. Some of its sequences are truncated."""
    meta, sample = trajectory(name, size=size)
    sample = sample.update(sample.derive({"seq_no_eos_mask": np.arange(size) % 3 == 1}, like="seq_no_eos_mask"))
    meta = msgspec.structs.replace(meta, ticket_id=ticket, locator=Locator(0, number))
    return meta, SequenceSample((ticket,), sample.seqlens, sample.data)


# ------------------------------------------------------------------------------------------------------------ expected


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path], train: TrainConfig) -> dict[tuple[str, bool], Update]:
    """The expected update of each batch, without and with train.ptx, computed in this process on engines without ranks."""
    plain = train
    updates = {}
    for batch, supervised in itertools.product(BATCHES, (False, True)):
        train = replace(of_budget("supervised", plain, paths), max_tokens_per_mb=100_000) if supervised else plain
        updates[batch, supervised] = update_here(BATCHES[batch], paths, train)
    return updates


def update_here(groups: dict[str, int], paths: dict[str, Path], train: TrainConfig) -> Update:
    graph = DataflowGraph(training_mfcs(train))
    engines = {role: TrainEngine(model_config(role, paths[role], train), train) for role in graph.roles}
    sample = SequenceSample.gather([group(name, size, name, 0)[1] for name, size in groups.items()])
    stats: dict[str, float] = {}
    for name in graph.order:
        mfc = graph.mfcs[name]
        interface = make_interface(mfc, train, seed=1, tokenizer_path=str(paths["ref"]))
        part = sample.select_keys(mfc.input_keys)
        made, of_mfc = interface.run(engines[mfc.role], part, batch_ids=list(groups), step=interface.begin(0))
        sample = sample.update(made) if made is not None else sample
        stats |= of_mfc
    return Update(stats, {role: take_share(engines[role]) for role in ("actor", "critic")})


# --------------------------------------------------------------------------------------------------------------- found


@pytest.fixture(scope="module")
def found(paths: dict[str, Path], train: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The update of each cell of a budget. The budget's first test computes them, in a trainer group of model workers."""

    @functools.cache
    def of(budget: str) -> dict[tuple[str, str, str], Update]:
        cells = [Cell(*cell) for cell in CELLS if cell[1] == budget]
        folder = tmp_path_factory.mktemp("trainer_group")
        return asyncio.run(train_all(cells, paths, of_budget(budget, train, paths), folder))

    return of


def placed_mfcs(cell: Cell, train: TrainConfig) -> list[PlacedMFC]:
    """The dataflow of a cell, on its models. Workers know MFCs by name, so each cell has its own names."""
    return [replace(mfc, name=f"{mfc.name}@{cell}").placed(cell.model(mfc.role)) for mfc in training_mfcs(train)]


async def train_all(
    cells: list[Cell], paths: dict[str, Path], train: TrainConfig, folder: Path
) -> dict[tuple[str, str, str], Update]:
    models = [model_config("ref", paths["ref"], train)]
    for cell in cells:
        for role in ("actor", "critic"):
            of_cell = model_config(cell.model(role), paths[role], train, grid=cell.layout)
            models.append(of_cell)
    mfcs = {cell: placed_mfcs(cell, train) for cell in cells}
    updates = {}
    number = 0
    async with training_side(models, [mfc for each in mfcs.values() for mfc in each], train, folder) as side:
        for cell in cells:
            tickets = []
            for name, size in BATCHES[cell.batch].items():
                meta, sample = group(name, size, f"{cell}:{name}", number)
                number += 1
                assert (await side.push(meta, sample)).verdict == "stored"
                tickets.append(meta.ticket_id)
            result = await side.step(tickets, 0, [mfc.name for mfc in mfcs[cell]])
            weights = {
                role: await export(side, models, cell.model(role), folder, f"{cell}/{role}")
                for role in ("actor", "critic")
            }
            updates[cell.layout, cell.budget, cell.batch] = Update(result.stats, weights)
    return updates


async def export(
    side: TrainingSide, models: list[ModelConfig], model: str, run_dir: Path, name: str
) -> dict[str, torch.Tensor]:
    """The exported weights of a model, written by the ranks that hold them."""
    version = "a0001-v00000001"
    workers = next(config.workers for config in models if config.name == model)
    path = run_dir / name / version
    path.parent.mkdir(parents=True)
    write = WriteWeights(role=model, weight_version=version, folder=f"{name}/{version}")
    replies = await side.caller.call("weights", workers, write)
    files = [file for reply in replies for file in reply.files]
    commit = CommitWeights(role=model, weight_version=version, folder=write.folder, files=files)
    await side.caller.call("a version", workers[:1], commit)
    verify_version(path)
    return {name: tensor for file in tensor_files(path) for name, tensor in load_file(file).items()}


# ---------------------------------------------------------------------------------------------------------------- same


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell))
def test_same_update(cell: tuple[str, str, str], found: Found, expected: dict[tuple[str, bool], Update]) -> None:
    assert_same(found(cell[1])[cell], expected[cell[2], cell[1] == "supervised"], supervised=cell[1] == "supervised")


def assert_same(update: Update, same: Update, *, supervised: bool = False) -> None:
    for name in (
        "actor/loss",
        *(["actor/ptx_loss"] if supervised else []),
        "actor/grad_norm",
        "critic/loss",
        "critic/grad_norm",
        "kl/sequence_mean",
        "advantages/std",
    ):
        assert update.stats[name] == pytest.approx(same.stats[name], rel=1e-5, abs=1e-6), name
    assert update.stats["actor/optimizer_steps"] == same.stats["actor/optimizer_steps"] > 0
    for role, weights in same.weights.items():
        assert update.weights[role].keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(update.weights[role][name], tensor, rtol=1e-5, atol=1e-6, msg=f"{role} {name}")


@pytest.mark.release
@pytest.mark.parametrize(
    ("layouts", "checkpointing"), [(("d2", "d2e2", "d4e2", "d2c2e2", "d2p2e2"), False), (("d2e2",), True)]
)
def test_same_update_of_a_mixture_of_experts(
    train: TrainConfig, tmp_path: Path, layouts: tuple[str, ...], checkpointing: bool
) -> None:
    """A trainer group of its own. One layer is dense."""
    paths = {role: tmp_path / role for role in ("actor", "ref", "critic")}
    for seed, role in enumerate(("actor", "ref")):
        torch.manual_seed(seed)
        make_family(paths[role], "qwen3_moe", hidden_size=32, num_hidden_layers=3, mlp_only_layers=[1])
    critic = AutoModelForTokenClassification.from_pretrained(paths["actor"], num_labels=1)
    critic.score.weight.data.normal_(std=0.5)
    critic.save_pretrained(paths["critic"])
    cells = [Cell(layout, "micro-batched", "seven") for layout in layouts]
    train = replace(train, max_tokens_per_mb=BUDGETS["micro-batched"], gradient_checkpointing=checkpointing)
    same = update_here(BATCHES["seven"], paths, replace(train, max_tokens_per_mb=BUDGETS["whole"]))
    updates = asyncio.run(train_all(cells, paths, train, tmp_path / "group"))
    assert len(updates) == len(layouts)
    for update in updates.values():
        assert_same(update, same)


def test_supervised_texts_change_the_update(expected: dict[tuple[str, bool], Update]) -> None:
    plain, supervised = expected["seven", False], expected["seven", True]
    assert supervised.stats["actor/ptx_loss"] > 1
    assert supervised.stats["actor/grad_norm"] != pytest.approx(plain.stats["actor/grad_norm"], rel=0.01)
    assert supervised.stats["critic/loss"] == plain.stats["critic/loss"]


def test_the_update_changes_all_weights(expected: dict[tuple[str, bool], Update], paths: dict[str, Path]) -> None:
    """If some weights did not change, the comparison of the layouts would show little."""
    for role, weights in expected["seven", False].weights.items():
        before = load_file(paths[role] / "model.safetensors")
        for name, tensor in weights.items():
            assert (tensor - before[name]).abs().max() > 1e-4, f"{role} {name}"
