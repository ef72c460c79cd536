"""Delta versions: the encoding of changed elements, chains of folders, and the refusal of broken ones."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from asyncrl.cli.doctor import judge_deltas
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.generation.checks import ModelTensors
from asyncrl.generation.engine import WeightsRefused
from asyncrl.launch.experiment import load_experiment
from asyncrl.manager.worker import ManagerFiles
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights import versions
from asyncrl.weights.delta import DeltaForm, TensorDelta
from asyncrl.weights.fetch import WeightFetcher, WeightFiles
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import (
    MANIFEST,
    VerifiedVersion,
    commit_version,
    list_versions,
    prune_versions,
    read_manifest,
    side_files,
    verify_version,
    write_part,
)
from asyncrl.weights.whole import whole, write_whole
from tests.support.live_tensors import live_tensors

DELTA = DeltaForm()
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.float8_e4m3fn, torch.bool]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(BITS[tensor.element_size()]).tolist()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and bits(one[name]) == bits(other[name])
        for name in one
    )


def random_tensor(rng: np.random.Generator, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Random bits: NaNs with payloads, infinities and -0.0 among them."""
    size = int(np.prod(shape))
    raw = rng.integers(0, 2 if dtype == torch.bool else 256, size * dtype.itemsize, dtype=np.uint8)
    return torch.frombuffer(bytearray(raw.tobytes()) or bytearray(8), dtype=dtype)[:size].clone().reshape(shape)


def decoded(encoded: bytes | None) -> list[TensorDelta]:
    return msgspec.msgpack.decode(encoded, type=list[TensorDelta])


def changed(rng: np.random.Generator, tensor: torch.Tensor, rate: float) -> torch.Tensor:
    """Other bits in about this share of the elements."""
    flipped = tensor.clone()
    flat = flipped.reshape(-1).view(BITS[tensor.element_size()])
    flat[torch.from_numpy(rng.random(len(flat)) < rate)] ^= 1
    return flipped


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=2), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    rate=st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0]),
)
def test_a_delta_has_exactly_the_changed_bits(seed, shapes, dtype, rate):
    rng = np.random.default_rng(seed)
    old = {str(number): random_tensor(rng, dtype, shape) for number, shape in enumerate(shapes)}
    new = {name: changed(rng, tensor, rate) for name, tensor in old.items()}
    deltas = decoded(DELTA.encode(old, new, worth=100.0))
    assert [one.name for one in deltas] == list(new)  # also those without a change
    for one in deltas:
        before, after = np.array(bits(old[one.name])), np.array(bits(new[one.name]))
        assert one.changes()[0].tolist() == np.flatnonzero(before != after).tolist()
    applied = {name: tensor.clone() for name, tensor in old.items()}
    DELTA.apply(deltas, applied)
    assert same(applied, new)


def test_signs_of_zeros_and_payloads_of_nans_are_kept():
    old = {"w": torch.tensor([0.0, 1.0, 2.0, 3.0] * 8, dtype=torch.bfloat16)}
    new = {"w": old["w"].clone()}
    new["w"].view(torch.int16)[:3] = torch.tensor([-0x8000, 0x7FC1, 0x7F81], dtype=torch.int16)  # -0.0, two NaNs
    DELTA.apply(decoded(DELTA.encode(old, new)), old)
    assert same(old, new)


def test_new_values_take_the_dtype_of_the_model():
    """An engine may compute in another dtype than that of exports."""
    generator = torch.Generator().manual_seed(1)
    old = {"w": torch.randn(64, generator=generator).to(torch.bfloat16)}
    new = {"w": old["w"].clone()}
    new["w"][5] = 3.0
    live = {"w": old["w"].float().reshape(8, 8).T.contiguous().T}  # not contiguous either
    DELTA.apply(decoded(DELTA.encode(old, new)), live)
    assert torch.equal(live["w"].reshape(-1), new["w"].float())


def test_a_delta_that_saves_little_is_not_made():
    old = {"w": torch.zeros(1000, dtype=torch.bfloat16), "small": torch.zeros(10, dtype=torch.bfloat16)}
    few, many = ({**old, "w": torch.arange(1000).lt(num).to(torch.bfloat16)} for num in (100, 900))
    encoded = DELTA.encode(old, few)
    assert len(encoded) < 500  # of 2,020 bytes
    assert DELTA.encode(old, many) is None
    assert DELTA.encode({}, {}) is None


@pytest.mark.parametrize(
    "forged",
    [
        {"shape": [2, 9]},  # fewer elements than the last position needs
        {"values": b"\0" * 4},
        {"values": b"\0" * 5},
        {"values": b"\0" * 8},
        {"gaps": b"no zlib"},
        {"gap_bytes": 3},
        {"dtype": "float31"},
        {"dtype": "float64"},
    ],
)
def test_changes_that_do_not_fit_their_tensor_change_nothing(forged):
    old = {"v": torch.zeros(64, dtype=torch.bfloat16), "w": torch.zeros(64, dtype=torch.bfloat16)}
    new = {name: torch.arange(64).remainder(30).eq(1).to(torch.bfloat16) for name in old}
    first, second = decoded(DELTA.encode(old, new))
    with pytest.raises(WeightsError, match="the changes of w"):
        DELTA.apply([first, msgspec.structs.replace(second, **forged)], old)
    assert not old["v"].any()


# ------------------------------------------------------------------------------------------------------------- versions


class Trainer:
    """Writes versions as the exporters of two ranks do. Rank 1's only tensor changes completely in version 2."""

    def __init__(self, tmp_path, num: int) -> None:
        self.directory, self.source = tmp_path / "actor", tmp_path / "model"
        self.source.mkdir()
        (self.source / "config.json").write_text("{}")
        rng = np.random.default_rng(1)
        tensors = {name: random_tensor(rng, torch.bfloat16, [40, 50]) for name in ("a", "b", "c")}
        self.expected: list[dict[str, torch.Tensor]] = []
        manifest, old = None, None
        for number in range(num):
            if number:
                tensors = {name: changed(rng, tensor, 0.02) for name, tensor in tensors.items()}
                tensors["c"] = changed(rng, tensors["c"], float(number == 2))
            self.expected.append(tensors)
            manifest = self.write(number, old, manifest)
            old = tensors

    def path(self, number: int):
        return self.directory / str(WeightVersion(1, number))

    def write(self, number: int, old=None, base=None, *, replace: bool = False):
        files, tensors = [], self.expected[number]
        for part, names in enumerate(["ab", "c"]):
            share = {name: tensors[name] for name in names}
            encoded = DELTA.encode(old, share) if old else None
            others = {DELTA.file_name(part): encoded} if encoded else None
            files += write_part(
                self.path(number), () if encoded else share.items(), part=part, fsync=False, others=others
            )
        version = WeightVersion(1, number)
        return commit_version(
            self.path(number),
            files,
            sides=side_files(self.source),
            version=version,
            fsync=False,
            base=base,
            replace=replace,
        )


@pytest.fixture
def trainer(tmp_path):
    return Trainer(tmp_path, 4)


def test_a_reader_without_weights_needs_the_full_version_and_the_deltas(trainer, tmp_path):
    for number, expected in enumerate(trainer.expected):
        manifest = verify_version(trainer.path(number), WeightVersion(1, number))
        assert manifest.kind == ("full" if number == 0 else "delta")
        assert same(whole(trainer.path(number)), expected)
    assert sorted(read_manifest(trainer.path(1)).files) == [
        "part-00000.delta",
        "part-00001.delta",
    ]  # no tokenizer either
    assert sorted(read_manifest(trainer.path(2)).files) == ["part-00000.delta", "part-00001-00000.safetensors"]
    sizes = [sum(entry.bytes for entry in read_manifest(trainer.path(number)).files.values()) for number in range(4)]
    assert read_manifest(trainer.path(3)).num_bytes == sum(sizes)  # decides how long a server may take
    assert sizes[1] < sizes[0] / 8
    write_whole(trainer.path(3), tmp_path / "whole")
    assert same(load_file(tmp_path / "whole" / "model.safetensors"), trainer.expected[3])
    assert (tmp_path / "whole" / "config.json").exists()


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def forge_base(trainer):
    """Version 1 is written again with other content, and correct checksums of its own."""
    trainer.expected[1] = {name: tensor + 1 for name, tensor in trainer.expected[1].items()}
    trainer.write(1, replace=True)


def make_a_cycle(trainer):
    file = trainer.path(1) / MANIFEST
    file.write_text(file.read_text().replace('"version": 0', '"version": 3'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda trainer: (trainer.path(0) / MANIFEST).unlink(), "its base cannot be used: .*v00000000 has no manifest"),
        (lambda trainer: flip(trainer.path(0) / "model-00001-of-00002.safetensors"), "another checksum"),
        (lambda trainer: flip(trainer.path(1) / "part-00000.delta"), "part-00000.delta has another checksum"),
        (lambda trainer: (trainer.path(2) / "part-00000.delta").write_bytes(b"torn"), "has 4 bytes"),
        (lambda trainer: (trainer.path(3) / "part-00000.delta").unlink(), "not on disk"),
        (forge_base, "v00000001 is not the base of .*v00000002: its checksums differ"),
        (make_a_cycle, "only a delta has a base, an older version"),
    ],
)
def test_a_broken_chain_is_refused_until_the_version_is_written_in_full(trainer, damage, message):
    reader, late = VerifiedVersion(), VerifiedVersion()
    reader.verify(trainer.path(2), WeightVersion(1, 2))
    damage(trainer)
    for verify in (verify_version, reader.verify, late.verify):
        with pytest.raises(WeightsError, match=message):
            verify(trainer.path(3), WeightVersion(1, 3))
    trainer.write(3, replace=True)
    verify_version(trainer.path(3), WeightVersion(1, 3))
    assert same(whole(trainer.path(3)), trainer.expected[3])


def test_a_base_is_read_once(trainer, monkeypatch):
    reads, real = [], versions.check_files
    monkeypatch.setattr(versions, "check_files", lambda path, files: (reads.append(path.name[-1]), real(path, files)))
    verified = VerifiedVersion()
    for number in (0, 1, 2, 3):
        verified.verify(trainer.path(number), WeightVersion(1, number))
    assert reads == ["0", "1", "2", "3"]


def test_the_manager_reads_the_bases_again_after_a_refusal(trainer, tmp_path):
    """It asks for the check of the same version again if a server has refused it."""
    files = ManagerFiles(SimpleNamespace(worker=SimpleNamespace(run_dir=str(tmp_path)), role="actor"))
    files.verify(trainer.path(2), WeightVersion(1, 2))
    damaged = trainer.path(1) / "part-00000.delta"
    stat = damaged.stat()
    flip(damaged)
    os.utime(damaged, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # so only its content tells
    manifest = files.verify(trainer.path(3), WeightVersion(1, 3))
    assert manifest.weight_version == WeightVersion(1, 3)
    with pytest.raises(WeightsError, match="another checksum"):
        files.verify(trainer.path(3), WeightVersion(1, 3))


def test_sglang_is_given_full_versions_in_place_of_deltas(trainer, tmp_path):
    (tmp_path / "memory").mkdir()
    hosts = [WeightFetcher(tmp_path / "memory", "run-full", keep=1, logger=logging.getLogger()) for _ in range(2)]
    servers = [ModelTensors(trainer.path(0), tied=False, local=host) for host in hosts]
    inodes = []
    for number, expected in enumerate(trainer.expected):
        for server in servers:
            with server.verified(trainer.path(number), WeightVersion(1, number), 30.0) as folder:
                assert (folder == trainer.path(number)) == (number == 0)
                assert same(
                    {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}, expected
                )
                assert (folder / "config.json").exists()
                inodes.append(folder.stat().st_ino)
    assert inodes[0::2] == inodes[1::2]  # written once for both servers
    assert list_versions(folder.parent) == [WeightVersion(1, 3)]

    def in_full(server: int, number: int):
        return servers[server].verified(trainer.path(number), WeightVersion(1, number), 30.0)

    with in_full(0, 2) as folder, in_full(1, 3):
        assert same(load_file(folder / "model.safetensors"), trainer.expected[2])  # stays while it is loaded
    for number in (1, 2):  # a later run in the same folder writes other versions of these names
        trainer.expected[number] = trainer.expected[0]
        trainer.write(number, trainer.expected[0], read_manifest(trainer.path(number - 1)), replace=True)
    with in_full(0, 2) as folder:
        assert same(load_file(folder / "model.safetensors"), trainer.expected[0])
    with pytest.raises(WeightsRefused, match="is not the base of"), in_full(0, 3):
        pass
    trainer.write(3, replace=True)  # in full, as after every refusal
    with in_full(0, 3) as folder:
        assert folder == trainer.path(3)
    for host in hosts:
        assert list((tmp_path / "memory").rglob("*.safetensors"))
        host.close()
    assert not list((tmp_path / "memory").rglob("run-full"))


def test_a_delta_that_does_not_fit_its_base_or_an_external_server_is_refused(trainer):
    tensors = ModelTensors(trainer.path(0), tied=False)
    with (
        pytest.raises(WeightsRefused, match="a delta, which this server cannot load"),
        tensors.verified(trainer.path(1), WeightVersion(1, 1), 30.0),
    ):
        pass
    trainer.expected[1] = {name: torch.cat([tensor, tensor]) for name, tensor in trainer.expected[1].items()}
    old = {name: torch.cat([tensor, tensor]) for name, tensor in trainer.expected[0].items()}
    trainer.write(1, old, read_manifest(trainer.path(0)), replace=True)
    with pytest.raises(WeightsError, match=r"changes a of shape \[80, 50\], which its base does not have"):
        whole(trainer.path(1))


class Model(torch.nn.Module):
    """The model of Trainer's versions, in float32. `b` is tied to `a` if `tied`."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, self.a if tied and name == "b" else torch.nn.Parameter(torch.zeros(40, 50)))


def without_nans(tensor):
    return tensor.float().nan_to_num(7.0)


def test_a_server_changes_what_it_serves_or_loads_the_chain(trainer):
    model, verified = Model(tied=False), VerifiedVersion()
    live, names = live_tensors(model), []
    copy = live._copy
    live._copy = lambda tensor_of, given: (names.append("".join(sorted(given))), copy(tensor_of, given))

    def load(number: int, served: str) -> str:
        names.clear()
        fingerprint = live.load_version(trainer.path(number), WeightVersion(1, number), verified, served)
        for name, tensor in model.state_dict().items():
            assert torch.equal(without_nans(tensor), without_nans(trainer.expected[number][name]))
        return fingerprint

    first = load(1, "")
    assert names == ["abc", ""]  # all tensors in full, then a delta
    second = load(2, first)
    assert names == ["c"]
    assert second == read_manifest(trainer.path(2)).fingerprint
    load(3, first)
    assert names == ["c", ""]
    load(2, "of another version")
    assert names == ["abc", "", "c"]
    load(2, second)  # loading the version again repairs whatever is wrong with it
    assert names == ["abc", "", "c"]


def test_changes_that_untie_tensors_are_refused(trainer):
    model = Model(tied=True)
    live = live_tensors(model)
    for tensors in trainer.expected:
        tensors["b"] = tensors["a"] = tensors["a"].nan_to_num(7.0)
    base = trainer.write(0, replace=True)
    served = live.load_version(trainer.path(0), WeightVersion(1, 0), VerifiedVersion())
    trainer.expected[1]["b"] = trainer.expected[0]["b"]
    trainer.write(1, trainer.expected[0], base, replace=True)
    before = model.a.clone()
    with pytest.raises(WeightsRefused, match="a and b are one tensor in this model"):
        live.load_version(trainer.path(1), WeightVersion(1, 1), VerifiedVersion(), served)
    assert torch.equal(model.a, before)


def test_pruning_keeps_the_bases_of_what_it_keeps(trainer):
    trainer.expected.append(trainer.expected[3])
    trainer.write(4)  # full
    assert prune_versions(trainer.directory, keep=1, in_use=[WeightVersion(1, 2)]) == [WeightVersion(1, 3)]
    assert list_versions(trainer.directory) == [WeightVersion(1, number) for number in (0, 1, 2, 4)]
    verify_version(trainer.path(2))
    assert len(prune_versions(trainer.directory, keep=1, in_use=[])) == 3


def test_changed_elements_without_a_base_are_not_committed(tmp_path):
    path = tmp_path / "actor" / str(WeightVersion(1, 1))
    files = write_part(path, (), fsync=False, others={DELTA.file_name(0): b""})
    with pytest.raises(ValueError, match="its base is not known"):
        commit_version(path, files, sides=side_files(tmp_path), version=WeightVersion(1, 1))
    assert not path.parent.exists() or not list(path.parent.iterdir())


def test_a_host_fetches_the_bases_that_it_lacks_and_keeps_them(trainer, tmp_path):
    files = WeightFiles(trainer.directory, host="127.0.0.1")
    (tmp_path / "memory").mkdir()
    host = WeightFetcher(tmp_path / "memory", "run", keep=1, logger=logging.getLogger())
    try:
        source = files.start()

        def fetch(number: int) -> Path:
            return host.fetch(Path("/no/such/folder"), WeightVersion(1, number), source, 30.0)

        full = fetch(0) / "model-00001-of-00002.safetensors"
        inode = full.stat().st_ino
        late = fetch(3)
        verify_version(late, WeightVersion(1, 3))
        assert full.stat().st_ino == inode  # not fetched again
        assert same(whole(late), trainer.expected[3])
        assert host.fetch(trainer.path(3), WeightVersion(1, 3), source, 30.0) == trainer.path(3)  # it sees the files

        trainer.expected += trainer.expected[2:]
        trainer.write(4)  # full
        with host.loading(WeightVersion(1, 3), 30.0):
            fetch(4)
            verify_version(late)  # complete while it is being loaded
        trainer.write(5)
        fetch(5)
        assert list_versions(late.parent) == [WeightVersion(1, 5)]

        prune_versions(trainer.directory, keep=1, in_use=[])
        with pytest.raises(WeightsError, match="answered 404"):
            fetch(3)
    finally:
        host.close()
        files.close()


# --------------------------------------------------------------------------------------------------------------- config


def config_of(tmp_path: Path, *overrides: str) -> ExperimentConfig:
    file = tmp_path / "run.yaml"
    file.write_text(
        'model_path: m\nprompts: {path: p.jsonl}\nrollout: {tasks: {default: {reward: "rewards.py:reward"}}}\n'
    )
    return load_experiment(file, overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["weights.transport=broadcast"], "weights.full_every=4: makes files smaller, and weights.transport=broadcast"),
        (
            ["allocation=external.d1+d1", "generation.urls=[http://h:1]"],
            "weights.full_every=4: an external SGLang server may not see this host's folders",
        ),
        (["weights.full_every=0"], "weights.full_every=0: must be"),
    ],
)
def test_configs_without_a_use_for_deltas_are_refused(tmp_path, overrides, told):
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, "weights.full_every=4", *overrides)
    assert told in str(caught.value)


def test_check_says_that_float32_saves_nothing(tmp_path):
    assert judge_deltas(config_of(tmp_path)) == []
    (warned,) = judge_deltas(config_of(tmp_path, "weights.full_every=4", "train.dtype=float32"))
    assert (warned.state, "nearly all elements change in a step" in warned.value) == ("warn", True)
    (fine,) = judge_deltas(config_of(tmp_path, "weights.full_every=4", "train.dtype=bfloat16"))
    assert fine.state == "ok"
