"""Versioned weight directories: how weights travel from the trainer to the generation servers.

`<run>/weights/<role>/a0001-v00000012/` holds Hugging Face safetensors in shards, config and tokenizer files, and
`manifest.json`: who made it and size and xxh3 of every file. A version is written under a temporary name, synced, then renamed:
a directory that has its final name is complete. Only then is `model_version` put to name resolve. Readers verify the
manifest before anything is loaded, because an engine may load a torn or foreign checkpoint without a word.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from asyncrl.messages import DECODE_ERRORS, WeightVersion

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
_TMP_SUFFIX = ".writing"
_CHUNK_BYTES = 1 << 22
# Files of a model's folder that are not weights and that a reader needs.
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


class WeightsError(ValueError):
    """A weight directory that must not be loaded; says which file and what differs."""


class FileEntry(msgspec.Struct, frozen=True):
    bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json of a version."""

    attempt: int
    version: int
    kind: Literal["full"]
    files: dict[str, FileEntry]

    @property
    def weight_version(self) -> WeightVersion:
        return WeightVersion(self.attempt, self.version)


def role_dir(run_dir: str | Path, role: str) -> Path:
    return Path(run_dir) / "weights" / role


def version_dir(run_dir: str | Path, role: str, version: WeightVersion) -> Path:
    """Where a version of a role is, or will be."""
    return role_dir(run_dir, role) / str(version)


def write_version(
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source_dir: Path,
    version: WeightVersion,
    shard_bytes: int = 2_000_000_000,
    fsync: bool = True,
) -> Manifest:
    """Write a full version to path: tensors in Hugging Face names, side files (config, tokenizer) copied from source_dir.

    Written beside path, synced and renamed, so that path is complete or absent. Leftovers of an earlier try are removed first.
    Raises FileExistsError if path is there, OSError (disk full, ...) with nothing left behind.
    """
    if path.exists():
        raise FileExistsError(f"weight version {path} exists already; versions are written once")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + _TMP_SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_shards(temporary, tensors, shard_bytes)
        for pattern in _SIDE_FILES:
            for side in sorted(source_dir.glob(pattern)):
                shutil.copyfile(side, temporary / side.name)
        files = {file.name: _entry(file, fsync) for file in sorted(temporary.iterdir())}
        manifest = Manifest(attempt=version.attempt, version=version.version, kind="full", files=files)
        (temporary / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        if fsync:
            _sync(temporary / MANIFEST)
            _sync(temporary)
        temporary.rename(path)
        if fsync:
            _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Manifest of a version directory. Raises WeightsError where there is none that can be read."""
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise WeightsError(f"{path} has no {MANIFEST}: not a weight version, or it was pruned") from None
    except (*DECODE_ERRORS, OSError) as error:
        raise WeightsError(f"{path / MANIFEST} cannot be read: {error}") from error


def verify_version(path: Path, expected: WeightVersion | None = None) -> Manifest:
    """Check every file against the manifest (size, then xxh3). Raises WeightsError naming the file and what differs."""
    manifest = read_manifest(path)
    if expected is not None and manifest.weight_version != expected:
        raise WeightsError(f"{path} holds {manifest.weight_version}, expected {expected}")
    if not any(name.endswith(".safetensors") for name in manifest.files):
        raise WeightsError(f"{path} lists no safetensors file")
    for name, entry in manifest.files.items():
        file = path / name
        if os.sep in name or not file.is_file():
            raise WeightsError(f"{file} is in the manifest but not on disk")
        size = file.stat().st_size
        if size != entry.bytes:
            raise WeightsError(f"{file} has {size} bytes, the manifest says {entry.bytes}")
        if _xxh3(file) != entry.xxh3:
            raise WeightsError(f"{file} has another checksum than the manifest")
    return manifest


def tensor_files(path: Path) -> list[Path]:
    """The safetensors files of a version, in order."""
    return sorted(path.glob("*.safetensors"))


def list_versions(directory: Path) -> list[WeightVersion]:
    """Complete versions below a role's directory, oldest first."""
    found: list[WeightVersion] = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        try:
            found.append(WeightVersion.parse(entry.name))
        except ValueError:
            continue
    return sorted(found)


def prune_versions(directory: Path, *, keep: int, in_use: Iterable[WeightVersion]) -> list[WeightVersion]:
    """Remove all but the newest `keep` versions and those in use. Returns what was removed.

    A version is renamed away before its files go, so that no reader takes a half-removed one for complete.
    """
    versions = list_versions(directory)
    kept = {*versions[max(0, len(versions) - keep) :], *in_use}
    removed = [version for version in versions if version not in kept]
    for version in removed:
        grave = directory / f".{version}.removing"
        (directory / str(version)).rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
    return removed


def _write_shards(directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """Shards by Hugging Face's naming: one file, or numbered ones with an index."""
    from safetensors.torch import save_file  # imports torch: only the writer needs it

    shards: list[list[str]] = []
    total = 0
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        save_file(shard, directory / f"shard-{number}", metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if not shards:
        raise ValueError("no tensors to write")
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}").rename(directory / name)
        weight_map.update(dict.fromkeys(names, name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_bytes(msgspec.json.encode(index))


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _entry(file: Path, fsync: bool) -> FileEntry:
    if fsync:
        _sync(file)
    return FileEntry(bytes=file.stat().st_size, xxh3=_xxh3(file))


def _xxh3(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
