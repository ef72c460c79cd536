"""Weight versions on disk: writing, committing, verifying and pruning them."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.protocol.versions import WeightVersion, WrittenFile
from asyncrl.weights import versions as weights
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import (
    commit_version,
    list_versions,
    prune_versions,
    publish_folder,
    read_manifest,
    side_files,
    tensor_files,
    verify_version,
    version_dir,
    write_part,
    write_version,
)

V1 = WeightVersion(1, 1)
TENSORS = [("a.weight", torch.arange(6.0).reshape(2, 3)), ("b.bias", torch.ones(4, dtype=torch.bfloat16))]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    (folder / "model.safetensors").write_text("not copied: weights are written anew")
    return folder


def write(tmp_path, source, version=V1, **options):
    path = version_dir(tmp_path, "actor", version)
    write_version(path, TENSORS, source_dir=source, version=version, **options)
    return path


def test_round_trip(tmp_path, source):
    path = write(tmp_path, source)
    assert path.name == "a0001-v00000001"
    assert verify_version(path, V1).weight_version == V1
    assert sorted(read_manifest(path).files) == ["config.json", "model.safetensors", "tokenizer.json"]
    loaded = load_file(tensor_files(path)[0])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # nothing temporary is left


def test_shards_have_an_index(tmp_path, source):
    path = write(tmp_path, source, shard_bytes=8)
    assert [file.name for file in tensor_files(path)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert '"b.bias":"model-00002-of-00002.safetensors"' in (path / "model.safetensors.index.json").read_text()


def test_ranks_write_parts_and_one_rank_commits(tmp_path, source):
    """Parts may arrive in any order. Files that a dead attempt left under the temporary name are not taken for parts."""
    path = version_dir(tmp_path, "actor", V1)
    left = path.with_name(path.name + ".writing")
    left.mkdir(parents=True)
    (left / "part-00007-00000.safetensors").write_bytes(b"torn")
    late = write_part(path, [TENSORS[1]], part=2)
    none = write_part(path, [], part=1)
    early = write_part(path, [TENSORS[0], ("c", torch.ones(3))], part=0, shard_bytes=24)
    assert [len(late), len(none), len(early)] == [1, 0, 2]
    assert not path.exists()
    commit_version(path, [*late, *early], sides=side_files(source), version=V1)
    verify_version(path, V1)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert [sorted(load_file(file)) for file in tensor_files(path)] == [["a.weight"], ["c"], ["b.bias"]]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 24 + 12 + 8
    assert index["weight_map"]["b.bias"] == "model-00003-of-00003.safetensors"


def test_files_that_differ_from_their_report_are_not_committed(tmp_path, source):
    path = version_dir(tmp_path, "actor", V1)

    def commit(files):
        with pytest.raises((WeightsError, ValueError)) as caught:
            commit_version(path, files, sides=side_files(source), version=V1)
        assert list(path.parent.iterdir()) == []
        return str(caught.value)

    files = write_part(path, TENSORS)
    (path.with_name(path.name + ".writing") / files[0].name).write_bytes(b"short")
    assert "has 5 bytes; the worker that wrote it reported" in commit(files)
    files = write_part(path, TENSORS) + write_part(path, TENSORS, part=1)
    assert "is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors" in commit(files)
    assert "part-00003-00000.safetensors is not there" in commit(
        [*write_part(path, TENSORS), WrittenFile("part-00003-00000.safetensors", 9, "", ["d"])]
    )


def test_a_part_that_fails_leaves_other_parts_intact(tmp_path, source):
    def torn():
        yield TENSORS[1]
        raise OSError(28, "No space left on device")

    path = version_dir(tmp_path, "actor", V1)
    files = write_part(path, [TENSORS[0]], part=0)
    with pytest.raises(OSError, match="No space left"):
        write_part(path, torn(), part=1)
    commit_version(path, files, sides=side_files(source), version=V1)
    verify_version(path, V1)


def test_unfinished_versions_of_older_attempts_are_pruned(tmp_path, source):
    path = write(tmp_path, source, WeightVersion(2, 3))
    for name in ("a0001-v00000009.writing", "a0002-v00000004.writing", "a0003-v00000000.writing", "mine.writing"):
        (path.parent / name).mkdir()
    prune_versions(path.parent, keep=1, in_use=[])
    assert sorted(entry.name for entry in path.parent.iterdir()) == [
        "a0002-v00000003",
        "a0002-v00000004.writing",
        "a0003-v00000000.writing",
        "mine.writing",
    ]


def test_a_version_can_be_written_only_once(tmp_path, source):
    write(tmp_path, source)
    with pytest.raises(FileExistsError, match="written only once"):
        write(tmp_path, source)


def test_a_failed_write_leaves_nothing(tmp_path, source):
    def torn():
        yield TENSORS[0]
        raise OSError(28, "No space left on device")

    path = version_dir(tmp_path, "actor", V1)
    with pytest.raises(OSError, match="No space left"):
        write_version(path, torn(), source_dir=source, version=V1)
    assert list(path.parent.iterdir()) == []


def test_the_safetensors_library_reads_every_dtype_and_shape(tmp_path, source):
    """asyncrl writes the files without the safetensors library, which must be able to read them."""
    given = {
        "odd bytes": torch.arange(3, dtype=torch.uint8),  # written last, because it would misalign the tensors after it
        "flags": torch.tensor([[True], [False]]),
        "wide": torch.arange(5, dtype=torch.float64),
        "half": torch.randn(3, 5).to(torch.float16),
        "brain": torch.randn(7).to(torch.bfloat16),
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
        "count": torch.tensor(7),
        "nothing": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "trained": torch.nn.Parameter(torch.ones(2)),
    }
    path = version_dir(tmp_path, "actor", V1)
    write_version(path, given.items(), source_dir=source, version=V1)
    verify_version(path, V1)
    loaded = load_file(tensor_files(path)[0])
    assert set(loaded) == set(given)
    for name, tensor in given.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert (
            loaded[name]
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(tensor.detach().contiguous().view(-1).view(torch.uint8))
        ), name


def test_a_dtype_that_files_cannot_hold_is_named(tmp_path, source):
    path = version_dir(tmp_path, "actor", V1)
    with pytest.raises(ValueError, match=r"tensor a has dtype torch\.complex64"):
        write_version(path, [("a", torch.zeros(1, dtype=torch.complex64))], source_dir=source, version=V1)
    assert list(path.parent.iterdir()) == []


def test_every_file_is_synced_before_the_rename(tmp_path, source, monkeypatch):
    tensor = torch.arange(200_000)  # larger than one write of 1 MB
    synced, fsync = set(), os.fsync
    path = version_dir(tmp_path, "actor", V1)

    def record(fd):
        fsync(fd)
        file = os.fstat(fd)
        synced.add((file.st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", record)
    write_version(path, [("a", tensor)], source_dir=source, version=V1)
    for file in [path, *path.iterdir()]:
        assert (file.stat().st_ino, False) in synced, file
    assert (path.parent.stat().st_ino, True) in synced
    verify_version(path, V1)
    assert torch.equal(load_file(tensor_files(path)[0])["a"], tensor)


def test_a_failed_sync_leaves_nothing(tmp_path, source, monkeypatch):
    """Some errors occur only at the sync: a full disk with delayed allocation, or a broken disk."""

    def refuse(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    path = version_dir(tmp_path, "actor", V1)
    with pytest.raises(OSError, match="Input/output error"):
        write_version(path, TENSORS, source_dir=source, version=V1)
    assert list(path.parent.iterdir()) == []


def test_without_fsync_nothing_is_synced(tmp_path, source, monkeypatch):
    monkeypatch.setattr(os, "fsync", None)
    verify_version(write(tmp_path, source, fsync=False), V1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
        (lambda path: (path / "manifest.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is in the manifest but not on disk"),
        (lambda path: (path / "model.safetensors").write_bytes(b"short"), "has 5 bytes"),
        (lambda path: _flip(path / "model.safetensors"), "another checksum"),
    ],
)
def test_damage_is_found(tmp_path, source, damage, message):
    path = write(tmp_path, source)
    damage(path)
    with pytest.raises(WeightsError, match=message):
        verify_version(path)


def test_a_folder_with_another_version_is_refused(tmp_path, source):
    path = write(tmp_path, source)
    with pytest.raises(WeightsError, match="holds a0001-v00000001, expected a0002-v00000001"):
        verify_version(path, WeightVersion(2, 1))


def test_pruning_keeps_the_newest_and_those_in_use(tmp_path, source):
    versions = [WeightVersion(1, number) for number in range(6)]
    for version in versions:
        path = write(tmp_path, source, version)
    (path.parent / "a0001-v00000099.writing").mkdir()  # unfinished, of another writer
    removed = prune_versions(path.parent, keep=2, in_use=[versions[1]])
    assert removed == [versions[0], versions[2], versions[3]]
    assert list_versions(path.parent) == [versions[1], versions[4], versions[5]]


def test_a_folder_is_published_as_it_is(tmp_path, source):
    """mode=rollout_only serves the model's own files, with a manifest."""
    path, version = version_dir(tmp_path, "actor", WeightVersion(2, 0)), WeightVersion(2, 0)
    publish_folder(path, source_dir=source, version=version)
    verify_version(path, version)
    assert sorted(read_manifest(path).files) == ["config.json", "model.safetensors", "tokenizer.json"]
    (file,) = tensor_files(path)
    assert file.samefile(source / "model.safetensors")  # a hard link: large files take no space and no time
    with pytest.raises(FileExistsError):
        publish_folder(path, source_dir=source, version=version)
    (source / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors"):
        publish_folder(tmp_path / "other", source_dir=source, version=version)
    assert not list(tmp_path.glob("other*"))


def test_versions_order_by_attempt_first():
    assert WeightVersion(1, 9) < WeightVersion(2, 0)
    assert WeightVersion(1, 9).pack() < WeightVersion(2, 0).pack()
    assert WeightVersion.unpack(WeightVersion(2, 7).pack()) == WeightVersion.parse("a0002-v00000007")


def _flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def test_a_verified_version_is_read_again_only_if_a_file_has_changed(tmp_path, source, monkeypatch):
    path, reads = write(tmp_path, source), []
    real = weights.check_files
    monkeypatch.setattr(weights, "check_files", lambda *args: (reads.append(args), real(*args)))
    verified = weights.VerifiedVersion()
    for _ in range(2):
        verified.verify(path, V1)
    assert len(reads) == 1
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for _ in range(2):  # failures are not cached
        with pytest.raises(WeightsError, match="another checksum"):
            verified.verify(path, V1)
    file.write_bytes(content)
    verified.verify(path, V1)
    assert len(reads) == 4
    with pytest.raises(WeightsError, match="expected a0001-v00000002"):
        verified.verify(path, WeightVersion(1, 2))
    file.unlink()
    with pytest.raises(WeightsError, match="not on disk"):
        verified.verify(path, V1)
