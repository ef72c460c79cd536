import pytest

from asyncrl.topology import (
    Allocation,
    ModelShardID,
    ParallelGrid,
    ProcessTopology,
    build_handler_routing,
    data_head,
    inference_topology,
    training_topology,
)


def shards(role, topology, grid):
    return {
        ModelShardID(role, data, pipe, tensor): topology.get_rank(data=data, pipe=pipe, tensor=tensor)
        for data in range(grid.data)
        for pipe in range(grid.pipe)
        for tensor in range(grid.tensor)
    }


def test_training_order_is_pipe_data_tensor():
    topology = training_topology(ParallelGrid(data=2, pipe=2, tensor=2))
    coordinates = [tuple(topology.get_coord(rank).values()) for rank in range(8)]
    assert coordinates == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]


def test_inference_order_is_data_pipe_tensor():
    topology = inference_topology(ParallelGrid(data=2, pipe=2, tensor=2))
    assert topology.get_coord(2) == {"data": 0, "pipe": 1, "tensor": 0}
    assert topology.get_rank(data=1, pipe=0, tensor=1) == 5


def test_routing_of_data_parallel_workers():
    grid = ParallelGrid(data=2)
    routing = build_handler_routing({"actor": [0, 1]}, training_topology(grid))
    assert routing == {
        ModelShardID("actor", 0, 0, 0): 0,
        ModelShardID("actor", 1, 0, 0): 1,
        "__data0__": 0,
        "__data1__": 1,
        0: 0,
        1: 1,
    }


def test_routing_of_data_and_tensor_ranks():
    routing = build_handler_routing({"actor": range(4)}, training_topology(ParallelGrid(data=2, tensor=2)))
    assert routing[ModelShardID("actor", data=0, pipe=0, tensor=1)] == 1
    assert (routing[data_head(0)], routing[data_head(1)]) == (0, 2)


def test_routing_of_a_full_grid_has_its_heads_on_the_last_stage():
    grid = ParallelGrid(data=2, pipe=2, tensor=2)
    routing = build_handler_routing({"actor": range(8)}, training_topology(grid))
    assert routing[ModelShardID("actor", data=1, pipe=1, tensor=0)] == 6
    assert (routing[data_head(0)], routing[data_head(1)]) == (4, 6)
    assert shards("actor", training_topology(grid), grid).items() <= routing.items()


def test_routing_of_two_roles_on_the_same_workers():
    routing = build_handler_routing({"actor": [0, 1], "critic": [0, 1]}, training_topology(ParallelGrid(data=2)))
    assert routing[ModelShardID("actor", 1, 0, 0)] == routing[ModelShardID("critic", 1, 0, 0)] == 1
    assert len(routing) == 8


def test_a_role_with_too_few_workers_is_refused():
    with pytest.raises(ValueError, match="'actor' has 1 workers for 2 ranks"):
        build_handler_routing({"actor": [0]}, training_topology(ParallelGrid(data=2)))


@pytest.mark.parametrize("rank", range(12))
def test_rank_and_coordinates_are_inverse(rank):
    topology = ProcessTopology(("a", "b", "c"), (2, 3, 2))
    assert topology.get_rank(**topology.get_coord(rank)) == rank


@pytest.mark.parametrize("text", ["d2p1m1", "m1d2p1", "d2", "p1d2"])
def test_grid_in_any_order(text):
    assert ParallelGrid.parse(text) == ParallelGrid(data=2)


@pytest.mark.parametrize("text", ["", "d0", "d2d2", "x2", "d", "d2p1m1q1", "2"])
def test_bad_grids_are_refused(text):
    with pytest.raises(ValueError, match="d2p1m1"):
        ParallelGrid.parse(text)


def test_allocation():
    allocation = Allocation.parse("transformers.d3p1m1+d2p1m1")
    assert (allocation.num_servers, allocation.training.size, str(allocation.training)) == (3, 2, "d2p1m1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d2+d2", "write <engine>"),
        ("transformers.d2", "write <engine>"),
        ("vllm.d1+d1", "unknown generation engine 'vllm'"),
    ],
)
def test_bad_allocations_say_what_would_fit(text, message):
    with pytest.raises(ValueError, match=message):
        Allocation.parse(text)
