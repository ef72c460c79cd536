"""Mixtures of experts on several ranks: gathered by FSDP, or split (`e` in a grid). Each layout updates as one rank does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sharded_models import shard
from test_parallel_engine import (
    EXPERT_GRIDS,
    LENGTHS,
    MICRO,
    OPTIMIZER,
    TRAIN,
    Cell,
    Loss,
    Outcome,
    assert_same_outcome,
    make_engine,
    make_meshes,
    make_sample,
    meshes,
    part_of,
    run,
    run_cell,
    whole_parameters,
)
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asyncrl.architectures.routes import routers_of
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, LoraConfig, TrainConfig
from asyncrl.data.routes import ROUTES, Routes
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import EXPERTS, PEERS, ParallelGrid
from asyncrl.dataflow.layout_checks import problem_of_grid
from asyncrl.model import checkpoint, experts, sharding
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.reallocate import reallocate
from asyncrl.model.routes import RouteReplay
from asyncrl.model.sharding import local_part
from asyncrl.protocol.versions import WrittenFile
from tests.support.families import make_family
from tests.support.rank_processes import RankProcesses

Arrays = dict[str, np.ndarray]
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
VARIANTS: dict[str, TrainConfig] = {
    "whole": TRAIN,
    "micro-batches": MICRO,
    "checkpointing": replace(MICRO, gradient_checkpointing=True),
    "critic": MICRO,
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses(8) as processes:
        yield processes


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        torch.manual_seed(0)
        make_family(folder / family, family, initializer_range=0.05)
    return {family: str(folder / family) for family in FAMILIES}


QUICK = [("qwen3_moe", grid) for grid in ("d2", "d2e2", "d4e2", "d2c2e2")] + [(name, "d4e2") for name in FAMILIES[1:]]
RARE = [("qwen3_moe", grid) for grid in ("d4", "c2", "p2", *EXPERT_GRIDS) if ("qwen3_moe", grid) not in QUICK]
RARE += [(family, grid) for family in FAMILIES[1:] for grid in ("d4", "d4e4", "c2e2", "d2p2e2")]


@pytest.mark.parametrize(
    ("family", "grid", "variant"),
    [
        pytest.param(family, grid, variant, marks=marks)
        for cases, marks in ((QUICK, ()), (RARE, pytest.mark.release))
        for family, grid in cases
        if grid != "d3e3"
        for variant in (VARIANTS if family == "qwen3_moe" else ["micro-batches"])
    ],
)
def test_a_mixture_of_experts_gives_the_same_update_in_every_layout(
    ranks: RankProcesses, paths: dict[str, str], family: str, grid: str, variant: str
) -> None:
    """Experts that FSDP gathers, and split ones. With four parts some ranks have few tokens for some experts."""
    cell = cell_of(paths[family], variant)
    (outcomes,) = run(ranks, grid, [cell])
    assert_same_outcome(outcomes, run_cell(0, "", cell), grid)


def cell_of(path: str, name: str) -> Cell:
    return Cell(path, kind="value" if name == "critic" else "lm", train=VARIANTS[name])


@pytest.mark.parametrize("grid", ["d4e4", "d4e2"])
def test_fewer_sequences_than_ranks(ranks: RankProcesses, paths: dict[str, str], grid: str) -> None:
    cell = Cell(paths["qwen3_moe"], lengths=(29,))
    (outcomes,) = run(ranks, grid, [cell])
    assert_same_outcome(outcomes, run_cell(0, "", cell), grid)


def rows_of_this_rank(mesh: ModelMesh, grad: torch.Tensor) -> torch.Tensor:
    """Each rank keeps what its own tokens add to its rows: nothing is summed."""
    group = mesh.group(PEERS)
    kept = torch.zeros_like(grad)
    rows = grad.chunk(group.size())[dist.get_rank(group)]
    kept.chunk(group.size())[dist.get_rank(group)].copy_(rows)
    return kept


def without_a_peer(mesh: ModelMesh, grad: torch.Tensor) -> torch.Tensor:
    return grad * float(dist.get_rank(mesh.group(PEERS)) == 0)


def with_other_experts(mesh: ModelMesh, grad: torch.Tensor) -> torch.Tensor:
    """Summed over ranks that have other experts, too."""
    summed = grad.clone()
    dist.all_reduce(summed, group=mesh.group_that_splits(EXPERTS))
    return summed


def planted(rank: int, grid: str, cell: Cell, fault: Callable[[ModelMesh, torch.Tensor], torch.Tensor]) -> Outcome:
    """A cell whose experts' gradients are changed before FSDP sums them over the ranks with equal experts."""
    mesh, own = meshes(0)[grid], experts._Own.__getattr__
    assert mesh is not None

    def hooked(layer: experts._Own, name: str) -> Any:
        value = own(layer, name)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(partial(fault, mesh))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts._Own, "__getattr__", hooked)
        return run_cell(rank, grid, cell)


@pytest.mark.parametrize("fault", [rows_of_this_rank, without_a_peer, with_other_experts])
def test_a_wrong_sum_of_the_experts_gradients_is_found(
    ranks: RankProcesses, paths: dict[str, str], fault: Callable[[ModelMesh, torch.Tensor], torch.Tensor]
) -> None:
    ranks.run(make_meshes)
    cell = cell_of(paths["qwen3_moe"], "whole")
    found, expected = ranks.run(planted, "d4e2", cell, fault, num_ranks=4), run_cell(0, "", cell)
    (first, *_), (same, *_) = found[0].steps, expected.steps
    assert first["loss"] == pytest.approx(same["loss"], rel=1e-5)  # the fault is in the gradients
    with pytest.raises(AssertionError, match="grad_norm"):
        assert_same_outcome(found, expected, "d4e2")


def replayed(rank: int, grid: str, path: str, train: TrainConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """A step whose tokens go to given experts."""
    engine = make_engine(grid, path, train=train)
    engine.routes = RouteReplay(engine.module, engine.model, path, replays=True, context=engine.context)
    engine.routes._is_checked = True  # these experts are drawn
    layout, rng, sample = engine.routes.layout, np.random.default_rng(3), make_sample(LENGTHS)
    runs = []
    for length in LENGTHS:
        order = rng.random((length, len(layout.layers), layout.num_experts)).argsort(-1)
        rows = order[:, :, : layout.top_k].reshape(length, -1).astype(layout.dtype)
        runs.append([Routes(layout, rows[:-1]).encode(length=length)])
    routes = SequenceSample.from_groups(sample.ids, [{ROUTES: run} for run in runs])
    part = part_of(engine, sample.update(routes))
    stats = engine.train_step(part, Loss(float(sample.data["loss_mask"].sum())), temperature=1.0, lr_step=0)
    return stats, whole_parameters(engine)


def test_replayed_experts_give_the_same_update(ranks: RankProcesses, paths: dict[str, str]) -> None:
    ranks.run(make_meshes)
    train = replace(MICRO, gradient_checkpointing=True)
    stats, parameters = replayed(0, "", paths["qwen3_moe"], train)
    own = run_cell(0, "", Cell(paths["qwen3_moe"], train=train))
    assert any(not np.allclose(parameters[name], own.parameters[name], atol=1e-5) for name in parameters)
    for grid in ("d2", "d2e2", "c2", "c2e2", "d2c2e2"):
        size = ParallelGrid.parse(grid).size
        for found, weights in ranks.run(replayed, grid, paths["qwen3_moe"], train, num_ranks=size):
            assert found == pytest.approx(stats, rel=1e-5, abs=1e-7)
            for name, value in weights.items():
                np.testing.assert_allclose(value, parameters[name], rtol=1e-5, atol=1e-6, err_msg=name)


COEF = 0.5


def of_routers(rank: int, grid: str, path: str, train: TrainConfig, lengths: tuple[int, ...]) -> tuple[float, Arrays]:
    """The auxiliary loss of a batch, and its gradients."""
    mesh = meshes(0)[grid] if grid else None
    workers = list(mesh.placement.workers) if mesh is not None else [0]
    train = replace(train, router_aux_loss_coef=COEF)
    engine = TrainEngine(ModelConfig("actor", path, grid or "d1", workers, trainable=True), train, mesh=mesh)
    sample = make_sample(lengths)
    stats = engine.try_step(
        part_of(engine, sample), lambda outputs, *_: (outputs["logprobs"].sum() * 0.0, {}), temperature=1.0
    )
    assert stats["loss"] == stats["router_aux_loss"]
    grads = {name: parameter.grad for name, parameter in engine.named_parameters().items()}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in grads.items()}
    return stats["loss"], {name: grad.numpy() for name, grad in whole.items()}


def of_transformers(path: str, lengths: tuple[int, ...]) -> tuple[float, Arrays]:
    """Those of plain transformers, with the sequences in one padded batch."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    rows = make_sample(lengths).slices("packed_input_ids")
    ids, mask = (torch.zeros(len(lengths), max(lengths), dtype=torch.int64) for _ in range(2))
    for number, (row,) in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = torch.from_numpy(np.array(row)), 1
    loss = COEF * model(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    loss.backward()
    grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return float(loss.detach()), {name: grad.numpy() for name, grad in grads.items()}


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.release) for family in ("mixtral", "gpt_oss"))]
)
def test_the_auxiliary_loss_is_that_of_transformers(
    ranks: RankProcesses, paths: dict[str, str], family: str, tmp_path: Path
) -> None:
    """In value and gradient, over the whole batch: in micro-batches, with gradient checkpointing, and on several ranks."""
    ranks.run(make_meshes)
    path = paths[family]
    if (
        family == "gpt_oss"
    ):  # by its biases two layers choose the other half of the experts each, for every token: no gradient
        model = AutoModelForCausalLM.from_pretrained(path)
        for name, parameter in model.named_parameters():
            parameter.data.mul_(not name.endswith("router.bias"))
        model.save_pretrained(tmp_path)
        path = str(tmp_path)
    loss, expected = of_transformers(path, LENGTHS)
    most = max(float(np.linalg.norm(grad)) for grad in expected.values())
    assert most > 1e-3
    shared = replace(MICRO, share_prefix="on")
    found = [of_routers(0, "", path, train, LENGTHS) for train in (TRAIN, shared, VARIANTS["checkpointing"])]
    for grid in ("d2", "d2e2", "c2", "d2c2e2", "d2r2e2"):
        for train in (MICRO, VARIANTS["checkpointing"]):
            found += ranks.run(of_routers, grid, path, train, LENGTHS, num_ranks=ParallelGrid.parse(grid).size)
    for value, grads in found:
        assert value == pytest.approx(loss, rel=1e-5)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert float(np.linalg.norm(grad - expected[name])) <= 1e-5 * most, name


def test_models_without_an_auxiliary_loss_are_refused(paths: dict[str, str], tmp_path: Path) -> None:
    make_family(tmp_path / "llama", "llama")
    with pytest.raises(
        ConfigError, match=r"train.router_aux_loss_coef: .*no experts; set train.router_aux_loss_coef=0"
    ):
        of_routers(0, "", str(tmp_path / "llama"), TRAIN, LENGTHS)
    with pytest.raises(ConfigError, match=r"train.router_aux_loss_coef=0.5: .*DeepseekV3TopkRouter.*set it to 0"):
        of_routers(0, "", paths["deepseek_v3"], TRAIN, LENGTHS)


def held(rank: int, grid: str, path: str, train: TrainConfig) -> tuple[dict[str, tuple[tuple[int, ...], ...]], int]:
    """The box of each parameter of experts that this rank holds, without a whole load; and the bytes that it sent for a forward
    pass."""

    def whole(*_: object) -> None:
        raise AssertionError("the model was loaded whole")

    kept, sharding.load_whole = sharding.load_whole, whole
    try:
        engine = make_engine(grid, path, train=train)
    finally:
        sharding.load_whole = kept
    boxes = {
        name: (local_part(parameter)[0].start, local_part(parameter)[0].size)
        for name, parameter in engine.named_parameters().items()
        if ".experts." in name
    }
    moved = 0
    exchange = dist.all_to_all_single

    def counting(output: torch.Tensor, rows: torch.Tensor, *args: object, **options: object) -> object:
        nonlocal moved
        moved += rows.nbytes if rows.is_floating_point() else 0
        return exchange(output, rows, *args, **options)

    dist.all_to_all_single = counting
    try:
        engine.logprobs(part_of(engine, make_sample((20, 20))), temperature=1.0)
    finally:
        dist.all_to_all_single = exchange
    return boxes, moved


def test_a_rank_loads_and_keeps_its_experts_only(ranks: RankProcesses, paths: dict[str, str]) -> None:
    ranks.run(make_meshes)
    found = ranks.run(held, "d2e2", paths["qwen3_moe"], TRAIN, num_ranks=2)
    for rank, (boxes, _) in enumerate(found):
        assert len(boxes) == 4  # two layers, two parameters
        assert all(start == (2 * rank, 0, 0) and size[0] == 2 for start, size in boxes.values())
    # Each token goes to its 2 experts and back, in each of 2 layers: 20 tokens and 64 numbers of 4 bytes
    there = 2 * 2 * 20 * 64 * 4
    assert sum(moved for _, moved in found) == 2 * 2 * there
    plain = ranks.run(held, "d2", paths["qwen3_moe"], TRAIN, num_ranks=2)
    assert all(moved == 0 for _, moved in plain)


def go_on(rank: int, grid: str, path: str, source: str, target: str) -> tuple[dict[str, np.ndarray], list[WrittenFile]]:
    """The parameters after one step from a checkpoint, and the files of this rank's part of the next one."""
    engine = make_engine(grid, path)
    workers = engine.mesh.placement.workers if engine.mesh is not None else (0,)
    if source:
        checkpoint.load(Path(source), {"actor": engine}, workers=workers)
    sample = make_sample(LENGTHS)
    loss = Loss(float(sample.data["loss_mask"].sum()) / 20)
    engine.train_step(part_of(engine, sample), loss, temperature=0.7, lr_step=int(bool(source)))
    files = checkpoint.write(Path(target), checkpoint.snapshot({"actor": engine}), fsync=False) if target else []
    return whole_parameters(engine), files


@pytest.mark.parametrize(("before", "after"), [("d2e2", "d1"), ("d1", "d2e2"), ("d4e2", "d2c2e2")])
def test_a_checkpoint_goes_on_in_another_layout(
    ranks: RankProcesses, paths: dict[str, str], tmp_path: Path, before: str, after: str
) -> None:
    ranks.run(make_meshes)
    path, folder = paths["qwen3_moe"], tmp_path / "checkpoint"
    expected = run_cell(0, "", Cell(path)).parameters  # two steps
    saved = ranks.run(go_on, before, path, "", str(folder), num_ranks=ParallelGrid.parse(before).size)
    checkpoint.commit(folder, [file for _, files in saved for file in files], fsync=False)
    for found, _ in ranks.run(go_on, after, path, str(folder), "", num_ranks=ParallelGrid.parse(after).size):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def copied(rank: int, path: str, grids: tuple[str, str]) -> tuple[dict[str, np.ndarray], int]:
    """This rank's share of a model that got the weights of another one, and the bytes that it sent."""
    both = [meshes(0)[grid] for grid in grids]
    source, target = (
        shard(path, mesh, change=change) if mesh is not None else None
        for mesh, change in zip(both, (0.1, 0.2), strict=True)
    )
    size = max(ParallelGrid.parse(grid).size for grid in grids)
    sent = reallocate(source, target, workers=range(size), max_bytes=4096)
    return ({name: each.numpy() for name, each in take_share(target).items()} if target is not None else {}), sent


@pytest.mark.parametrize("grids", [("d4e2", "d2e2"), ("d2e2", "d4"), ("d2", "d2r2e2"), ("d4e2", "d4e2")], ids=str)
def test_weights_move_between_layouts(ranks: RankProcesses, paths: dict[str, str], grids: tuple[str, str]) -> None:
    ranks.run(make_meshes)
    path = paths["qwen3_moe"]
    expected = {name: tensor.numpy() for name, tensor in take_share(shard(path, None, change=0.1)).items()}
    size = max(ParallelGrid.parse(grid).size for grid in grids)
    shares, sent = zip(*ranks.run(copied, path, grids, num_ranks=size), strict=True)
    found = {name: tensor for each in shares for name, tensor in each.items()}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    assert (sum(sent) == 0) == (grids[0] == grids[1])


def trained_adapters(rank: int, grid: str, path: str, kind: str) -> tuple[list[float], dict[str, np.ndarray]]:
    mesh = meshes(0)[grid] if grid else None
    workers = list(mesh.placement.workers) if mesh is not None else [0]
    lora = LoraConfig(rank=3, alpha=6.0, targets=["q_proj", "v_proj", "o_proj"])
    model = ModelConfig("model", path, grid or "d1", workers, kind, True, OPTIMIZER, lora=lora)
    engine, sample = TrainEngine(model, MICRO, mesh=mesh), make_sample(LENGTHS)
    loss = Loss(float(sample.data["loss_mask"].sum()) / 20)
    part = part_of(engine, sample)
    norms = [engine.train_step(part, loss, temperature=0.7, lr_step=step)["grad_norm"] for step in range(3)]
    share = take_share(engine)
    return norms, {name: tensor.numpy() for name, tensor in share.items()}


@pytest.mark.parametrize(("grid", "kind"), [("d2e2", "lm"), ("d4e2", "lm"), ("d2c2e2", "lm"), ("d2e2", "value")])
def test_adapters_of_attention_beside_split_experts(
    ranks: RankProcesses, paths: dict[str, str], grid: str, kind: str
) -> None:
    """Three steps, and what is exported: the adapters of one rank."""
    ranks.run(make_meshes)
    norms, expected = trained_adapters(0, "", paths["qwen3_moe"], kind)
    found = ranks.run(trained_adapters, grid, paths["qwen3_moe"], kind, num_ranks=ParallelGrid.parse(grid).size)
    assert all(each == pytest.approx(norms, rel=1e-5) for each, _ in found)
    shares = {name: tensor for _, share in found for name, tensor in share.items()}
    assert shares.keys() == expected.keys()
    for name, value in shares.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def routed(rank: int, grid: str, path: str) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """What each router has got, and its output, in bfloat16."""
    found = []
    engine = make_engine(grid, path, train=replace(TRAIN, dtype="bfloat16"))
    for router in routers_of(engine.model, path)[1]:
        router.register_forward_hook(lambda _, inputs, output: found.append((inputs[0], output)))
    engine.logprobs(part_of(engine, make_sample((20, 20))), temperature=1.0)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_have_the_dtypes_of_the_models_code(ranks: RankProcesses, paths: dict[str, str], family: str) -> None:
    """To the bit those of transformers' model in bfloat16: in one rank under autocast, and with FSDP. DeepSeek-V3's multiply in
    float32."""
    ranks.run(make_meshes)
    plain = AutoModelForCausalLM.from_pretrained(paths[family], dtype=torch.bfloat16)
    routers = routers_of(plain, "")[1]
    for found in (routed(0, "", paths[family]), *ranks.run(routed, "d2e2", paths[family], num_ranks=2)):
        assert len(found) == len(routers)
        for router, (hidden, output) in zip(routers, found, strict=True):
            with torch.no_grad():
                expected = router(hidden.to(torch.bfloat16))
            assert [one.dtype for one in output] == [one.dtype for one in expected]
            assert all(torch.equal(one, other) for one, other in zip(output, expected, strict=True))
            assert output[0].dtype == (torch.float32 if family == "deepseek_v3" else torch.bfloat16)


def exported(rank: int, grid: str, path: str, train: TrainConfig) -> dict[str, np.ndarray]:
    engine = make_engine(grid, path, train=train)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy()
        for name, tensor in engine.named_parameters().items()
    }


def share(rank: int, grid: str, path: str, train: TrainConfig) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in take_share(make_engine(grid, path, train=train)).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shares_of_all_ranks_are_the_checkpoint(ranks: RankProcesses, paths: dict[str, str], family: str) -> None:
    """Experts are exported under the names of the checkpoint, each by a rank that holds it."""
    ranks.run(make_meshes)
    expected = load_file(Path(paths[family]) / "model.safetensors")
    for grid in ("d2", "d2r2", "d2e2", "d4e4", "d4e2", "d2c2e2", "d2r2e2", "d2p2e2"):
        shares = ranks.run(share, grid, paths[family], TRAIN, num_ranks=ParallelGrid.parse(grid).size)
        found = {name: tensor for each in shares for name, tensor in each.items()}
        assert sum(map(len, shares)) == len(found)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name].numpy()) for name in found)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_loads_the_same_weights(ranks: RankProcesses, paths: dict[str, str], family: str) -> None:
    ranks.run(make_meshes)
    expected = exported(0, "", paths[family], TRAIN)
    for grid in ("d2", "d2e2", "d4e4", "d4e2", "d2c2e2", "d2r2e2"):
        for found in ranks.run(exported, grid, paths[family], TRAIN, num_ranks=ParallelGrid.parse(grid).size):
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], expected[name]) for name in found)


def refusal(rank: int, grid: str, path: str) -> str:
    try:
        make_engine(grid, path)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_cannot_be_split_is_refused(ranks: RankProcesses, paths: dict[str, str], tmp_path: Path) -> None:
    ranks.run(make_meshes)
    make_family(tmp_path / "llama", "llama")
    make_family(tmp_path / "three", "qwen3_moe", num_experts=3)
    for grid, path, why in (
        ("d2e2", str(tmp_path / "llama"), "has no experts; leave e out"),
        ("d2e2", str(tmp_path / "three"), "e2 does not divide 3 experts"),
        ("m2", paths["qwen3_moe"], "not supported; use m1"),
    ):
        size = ParallelGrid.parse(grid).size
        assert all(why in text for text in ranks.run(refusal, grid, path, num_ranks=size))
    config = {"num_experts": 6, "num_hidden_layers": 2, "num_attention_heads": 4}
    for grid in ("d4", "d3e3", "d4e2", "d2c2e2", "d2p2e2", "d2r2e2"):
        assert problem_of_grid(ParallelGrid.parse(grid), config) == ""
    assert problem_of_grid(ParallelGrid.parse("d4e4"), config) == "e4 does not divide 6 experts: use e2"
    for grid in ("m2", "d2m2e2"):
        assert "tensor ranks do not split a mixture of experts" in problem_of_grid(ParallelGrid.parse(grid), config)
    assert "no experts that e could split" in problem_of_grid(ParallelGrid.parse("d2e2"), {"num_hidden_layers": 2})
