"""LoRA: adapters in every layout equal peft's on one process, and the base with adapters off is the base model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, LoraConfig, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model import checkpoint
from asyncrl.model.engine import TrainEngine, base_engine
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.sharding import local_tensor
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.adapter import ABOUT, TENSORS, about, name_of
from tests.support.rank_processes import RankProcesses

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # peft asks transformers for it

LARGE = ("d2r2", "d2m2", "p2m2", "d2c2", "m2c2")
GRIDS = ("d1", "d2", "p2", "m2", "c2", *LARGE)
# eps: a gradient that is zero except for rounding must not cause a step of the learning rate's size
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0, schedule="constant", eps=1e-5, grad_clip=0.0)
LORA = LoraConfig(rank=3, alpha=6.0)
LENGTHS, STEPS = (29, 3, 17, 1, 8, 23, 12), 5


def make_sample(lengths: tuple[int, ...] = LENGTHS) -> SequenceSample:
    rng = np.random.default_rng(0)
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


def loss(outputs, data, cu_seqlens):
    return -(data["advantages"] * outputs["logprobs"])[data["loss_mask"]].sum() / 4.0, {}


def value_loss(outputs, data, cu_seqlens):
    return (data["advantages"] - outputs["values"]).square()[data["loss_mask"]].sum() / 4.0, {}


@cache
def meshes(_world: int) -> dict[str, ModelMesh | None]:
    placements = [ModelPlacement(text, grid := ParallelGrid.parse(text), tuple(range(grid.size))) for text in GRIDS]
    return {placement.name: ModelMesh.make(placement, "cpu") for placement in placements}


def make_engine(
    path: str, grid: str = "", lora: LoraConfig | None = LORA, dtype: str = "float32", kind: str = "lm"
) -> TrainEngine:
    mesh = meshes(0)[grid] if grid else None
    workers = list(mesh.placement.workers) if mesh is not None else [0]
    text = str(mesh.placement.grid) if mesh is not None else "d1p1m1"
    model = ModelConfig("model", path, text, workers, kind, lora is not None, OPTIMIZER, lora=lora)
    return TrainEngine(model, TrainConfig(dtype=dtype, logprob_chunk_tokens=16), mesh=mesh)


@dataclass
class Outcome:
    base: np.ndarray | None  # logprobs with the adapters off, after the steps
    logprobs: np.ndarray | None
    norms: list[float]
    adapter: dict[str, Tensor]
    frozen: bool  # all other parameters are as before


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(rank: int, grid: str, path: str, lora: LoraConfig = LORA, dtype: str = "float32") -> Outcome:
    engine = make_engine(path, grid, lora, dtype)
    assert engine.adapters is not None
    own = engine.own_parameters()
    others = {
        name: local_tensor(tensor.detach()).clone()
        for name, tensor in engine.named_parameters().items()
        if name not in own
    }
    sample = make_sample()
    ids = sample.ids[engine.replica :: engine.num_replicas]
    part = sample.select_ids(ids) if ids else None
    norms = [engine.train_step(part, loss, temperature=0.7, lr_step=step)["grad_norm"] for step in range(STEPS)]
    frozen = all(torch.equal(tensor, local_tensor(engine.named_parameters()[name])) for name, tensor in others.items())
    names = engine.adapters.names
    adapter = {names[name]: whole(tensor) for name, tensor in own.items()}
    base = base_engine(engine).logprobs(part, temperature=1.0)
    return Outcome(base, engine.logprobs(part, temperature=1.0), norms, adapter, frozen)


def train_critic(
    rank: int, grid: str, path: str, dtype: str = "float32"
) -> tuple[np.ndarray | None, dict[str, Tensor]]:
    engine = make_engine(path, grid, dtype=dtype, kind="value")
    assert engine.adapters is not None
    sample = make_sample()
    ids = sample.ids[engine.replica :: engine.num_replicas]
    part = sample.select_ids(ids) if ids else None
    for step in range(STEPS):
        engine.train_step(part, value_loss, temperature=1.0, lr_step=step)
    names = engine.adapters.names
    own = {names[name]: whole(tensor) for name, tensor in engine.own_parameters().items()}
    assert {tensor.dtype for tensor in own.values()} == {torch.float32}
    return engine.values(part), own


def make_meshes(rank: int) -> None:
    meshes(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("lora") / "model"
    make_tiny_model(path, num_layers=4)
    return str(path)


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(4) as processes:
        processes.run(make_meshes)
        yield processes


def by_peft(path: str, lora: LoraConfig = LORA) -> tuple[dict[str, Tensor], list[np.ndarray]]:
    """Train the same adapter by peft and torch alone, one sequence at a time. Returns the adapter as peft saves it, and the
    logprobs of each sequence afterwards."""
    targets = "all-linear" if lora.targets == ["all-linear"] else lora.targets
    config = peft.LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    adapters = make_engine(path, lora=lora).adapters
    assert adapters is not None
    peft.set_peft_model_state_dict(model, {adapters.names[name]: adapters.initial(name) for name in adapters.shapes})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": OPTIMIZER.lr, "betas": (OPTIMIZER.beta1, OPTIMIZER.beta2), "eps": OPTIMIZER.eps}
    optimizer = torch.optim.AdamW(trained, weight_decay=OPTIMIZER.weight_decay, **settings)
    sample = make_sample()
    ids = np.split(sample.data["packed_input_ids"], np.cumsum(LENGTHS)[:-1])
    advantages = np.split(sample.data["advantages"], np.cumsum(LENGTHS)[:-1])
    masks = np.split(sample.data["loss_mask"], np.cumsum(LENGTHS)[:-1])

    def logprobs(tokens: np.ndarray, temperature: float) -> Tensor:
        tensor = torch.tensor(tokens)
        log = torch.log_softmax(model(tensor[None]).logits[0, :-1] / temperature, -1)
        return torch.cat([torch.zeros(1), log.gather(1, tensor[1:, None])[:, 0]])

    for _ in range(STEPS):
        optimizer.zero_grad()
        for tokens, weights, mask in zip(ids, advantages, masks, strict=True):
            term = -(torch.tensor(weights) * logprobs(tokens, 0.7))[torch.tensor(mask)].sum() / 4.0
            if term.requires_grad:
                term.backward()
        optimizer.step()
    with torch.no_grad():
        after = [logprobs(tokens, 1.0).numpy() for tokens in ids]
    return peft.get_peft_model_state_dict(model), after


@pytest.fixture(scope="module")
def expected(model):
    return by_peft(model)


@pytest.mark.parametrize(
    "grid", [pytest.param(grid, marks=pytest.mark.release if grid in LARGE[2:] else ()) for grid in GRIDS]
)
def test_adapters_in_every_layout_equal_those_of_peft(ranks, model, expected, grid):
    outcomes = ranks.run(train, grid, model, num_ranks=ParallelGrid.parse(grid).size)
    adapter = {name: tensor for outcome in outcomes for name, tensor in outcome.adapter.items()}
    wanted, logprobs = expected
    assert adapter.keys() == wanted.keys()
    torch.testing.assert_close(adapter, wanted, rtol=0, atol=1e-5)
    assert (
        max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name) > 1e-3
    )  # it has learnt
    assert all(outcome.frozen for outcome in outcomes)
    num_replicas = ParallelGrid.parse(grid).num_replicas
    found = [outcome.logprobs for outcome in outcomes if outcome.logprobs is not None]
    for outcome in found:
        parts = [np.concatenate(logprobs[replica::num_replicas]) for replica in range(num_replicas)]
        assert min(np.abs(part - outcome).max() for part in parts if len(part) == len(outcome)) < 1e-4
    assert found


@pytest.fixture(scope="module")
def critic(model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("critic") / "model"
    value_model = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.normal_(value_model.score.weight, std=0.2)
    value_model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def critic_by_peft(critic) -> tuple[dict[str, Tensor], list[np.ndarray]]:
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=r".*\.\w+_proj", task_type="TOKEN_CLS"
    )
    model = peft.get_peft_model(AutoModelForTokenClassification.from_pretrained(critic), config)
    adapters = make_engine(critic, kind="value").adapters
    assert adapters is not None
    given = peft.get_peft_model_state_dict(model)
    for name in adapters.shapes:
        given[adapters.names[name]] = adapters.initial(name)
    peft.set_peft_model_state_dict(model, given)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": OPTIMIZER.lr, "betas": (OPTIMIZER.beta1, OPTIMIZER.beta2), "eps": OPTIMIZER.eps}
    groups = [
        {"params": [one for one in trained if one.ndim == 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **settings)
    sample = make_sample()
    keys = ("packed_input_ids", "advantages", "loss_mask")
    parts = [np.split(sample.data[key], np.cumsum(LENGTHS)[:-1]) for key in keys]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for tokens, targets, mask in zip(*parts, strict=True):
            values = model(torch.tensor(tokens)[None]).logits[0, :, 0]
            ((torch.tensor(targets) - values).square()[torch.tensor(mask)].sum() / 4.0).backward()
        optimizer.step()
    with torch.no_grad():
        after = [model(torch.tensor(tokens)[None]).logits[0, :, 0].numpy() for tokens in parts[0]]
    return peft.get_peft_model_state_dict(model), after


@pytest.mark.parametrize(
    "grid", ["d1", "m2", "p2", "c2", *(pytest.param(grid, marks=pytest.mark.release) for grid in LARGE)]
)
def test_a_critics_adapters_and_its_output_layer_equal_those_of_peft(ranks, critic, critic_by_peft, grid):
    outcomes = ranks.run(train_critic, grid, critic, num_ranks=ParallelGrid.parse(grid).size)
    wanted, values = critic_by_peft
    found = {name: tensor for _, own in outcomes for name, tensor in own.items()}
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    before = AutoModelForTokenClassification.from_pretrained(critic).score.weight
    assert (found["base_model.model.score.weight"] - before).abs().max() > 1e-3
    assert max(float(tensor.abs().max()) for name, tensor in found.items() if "lora_B" in name) > 1e-3
    num_replicas = ParallelGrid.parse(grid).num_replicas
    for outcome in [values for values, _ in outcomes if values is not None]:
        parts = [np.concatenate(values[replica::num_replicas]) for replica in range(num_replicas)]
        assert min(np.abs(part - outcome).max() for part in parts if len(part) == len(outcome)) < 1e-4


@pytest.mark.parametrize("grid", ["d1", "d2"])
def test_a_critic_on_a_base_in_bfloat16_trains_its_output_layer_in_float32(ranks, critic, critic_by_peft, grid):
    outcomes = ranks.run(train_critic, grid, critic, "bfloat16", num_ranks=ParallelGrid.parse(grid).size)
    own = {name: tensor for _, found in outcomes for name, tensor in found.items()}
    for name, tensor in critic_by_peft[0].items():
        assert (own[name] - tensor).abs().max() < 2.5 * STEPS * OPTIMIZER.lr, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grid", ["d1", "d2", "m2", "p2"])
def test_the_base_with_its_adapters_off_equals_the_base_model_bit_for_bit(ranks, model, grid, dtype):
    num_ranks = ParallelGrid.parse(grid).size
    for with_adapters, alone in zip(
        ranks.run(train, grid, model, LORA, dtype, num_ranks=num_ranks),
        ranks.run(logprobs_of_base, grid, model, dtype, num_ranks=num_ranks),
        strict=True,
    ):
        assert (with_adapters.base is None) == (alone is None)
        if alone is not None:
            assert np.array_equal(with_adapters.base, alone)
            assert not np.array_equal(with_adapters.logprobs, alone)


def logprobs_of_base(rank: int, grid: str, path: str, dtype: str) -> np.ndarray | None:
    engine = make_engine(path, grid, None, dtype)
    sample = make_sample()
    ids = sample.ids[engine.replica :: engine.num_replicas]
    return engine.logprobs(sample.select_ids(ids), temperature=1.0)


@pytest.mark.parametrize("kind", ["lm", "value"])
def test_a_checkpoint_holds_the_trained_parameters_alone_and_training_goes_on_from_it(tmp_path, model, critic, kind):
    path, loss_of = (model, loss) if kind == "lm" else (critic, value_loss)
    sample, (first, second) = make_sample(), (make_engine(path, kind=kind), make_engine(path, kind=kind))
    for step in range(2):
        first.train_step(sample, loss_of, temperature=1.0, lr_step=step)
    part = checkpoint.snapshot({kind: first})
    assert first.adapters is not None
    assert len(first.adapters.names) == len(first.adapters.shapes) + 2 * (kind == "value")
    trained = [f"{kind}.{name}{of}" for name in first.adapters.names for of in ("", ".exp_avg", ".exp_avg_sq")]
    assert sorted(part.tensors) == sorted(trained)
    checkpoint.commit(tmp_path / "point", checkpoint.write(tmp_path / "point", part, fsync=False), fsync=False)
    checkpoint.load(tmp_path / "point", {kind: second}, workers=[0])
    for engine in (first, second):
        engine.train_step(sample, loss_of, temperature=1.0, lr_step=2)
    torch.testing.assert_close(second.own_parameters(), first.own_parameters(), rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------- refused, with names


def start(folder: Path, path: str, lora: LoraConfig = LORA) -> LoraConfig:
    """An adapter of random values in peft's format, made by hand. Returns the config that begins with it."""
    adapters = make_engine(path, lora=lora).adapters
    assert adapters is not None
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    values = {adapters.names[name]: torch.randn(shape, generator=generator) for name, shape in adapters.shapes.items()}
    save_file(values, folder / TENSORS)
    (folder / ABOUT).write_bytes(about(lora, path, adapters.layers))
    return LoraConfig(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, start=str(folder))


def test_training_begins_with_a_given_adapter_which_peft_reads_alike(tmp_path, model):
    lora = start(tmp_path / "start", model)
    engine = make_engine(model, lora=lora)
    sample = make_sample((20,))
    other = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), lora.start)
    ids = torch.tensor(sample.data["packed_input_ids"])
    with torch.no_grad():
        expected = torch.log_softmax(other(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    found = engine.logprobs(sample, temperature=1.0)
    assert found is not None
    np.testing.assert_allclose(found[1:], expected, atol=1e-4)


def edit(folder: Path, **fields: object) -> None:
    (folder / ABOUT).write_text(json.dumps({**json.loads((folder / ABOUT).read_text()), **fields}))


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    tensors.pop(name_of("model.layers.1.mlp.up_proj", "B"))
    save_file(tensors, folder / TENSORS)


def spoil(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    tensors[name_of("model.layers.1.mlp.up_proj", "B")][0, 0] = float("inf")
    save_file(tensors, folder / TENSORS)


def pickled(folder: Path) -> None:
    (folder / TENSORS).rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: edit(folder, r=8), "r is 8, but train.lora.rank is 3"),
        (lambda folder: edit(folder, lora_alpha=16), "lora_alpha is 16, but train.lora.alpha is 6"),
        (lambda folder: edit(folder, base_model_name_or_path="x/other"), "belongs to 'x/other', but model_path is"),
        (lambda folder: edit(folder, use_dora=True), "use_dora is True"),
        (lambda folder: edit(folder, target_modules=["q_proj"]), "target_modules and train.lora.targets differ"),
        (drop_tensor, "mlp.up_proj.lora_B.weight is missing"),
        (spoil, "mlp.up_proj.lora_B.weight has values that are not finite"),
        (pickled, "adapter_model.bin, a pickle"),
        (shutil.rmtree, "has no adapter_model.safetensors"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_the_start(tmp_path, model, damage, message):
    lora = start(tmp_path / "start", model)
    damage(Path(lora.start))
    with pytest.raises(ConfigError, match=message) as caught:
        make_engine(model, lora=lora)
    assert "train.lora.start" in str(caught.value)


def test_targets_are_ends_of_names_and_an_unknown_one_is_refused_with_the_names_that_exist(model):
    adapters = make_engine(model, lora=LoraConfig(targets=["q_proj", "mlp.up_proj"])).adapters
    assert adapters is not None
    assert len(adapters.layers) == 8
    with pytest.raises(
        ConfigError, match="'c_attn' is no linear layer of this model; there are down_proj, gate_proj, k_proj"
    ):
        make_engine(model, lora=LoraConfig(targets=["q_proj", "c_attn"]))
    with pytest.raises(ConfigError, match="'lm_head' is no linear layer"):
        make_engine(model, lora=LoraConfig(targets=["lm_head"]))
