"""Context ranks, split experts and replayed routers on GPUs give the numbers of one CPU.

With one GPU the world of NCCL has one rank: the layer of experts and the replay. Layouts of several ranks need as many GPUs. The
same tests run on CPUs over gloo, with four ranks, so this code has run where there is no GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import GenerationConfig, OptimizerConfig, TrainConfig
from asyncrl.data.routes import ROUTES, Routes
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.generation.engine import EngineArguments, EngineRequest
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.model.engine import TrainEngine
from asyncrl.model.export import take_share
from asyncrl.model.mesh import ModelMesh
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import version_dir, write_version
from tests.support.families import make_family
from tests.support.rank_processes import RankProcesses
from tests.support.routed import difference, experts_of, loss_fn, sample_of, shares
from tests.support.split_experts import FAMILIES, assert_whole, layer_of, outcome_of_rank

pytestmark = pytest.mark.timeout(300)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
NUM_RANKS = 4
GRIDS = ("c2", "d2e2", *(pytest.param(grid, marks=pytest.mark.release) for grid in ("c2e2", "d2c2e2", "d4e2")))
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0)
V0 = WeightVersion(1, 0)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(device: str) -> Iterator[RankProcesses]:
    count = NUM_RANKS if device == "cpu" else min(NUM_RANKS, 1 << torch.cuda.device_count().bit_length() - 1)
    with RankProcesses(count, backend=BACKENDS[device], limit_s=120.0) as processes:
        yield processes


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("experts")
    make_family(path, "qwen3_moe", num_hidden_layers=3, num_experts=8, mlp_only_layers=[1])
    return str(path)


def first(device: str) -> torch.device:
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


def trainer_of(
    path: str, dtype: str, where: torch.device, grid: str = "", mesh: ModelMesh | None = None
) -> TrainEngine:
    workers = list(mesh.placement.workers) if mesh is not None else [0]
    model = ModelConfig("actor", path, grid or "d1", workers, trainable=True, optimizer=OPTIMIZER)
    train = TrainConfig(optimizer=OPTIMIZER, dtype=dtype, routes="replay", max_tokens_per_mb=256)
    return TrainEngine(model, train, mesh=mesh, device=where)


async def sampled(path: str, folder: Path, device: str) -> list[SequenceSample]:
    """Groups of one response each, with the experts that the embedded engine has chosen."""
    version = version_dir(folder, "actor", V0)
    trainer = trainer_of(path, "float32", torch.device("cpu"))
    write_version(version, take_share(trainer).items(), source_dir=Path(path), version=V0, fsync=False)
    generation = GenerationConfig(max_running_requests=8, max_batch_tokens=64, num_blocks=256, page_size=16)
    engine = TransformersEngine(EngineArguments(path, generation, returns_routes=True), device=first(device))
    await engine.start()
    try:
        await engine.load_weights(version, V0)
        prompts = [[1 + number, *range(2, 2 + 7 * number)] for number in range(7)]
        params = SamplingParams(max_new_tokens=30, ignore_eos=True)
        results = await asyncio.gather(
            *(engine.submit(EngineRequest(str(number), prompt, params)) for number, prompt in enumerate(prompts))
        )
    finally:
        await engine.close()
    made = [sample_of([prompt], [result]) for prompt, result in zip(prompts, results, strict=True)]
    return [SequenceSample((f"g{number}",), one.seqlens, one.data) for number, one in enumerate(made)]


@pytest.fixture(scope="module")
def groups(model_path: str, device: str, tmp_path_factory: pytest.TempPathFactory) -> list[SequenceSample]:
    return asyncio.run(sampled(model_path, tmp_path_factory.mktemp("version"), device))


def test_the_trainer_replays_what_the_engine_has_chosen(
    model_path: str, device: str, groups: list[SequenceSample]
) -> None:
    trainer = trainer_of(model_path, "float32", first(device))
    for group in groups:
        (rows,) = (Routes.decode(run).rows for run in group.slices(ROUTES)[0])
        assert trainer.routes is not None
        known = rows[:, 0] != trainer.routes.layout.unknown
        assert known.sum() == len(rows) - 1
        assert (experts_of(trainer, group)[known] == rows[known]).all()
    sample = SequenceSample.gather(groups)
    assert difference(trainer, sample) <= (1e-6 if device == "cpu" else 1e-4)
    # In bfloat16 the trainer's own routers would choose otherwise here and there
    lower = trainer_of(model_path, "bfloat16", first(device))
    assert shares(lower, sample)[1] < 0.5
    assert difference(lower, sample) <= 0.1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_split_experts_compute_what_the_layers_code_does(
    ranks: RankProcesses, device: str, family: str, dtype: str, tolerance: float
) -> None:
    assert_whole(ranks.run(outcome_of_rank, family, device, dtype), layer_of(family), tolerance)


def gradients(
    rank: int, grid: str, device: str, path: str, dtype: str, groups: list[SequenceSample]
) -> tuple[dict[str, float], dict[str, np.ndarray]] | None:
    """The statistics of a batch, and the gradient of each parameter. Collective over the world; grid "": this rank alone."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    mesh = None
    if grid:
        placement = ModelPlacement(grid, parsed := ParallelGrid.parse(grid), tuple(range(parsed.size)))
        if (mesh := ModelMesh.make(placement, device)) is None:
            return None
    trainer = trainer_of(path, dtype, where, grid, mesh)
    own = groups[trainer.replica :: trainer.num_replicas]
    stats = trainer.try_step(SequenceSample.gather(own), loss_fn, temperature=1.0)
    grads = {name: parameter.grad for name, parameter in trainer.named_parameters().items()}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in grads.items()}
    return stats, {name: tensor.cpu().numpy() for name, tensor in whole.items()}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_ranks_have_the_gradients_of_one(
    ranks: RankProcesses, device: str, model_path: str, groups: list[SequenceSample], grid: str, dtype: str
) -> None:
    """In float32 those of a CPU; in bfloat16, with the kernels for packed rows, those of one rank on the same kind of device. Both
    with replayed experts, since rounding would change the routers' choices."""
    if (size := ParallelGrid.parse(grid).size) > ranks.num_ranks:
        pytest.skip(f"{grid} needs {size} GPUs")
    if dtype == "float32":
        alone = gradients(0, "", "cpu", model_path, dtype, groups)
    else:
        (alone,) = ranks.run(gradients, "", device, model_path, dtype, groups, num_ranks=1)
    assert alone is not None
    stats, expected = alone
    tolerance = 0.03 if dtype == "bfloat16" else 1e-5 if device == "cpu" else 1e-3
    for found in ranks.run(gradients, grid, device, model_path, dtype, groups)[:size]:
        assert found is not None
        for name in ("loss", "grad_norm"):
            assert found[0][name] == pytest.approx(stats[name], rel=tolerance), name
        assert found[1].keys() == expected.keys()
        for name, grad in found[1].items():
            assert np.linalg.norm(grad - expected[name]) <= tolerance * max(
                np.linalg.norm(expected[name]), 0.01 * stats["grad_norm"]
            ), name
