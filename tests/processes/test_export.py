"""Hugging Face files and shares for a broadcast, from any layout: bit-equal to the whole parameters. No rank ever holds the whole
model."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sharded_models import placement, shard, united
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import ConfigError
from asyncrl.model import export
from asyncrl.model.export import checkpoint_tensors, commit_model, take_buckets, take_share
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.shards import Box
from asyncrl.protocol.versions import WeightVersion, WrittenFile
from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.testing.tiny import ALPHABET, make_char_tokenizer, make_tiny_model
from asyncrl.weights.versions import commit_version, side_files, tensor_files, verify_version, write_part
from tests.support.families import make_family
from tests.support.rank_processes import RankProcesses

V1 = WeightVersion(1, 1)
GRIDS = ["d2", "m2", "p2", "d3", "d2m2", "p2m2", "d2p2", "d2p2m2", "d2m2r2", "d2c2", "c2m2"]
MAX_BYTES = 3000  # limit of the bytes in transit at a rank: so low that there are many rounds, and tensors in pieces


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(8, limit_s=120.0) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_path(request, tmp_path_factory) -> Path:
    """A model with 63 tokens, 3 layers and intermediate size 54: none is divisible by 4, and the first two not even by 2."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_char_tokenizer(None, ALPHABET[:-1])
    make_tiny_model(
        path,
        "qwen3",
        tokenizer=tokenizer,
        hidden_size=24,
        intermediate_size=54,
        num_layers=3,
        tie_embeddings=request.param,
    )
    return path


def expected(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = shard(str(path), None, change=0.1)
    return {name: tensor.detach().to(dtype) for name, tensor in model.named_parameters().items()}


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# ---------------------------------------------------------------------------------------------------------------- ranks


def write(rank: int, path: str, grid: str, to: str, dtype: torch.dtype, shard_bytes: int) -> list[WrittenFile]:
    mesh = ModelMesh.make(placement("actor", grid), "cpu")
    if mesh is None:
        return []
    model = shard(path, mesh, dtype=dtype, change=0.1)
    tensors = take_share(model, max_bytes=MAX_BYTES)
    with torch.no_grad():
        for parameter in model.named_parameters().values():  # training goes on before the share is written
            parameter.zero_()
    return write_part(Path(to), tensors.items(), part=rank, shard_bytes=shard_bytes, fsync=False)


def hold(rank: int, path: str, grid: str) -> tuple[dict[str, torch.Tensor], list[list[TensorSpecs]], list[TensorSpecs]]:
    """Return (this rank's tensors, the specs of all ranks' buckets, those of its own buckets)."""
    mesh = ModelMesh.make(placement("actor", grid), "cpu")
    if mesh is None:
        return {}, [], []
    buckets, specs = take_buckets(shard(path, mesh, dtype=torch.bfloat16, change=0.1), 20_000, max_bytes=MAX_BYTES)
    assert all(bucket.flat.numel() <= 20_000 for bucket in buckets)
    tensors = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors()}
    return tensors, specs, [bucket.specs for bucket in buckets]


def export_again(rank: int, path: str, grid: str) -> tuple[int, int, bool] | None:
    """Return (operations between ranks of the first export, of the second, whether the second has the new weights)."""
    mesh = ModelMesh.make(placement("actor", grid), "cpu")
    if mesh is None:
        return None
    model = shard(path, mesh)
    counts, batch = [], dist.batch_isend_irecv
    for value in (1.0, 2.0):
        with torch.no_grad():
            for parameter in model.named_parameters().values():
                parameter.fill_(value)
        counts.append(0)

        def count(operations):
            counts[-1] += len(operations)
            return batch(operations)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", count)
            tensors = take_share(model)
    return counts[0], counts[1], all(bool((tensor == 2.0).all()) for tensor in tensors.values())


class MemoryCounter(TorchDispatchMode):
    """Measures the peak, in bytes, of the live tensor memory that is allocated inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()  # ids: a storage has one Python object as long as it is alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                if leaf.device.type != "meta" and id(storage) not in known | self._seen:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def free() -> None:
            self._seen.discard(key)
            self.now -= size

        weakref.finalize(storage, free)


def measure(rank: int, path: str, grid: str) -> tuple[int, int, int]:
    """Return (bytes of this rank's share, most bytes that the snapshot allocated at once, bytes of its own parameters)."""
    mesh = ModelMesh.make(placement("actor", grid), "cpu")
    assert mesh is not None
    model = shard(path, mesh)
    own = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.named_parameters().values())
    with MemoryCounter() as counter:
        tensors = take_share(model, max_bytes=MAX_BYTES)
    return sum(tensor.nbytes for tensor in tensors.values()), counter.peak, own


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("grid", GRIDS)
def test_files_are_bit_equal_to_the_parameters(ranks, tmp_path, model_path, grid):
    path, wanted = tmp_path / str(V1), expected(model_path, torch.bfloat16)
    answers = ranks.run(write, str(model_path), grid, str(path), torch.bfloat16, 20_000)
    size = placement("actor", grid).grid.size
    assert all(answers[:size])  # every rank has written a part
    files = [file for answer in answers for file in answer]
    commit_version(path, files, sides=side_files(model_path), version=V1, fsync=False)
    manifest = verify_version(path, V1)
    assert (
        len(tensor_files(path))
        == len(files)
        == sum("safetensors" in name and "index" not in name for name in manifest.files)
    )
    found: dict[str, torch.Tensor] = {}
    for file in tensor_files(path):
        assert file.name.startswith("model-")
        part = load_file(file)
        assert not set(part) & set(found)
        found |= part
    equal(found, wanted)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    equal({name: tensor.detach() for name, tensor in loaded.named_parameters()}, wanted)


def test_shares_are_even_and_nobody_has_the_whole_model(ranks, model_path):
    """All tensor memory that a snapshot allocates is counted, not estimated."""
    whole = sum(tensor.nbytes for tensor in expected(model_path, torch.float32).values())
    shares, peaks, _ = zip(*ranks.run(measure, str(model_path), "d2p2m2"), strict=True)
    assert sum(shares) == whole
    largest = max(tensor.nbytes for tensor in expected(model_path, torch.float32).values())
    assert (
        max(shares) <= whole / 8 + whole / 8 + largest
    )  # a stage may hold twice the mean; its ranks hold even shares, but for at most one tensor
    for share, peak in zip(shares, peaks, strict=True):
        assert share <= peak <= share + 4 * MAX_BYTES
    assert max(peaks) < whole / 3


@pytest.mark.parametrize("grid", ["d1", "d2p2m2"])
def test_shares_for_the_network_are_known_to_all_ranks(ranks, model_path, grid):
    """Together the shares are the model. The sender knows the buckets of the other ranks without asking them."""
    shares, known, own = zip(*ranks.run(hold, str(model_path), grid), strict=True)
    size = placement("actor", grid).grid.size
    equal(united(shares), expected(model_path, torch.bfloat16))
    assert all(specs == list(own[:size]) for specs in known[:size])


def test_the_plan_of_an_export_is_made_once(ranks, model_path):
    """The second export exchanges no holdings: in a ring of four each rank sends and receives three of them, size and content."""
    for first, again, is_new in ranks.run(export_again, str(model_path), "d2m2")[:4]:
        assert is_new
        assert first - again == 3 * 4


def test_a_model_for_the_user(ranks, tmp_path, model_path):
    path = tmp_path / "final"
    (path / "of an earlier save").mkdir(parents=True)
    answers = ranks.run(write, str(model_path), "d2p2", str(path), torch.bfloat16, 10**9)
    files = [file for answer in answers for file in answer]
    config = shard(str(model_path), None).config
    commit_model(
        path,
        files,
        config=config,
        dtype=torch.bfloat16,
        sides=side_files(model_path),
    )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["final"]
    assert not (path / "of an earlier save").exists()
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    equal(dict(loaded.named_parameters()), expected(model_path, torch.bfloat16))
    assert loaded.generation_config.eos_token_id == config.eos_token_id
    with torch.no_grad():
        assert loaded(torch.tensor([[1, 2]])).logits.isfinite().all()


# -------------------------------------------------------------------------------------------------------- fused experts


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory) -> Path:
    """A model whose checkpoint has a tensor for each expert, and whose module has one tensor for all experts."""
    path = tmp_path_factory.mktemp("experts")
    tokenizer = make_char_tokenizer(path)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_experts_are_taken_apart_by_one_rank(experts_path):
    source = load_file(experts_path / "model.safetensors")
    found = take_share(shard(str(experts_path), None))
    assert any(".experts.3.down_proj" in name for name in found)
    equal(found, source)


def test_other_names_of_the_checkpoint_are_given_by_each_rank(tmp_path):
    """GPT-NeoX has other names in its modules, and no fused tensors."""
    make_family(tmp_path, "gpt_neox")
    engine = shard(str(tmp_path), None)
    one_of_two = SimpleNamespace(
        mesh=SimpleNamespace(placement=placement("actor", "d2")),
        model=engine.model,
        config=engine.config,
        named_parameters=engine.named_parameters,
        onload=engine.onload,
        adapters=None,
    )
    found, source = checkpoint_tensors(one_of_two), load_file(tmp_path / "model.safetensors")
    assert found.keys() == source.keys() != engine.named_parameters().keys()
    equal(found, source)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_of_several_exports_the_experts_that_it_holds(experts_path, monkeypatch, dim):
    """dim: which one the ranks split. They split experts along the first only; other parts of experts have no place in a file."""
    engine = shard(str(experts_path), None)
    one_of_two = SimpleNamespace(
        mesh=SimpleNamespace(placement=placement("actor", "d2")),
        model=engine.model,
        config=engine.config,
        named_parameters=engine.named_parameters,
        onload=engine.onload,
        adapters=None,
    )

    def second_half(tensor):
        first = tensor.shape[dim] // 2
        box = Box.whole(tensor.shape)
        start, size = list(box.start), list(box.size)
        start[dim], size[dim] = first, tensor.shape[dim] - first
        return Box(tuple(start), tuple(size)), tensor.detach().narrow(dim, first, size[dim])

    monkeypatch.setattr(export, "local_part", second_half)
    if dim == 1:
        with pytest.raises(
            ConfigError, match=r"allocation: models of type 'qwen3_moe' keep .*experts.* train it on d1p1m1"
        ):
            checkpoint_tensors(one_of_two)
        return
    found, source = checkpoint_tensors(one_of_two), load_file(experts_path / "model.safetensors")
    assert source.keys() - found.keys() == {name for name in source if ".experts.0." in name or ".experts.1." in name}
    equal(found, {name: source[name] for name in found})
