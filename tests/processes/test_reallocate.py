"""Move a model's weights into another layout, on the same workers or on others: bit for bit, or as a moving average."""

from __future__ import annotations

import pytest
import torch
from sharded_models import placement, shard, three_layers, united

from asyncrl.model.export import take_share
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.reallocate import reallocate
from asyncrl.model.shards import ShardError
from asyncrl.testing.tiny import make_tiny_model
from tests.support.rank_processes import RankError, RankProcesses

MAX_BYTES = 3000


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(8, limit_s=120.0) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return three_layers(tmp_path_factory.mktemp("model"))


def weights(path: str, change: float) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in shard(path, None, change=change).named_parameters().items()}


def move(
    rank: int,
    paths: tuple[str, str],
    source: tuple[str, list[int]],
    target: tuple[str, list[int]],
    share: float,
    times: int,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """(target afterwards, source afterwards, bytes sent). Tensors are this rank's share."""
    meshes = [ModelMesh.make(placement(name, *at), "cpu") for name, at in (("a", source), ("b", target))]
    ours, theirs = (
        shard(path, mesh, change=change) if mesh is not None else None
        for path, mesh, change in zip(paths, meshes, (0.1, 0.2), strict=True)
    )
    if ours is None and theirs is None:
        return {}, {}, 0
    workers = sorted({*source[1], *target[1]})
    sent = sum(reallocate(ours, theirs, workers=workers, share=share, max_bytes=MAX_BYTES) for _ in range(times))

    after, before = (take_share(model) if model is not None else {} for model in (theirs, ours))
    return after, before, sent


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("d2p2m2", [*range(8)]), ("d2", [0, 1])),
        (("d2p2m2", [*range(8)]), ("m2", [3, 6])),
        (("d2p2m2", [*range(8)]), ("p2m2", [2, 3, 4, 5])),
        (("d1", [0]), ("d2p2m2", [*range(8)])),
        (("d2p2", [0, 1, 2, 3]), ("m2", [4, 5])),
        (("d3", [0, 1, 2]), ("d2m2", [2, 3, 4, 5])),
        (("d2m2r2", [*range(8)]), ("d2r2", [0, 1, 2, 3])),
        (("d2c2", [0, 1, 2, 3]), ("c2m2", [2, 3, 4, 5])),
    ],
    ids=lambda at: f"{at[0]} on {at[1]}",
)
def test_a_copy_has_the_same_bits(ranks, model_path, source, target):
    targets, sources, sent = zip(*ranks.run(move, (model_path,) * 2, source, target, 1.0, 1), strict=True)
    wanted = weights(model_path, 0.1)
    for found in (united(targets), united(sources)):  # the source is unchanged too
        assert set(found) == set(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
    assert (
        sum(sent) <= sum(tensor.nbytes for tensor in wanted.values()) * 2
    )  # not once only: several ranks hold norms and tied tensors


def test_the_least_is_sent(ranks, model_path):
    """The same layout on the same workers sends nothing. With other workers, every rank's part is sent once."""
    grid = ("d2", [0, 1])
    *_, sent = zip(*ranks.run(move, (model_path,) * 2, grid, grid, 1.0, 1), strict=True)
    assert sum(sent) == 0
    *_, sent = zip(*ranks.run(move, (model_path,) * 2, grid, ("d2", [2, 3]), 1.0, 1), strict=True)
    assert sum(sent) == sum(tensor.nbytes for tensor in weights(model_path, 0.1).values())


@pytest.mark.parametrize("target", [("d2m2", [4, 5, 6, 7]), ("d1", [1])], ids=str)
def test_a_moving_average(ranks, model_path, target):
    targets, sources, _ = zip(*ranks.run(move, (model_path,) * 2, ("p2", [0, 1]), target, 0.25, 2), strict=True)
    ours, theirs = weights(model_path, 0.1), weights(model_path, 0.2)
    for name, tensor in ours.items():
        assert torch.equal(united(sources)[name], tensor)
        wanted = 0.25 * tensor + 0.75 * (0.25 * tensor + 0.75 * theirs[name])
        torch.testing.assert_close(united(targets)[name], wanted, rtol=1e-6, atol=1e-7)


def test_another_model_is_refused_everywhere(ranks, model_path, tmp_path):
    make_tiny_model(tmp_path, hidden_size=24, intermediate_size=54, num_layers=3)
    with pytest.raises(
        RankError, match=r"tensor model\.embed_tokens\.weight has the shape \(63, 24\) in the source, \(64, 24\)"
    ) as caught:
        ranks.run(move, (model_path, str(tmp_path)), ("d2", [0, 1]), ("m2", [1, 2]), 1.0, 1, grace_s=120.0)
    assert [type(error) for _, error in sorted(caught.value.errors.items())] == [ShardError] * 3


def test_a_share_is_a_share(model_path):
    model = shard(model_path, None)
    with pytest.raises(ValueError, match=r"share=0\.0: it must be above 0 and at most 1"):
        reallocate(model, model, workers=[0], share=0.0)
