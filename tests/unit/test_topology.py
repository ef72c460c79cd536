"""Order of ranks, routing, and allocations: the workers of each model and the model of each MFC."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import TrainConfig
from asyncrl.dataflow.axes import LAYERS, MATRICES, SAMPLES, ParallelGrid
from asyncrl.dataflow.graph import DataflowGraph, training_mfcs
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.topology import (
    Allocation,
    ModelPlacement,
    ModelShardID,
    ProcessTopology,
    build_handler_routing,
    training_topology,
)
from asyncrl.dataflow.worker_groups import worker_groups_of


def model(name: str, grid: str, first: int = 0) -> ModelPlacement:
    parsed = ParallelGrid.parse(grid)
    return ModelPlacement(name, parsed, tuple(range(first, first + parsed.size)))


def shard(model: str, at: str) -> ModelShardID:
    """at: such as d0p1m0."""
    return ModelShardID(model, tuple(int(number) for number in at[1::2]))


def mfc(name: str, role: str, kind: str = "inference") -> MFCDef:
    return MFCDef(name, role, kind, "a:b", ("packed_input_ids",))


# The MFCs of a run with all roles. place() uses their names, roles, kinds and order.
ALL = (
    mfc("actor_inf", "actor"),
    mfc("ref_inf", "ref"),
    mfc("rew_inf", "reward"),
    mfc("critic_inf", "critic"),
    mfc("critic_train", "critic", "train_step"),
    mfc("actor_train", "actor", "train_step"),
)
GRAPH = DataflowGraph(ALL)


def place(text: str, graph: DataflowGraph = GRAPH) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str]]:
    """Return ({model: (grid, workers)}, {MFC: model})."""
    models, model_of = Allocation.parse(text).place(graph)
    return {model.name: (str(model.grid), model.workers) for model in models}, model_of


# ---------------------------------------------------------------------------------------------------------------- ranks


def test_training_order_is_pipe_data_tensor():
    topology = training_topology(ParallelGrid.parse("d2p2m2"))
    coordinates = [tuple(topology.get_coord(rank).values()) for rank in range(8)]
    assert coordinates == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]


@pytest.mark.parametrize("text", ["d2p3m5", "d5p2m3", "d3p1m2"])
def test_rank_formulas(text):
    grid = ParallelGrid.parse(text)
    training, inference = training_topology(grid), ProcessTopology(("data", "pipe", "tensor"), grid.sizes)
    num_data, num_pipe, num_tensor = grid.sizes
    for data in range(num_data):
        for pipe in range(num_pipe):
            for tensor in range(num_tensor):
                at = {"data": data, "pipe": pipe, "tensor": tensor}
                assert training.get_rank(**at) == pipe * (num_data * num_tensor) + data * num_tensor + tensor
                assert inference.get_rank(**at) == data * (num_pipe * num_tensor) + pipe * num_tensor + tensor


@pytest.mark.parametrize("rank", range(12))
def test_rank_and_coordinates_are_inverse(rank):
    topology = ProcessTopology(("a", "b", "c"), (2, 3, 2))
    assert topology.get_rank(**topology.get_coord(rank)) == rank


# -------------------------------------------------------------------------------------------------------------- routing


def test_routing_of_data_parallel_workers():
    """Scenario 1 of the seed documents: DP=2."""
    assert model("actor", "d2").heads == (0, 1)
    assert build_handler_routing([model("actor", "d2")]) == {
        shard("actor", "d0p0m0"): 0,
        shard("actor", "d1p0m0"): 1,
        0: 0,
        1: 1,
    }


def test_routing_of_data_and_tensor_ranks():
    """Scenario 2 of the seed documents: DP=2, TP=2. The head of a replica is its tensor rank 0."""
    assert model("actor", "d2m2").heads == (0, 2)
    assert build_handler_routing([model("actor", "d2m2")]) == {
        shard("actor", "d0p0m0"): 0,
        shard("actor", "d0p0m1"): 1,
        shard("actor", "d1p0m0"): 2,
        shard("actor", "d1p0m1"): 3,
        0: 0,
        1: 1,
        2: 2,
        3: 3,
    }


def test_routing_of_data_tensor_and_pipeline_ranks():
    """Scenario 3 of the seed documents: DP=2, TP=2, PP=2. The heads are on the last stage."""
    assert model("actor", "d2p2m2").heads == (4, 6)
    assert build_handler_routing([model("actor", "d2p2m2")]) == {
        shard("actor", "d0p0m0"): 0,
        shard("actor", "d0p0m1"): 1,
        shard("actor", "d1p0m0"): 2,
        shard("actor", "d1p0m1"): 3,
        shard("actor", "d0p1m0"): 4,
        shard("actor", "d0p1m1"): 5,
        shard("actor", "d1p1m0"): 6,
        shard("actor", "d1p1m1"): 7,
        0: 0,
        1: 1,
        2: 2,
        3: 3,
        4: 4,
        5: 5,
        6: 6,
        7: 7,
    }


def test_routing_of_actor_and_critic_on_the_same_workers():
    """Scenario 4 of the seed documents: actor and critic, DP=2."""
    assert model("critic", "d2").heads == (0, 1)
    assert build_handler_routing([model("actor", "d2"), model("critic", "d2")]) == {
        shard("actor", "d0p0m0"): 0,
        shard("actor", "d1p0m0"): 1,
        shard("critic", "d0p0m0"): 0,
        shard("critic", "d1p0m0"): 1,
        0: 0,
        1: 1,
    }


def test_routing_of_models_on_disjoint_workers():
    routing = build_handler_routing([model("actor", "p2"), model("ref", "d2", first=2)])
    assert routing == {
        shard("actor", "d0p0m0"): 0,
        shard("actor", "d0p1m0"): 1,
        shard("ref", "d0p0m0"): 2,
        shard("ref", "d1p0m0"): 3,
        0: 0,
        1: 1,
        2: 2,
        3: 3,
    }


def test_replicas_and_heads_of_a_placement():
    placed = model("actor@1", "d2p2m2", first=3)
    assert placed.role == "actor"
    assert placed.replicas == ((3, 4, 7, 8), (5, 6, 9, 10))
    assert placed.heads == (7, 9)
    assert placed.shard_of(10) == shard("actor@1", "d1p1m1")
    assert placed.parts(MATRICES)[1] == (4, 6, 8, 10)
    assert placed.part_of(8, LAYERS) == 1


@pytest.mark.parametrize("workers", [(0,), (0, 1, 2), (1, 1)])
def test_a_placement_needs_one_worker_per_rank(workers):
    with pytest.raises(ValueError, match="one worker a rank"):
        ModelPlacement("actor", ParallelGrid.parse("d2"), workers)


# ---------------------------------------------------------------------------------------------------------- allocations


@pytest.mark.parametrize("text", ["d2p1m1", "m1d2p1", "d2", "p1d2"])
def test_the_parts_of_a_grid_may_be_in_any_order(text):
    assert ParallelGrid.parse(text) == ParallelGrid.parse("d2")


@pytest.mark.parametrize("text", ["", "d0", "d2d2", "x2", "d", "d2p1m1q1", "2"])
def test_bad_grids_are_refused(text):
    with pytest.raises(ValueError, match="d2p1m1"):
        ParallelGrid.parse(text)


def test_an_allocation_is_parsed_and_written():
    allocation = Allocation.parse("transformers.d3p1m1+d2p2m1+ref_inf:d1,critic:m3")
    assert (allocation.engine, allocation.num_servers, str(allocation.generation)) == ("transformers", 3, "d3p1m1")
    assert [devices.size for devices in allocation.training] == [4, 3]
    assert allocation.num_model_workers == 7
    assert allocation.names == ("ref_inf", "critic")
    assert str(allocation) == "transformers.d3p1m1+d2p2m1+ref_inf:d1p1m1,critic:d1p1m3"


@pytest.mark.parametrize(
    ("text", "models", "elsewhere"),
    [
        (  # one grid for all roles
            "sglang.d4p1m1+d2p2m2",
            {role: ("d2p2m2", (0, 1, 2, 3, 4, 5, 6, 7)) for role in ("actor", "ref", "reward", "critic")},
            {},
        ),
        (  # separate grids on shared workers; a role that is not named goes with the actor
            "sglang.d4p1m1+actor_train:d2p2m1,ref_inf:d3p1m1",
            {
                "actor": ("d2p2m1", (0, 1, 2, 3)),
                "ref": ("d3p1m1", (0, 1, 2)),
                "reward": ("d2p2m1", (0, 1, 2, 3)),
                "critic": ("d2p2m1", (0, 1, 2, 3)),
            },
            {},
        ),
        (  # disjoint workers; the grid without a name is for the other roles
            "transformers.d1p1m1+d2p2m1+ref_inf:d1p1m1+critic:d2p1m1,rew_inf:d1p1m1",
            {
                "actor": ("d2p2m1", (0, 1, 2, 3)),
                "ref": ("d1p1m1", (4,)),
                "reward": ("d1p1m1", (5,)),
                "critic": ("d2p1m1", (5, 6)),
            },
            {},
        ),
        (  # a role with two models: the first one is trained
            "sglang.d1+actor_inf:d4,actor_train:d2p2+critic_inf:d1",
            {
                "actor": ("d2p2m1", (0, 1, 2, 3)),
                "actor@1": ("d4p1m1", (0, 1, 2, 3)),
                "ref": ("d2p2m1", (0, 1, 2, 3)),
                "reward": ("d2p2m1", (0, 1, 2, 3)),
                "critic": ("d1p1m1", (4,)),
            },
            {"actor_inf": "actor@1"},
        ),
        (  # the name of an MFC takes precedence over that of its role
            "sglang.d1+actor:d2+actor_inf:d2,critic_inf:d1",
            {
                "actor": ("d2p1m1", (0, 1)),
                "actor@1": ("d2p1m1", (2, 3)),
                "ref": ("d2p1m1", (0, 1)),
                "reward": ("d2p1m1", (0, 1)),
                "critic": ("d1p1m1", (2,)),
            },
            {"actor_inf": "actor@1"},
        ),
        (  # the same grid on the same workers, written in two ways: one model
            "sglang.d1+actor_inf:d2,actor_train:d2p1m1,ref:d1,critic:d1,reward:d1",
            {
                "actor": ("d2p1m1", (0, 1)),
                "ref": ("d1p1m1", (0,)),
                "reward": ("d1p1m1", (0,)),
                "critic": ("d1p1m1", (0,)),
            },
            {},
        ),
    ],
)
def test_models_are_placed_on_workers(text, models, elsewhere):
    assert place(text) == (models, {name: GRAPH.mfcs[name].role for name in GRAPH.mfcs} | elsewhere)


def test_the_trained_actor_is_the_first_model():
    graph = DataflowGraph([mfc("ref_inf", "ref"), mfc("actor_inf", "actor"), mfc("actor_train", "actor", "train_step")])
    placed, _ = Allocation.parse("sglang.d1+ref:d1+actor_inf:d1+actor_train:d2").place(graph)
    assert [(model.name, model.workers) for model in placed] == [("actor", (2, 3)), ("actor@1", (1,)), ("ref", (0,))]


def test_a_role_that_nothing_trains_has_the_model_of_its_first_mfc():
    graph = DataflowGraph([*ALL, mfc("other", "ref")])
    models, model_of = place("sglang.d1+d1+other:d2+ref_inf:d1", graph)
    assert (model_of["ref_inf"], model_of["other"]) == ("ref", "ref@1")
    assert (models["ref"], models["ref@1"]) == (("d1p1m1", (3,)), ("d2p1m1", (1, 2)))


def test_mfcs_without_a_model_are_placed_on_cpu_workers():
    allocation = Allocation.parse("sglang.d1+d2+advantages:cpu2,other:cpu1")
    assert str(allocation) == "sglang.d1p1m1+d2p1m1+advantages:cpu2,other:cpu1"
    assert (allocation.num_model_workers, allocation.num_training_devices, allocation.num_devices) == (4, 2, 3)
    graph = DataflowGraph([*training_mfcs(TrainConfig()), mfc("other", "actor")])
    placed, model_of = allocation.place(graph)
    assert {model.name: (str(model.grid), model.workers) for model in placed} == {
        "actor": ("d2p1m1", (0, 1)),
        "advantages@cpu": ("cpu2", (2, 3)),
        "other@cpu": ("cpu1", (2,)),
    }
    assert model_of["advantages"] == "advantages@cpu"
    placed_mfcs = [entry.placed(model_of[name]) for name, entry in graph.mfcs.items()]
    groups = worker_groups_of(placed, placed_mfcs, TrainConfig(), num_workers=4, mode="async")
    assert (groups.trainer, groups.detached) == ((0, 1), ((2, 3),))
    named = Allocation.parse("sglang.d1@0+d1@1+advantages:cpu1")
    assert named.num_devices == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sglang.d1+d1+actor_inf:cpu1", "actor_inf cannot run on cpu1, which has no model; name MFCs that need none"),
        ("sglang.d1+actor_train:d1+actor:cpu1", "actor_inf cannot run on cpu1"),
        ("sglang.d1+cpu2", "cpu2: CPU workers have no model, so name an MFC"),
        ("sglang.d1@0+d1@1+advantages:cpu1@1", "CPU workers have no model, so name an MFC and no devices"),
        ("sglang.d1+d1+advantages:cpu1,actor_inf:d1", "mixes workers with and without GPUs"),
        ("sglang.d1+d1+advantages:cpu0", "'cpu0' is not a grid"),
    ],
)
def test_cpu_workers_that_cannot_work_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Allocation.parse(text).place(DataflowGraph(training_mfcs(TrainConfig())))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d2+d2", "write <engine>"),
        ("transformers.d2", "write <engine>"),
        ("tgi.d1+d1", "unknown generation engine 'tgi'"),
        ("sglang.d1+d1+", "'' is not a grid such as d2p1m1"),
        ("sglang.d1+d1+d2", "has 2 grids without a name: one is for all MFCs that are not named"),
        ("sglang.d1+d1,ref:d2", "'d1' in 'd1,ref:d2' has no name: write name:grid"),
        ("sglang.d1+actor:d1,:d2", "':d2' in 'actor:d1,:d2' has no name"),
        ("sglang.d1+ref:d1+actor:d1+ref:d2", "'ref' has 2 grids .* keep one"),
        ("sglang.d1+actor:x2", "'x2' is not a grid such as d2p1m1"),
        ("sglang.d1+d1+actor:", "'' is not a grid such as d2p1m1"),
    ],
)
def test_the_error_for_a_bad_allocation_names_the_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        Allocation.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "sglang.d1+d1+ref_in:d1",
            r"'ref_in' is neither an MFC nor a role of this run: did you mean 'ref_inf'\? MFCs: ",
        ),
        ("sglang.d1+d1+zzz:d1", "this run: MFCs: actor_inf, ref_inf, .*; roles: actor, "),
        ("sglang.d1+ref:d1", r"the actor has no workers: add a grid .*\+d1p1m1, or actor:d1p1m1"),
        ("sglang.d1+actor:d1,actor_inf:d1,actor_train:d1", "no MFC runs on actor:d1p1m1: .* leave this grid out"),
        ("sglang.d1+d2+actor:d1,ref:d1,reward:d1,critic:d1", "no MFC runs on d2p1m1: .* leave this grid out"),
        (
            "sglang.d1+d2+more_train:d1",
            r"both train the actor, on .*: name the role alone \(actor:d",
        ),
    ],
)
def test_the_error_for_an_impossible_placement_names_the_remedy(text, message):
    more = [mfc("more_train", "actor", "train_step")] if "more_train" in text else []
    with pytest.raises(ValueError, match=message):
        place(text, DataflowGraph([*ALL, *more]))


@st.composite
def runs(draw):
    """A graph with some of the MFCs, and an allocation that fits it. The named MFCs and roles are divided among sets of workers."""
    graph = DataflowGraph([entry for entry in ALL if entry.name == "actor_train" or draw(st.booleans())])
    grids = st.builds(ParallelGrid, st.tuples(*[st.integers(1, 3)] * 3))
    names, covered = [], set()
    for role in graph.roles:
        of_role = [entry.name for entry in graph.mfcs.values() if entry.role == role]
        named = [name for name in of_role if draw(st.booleans())]
        if len(named) < len(of_role) and draw(st.booleans()):
            names.append(role)
            covered |= set(of_role)
        names += named
        covered |= set(named)
    names = draw(st.permutations(names))
    texts = []
    while names:
        count = draw(st.integers(1, len(names)))
        texts.append(",".join(f"{name}:{draw(grids)}" for name in names[:count]))
        names = names[count:]
    if not covered & {"actor_inf", "actor_train"} or (covered != graph.mfcs.keys() and draw(st.booleans())):
        texts.insert(draw(st.integers(0, len(texts))), str(draw(grids)))
    return graph, Allocation.parse(f"sglang.d1+{'+'.join(texts)}")


@given(run=runs())
def test_every_mfc_has_one_place_and_every_worker_a_model(run):
    graph, allocation = run
    assert Allocation.parse(str(allocation)) == allocation
    models, model_of = allocation.place(graph)
    by_name = {model.name: model for model in models}
    assert len(by_name) == len(models)
    assert model_of.keys() == graph.mfcs.keys()
    assert set(model_of.values()) == by_name.keys()  # no model without an MFC
    assert all(by_name[model].role == graph.mfcs[name].role for name, model in model_of.items())
    assert (models[0].name, model_of["actor_train"]) == ("actor", "actor")
    assert "critic_train" not in model_of or model_of["critic_train"] == "critic"
    places = [(model.role, model.grid, model.workers) for model in models]
    assert len(set(places)) == len(places)  # equal role, grid and workers mean the same model

    used = {worker for model in models for worker in model.workers}
    assert used == set(range(allocation.num_model_workers))  # numbered without gaps, and none is idle
    sets, first = [], 0
    for devices in allocation.training:
        sets.append(range(first, first + devices.size))
        first += devices.size
    for model in models:  # each model is in one set and starts at its first worker
        (home,) = [workers for workers in sets if set(model.workers) & set(workers)]
        assert model.workers == tuple(home[: model.grid.size])
    named = {name: grid for devices in allocation.training for name, grid in devices.grids}
    for name, model in model_of.items():
        wanted = named.get(name) or named.get(graph.mfcs[name].role) or named.get("")
        assert wanted is None or by_name[model].grid == wanted

    routing = build_handler_routing(models)
    assert {routing[worker] for worker in used} == used
    assert all(
        routing[shard] == worker for model in models for shard, worker in zip(model.shards, model.workers, strict=True)
    )


def test_devices_of_an_allocation():
    allocation = Allocation.parse("sglang.d2m2@0-3+d2p2@0-3+ref_inf:d1@4")
    assert str(allocation) == "sglang.d2p1m2@0-3+d2p2m1@0-3+ref_inf:d1p1m1@4"
    assert allocation == Allocation.parse(str(allocation))
    assert allocation.shared_workers == (0, 1, 2, 3)
    assert [allocation.device_of_worker(index) for index in range(5)] == [0, 1, 2, 3, 4]
    assert allocation.num_devices == 5
    assert Allocation.parse("transformers.d2@0-1+d2@2-3").shared_workers == ()
    assert Allocation.parse("transformers.d2+d2").shared_workers == ()
    assert Allocation.parse("transformers.d2+d2").num_devices == 4


def test_generation_shares_the_devices_that_a_set_names_in_part():
    allocation = Allocation.parse("sglang.d4@0-3+actor:d2,ref:d2@0-1+critic:d2,reward:d1@2-3+teacher:d1@4")
    assert allocation.shared_workers == (0, 1, 2, 3)
    assert Allocation.parse("sglang.d2@0-1+actor:d2@1-2").shared_workers == (0, 1)


def test_sets_on_the_same_devices_are_one_set():
    apart = Allocation.parse("sglang.d2@0-1+d2@2-3+ref_inf:d1p2@2-3+critic:d1@4+reward:d1@4")
    assert [part.grids for part in apart.training] == [
        (("", ParallelGrid.parse("d2")), ("ref_inf", ParallelGrid.parse("d1p2"))),
        (("critic", ParallelGrid.parse("d1")), ("reward", ParallelGrid.parse("d1"))),
    ]
    assert apart.num_model_workers == 3
    assert apart.shared_workers == ()
    assert Allocation.parse(str(apart)) == apart


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sglang.d2@0-1+d2", "name them for every grid, or for none"),
        ("sglang.d2@0-2+d2@0-1", "needs 2 devices; @0-2 are 3"),
        ("sglang.d2@0-1+d2@2-3+ref_inf:d2@3-4", "name the same devices for both"),
        ("sglang.d2@1-0+d2@0-1", "does not name devices"),
        ("sglang.d2@x+d2@0-1", "does not name devices"),
    ],
)
def test_devices_that_contradict_each_other_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Allocation.parse(text)


def test_copies_of_the_weights() -> None:
    """The ranks of a copy are consecutive, as on one host. The samples are split among all of them."""
    grid = ParallelGrid.parse("d2m2r3")
    placement = ModelPlacement("actor", grid, tuple(range(12)))
    assert (str(grid), grid.size, grid.num_replicas, grid.num_copies, grid.replica_size) == ("d2p1m2r3", 12, 6, 3, 2)
    assert placement.groups("data", "tensor") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert placement.replicas == tuple((first, first + 1) for first in range(0, 12, 2))
    assert placement.heads == (0, 2, 4, 6, 8, 10)
    assert str(placement.shards[7]) == "actor:d1p0m1r1"
    assert ParallelGrid.parse("d2r1") == ParallelGrid.parse("d2")
    assert grid.with_parts({SAMPLES: 6}) == ParallelGrid.parse("d6m2")
    assert grid.only(SAMPLES) == ParallelGrid.parse("d2r3")
