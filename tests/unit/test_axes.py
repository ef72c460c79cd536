"""The table of axes: the contract of layouts, ranks and groups, with the table's axes and with one more, and that no other code
names an axis."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from fake_axis import SLICE, SLICES
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncrl.dataflow.axes import (
    AXES,
    EXPERTS,
    GRADIENTS,
    LAYERS,
    LOSSES,
    MATRICES,
    NORMS,
    PARTIALS,
    PEERS,
    SAMPLES,
    TABLE,
    TOKENS,
    Axis,
    ParallelGrid,
)
from asyncrl.dataflow.topology import ModelPlacement, training_topology
from asyncrl.model.mesh import ModelMesh
from tests.support.decisions import PACKAGE

WITH_SLICE = (*AXES, SLICE)
TABLES = pytest.mark.parametrize("axes", [AXES, WITH_SLICE], ids=["the table", "with a fourth axis"])
SIZES = (2, 3, 1, 2)


def placed(axes: tuple[Axis, ...], sizes: tuple[int, ...] = SIZES) -> ModelPlacement:
    grid = ParallelGrid(sizes[: len(axes)], axes=axes)
    return ModelPlacement("actor", grid, tuple(range(10, 10 + grid.size)))


@TABLES
def test_a_layout_is_parsed_and_written(axes: tuple[Axis, ...]) -> None:
    grids = list(ParallelGrid.of_size(12, axes))
    assert len({grid.sizes for grid in grids}) == len(grids)
    for grid in grids:
        assert grid.size == 12
        assert ParallelGrid.parse(str(grid), axes) == grid
    letters = "".join(axis.letter for axis in axes)
    assert ParallelGrid.parse(f"{letters[-1]}3{letters[0]}2", axes).sizes == (2, *[1] * (len(axes) - 2), 3)
    assert ParallelGrid.parse("cpu2", axes).num_replicas == 2
    with pytest.raises(ValueError, match=f"{axes[-1].letter}: {axes[-1].name}"):
        ParallelGrid.parse("x2", axes)


@TABLES
def test_ranks_and_coordinates_are_inverse(axes: tuple[Axis, ...]) -> None:
    grid = placed(axes).grid
    topology = training_topology(grid)
    assert [topology.get_rank(**topology.get_coord(rank)) for rank in range(grid.size)] == list(range(grid.size))
    sizes = dict(zip(topology.axes, topology.dims, strict=True))
    assert tuple(sizes[axis.name] for axis in axes) == grid.sizes
    shards = placed(axes).shards
    assert len({*shards}) == len({*map(str, shards)}) == grid.size


@TABLES
def test_groups_partition_the_workers(axes: tuple[Axis, ...]) -> None:
    placement = placed(axes)
    for axis, size in zip(axes, placement.grid.sizes, strict=True):
        groups = placement.groups(axis.name)
        assert sorted(worker for group in groups for worker in group) == list(placement.workers)
        assert {len(group) for group in groups} == {size}
    assert placement.groups(*(axis.name for axis in axes)) == (placement.workers,)


@TABLES
def test_each_part_of_the_samples_has_one_head(axes: tuple[Axis, ...]) -> None:
    placement = placed(axes)
    assert len(placement.replicas) == len(placement.heads) == placement.grid.num_replicas == 2
    assert {len(replica) for replica in placement.replicas} == {placement.grid.replica_size}
    for number, (replica, head) in enumerate(zip(placement.replicas, placement.heads, strict=True)):
        assert head in replica
        assert {placement.part_of(worker, SAMPLES) for worker in replica} == {number}
        assert placement.part_of(head, LAYERS) == placement.grid.num_stages - 1


@pytest.fixture
def fake_world() -> Iterator[int]:
    """Rank 7 of a process group of 24 ranks that exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=24)
    yield 7
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("axes", "letter", "splits", "losses"),
    [(WITH_SLICE, "s", SLICES, {"data", "slice"}), (TABLE, "c", TOKENS, {"data"})],
    ids=["with a fourth axis", "with context"],
)
def test_a_sum_is_over_all_axes_whose_rows_name_it(
    fake_world: int, axes: tuple[Axis, ...], letter: str, splits: str, losses: set[str]
) -> None:
    grid = ParallelGrid.parse(f"d2p3m2{letter}2", axes)
    placement = ModelPlacement("actor", grid, tuple(range(24)))
    mesh = ModelMesh.make(placement, "cpu")
    assert mesh is not None
    own = {axis.name: at for axis, at in zip(grid.axes, placement.shards[fake_world].coordinates, strict=True)}
    (further,) = own.keys() - {"data", "pipe", "tensor"}
    assert own == {"data": 1, "pipe": 0, "tensor": 1, further: 1}
    over = {LOSSES: losses, GRADIENTS: {"data", further}, PARTIALS: {"tensor"}, NORMS: {*own}}
    for what, names in over.items():
        found = dist.get_process_group_ranks(mesh.group_that_sums(what))
        assert mesh.group_that_sums(what) is mesh.group(*names)
        assert fake_world in found
        assert len(found) == math.prod(grid.parts(axis.splits) for axis in grid.axes if axis.name in names)
        for rank in found:  # differs along these axes only
            other = zip(grid.axes, placement.shards[rank].coordinates, strict=True)
            assert {axis.name for axis, at in other if at != own[axis.name]} <= names
    for what in (SAMPLES, LAYERS, MATRICES, splits):
        members = dist.get_process_group_ranks(mesh.group_that_splits(what))
        assert [placement.part_of(rank, what) for rank in members] == list(range(grid.parts(what)))
    assert mesh.parts == {SAMPLES: 1, LAYERS: 0, MATRICES: 1, splits: 1}
    assert mesh.submesh(PARTIALS).get_group() is mesh.group("tensor")
    with pytest.raises(KeyError):
        mesh.group("data", "pipe")


def test_weights_are_split_along_one_dim_of_the_mesh(fake_world: int) -> None:
    """FSDP takes a mesh of two dims for copies of the weights."""
    for text, dims in (("d2p3m2c2", (4,)), ("d3c2m2r2", (2, 6))):
        grid = ParallelGrid.parse(text)
        mesh = ModelMesh.make(ModelPlacement("actor", grid, tuple(range(24))), "cpu")
        assert mesh is not None
        assert mesh.submesh(GRADIENTS).shape == dims
        assert (grid.num_shards, grid.num_copies) == (dims[-1], dims[0] if len(dims) > 1 else 1)


@pytest.mark.parametrize(
    ("text", "experts", "same"),
    [
        ("d4p3m2e2", [(0, 2), (4, 6)], [(0, 4), (2, 6)]),
        ("d4p3m2e4", [(0, 2, 4, 6)], [(0,), (2,), (4,), (6,)]),
        ("d2c2p3m2e2", [(0, 2), (4, 6)], [(0, 4), (2, 6)]),
        ("d2r2p3m2e2", [(0, 2), (4, 6)], [(0, 4), (2, 6)]),
    ],
)
def test_neighbours_among_the_ranks_of_a_copy_share_out_the_experts(
    fake_world: int, text: str, experts: list[tuple[int, ...]], same: list[tuple[int, ...]]
) -> None:
    """Whatever the axes of the copy are. Gradients of an expert are summed over all ranks that have it. experts, same: ranks of the
    first stage with the first part of the matrices; the world's rank is the second part of one of them."""
    grid = ParallelGrid.parse(text)
    mesh = ModelMesh.make(ModelPlacement("actor", grid, tuple(range(24))), "cpu")
    assert mesh is not None
    between, copies = mesh.submesh_of_parts(EXPERTS)
    found = dist.get_process_group_ranks(mesh.group_that_splits(EXPERTS))
    assert tuple(rank - 1 for rank in found) in experts
    assert between.mesh.tolist() == found
    assert mesh.group_that_splits(EXPERTS) is not mesh.group(*grid.sharding)
    assert mesh.parts[EXPERTS] == found.index(fake_world)
    assert tuple(rank - 1 for rank in copies.mesh.flatten().tolist()) in same
    assert copies.ndim == 1 + (grid.num_copies > 1)
    assert mesh.label({"expert"}) == "expert"
    assert mesh.label({PEERS}) == PEERS
    assert mesh.submesh(GRADIENTS).size() == 4


def test_expert_ranks_are_ranks_that_exist() -> None:
    grid = ParallelGrid.parse("d4c2e8")
    assert (str(grid), grid.size, grid.num_replicas, grid.replica_size, grid.parts(EXPERTS)) == (
        "d4p1m1c2e8",
        8,
        4,
        2,
        8,
    )
    assert grid.only(SAMPLES, TOKENS) == ParallelGrid.parse("d4c2")
    assert ParallelGrid.parse("d4e1") == ParallelGrid.parse("d4")
    assert [str(ModelPlacement("a", ParallelGrid.parse("d2e2"), (0, 1)).shards[1])] == ["a:d1p0m0"]
    with pytest.raises(ValueError, match=r"'d4m2e8': e8 .* among the 4 that share out a copy .* use e1, e2, e4"):
        ParallelGrid.parse("d4m2e8")
    grids = [str(grid) for grid in ParallelGrid.of_size(4, TABLE)]
    assert len({*grids}) == len(grids)
    assert {"d4p1m1e2", "d4p1m1e4", "d2p1m1c2e4", "d2p1m1r2e2"} <= {*grids}
    assert not {"d2p1m1r2e4", "d1p2m2e2"} & {*grids}
    assert all(ParallelGrid.parse(text).size == 4 for text in grids)


def test_only_a_grid_with_several_ranks_along_an_optional_axis_has_it() -> None:
    assert ParallelGrid.parse("d2c1r1") == ParallelGrid.parse("d2")
    assert str(ParallelGrid.parse("r2c4")) == "d1p1m1c4r2"
    grid = ParallelGrid.parse("d2m2").with_parts({TOKENS: 4})
    assert grid == ParallelGrid.parse("d2m2c4")
    assert grid.with_parts({TOKENS: 1}) == grid.only(SAMPLES, MATRICES) == ParallelGrid.parse("d2m2")
    assert ParallelGrid.parse("d2c2r3").with_parts({SAMPLES: 4}) == ParallelGrid.parse("d4c2")
    assert (grid.num_replicas, grid.replica_size) == (2, 8)


NAMES = {"data", "pipe", "tensor", "context", "copy", "expert"}
OWNERS = {"grid", "mesh", "placement", "generation", "shard", "topology", "at", "servers"}
MAKERS = {"ParallelGrid", "get_rank", "group", "groups", "device_mesh", "worker_of"}


def axes_read(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that read an axis by its name: `grid.tensor`, `mesh.group("data")`, `get_rank(pipe=0)`, `engine.dp_rank`."""

    def last(node: ast.AST) -> str:
        return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

    def is_name(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and node.value in NAMES

    for node in ast.walk(tree):
        if (
            (isinstance(node, ast.Attribute) and node.attr in NAMES and last(node.value).lstrip("_") in OWNERS)
            or (isinstance(node, ast.Attribute) and node.attr in ("dp_rank", "dp_size", "tp_rank", "pp_rank"))
            or (isinstance(node, ast.Subscript) and last(node.value) in MAKERS and is_name(node.slice))
            or (
                isinstance(node, ast.Call)
                and last(node.func) in MAKERS
                and (any(map(is_name, node.args)) or any(keyword.arg in NAMES for keyword in node.keywords))
            )
        ):
            yield node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "self._mesh.tensor",
        "allocation.generation.pipe",
        "engine.dp_size",
        "mesh.device_mesh['data']",
        "mesh.group('data', 'pipe')",
        "topology.get_rank(data=0, pipe=1, tensor=0)",
    ],
)
def test_the_scan_finds_an_axis(code: str) -> None:
    assert list(axes_read(ast.parse(code)))


def test_no_other_code_names_an_axis() -> None:
    """Other code asks for parts, replicas, heads and groups, so that a further axis needs no change there."""
    tables = {PACKAGE / "dataflow" / "axes.py", PACKAGE / "dataflow" / "topology.py", PACKAGE / "model" / "mesh.py"}
    servers = PACKAGE / "generation"  # the settings of SGLang's own servers, such as dp_size
    found = {
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in {*PACKAGE.rglob("*.py")} - tables
        if servers not in file.parents
        for line in axes_read(ast.parse(file.read_text()))
    }
    assert found == set()
