"""The training engine on several ranks: the same batch gives the same update in every layout of data, context, pipeline and
tensor ranks.

All cells run in eight rank processes. A cell uses the first of them, with meshes that all ranks have made together.
"""

from __future__ import annotations

import gc
import math
import re
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.architectures.agreement import BOUND, SelfCheckError
from asyncrl.architectures.small_copy import small_config
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import LAYERS, MATRICES, SAMPLES, ParallelGrid
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model import self_check, sharding
from asyncrl.model.engine import TrainEngine
from asyncrl.model.mesh import ModelMesh
from asyncrl.testing.tiny import ALPHABET, make_char_tokenizer, make_tiny_model
from tests.support.family_table import default_config
from tests.support.rank_processes import RankProcesses

GRIDS = ("d1", "d2", "d4", "m2", "p2", "d2m2", "d2p2", "p2m2", "d2p2m2", "d2r2", "c2", "d2c2", "c2m2", "c2p2", "c2r2")
RARE_GRIDS = ("r2", "d2m2r2", "d2p2r2", "c4", "d2p2c2", "d2c2r2", "p2c2m2")
ALL_GRIDS = (*GRIDS, *(pytest.param(grid, marks=pytest.mark.release) for grid in RARE_GRIDS))
OTHER_GRIDS = ("p3", "m4", "p4", "c3", "c8")
EXPERT_GRIDS = (
    "d2e2",
    "d4e2",
    "d4e4",
    "c2e2",
    "d2c2e2",
    "d2c2e4",
    "d2r2e2",
    "d4r2e2",
    "d2p2e2",
    "d3e3",
)  # test_expert_ranks.py
# eps: a gradient that is zero except for rounding (of the key projection's bias) must not cause a step of the learning rate's size
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0, eps=1e-5)
TRAIN = TrainConfig(max_tokens_per_mb=16384, logprob_chunk_tokens=16)
LENGTHS = (29, 3, 17, 1, 8, 23, 12)
# Families whose matrices tensor ranks can split: all of transformers' causal language models that train on one rank
SPLIT_FAMILIES = (
    *("apertus", "arcee", "cohere", "cohere2", "cohere_compass_text", "cwm", "deepseek_v3", "ernie4_5", "exaone4"),
    *("got_ocr2", "gpt_neox", "granite", "helium", "hyperclovax", "internlm3", "iquestcoder", "jais2"),
    *("llama", "ministral", "ministral3", "mistral", "moss_transcribe_diarize", "nanochat", "olmo", "phi", "qwen2"),
    *("qwen3", "seed_oss", "smollm3", "starcoder2", "youtu"),
)
QUICK_FAMILIES = ("apertus", "exaone4", "gpt_neox", "phi", "youtu")
STEPS = 2


@dataclass(frozen=True)
class Cell:
    """Work to do on a grid. The outcome must not depend on the grid."""

    path: str
    kind: str = "lm"
    train: TrainConfig = TRAIN
    lengths: tuple[int, ...] = LENGTHS
    poison: int = -1  # the step at which the first sequence's advantages are NaN
    stop: int = -1  # the step that the loss function stops
    entropy: float = 0.0  # coefficient of the entropies in the loss


def make_sample(lengths: tuple[int, ...], seed: int = 0) -> SequenceSample:
    rng = np.random.default_rng(seed)
    groups = [
        {
            "packed_input_ids": [rng.integers(0, 64, n)],
            "loss_mask": [np.arange(n) >= min(2, n - 1)],
            "advantages": [rng.normal(size=n).astype(np.float32)],
            "task_ids": 0,
        }
        for n in lengths
    ]
    return SequenceSample.from_groups([f"g{i}" for i in range(len(lengths))], groups)


class Loss:
    """Logprobs: -sum(advantage * logprob + entropy coefficient * entropy). Values: squared distance to the advantages. Divided by
    the global number of tokens."""

    def __init__(self, denominator: float, *, poison: bool = False, stop: bool = False, entropy: float = 0.0) -> None:
        self.denominator = math.nan if poison else denominator
        self.stop = stop
        self.entropy = entropy

    def __call__(self, outputs, data, cu_seqlens):
        mask = data["loss_mask"]
        if "values" in outputs:
            terms = (outputs["values"] - data["advantages"]).square()
        else:
            terms = -data["advantages"] * outputs["logprobs"]
            if self.entropy:
                terms = terms - self.entropy * outputs["entropy"]
        stats = {"tokens": mask.sum(), "longest_max": cu_seqlens.diff().max()}
        if "entropy" in outputs:
            stats["entropy"] = outputs["entropy"][mask].sum().detach()
        return terms[mask].sum() / self.denominator, stats

    def stop_reason(self, stats):
        assert stats["tokens"] > 0
        return "far enough" if self.stop else ""


# -------------------------------------------------------------------------------------------------------- run by the ranks


@cache
def meshes(_world: int) -> dict[str, ModelMesh | None]:
    placements = [
        ModelPlacement(text, grid := ParallelGrid.parse(text), tuple(range(grid.size)))
        for text in (*GRIDS, *RARE_GRIDS, *OTHER_GRIDS, *EXPERT_GRIDS)
    ]
    return {placement.name: ModelMesh.make(placement, "cpu") for placement in placements}


def ping(rank: int) -> int:
    return rank


def make_meshes(rank: int) -> None:
    meshes(0)


def make_engine(grid: str, path: str, kind: str = "lm", train: TrainConfig = TRAIN, *, trainable: bool = True):
    mesh = meshes(0)[grid] if grid else None
    workers = list(mesh.placement.workers) if mesh is not None else [0]
    grid = str(mesh.placement.grid) if mesh is not None else "d1"
    model = ModelConfig("model", path, grid, workers, kind, trainable, OPTIMIZER)
    return TrainEngine(model, train, mesh=mesh)


def part_of(engine: TrainEngine, sample: SequenceSample) -> SequenceSample | None:
    ids = sample.ids[engine.replica :: engine.num_replicas]
    return sample.select_ids(ids) if ids else None


def whole_parameters(engine: TrainEngine) -> dict[str, np.ndarray]:
    """Parameters of this stage. Collective."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().numpy()
        for name, tensor in engine.named_parameters().items()
    }


@dataclass
class Outcome:
    before: np.ndarray | None
    steps: list[dict[str, float]]
    after: np.ndarray | None
    parameters: dict[str, np.ndarray]
    coordinates: tuple[int, int, int]
    ids: list[str]


def infer(engine: TrainEngine, sample: SequenceSample | None) -> np.ndarray | None:
    return engine.logprobs(sample, temperature=0.7) if engine.kind == "lm" else engine.values(sample)


def run_cell(rank: int, grid: str, cell: Cell) -> Outcome:
    engine = make_engine(grid, cell.path, cell.kind, cell.train)
    sample = make_sample(cell.lengths)
    part = part_of(engine, sample)
    before = infer(engine, part)
    denominator = float(sample.data["loss_mask"].sum()) / 20
    steps = [
        engine.train_step(
            part,
            Loss(denominator, poison=step == cell.poison, stop=step == cell.stop, entropy=cell.entropy),
            temperature=0.7,
            lr_step=step,
        )
        for step in range(STEPS)
    ]
    mesh = engine.mesh
    at = (0, 0, 0) if mesh is None else (mesh.parts[LAYERS], mesh.parts[SAMPLES], mesh.parts[MATRICES])
    ids = part.ids if part is not None else []
    return Outcome(before, steps, infer(engine, part), whole_parameters(engine), at, list(ids))


def check_packing(rank: int, grid: str, path: str, fault: float) -> str:
    """The message of the self-check of packing, or "". fault: share of the row's sum so far that each MLP reads, too."""
    engine = make_engine(grid, path)
    for layer in engine.model.model.layers if fault else ():
        norm = layer.post_attention_layernorm
        norm.register_forward_hook(lambda _, arguments, output: output + fault * output.cumsum(1))
    try:
        self_check.check_packing(engine)
    except SelfCheckError as error:
        return str(error)
    return ""


PARTS = (slice(0, 2), slice(2, 3), slice(3, None))  # of the groups of a sample


def run_in_parts(rank: int, grid: str, cell: Cell) -> Outcome:
    """Like run_cell, with gradients that add up over parts of the batch, and other forward passes in between."""
    engine = make_engine(grid, cell.path, cell.kind, cell.train)
    sample = make_sample(cell.lengths)
    part = part_of(engine, sample)
    before = infer(engine, part)
    denominator = float(sample.data["loss_mask"].sum()) / 20
    steps = []
    for step in range(STEPS):
        total: dict[str, float] = {}
        for number, where in enumerate(PARTS):
            some = part_of(engine, sample.select_ids(sample.ids[where]))
            infer(engine, some)
            loss = Loss(1.0, poison=step == cell.poison, stop=step == cell.stop)
            found = engine.accumulate(some, loss, temperature=0.7, begins=number == 0)
            for name, value in found.items():
                total[name] = (
                    max(total.get(name, 0.0), value) if name.endswith("_max") else total.get(name, 0.0) + value
                )
        steps.append(engine.step(total, loss, lr_step=step, divisor=denominator))
    mesh = engine.mesh
    at = (0, 0, 0) if mesh is None else (mesh.parts[LAYERS], mesh.parts[SAMPLES], mesh.parts[MATRICES])
    ids = part.ids if part is not None else []
    return Outcome(before, steps, infer(engine, part), whole_parameters(engine), at, list(ids))


def gradients(rank: int, grid: str, cell: Cell) -> dict[str, np.ndarray]:
    """The summed gradient of each parameter of this rank's stage. Collective."""
    engine, sample = make_engine(grid, cell.path, cell.kind, cell.train), make_sample(cell.lengths)
    engine.try_step(part_of(engine, sample), Loss(10.0), temperature=0.7)
    grads = {name: parameter.grad for name, parameter in engine.named_parameters().items()}
    return {name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).numpy() for name, grad in grads.items()}


def logprobs_and_gradients(rank: int, grid: str, cell: Cell) -> dict[str, np.ndarray]:
    """The gradients, and by its id each sequence's logprobs that this rank has. Collective."""
    engine = make_engine(grid, cell.path, cell.kind, cell.train)
    part = part_of(engine, make_sample(cell.lengths))
    found = infer(engine, part)
    logprobs = {}
    if found is not None:
        lengths = [cell.lengths[int(name.removeprefix("g"))] for name in part.ids]
        logprobs = dict(zip(part.ids, np.split(found, np.cumsum(lengths)[:-1]), strict=True))
    return logprobs | gradients(rank, grid, cell)


def run_cells(rank: int, grid: str, cells: list[Cell]) -> list[Outcome]:
    return [run_cell(rank, grid, cell) for cell in cells]


# ------------------------------------------------------------------------------------------------------------------- cells


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(8, limit_s=100) as ranks:
        yield ranks


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Tiny models of 3 layers, which 2 stages cannot share evenly."""
    kinds = {"tied": ("qwen2", True), "untied": ("qwen2", False), "qwen3": ("qwen3", True), "llama": ("llama", False)}
    made = {}
    for name, (architecture, tied) in kinds.items():
        path = made[name] = str(tmp_path_factory.mktemp(name))
        make_tiny_model(
            path,
            architecture,
            hidden_size=32,
            intermediate_size=64,
            num_layers=3,
            tie_embeddings=tied,
            initializer_range=0.2,
        )
    return made


def run(ranks: RankProcesses, grid: str, cells: list[Cell]) -> list[list[Outcome]]:
    """Outcomes of each cell on each rank."""
    ranks.run(make_meshes)
    return list(
        map(list, zip(*ranks.run(run_cells, grid, cells, num_ranks=ParallelGrid.parse(grid).size), strict=True))
    )


def of_groups(values: np.ndarray, sample_ids: list[str], ids: list[str]) -> np.ndarray:
    """The part of some groups, from the values of all tokens of a sample."""
    starts = np.cumsum([0, *LENGTHS])
    return np.concatenate([values[starts[i] : starts[i + 1]] for i in map(sample_ids.index, ids)])


def assert_same_outcome(found: list[Outcome], expected: Outcome, grid: str) -> None:
    size = ParallelGrid.parse(grid)
    sample_ids = expected.ids
    seen = set()
    for outcome in found:
        pipe = outcome.coordinates[0]
        is_last = pipe == size.num_stages - 1
        for ours, theirs in zip(outcome.steps, expected.steps, strict=True):
            everywhere = {"grad_norm", "lr", "skipped_steps", "stopped_steps"}
            assert set(ours) == (set(theirs) if is_last else everywhere)
            for name, value in ours.items():
                assert value == pytest.approx(theirs[name], rel=1e-5, abs=1e-7, nan_ok=True), (grid, name)
        for name, value in outcome.parameters.items():
            seen.add(name)
            # Adam divides gradients by their size, and so enlarges the rounding of small ones: a thousandth of a step may differ.
            np.testing.assert_allclose(value, expected.parameters[name], rtol=1e-5, atol=1e-6, err_msg=f"{grid} {name}")
        for ours, theirs in ((outcome.before, expected.before), (outcome.after, expected.after)):
            if not is_last or not outcome.ids:
                assert ours is None
                continue
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, of_groups(theirs, sample_ids, outcome.ids), rtol=1e-5, atol=2e-5)
    assert seen == set(expected.parameters)


MICRO = replace(TRAIN, max_tokens_per_mb=30)
VARIANTS = {
    "lm, tied": ("tied", {}),
    "lm, untied, micro-batches": ("untied", {"train": MICRO}),
    "lm, entropy": ("untied", {"entropy": 3.0, "train": MICRO}),
    "value": ("tied", {"kind": "value"}),
    "value, micro-batches": ("untied", {"kind": "value", "train": MICRO}),
    "fewer sequences than ranks": ("tied", {"lengths": LENGTHS[:1]}),
}


@pytest.fixture(scope="module")
def expected(paths):
    """The outcomes of a single process."""
    return {name: run_cell(0, "", Cell(paths[model], **settings)) for name, (model, settings) in VARIANTS.items()}


@pytest.mark.parametrize("grid", ALL_GRIDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_gives_the_same_update(ranks, paths, expected, grid, variant):
    model, settings = VARIANTS[variant]
    (outcomes,) = run(ranks, grid, [Cell(paths[model], **settings)])
    assert_same_outcome(outcomes, expected[variant], grid)


def local_elements(rank: int, grid: str, path: str) -> int:
    return sum(sharding.local_tensor(tensor).numel() for tensor in make_engine(grid, path).named_parameters().values())


def test_each_copy_holds_the_weights_once(ranks, paths):
    ranks.run(make_meshes)
    (whole,) = ranks.run(local_elements, "", paths["tied"], num_ranks=1)
    held = ranks.run(local_elements, "d2r2", paths["tied"], num_ranks=4)
    assert held[0] + held[1] == held[2] + held[3] == whole


def test_the_entropy_changes_the_update(expected):
    """If it changed nothing, the comparison of the layouts would show little."""
    without, with_it = (expected[name].parameters for name in ("lm, untied, micro-batches", "lm, entropy"))
    for name, parameter in without.items():
        assert np.abs(with_it[name] - parameter).max() > 1e-4, name


@pytest.mark.parametrize("grid", ALL_GRIDS)
@pytest.mark.parametrize("unsharded", [False, True])
def test_gradients_of_parts_add_up_to_the_same_update(ranks, paths, expected, grid, unsharded):
    name = "lm, untied, micro-batches" if unsharded else "lm, tied"
    model, settings = VARIANTS[name]
    train = replace(settings.get("train", TRAIN), accumulate_unsharded=unsharded)
    ranks.run(make_meshes)
    cell = Cell(paths[model], **{**settings, "train": train})
    outcomes = ranks.run(run_in_parts, grid, cell, num_ranks=ParallelGrid.parse(grid).size)
    assert_same_outcome(outcomes, expected[name], grid)


@pytest.mark.parametrize("event", ["poison", "stop"])
def test_steps_on_parts_are_skipped_and_stopped_everywhere(ranks, paths, event):
    cell = Cell(paths["tied"], **{event: 0})
    ranks.run(make_meshes)
    outcomes = ranks.run(run_in_parts, "d2p2", cell, num_ranks=4)
    assert_same_outcome(outcomes, run_cell(0, "", cell), "d2p2")


# ---------------------------------------------------------------------------------------------------------- other variations


def compare(ranks: RankProcesses, cell: Cell, grids: tuple[str, ...]) -> None:
    expected = run_cell(0, "", cell)
    for grid in grids:
        assert_same_outcome(run(ranks, grid, [cell])[0], expected, grid)


def test_heads_with_norms_of_their_own(ranks, paths):
    """In Qwen3 every tensor rank has q_norm and uses it on its own heads, so the gradient of q_norm is a sum over the tensor
    ranks."""
    compare(ranks, Cell(paths["qwen3"]), ("m2", "d2p2m2"))


@pytest.mark.parametrize("grid", ["d2m2", "p2m2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_does_not_divide(ranks, tmp_path, tied, grid):
    """65 tokens over 2 tensor ranks, and in d2m2 each part over 2 data ranks."""
    tokenizer = make_char_tokenizer(None, ALPHABET + "#")
    make_tiny_model(str(tmp_path), tokenizer=tokenizer, hidden_size=32, intermediate_size=64, tie_embeddings=tied)
    compare(ranks, Cell(str(tmp_path)), (grid,))


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("cohere", {"logit_scale": 0.1}),
        ("granite", {"logits_scaling": 8.0}),
        ("nanochat", {"final_logit_softcapping": 2.0}),
    ],
)
def test_logits_that_are_scaled_or_capped(ranks, tmp_path, architecture, more):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        architecture, vocab_size=64, pad_token_id=None, num_key_value_heads=2, **sizes, **more
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    compare(ranks, Cell(str(tmp_path)), ("d2", "m2") if architecture != "nanochat" else ("d2",))


def save_with_noise(family: str, path: str) -> None:
    """A small model of the family. Noise in each parameter makes it count, and keeps gradients small enough to be compared."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(default_config(family)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)


def some_or_all(families: tuple[str, ...]) -> list[object]:
    return [
        family if family in QUICK_FAMILIES else pytest.param(family, marks=pytest.mark.release) for family in families
    ]


@pytest.mark.parametrize("family", some_or_all(SPLIT_FAMILIES))
def test_families_whose_matrices_can_be_split(ranks, tmp_path, family):
    """Gradients, not updates: Adam's division enlarges the rounding of elements near 0, of which these models have more."""
    save_with_noise(family, str(tmp_path))
    cell = Cell(str(tmp_path), train=MICRO)
    expected = gradients(0, "", cell)
    ranks.run(make_meshes)
    for found in ranks.run(gradients, "m2", cell, num_ranks=2):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "grid"),
    [
        pytest.param(family, grid, marks=marks)
        for family, grids, marks in (
            ("qwen3_5_text", ("d1", "d2", "m2", "p2", "d2p2m2", "c2", "d2c2"), ()),
            ("lfm2", ("d1", "d2", "c2"), ()),
            ("bamba", ("d1", "d2", "c2"), pytest.mark.release),
        )
        for grid in grids
    ],
)
def test_layers_with_a_state(ranks, tmp_path, family, grid, checkpointing):
    """Sequences that share a row have the logprobs and give the gradients that they give one by one."""
    save_with_noise(family, str(tmp_path))
    expected = logprobs_and_gradients(0, "", Cell(str(tmp_path), train=replace(TRAIN, max_tokens_per_mb=1)))
    cell = Cell(str(tmp_path), train=replace(MICRO, gradient_checkpointing=checkpointing))
    ranks.run(make_meshes)
    size = ParallelGrid.parse(grid).size
    found = [logprobs_and_gradients(0, "", cell)]
    if size > 1:
        found = ranks.run(logprobs_and_gradients, grid, cell, num_ranks=size)
    assert {name for one in found for name in one} == expected.keys()
    for name, value in ((name, value) for one in found for name, value in one.items()):
        most = np.abs(expected[name]).max()
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5 * most, err_msg=f"{grid} {name}")


def refusal_of(rank: int, grid: str, path: str) -> str:
    """Why the model does not load. Collective."""
    with pytest.raises(ConfigError) as raised:
        make_engine(grid, path)
    return str(raised.value)


@pytest.mark.parametrize("grid", ["c2m2", "c2p2"])
def test_context_ranks_refuse_layers_with_a_state_in_further_axes(ranks, tmp_path, grid):
    save_with_noise("qwen3_5_text", str(tmp_path))
    ranks.run(make_meshes)
    for message in ranks.run(refusal_of, grid, str(tmp_path), num_ranks=4):
        assert "layers.0.linear_attn carries a state" in message
        assert "use d and c alone" in message


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "gemma3_text", "mistral", "deepseek_v3"])
def test_attention_of_context_ranks(ranks, tmp_path, family):
    """Sinks, windows, soft caps, and keys that are wider than values."""
    save_with_noise(family, str(tmp_path))
    cell = Cell(str(tmp_path), train=MICRO)
    expected = logprobs_and_gradients(0, "", cell)
    ranks.run(make_meshes)
    found = ranks.run(logprobs_and_gradients, "c2", cell, num_ranks=2)
    assert {name for one in found for name in one} == expected.keys()
    for name, value in ((name, value) for one in found for name, value in one.items()):
        most = np.abs(expected[name]).max()
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5 * most, err_msg=name)


def saved_bytes(rank: int, grid: str, path: str, checkpointing: bool) -> int:
    """The bytes that backward needs of a row of 1,000 tokens. Collective."""
    engine = make_engine(grid, path, train=replace(TRAIN, gradient_checkpointing=checkpointing))
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor):
        kept.append(tensor)  # a storage that is freed would give its address to another one
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.try_step(make_sample((401, 599)), Loss(10.0), temperature=0.7)
    return sum(storages.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_context_ranks_share_the_activations(ranks, paths, checkpointing):
    ranks.run(make_meshes)
    (whole,) = ranks.run(saved_bytes, "", paths["llama"], checkpointing, num_ranks=1)
    for found in ranks.run(saved_bytes, "c2", paths["llama"], checkpointing, num_ranks=2):
        assert found <= 0.55 * whole


def test_ranks_in_the_middle_of_a_larger_world(ranks, paths):
    """Ranks 3 to 6 hold a model of their own. The others hold no part of it."""
    outcomes = ranks.run(run_in_the_middle, Cell(paths["tied"]))
    assert [outcome is None for outcome in outcomes] == [True] * 3 + [False] * 4 + [True]
    assert_same_outcome(outcomes[3:7], run_cell(0, "", Cell(paths["tied"])), "d2p2")


def run_in_the_middle(rank: int, cell: Cell) -> Outcome | None:
    mesh = ModelMesh.make(ModelPlacement("middle", ParallelGrid.parse("d2p2"), (3, 4, 5, 6)), "cpu")
    meshes(0)["middle"] = mesh
    return None if mesh is None else run_cell(rank, "middle", cell)


@pytest.mark.parametrize(
    ("choice", "grids"), [(True, ("d2m2", "p2m2", "c2m2")), ("attention", ("d2", "m2", "p2", "c2"))]
)
def test_gradient_checkpointing(ranks, paths, choice, grids):
    train = replace(MICRO, gradient_checkpointing=choice)
    compare(ranks, Cell(paths["llama"], train=train), grids)


def test_more_stages_than_two(ranks, paths):
    """The first and last stages add their gradients of a tied embedding. The stages between them do not take part."""
    compare(ranks, Cell(paths["tied"], train=MICRO), ("p3",))


def run_in_units(rank: int, grid: str, cell: Cell) -> Outcome:
    whole = sharding.UNIT_ELEMENTS
    sharding.UNIT_ELEMENTS = 1
    try:
        return run_cell(rank, grid, cell)
    finally:
        sharding.UNIT_ELEMENTS = whole


def test_large_models_are_gathered_in_units(ranks, paths):
    """The test makes units so small that every layer is one."""
    ranks.run(make_meshes)
    cell = Cell(paths["untied"], train=replace(MICRO, gradient_checkpointing=True))
    for grid in ("d2", "d2p2"):
        size = ParallelGrid.parse(grid).size
        assert_same_outcome(ranks.run(run_in_units, grid, cell, num_ranks=size), run_cell(0, "", cell), grid)


def run_compiled(rank: int, grid: str, cell: Cell) -> Outcome:
    made = TrainEngine.__init__

    def compiled(engine: TrainEngine, *arguments: Any, **options: Any) -> None:
        made(engine, *arguments, **options)
        engine.compile_layers("aot_eager")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainEngine, "__init__", compiled)
        return run_cell(rank, grid, cell)


@pytest.mark.timeout(300)
def compile_refusal(rank: int, grid: str, path: str) -> str:
    """The message of the refusal to compile, or ""."""
    try:
        self_check.compile_checked(make_engine(grid, path), "model", 1.0)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("grid", "reason"), [("m2", "its layers are split"), ("c2", "its context ranks exchange heads")]
)
def test_layers_that_exchange_parts_of_rows_are_not_compiled(ranks, paths, grid, reason):
    ranks.run(make_meshes)
    for told in ranks.run(compile_refusal, grid, paths["tied"], num_ranks=2):
        assert f"train.compile='on': model cannot be compiled: {reason}" in told


@pytest.mark.parametrize("grid", ["d2", "p2"])
def test_compiled_layers(ranks, paths, grid):
    """FSDP gathers and frees the weights of compiled layers, and stages have only some layers."""
    ranks.run(make_meshes)
    cell = Cell(paths["untied"], train=MICRO)
    assert_same_outcome(ranks.run(run_compiled, grid, cell, num_ranks=2), run_cell(0, "", cell), grid)


class CountedReductions(TorchDispatchMode):
    """Counts collectives under any of torch's names for the operation."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.operation in str(func)
        return func(*args, **(kwargs or {}))


def count_reductions(rank: int, grid: str, cell: Cell, operation: str = "reduce_scatter") -> int:
    """The number of collectives in a step. By reduce-scatter data ranks sum gradients, of which each rank keeps a part."""
    engine, sample = make_engine(grid, cell.path, cell.kind, cell.train), make_sample(cell.lengths)
    with CountedReductions(operation) as calls:
        engine.train_step(part_of(engine, sample), Loss(10.0), temperature=1.0, lr_step=0)
    return calls.count


def test_gradients_are_summed_after_each_micro_batch_unless_they_may_add_up(ranks, paths):
    """If gradients are not summed after each micro-batch, each rank holds those of all parameters until the end of the step."""
    ranks.run(make_meshes)
    once = ranks.run(count_reductions, "d2", Cell(paths["untied"]), num_ranks=2)
    each = ranks.run(count_reductions, "d2", Cell(paths["untied"], train=MICRO), num_ranks=2)
    train = replace(MICRO, accumulate_unsharded=True)
    at_last = ranks.run(count_reductions, "d2", Cell(paths["untied"], train=train), num_ranks=2)
    assert once == at_last
    assert each[0] == each[1] >= 2 * once[0] > 0
    compare(ranks, Cell(paths["untied"], train=train), ("d2", "d2p2m2"))


def test_gradients_are_summed_over_copies_once_in_a_step(ranks, paths):
    ranks.run(make_meshes)
    whole = ranks.run(count_reductions, "d2r2", Cell(paths["untied"]), "allreduce", num_ranks=4)
    micro = ranks.run(count_reductions, "d2r2", Cell(paths["untied"], train=MICRO), "allreduce", num_ranks=4)
    assert micro == whole
    assert whole[0] > 0
    scattered = [
        ranks.run(count_reductions, "d2r2", Cell(paths["untied"], train=t), num_ranks=4) for t in (TRAIN, MICRO)
    ]
    assert scattered[1][0] >= 2 * scattered[0][0] > 0


def graphs_left(rank: int, grid: str, cell: Cell) -> int:
    """Tensors with an autograd graph after a step, minus those before it."""

    def count() -> int:
        gc.collect()
        return sum(isinstance(found, torch.Tensor) and found.grad_fn is not None for found in gc.get_objects())

    engine, sample = make_engine(grid, cell.path, cell.kind, cell.train), make_sample(cell.lengths)
    before = count()
    engine.train_step(part_of(engine, sample), Loss(10.0), temperature=1.0, lr_step=0)
    return count() - before


def test_no_recomputed_graph_outlives_the_step(ranks, paths):
    """Recomputation stops a layer's forward pass once backward has its inputs."""
    ranks.run(make_meshes)
    cell = Cell(paths["untied"], train=replace(TRAIN, gradient_checkpointing=True))
    assert ranks.run(graphs_left, "m2", cell, num_ranks=2) == [0, 0]


def sent_and_alive(rank: int, grid: str, cell: Cell) -> tuple[int, int]:
    """(Micro-batches of an inference, the most outputs of earlier ones that are in memory when the next one begins)."""
    engine, sample = make_engine(grid, cell.path, cell.kind, cell.train), make_sample(cell.lengths)
    storages: list[StorageWeakRef] = []
    alive: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: alive.append(sum(not storage.expired() for storage in storages)))
    engine.module.register_forward_hook(
        lambda _, __, made: storages.append(StorageWeakRef((made if rank < 2 else made[0]).untyped_storage()))
    )
    infer(engine, sample)
    return len(alive), max(alive)


def test_a_stage_frees_the_hidden_states_that_it_has_sent(ranks, paths):
    ranks.run(make_meshes)
    cell = Cell(paths["untied"], train=replace(TRAIN, max_tokens_per_mb=max(LENGTHS)))
    (first, kept), (_, kept_by_second), (last, results) = ranks.run(sent_and_alive, "p3", cell, num_ranks=3)
    assert first == last > 3
    assert kept == kept_by_second == 1  # the one that is on its way
    assert results == last - 1  # results stay


def tries_without_memory(rank: int, grid: str, cell: Cell) -> int:
    engine, tries = make_engine(grid, cell.path, cell.kind, cell.train), 0

    def fail(*_):
        nonlocal tries
        tries += 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    next(iter(engine.model.model.layers)).register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        infer(engine, make_sample(cell.lengths))
    return tries


def test_inference_of_several_ranks_is_not_repeated_when_memory_runs_out(ranks, paths):
    """A rank that begins again would meet the others in another collective."""
    ranks.run(make_meshes)
    assert ranks.run(tries_without_memory, "d2", Cell(paths["untied"]), num_ranks=2) == [1, 1]


@pytest.mark.parametrize("grid", ["d2", "p2m2"])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(ranks, paths, grid):
    outcomes = run(ranks, grid, [Cell(paths["tied"], poison=0)])[0]
    assert [[step["skipped_steps"] for step in outcome.steps] for outcome in outcomes] == [[1.0, 0.0]] * len(outcomes)
    expected = run_cell(0, "", Cell(paths["tied"], poison=0))
    assert_same_outcome(outcomes, expected, grid)


@pytest.mark.parametrize("grid", ["d2", "p2m2"])
def test_the_loss_function_can_stop_the_step_everywhere(ranks, paths, grid):
    outcomes = run(ranks, grid, [Cell(paths["tied"], stop=0)])[0]
    assert [[step["stopped_steps"] for step in outcome.steps] for outcome in outcomes] == [[1.0, 0.0]] * len(outcomes)
    assert_same_outcome(outcomes, run_cell(0, "", Cell(paths["tied"], stop=0)), grid)


def test_bfloat16_stays_near_float32(ranks, paths):
    exact = run_cell(0, "", Cell(paths["tied"]))
    for grid in ("d2", "p2m2"):
        outcomes = run(ranks, grid, [Cell(paths["tied"], train=replace(TRAIN, dtype="bfloat16"))])[0]
        last = outcomes[-1]
        assert all(array.dtype == np.float32 for array in last.parameters.values())
        assert last.steps[0]["grad_norm"] == pytest.approx(exact.steps[0]["grad_norm"], rel=0.03)
        assert last.steps[0]["grad_norm"] != exact.steps[0]["grad_norm"]
        assert last.steps[0]["loss"] == pytest.approx(exact.steps[0]["loss"], rel=0.03)


def test_bfloat16_computes_the_same_with_data_ranks_and_stages(ranks, paths):
    """The residual stream and the sums of gradients have the same dtypes. Most logprobs are equal to the bit: products of another
    number of rows may be rounded otherwise. With tensor ranks the parts of a sum are rounded before they are added."""
    cell = Cell(paths["untied"], train=replace(TRAIN, dtype="bfloat16"))
    expected = run_cell(0, "", cell)
    for grid in ("d2", "p2"):
        for outcome in run(ranks, grid, [cell])[0]:
            assert outcome.steps[0]["grad_norm"] == pytest.approx(expected.steps[0]["grad_norm"], rel=1e-3)
            if outcome.before is not None:
                off = np.abs(outcome.before - of_groups(expected.before, expected.ids, outcome.ids))
                assert (off == 0).mean() > 0.9
                assert off.mean() < 0.002


# ------------------------------------------------------------------------------------------------------------ weights


def weights_of(rank: int, grid: str, path: str, kind: str) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    engine = make_engine(grid, path, kind, trainable=False)
    local = {name: sharding.local_tensor(p.detach()).numel() for name, p in engine.named_parameters().items()}
    return whole_parameters(engine), local


def elements_read(rank: int, grid: str, path: str) -> tuple[int, int]:
    """Return (elements that this rank read from the files, elements that it keeps)."""
    count = 0

    class Counted:
        def __init__(self, stored: Any) -> None:
            self.get_shape = stored.get_shape
            self._stored = stored

        def __getitem__(self, at: Any) -> torch.Tensor:
            nonlocal count
            part = self._stored[at]
            count += part.numel()
            return part

    class File:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._file = safe_open(*arguments, **options)
            self.keys = self._file.keys

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def get_slice(self, name: str) -> Counted:
            return Counted(self._file.get_slice(name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "safe_open", File)
        engine = make_engine(grid, path)
    return count, sum(sharding.local_tensor(parameter).numel() for parameter in engine.named_parameters().values())


@pytest.mark.parametrize("grid", ["d2", "d4", "d2m2", "d2p2", "d2r2", "m2", "p2"])
def test_a_rank_reads_what_it_keeps(ranks, paths, grid):
    ranks.run(make_meshes)
    found = ranks.run(elements_read, grid, paths["untied"], num_ranks=ParallelGrid.parse(grid).size)
    assert all(read == kept for read, kept in found)
    held = sum(kept for _, kept in found)
    whole = sum(tensor.numel() for tensor in load_file(f"{paths['untied']}/model.safetensors").values())
    copies, repeated = (2 if "r" in grid else 1), (0.05 * whole if "m" in grid else 0)  # tensor ranks repeat norms
    assert copies * whole <= held <= copies * whole + repeated


def memory_of_a_load(rank: int, grid: str, small: str, path: str) -> tuple[int, int]:
    """Return (bytes of resident memory that the load adds at its peak, bytes of this rank's share). The small model's load imports
    and allocates what does not depend on the model."""
    make_engine(grid, small)
    gc.collect()

    def resident(name: str) -> int:
        return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    engine = make_engine(grid, path)
    share = sum(sharding.local_tensor(parameter).nbytes for parameter in engine.named_parameters().values())
    return resident("VmHWM") - before, share


def test_a_load_takes_the_memory_of_the_share_and_of_little_more(ranks, paths, tmp_path):
    """The pages of the file that a rank has read count as its memory until the system needs them, so a share counts twice."""
    make_tiny_model(tmp_path, hidden_size=1024, intermediate_size=6144, num_layers=2, tie_embeddings=False)
    ranks.run(make_meshes)
    largest = 4 * 1024 * 6144
    for grid in ("", "d2", "d4", "d2m2", "d2p2"):
        size = ParallelGrid.parse(grid).size if grid else 1
        for added, share in ranks.run(memory_of_a_load, grid, paths["untied"], str(tmp_path), num_ranks=size):
            assert added < 2 * share + 2 * largest, grid


@pytest.mark.parametrize("kind", ["lm", "value"])
@pytest.mark.parametrize("grid", ["m2", "d2p2m2"])
def test_every_rank_loads_its_pieces_under_the_names_of_the_checkpoint(ranks, paths, grid, kind):
    expected, sizes = weights_of(0, "", paths["untied"], kind)
    ranks.run(make_meshes)
    count = ParallelGrid.parse(grid).size
    found = ranks.run(weights_of, grid, paths["untied"], kind, num_ranks=count)
    for name, value in expected.items():
        holders = [parameters[name] for parameters, _ in found if name in parameters]
        assert holders
        for held in holders:
            np.testing.assert_array_equal(held, value)
        if value.ndim == 2 and not name.startswith("score."):  # every rank holds exactly its share of each large tensor
            assert sum(local.get(name, 0) for _, local in found) == sizes[name]


def test_a_checkpoint_with_other_names_is_loaded_too(ranks, paths, tmp_path):
    """The checkpoint has the backbone's names only. transformers maps them."""
    AutoModel.from_pretrained(paths["tied"]).save_pretrained(tmp_path)
    expected, _ = weights_of(0, "", paths["tied"], "lm")
    ranks.run(make_meshes)
    found = ranks.run(weights_of, "d2p2m2", str(tmp_path), "lm", num_ranks=8)
    for parameters, _ in found:
        for name, value in parameters.items():
            np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda name, tensor: None if "layers.2.mlp.down_proj" in name else tensor,
            "lack model.layers.2.mlp.down_proj",
        ),
        (lambda name, tensor: torch.full_like(tensor, math.nan), "are broken: .* NaN"),
        (lambda name, tensor: tensor[:8].contiguous(), "does not have the shape|cannot be loaded"),
    ],
    ids=["tensor missing", "nan", "other shape"],
)
def test_a_broken_checkpoint_is_told_on_every_rank(ranks, paths, tmp_path, damage, reason):
    shutil.copytree(paths["tied"], tmp_path, dirs_exist_ok=True)
    tensors = {name: damage(name, tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    ranks.run(make_meshes)
    for told in ranks.run(refusal, "p2m2", str(tmp_path), num_ranks=4):
        assert re.match(f"model_path='{tmp_path}': .*({reason})", told, re.DOTALL), told


def refusal_of_checked(rank: int, grid: str, path: str) -> str:
    mesh = meshes(0)[grid]
    model = ModelConfig("model", path, grid, list(mesh.placement.workers), "lm", True, OPTIMIZER)
    with pytest.raises(ConfigError) as caught:
        self_check.load_checked(model, TRAIN, mesh=mesh, device=torch.device("cpu"))
    return str(caught.value)


@pytest.mark.parametrize("grid", ["d4", "d2p2"])
def test_what_one_rank_finds_in_the_weights_is_raised_by_all(ranks, paths, tmp_path, grid):
    """The NaN is in the last row, which only the last rank reads."""
    shutil.copytree(paths["untied"], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][-1, -1] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ranks.run(make_meshes)
    (told,) = set(ranks.run(refusal_of_checked, grid, str(tmp_path), num_ranks=4))
    assert told.startswith(
        f"model_path='{tmp_path}': its weights are broken: model.layers.2.mlp.down_proj.weight in {tmp_path}"
    )
    assert "model.safetensors contains NaN" in told


def scores_of(rank: int, grid: str, path: str) -> tuple[list[str], np.ndarray | None]:
    engine = make_engine(grid, path, "reward", MICRO, trainable=False)
    part = part_of(engine, make_sample(LENGTHS))
    assert engine.scores(None if part is None else part) is None or engine.is_last_stage
    return list(part.ids), engine.scores(part)


def test_scores_in_any_layout(ranks, paths, tmp_path):
    config = AutoConfig.from_pretrained(paths["tied"], num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(paths["tied"], config=config).save_pretrained(tmp_path)
    _, expected = scores_of(0, "", str(tmp_path))
    ranks.run(make_meshes)
    found = ranks.run(scores_of, "d2p2m2", str(tmp_path), num_ranks=8)
    for rank, (ids, scores) in enumerate(found):
        if rank < 4:
            assert scores is None
        else:
            np.testing.assert_allclose(scores, expected[[int(name[1:]) for name in ids]], rtol=1e-5, atol=1e-5)


def overwrite(rank: int, grid: str, path: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Outputs before and after all parameters are set to zero in place."""
    engine = make_engine(grid, path, trainable=False)
    sample = make_sample(LENGTHS)
    before = engine.logprobs(sample, temperature=1.0)
    with torch.no_grad():
        for parameter in engine.named_parameters().values():
            sharding.local_tensor(parameter).zero_()
    return before, engine.logprobs(sample, temperature=1.0)


def test_what_is_written_into_the_parameters_counts_at_once(ranks, paths):
    ranks.run(make_meshes)
    for before, after in ranks.run(overwrite, "d2", paths["tied"], num_ranks=2):
        first = np.cumsum([0, *LENGTHS])[:-1]
        assert np.delete(before, first).std() > 0.1
        np.testing.assert_allclose(np.delete(after, first), -math.log(64), rtol=1e-6)


# -------------------------------------------------------------------------------------------------------------- refusals


def refusal(rank: int, grid: str, path: str) -> str:
    try:
        make_engine(grid, path)
    except ValueError as error:  # includes ConfigError
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ("m4", "has 2 key heads, which m4 cannot split; m1, m2 would fit"),
        ("p4", "has 3 layers, fewer .*; use at most p3"),
        ("c3", "4 attention heads do not divide evenly among 3 context ranks; use another c"),
        ("c8", "4 attention heads do not divide evenly among 8 context ranks; use another c"),
    ],
)
def test_a_grid_that_the_model_does_not_fit_is_refused_with_one_that_would(ranks, paths, grid, reason):
    ranks.run(make_meshes)
    for told in ranks.run(refusal, grid, paths["tied"], num_ranks=ParallelGrid.parse(grid).size):
        assert told.startswith(f"model_path={paths['tied']!r}: ")
        assert re.search(reason, told), told


@pytest.mark.parametrize(
    ("architecture", "more", "grid", "reason"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "m2", "'gpt2' has no plan for tensor parallelism"),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "p2", "'gpt2' has no plan for pipeline stages"),
        ("olmo2", {}, "m2", "splits .*q_proj as 'colwise_gather_output', which is not supported; use m1"),
    ],
)
def test_an_architecture_that_cannot_be_split_is_refused(ranks, tmp_path, architecture, more, grid, reason):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        architecture, vocab_size=64, pad_token_id=None, **(more if "n_embd" in more else sizes | more)
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ranks.run(make_meshes)
    for told in ranks.run(refusal, grid, str(tmp_path), num_ranks=2):
        assert re.search(reason, told), told


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """In float32, a sequence alone and in a packed row differ by more than BOUND here, by rounding."""
    path = tmp_path_factory.mktemp("deep")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 12, "num_heads": 8}
    make_tiny_model(path, **sizes, initializer_range=0.08)
    return str(path)


@pytest.mark.parametrize("grid", ["d2", "m2", "p2", "c2"])
def test_rounding_of_a_deep_model_is_no_fault_on_several_ranks(ranks, deep, grid):
    ranks.run(make_meshes)
    size = ParallelGrid.parse(grid).size
    assert ranks.run(check_packing, grid, deep, 0.0, num_ranks=size) == [""] * size
    told = "".join(ranks.run(check_packing, grid, deep, 0.1, num_ranks=size))
    figure, bound = map(float, re.search(r"differ by ([\d.e+-]+) \(bound: ([\d.e+-]+)\)", told).groups())
    assert figure > 10 * bound
    assert bound > BOUND


def test_workers_are_listed_in_the_order_of_the_world():
    with pytest.raises(ValueError, match="ascending"):
        ModelMesh.make(ModelPlacement("actor", ParallelGrid.parse("d2"), (1, 0)), "cpu")
