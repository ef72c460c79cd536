"""Versioned weight directories, through which weights get from the trainer to the generation servers.

`<run>/weights/<role>/a0001-v00000012/` holds Hugging Face safetensors in shards, config and tokenizer files, and `manifest.json`
with the attempt, the version, and size and xxh3 of every file. A version is written in two steps, under a temporary name.
`write_part` runs at every rank that has tensors; it writes and syncs the rank's files. `commit_version` runs at one rank after all
ranks have finished; it adds the remaining files and renames the directory. A directory that has its final name is complete.
`model_version` is published in name resolve only after that. Readers verify the manifest before they load anything, because an
engine may load a torn or foreign checkpoint without an error.

The form of a version (form.py) says what its files hold. A version that holds changes to an earlier one, its base, consists of a
chain of folders: a full version, and all changes from there on. Its manifest names the base and the checksum of the base's
fingerprint, which covers the rest of the chain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from asyncrl.data.model_folder import is_plain_name
from asyncrl.protocol.errors import DECODE_ERRORS, Failures
from asyncrl.protocol.versions import WeightVersion, WrittenFile
from asyncrl.runtime.disk import write_when_there_is_room
from asyncrl.weights.form import WeightsError
from asyncrl.weights.forms import FORMS, FULL, kind_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
_TMP_SUFFIX = ".writing"
_FULL_LIMIT_S = 5.0  # a full disk delays the files of a folder for at most this long
_CHUNK_BYTES = 1 << 20  # a piece that is written, and then hashed while it is still in a core's cache
# A piece that is read, then hashed. It is large, so that the reading thread takes the GIL less often from the manager's event loop
_READ_BYTES = 1 << 23
_NUM_SYNCERS = 4  # threads that wait for the disk; the file system combines the syncs of small files into one commit
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Files of a model's folder, besides the weights, that a reader needs.
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


class FileEntry(msgspec.Struct, frozen=True):
    bytes: int
    xxh3: str


class ScoredText(msgspec.Struct, frozen=True):
    """The trainer's logprobs of a short text under these weights. A server that has loaded these weights must compute the same,
    within a tolerance."""

    input_ids: list[int]
    logprobs: list[float]  # at temperature 1; of the last len(logprobs) tokens, each given the tokens before it


class Base(msgspec.Struct, frozen=True):
    """The version of the same attempt whose tensors a version changes."""

    version: int
    xxh3: str  # of its fingerprint
    num_bytes: int  # of its chain


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """manifest.json of a version."""

    attempt: int
    version: int
    kind: str  # of its form
    files: dict[str, FileEntry]
    base: Base | None = None  # if the form has one
    scored_text: ScoredText | None = msgspec.field(default=None, name="probe")  # weights.verify_logprobs

    def __post_init__(self) -> None:
        if outside := [name for name in self.files if not is_plain_name(name)]:
            raise ValueError(f"{self.weight_version} lists {outside[0]!r}, which is not a name in its folder")
        if self.kind not in FORMS:
            raise ValueError(f"{self.weight_version} is {self.kind!r}; the known forms are {', '.join(FORMS)}")
        has_base = FORMS[self.kind].has_base
        if has_base != (self.base is not None) or (self.base and self.base.version >= self.version):
            with_base = " or a ".join(kind for kind, form in FORMS.items() if form.has_base)
            raise ValueError(
                f"{self.weight_version} is {self.kind}, with {self.base}; only a {with_base} has a base, an older version"
            )

    @property
    def weight_version(self) -> WeightVersion:
        return WeightVersion(self.attempt, self.version)

    @property
    def base_version(self) -> WeightVersion | None:
        return WeightVersion(self.attempt, self.base.version) if self.base is not None else None

    @property
    def num_bytes(self) -> int:
        """Size of all files that a server without weights loads for this version."""
        return sum(entry.bytes for entry in self.files.values()) + (self.base.num_bytes if self.base is not None else 0)

    @property
    def fingerprint(self) -> str:
        """Checksums of the tensor files only, and of the base: equal for versions that hold the same weights in the same files."""
        suffixes = (".safetensors", FORMS[self.kind].suffix or ".safetensors")
        own = [entry.xxh3 for name, entry in sorted(self.files.items()) if name.endswith(suffixes)]
        return ",".join(own if self.base is None else [self.base.xxh3, *own])

    def as_base(self) -> Base:
        return Base(self.version, xxhash.xxh3_64_hexdigest(self.fingerprint.encode()), self.num_bytes)


def role_dir(run_dir: str | Path, role: str) -> Path:
    return Path(run_dir) / "weights" / role


def version_dir(run_dir: str | Path, role: str, version: WeightVersion) -> Path:
    """Path of a version of a role, whether or not it exists yet."""
    return role_dir(run_dir, role) / str(version)


def side_files(folder: Path) -> dict[str, bytes]:
    """Return the content of the files in a model's folder, besides the weights, that a reader of a version needs, by name."""
    return {file.name: file.read_bytes() for file in _side_files_in(folder)}


def model_files(folder: Path) -> list[Path]:
    """Return the paths of all files in a model's folder that a reader of the model needs."""
    return [*_side_files_in(folder), *folder.glob(INDEX), *tensor_files(folder)]


def _side_files_in(folder: Path) -> list[Path]:
    return [file for pattern in _SIDE_FILES for file in sorted(folder.glob(pattern)) if file.is_file()]


def publish_folder(path: Path, *, source_dir: Path, version: WeightVersion, fsync: bool = True) -> Manifest:
    """Make a version from a model's folder, without torch. The folder's safetensors are hard-linked, or copied if that fails.

    path is complete or absent afterwards, as with write_version. Raises WeightsError if the folder has no safetensors.
    """
    shards = tensor_files(source_dir)
    if not shards:
        raise WeightsError(
            f"{source_dir} has no *.safetensors; save the model with save_pretrained(safe_serialization=True)"
        )

    def fill(writer: FileWriter) -> Manifest:
        for file in (*shards, *source_dir.glob(INDEX)):
            writer.link(file)
        return _finish_version(writer, side_files(source_dir), version, FULL, None, None)

    return commit_folder(path, [], fill, fsync=fsync)


def write_version(
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source_dir: Path,
    version: WeightVersion,
    shard_bytes: int = 2_000_000_000,
    fsync: bool = True,
    scored_text: ScoredText | None = None,
) -> Manifest:
    """Write a version in both steps, if one process has all tensors.

    path is complete or absent afterwards. Raises FileExistsError if it exists already, and OSError (disk full, ...) with nothing
    left behind.
    """
    _check_absent(path)
    files = write_part(path, tensors, shard_bytes=shard_bytes, fsync=fsync)
    sides = side_files(source_dir)
    return commit_version(path, files, sides=sides, version=version, fsync=fsync, scored_text=scored_text)


def write_part(
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    part: int = 0,
    shard_bytes: int = 2_000_000_000,
    fsync: bool = True,
    offsets: Mapping[str, Sequence[int]] | None = None,
    others: Mapping[str, bytes] | None = None,
) -> list[WrittenFile]:
    """The first step, at each rank that has tensors: write them to a temporary folder beside path, in files of at most shard_bytes
    (or one larger tensor). With fsync they are on disk when this returns. Does not wait for other ranks; `part` distinguishes the
    ranks. Writes no file for tensors if there are none.

    path: the final path of the version or other folder. offsets: position of each tensor that is a part of a larger one (in a
    checkpoint), in the format of torch.distributed.checkpoint. others: files without tensors, by name. Raises OSError (disk full,
    ...) with nothing of this part left behind.
    """
    temporary = _temporary(path)
    written: list[WrittenFile] = []
    try:
        with FileWriter(temporary, fsync) as writer:  # the commit removes files that an earlier attempt left in it
            for number, shard in enumerate(_shards(tensors, shard_bytes)):
                name = f"part-{part:05d}-{number:05d}.safetensors"
                written.append(WrittenFile(name, 0, "", list(shard)))
                writer.write(name, _safetensors(shard, offsets))
            for name, content in (others or {}).items():
                written.append(WrittenFile(name, 0, "", []))
                writer.write(name, [content])
    except BaseException:
        for file in written:
            (temporary / file.name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # raised if it is not empty: other ranks write to it
            temporary.rmdir()
        raise
    entries = writer.files
    return [WrittenFile(file.name, entries[file.name].bytes, entries[file.name].xxh3, file.tensors) for file in written]


def commit_version(
    path: Path,
    files: Sequence[WrittenFile],
    *,
    sides: Mapping[str, bytes],
    version: WeightVersion,
    fsync: bool = True,
    scored_text: ScoredText | None = None,
    base: Manifest | None = None,
    replace: bool = False,
) -> Manifest:
    """The second step, at one process that sees the files of all ranks: give the files Hugging Face's names, add the side files and
    the manifest, and rename the directory to its final name. The form follows from the names of all files. A version whose form
    has a base holds changes to `base`, and gets no side files.

    sides: as `side_files` returns them. replace: remove a (damaged) version that is at path. Raises FileExistsError if path exists
    and `replace` is not set, OSError (disk full, ...), ValueError if the files have no tensors or have a tensor twice, and
    WeightsError if a file differs from its report. After an error nothing is left behind.
    """

    def finish(writer: FileWriter) -> Manifest:
        found = kind_of([*sides, *(file.name for file in files)])
        if not FORMS[found].has_base:
            name_shards(writer, files, FORMS[found].stem)
            return _finish_version(writer, sides, version, found, None, scored_text)
        if base is None:
            raise ValueError(f"{version} is a {found}, but its base is not known")
        return _finish_version(writer, {}, version, found, base.as_base(), scored_text)

    return commit_folder(path, files, finish, fsync=fsync, replace=replace)


def commit_folder(
    path: Path, files: Sequence[WrittenFile], finish: Callable[[FileWriter], T], *, fsync: bool, replace: bool = False
) -> T:
    """Complete the temporary folder beside path, and rename it to path, which is then complete or absent. Before the
    rename `finish` adds the remaining files.

    Removes files that are not in `files` (left by an attempt that died). replace: remove what is at path; without it, path must
    not exist.
    """
    temporary = _temporary(path)
    old: Path | None = None
    try:
        if not replace:
            _check_absent(path)
        with FileWriter(temporary, fsync) as writer:
            writer.adopt(files)
            result = finish(writer)
        if fsync:
            _sync(temporary)
        if replace and path.exists():
            grave = writer.when_there_is_room(lambda: tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
            old = writer.when_there_is_room(lambda: path.rename(grave))
        writer.when_there_is_room(lambda: temporary.rename(path))
        if fsync:
            _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    return result


def name_shards(writer: FileWriter, files: Sequence[WrittenFile], stem: str = "model") -> None:
    """Give the files Hugging Face's names: one file, or numbered files with an index."""
    if not files:
        raise ValueError("no tensors to write")
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, file in enumerate(sorted(files, key=lambda file: file.name)):
        name = f"{stem}.safetensors" if len(files) == 1 else f"{stem}-{number + 1:05d}-of-{len(files):05d}.safetensors"
        num_bytes += writer.num_tensor_bytes(file.name)
        writer.rename(file.name, name)
        if twice := [tensor for tensor in file.tensors if tensor in weight_map]:
            raise ValueError(f"tensor {twice[0]} is in {weight_map[twice[0]]} and in {name}")
        weight_map.update(dict.fromkeys(file.tensors, name))
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        writer.write(INDEX, [msgspec.json.encode(index)])


def _finish_version(
    writer: FileWriter,
    sides: Mapping[str, bytes],
    version: WeightVersion,
    kind: str,
    base: Base | None,
    scored_text: ScoredText | None,
) -> Manifest:
    for name, content in sides.items():
        writer.write(name, [content])
    files = dict(sorted(writer.files.items()))
    manifest = Manifest(
        attempt=version.attempt,
        version=version.version,
        kind=kind,
        files=files,
        base=base,
        scored_text=scored_text,
    )
    writer.write(MANIFEST, [msgspec.json.format(msgspec.json.encode(manifest), indent=1)])
    return manifest


def _check_absent(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists already; a version or checkpoint is written only once")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + _TMP_SUFFIX)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a version directory. Raises WeightsError if it is missing or cannot be read."""
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        newest = max(list_versions(path.parent), default="none")
        raise WeightsError(
            f"{path} has no {MANIFEST}: not a weight version, or it was pruned; the newest one beside it: {newest}"
        ) from None
    except (*DECODE_ERRORS, OSError) as error:
        raise WeightsError(f"{path / MANIFEST} cannot be read: {error}") from error


Chain = list[tuple[Path, Manifest]]


def read_chain(path: Path, expected: WeightVersion | None = None) -> Chain:
    """The folders that a version consists of, oldest first: a full version, then the changes. `path` is the last one. Reads
    manifests only.

    Raises WeightsError if a manifest is missing or cannot be read, or if a base is not the one that the changes were made for.
    """
    chain = [(path, read_manifest(path))]
    found = chain[0][1].weight_version
    if expected is not None and found != expected:
        raise WeightsError(f"{path} holds {found}, expected {expected}")
    while (version := chain[0][1].base_version) is not None:
        folder = path.parent / str(version)
        try:
            manifest = read_manifest(folder)
        except WeightsError as error:
            raise WeightsError(
                f"{chain[0][0]} is a {chain[0][1].kind}, and its base cannot be used: {error}"
            ) from error
        if manifest.weight_version != version or manifest.as_base() != chain[0][1].base:
            raise WeightsError(f"{folder} is not the base of {chain[0][0]}: its checksums differ")
        chain.insert(0, (folder, manifest))
    if not any(name.endswith(".safetensors") for name in chain[0][1].files):
        raise WeightsError(f"{chain[0][0]} lists no safetensors file")
    return chain


def verify_version(path: Path, expected: WeightVersion | None = None) -> Manifest:
    """Check every file of the chain against its manifest (size, then xxh3). Raises WeightsError that names the file and the
    difference."""
    chain = read_chain(path, expected)
    for folder, manifest in chain:
        check_files(folder, manifest.files)
    return chain[-1][1]


class VerifiedVersion:
    """Verifies versions, and remembers the chain of the last one. Reads a folder of it again only if one of its files has changed
    since. So a version is verified without its base being read again."""

    def __init__(self) -> None:
        self._known: dict[Path, _Stamps] = {}

    def verify(self, path: Path, version: WeightVersion) -> Chain:
        """Like verify_version, but without reading the folders that were verified last, if their files have not changed. Raises
        WeightsError, OSError."""
        chain = read_chain(path, version)
        # The stamps are from before the files are read, so a change meanwhile is noticed
        found = {folder: _stamps(folder, [MANIFEST, *manifest.files]) for folder, manifest in chain}
        for folder, manifest in chain:
            if self._known.get(folder) != found[folder]:
                check_files(folder, manifest.files)
        self._known = found
        return chain


_Stamps = list[tuple[str, int, int, int]]  # name, inode, bytes, modification time in ns


def _stamps(path: Path, names: Iterable[str]) -> _Stamps:
    """Stamps of the named files. Raises WeightsError for a file that is missing."""
    try:
        found = [(name, (path / name).stat()) for name in names]
    except FileNotFoundError as error:
        raise WeightsError(f"{error.filename} is in the manifest but not on disk") from None
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def check_files(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Check files of a folder (size, then xxh3). Raises WeightsError that names the file and the difference."""
    for name, entry in files.items():
        file = path / name
        if os.sep in name or not file.is_file():
            raise WeightsError(f"{file} is in the manifest but not on disk")
        size = file.stat().st_size
        if size != entry.bytes:
            raise WeightsError(f"{file} has {size} bytes, the manifest says {entry.bytes}")
        if _xxh3(file) != entry.xxh3:
            raise WeightsError(f"{file} has another checksum than the manifest")


def tensor_files(path: Path) -> list[Path]:
    """The safetensors files of a version, sorted by name."""
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


def with_bases(directory: Path, versions: Iterable[WeightVersion]) -> set[WeightVersion]:
    """These versions, and the older ones that are their bases."""
    found = set(versions)
    for version in list(found):
        with contextlib.suppress(WeightsError):  # not there, or a broken chain, which no server loads
            found.update(manifest.weight_version for _, manifest in read_chain(directory / str(version)))
    return found


def prune_versions(directory: Path, *, keep: int, in_use: Iterable[WeightVersion]) -> list[WeightVersion]:
    """Remove all but the newest `keep` versions, those in use, and the bases of all of these. Returns what was removed.

    A version is renamed before its files are removed, so that no reader takes a half-removed version for a complete one. Unfinished
    versions of attempts before the newest version's are removed, too, because no process writes them any more.
    """
    versions = list_versions(directory)
    for unfinished in directory.glob(f"*{_TMP_SUFFIX}") if versions else ():
        with contextlib.suppress(ValueError):
            if WeightVersion.parse(unfinished.name.removesuffix(_TMP_SUFFIX)).attempt < versions[-1].attempt:
                shutil.rmtree(unfinished, ignore_errors=True)
    kept = with_bases(directory, [*versions[max(0, len(versions) - keep) :], *in_use])
    removed = [version for version in versions if version not in kept]
    for version in removed:
        grave = directory / f".{version}.removing"
        path = directory / str(version)
        write_when_there_is_room(path, partial(path.rename, grave))
        shutil.rmtree(grave, ignore_errors=True)
    return removed


class FileWriter:
    """Writes the files of a folder and hashes them in the same pass. Threads close the written files, and sync them if `fsync`,
    while the next one is written.

    Leaving the `with` block waits for these threads. A failed write raises at once. A failed sync raises when the block ends,
    unless the block itself raised.
    """

    def __init__(self, directory: Path, fsync: bool) -> None:
        self.files: dict[str, FileEntry] = {}
        self.directory, self._fsync = directory, fsync
        self._failures = Failures(_FULL_LIMIT_S)
        self.when_there_is_room(lambda: directory.mkdir(parents=True, exist_ok=True))
        self._closes: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(_NUM_SYNCERS, thread_name_prefix="sync_weights")

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file. Reads the buffers without copying, in pieces that fit into a core's cache."""
        digest, size = xxhash.xxh3_64(), 0
        file = self.when_there_is_room(lambda: (self.directory / name).open("wb", buffering=0))
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    written = self.when_there_is_room(lambda piece=view[:_CHUNK_BYTES]: file.write(piece))  # type: ignore[misc]
                    digest.update(view[:written])
                    view = view[written:]
                    size += written
        except BaseException:
            file.close()
            raise
        self.files[name] = FileEntry(bytes=size, xxh3=digest.hexdigest())
        self._closes.append(self._pool.submit(_close, file, self._fsync))

    def link(self, source: Path) -> None:
        """Add an existing file: as a hard link, or as a copy if the file system cannot link."""
        target = self.directory / source.name
        try:
            os.link(source.resolve(), target)
        except OSError:  # another file system, or one without links
            self.when_there_is_room(lambda: shutil.copyfile(source, target))
        self.files[target.name] = FileEntry(bytes=target.stat().st_size, xxh3=_xxh3(target))
        self._closes.append(self._pool.submit(_close, target.open("rb", buffering=0), self._fsync))

    def when_there_is_room(self, write: Callable[[], T]) -> T:
        """Call a function that writes to the folder, again while the disk is full. Raises StorageError."""
        final = self.directory.with_name(self.directory.name.removesuffix(_TMP_SUFFIX))
        return write_when_there_is_room(final, write, self._failures)

    def adopt(self, files: Sequence[WrittenFile]) -> None:
        """Take over files that other processes wrote to this folder, and remove all others. Raises WeightsError if a file is
        missing or its size differs from the report."""
        self.files |= {file.name: FileEntry(bytes=file.size, xxh3=file.xxh3) for file in files}
        for there in self.directory.iterdir():
            if there.name not in self.files:
                there.unlink()
        for file in files:
            there = self.directory / file.name
            size = there.stat().st_size if os.sep not in file.name and there.is_file() else -1
            if size != file.size:
                found = f"has {size} bytes" if size >= 0 else "is not there"
                raise WeightsError(f"{there} {found}; the worker that wrote it reported {file.size} bytes")

    def num_tensor_bytes(self, name: str) -> int:
        """Size of a safetensors file without its header."""
        with (self.directory / name).open("rb") as file:
            return self.files[name].bytes - 8 - int.from_bytes(file.read(8), "little")

    def rename(self, old: str, new: str) -> None:
        self.when_there_is_room(lambda: (self.directory / old).rename(self.directory / new))
        self.files[new] = self.files.pop(old)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown()  # waits for the disk, without a limit
        if kind is None:
            for close in self._closes:
                close.result()


def _close(file: FileIO, fsync: bool) -> None:
    with file:
        if fsync:
            os.fsync(file.fileno())


def _safetensors(
    shard: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]] | None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces, which include the tensors' memory without a copy. The library's writer copies, and
    cannot hash in the same pass.

    The format: the header's length (64 bits, little-endian), the header (JSON, padded with spaces to a multiple of 8 bytes), the
    tensors' bytes. Wide dtypes come first, so that every tensor is aligned.
    """
    import torch  # only the writer needs it

    order = sorted(shard, key=lambda name: (-shard[name].element_size(), name))
    about = {"format": "pt"}
    if offsets is not None:
        saved = {name: {"saved_offsets": list(offsets[name])} for name in order}
        about["DCP_SHARDING_INFO"] = msgspec.json.encode(saved).decode()
    header: dict[str, object] = {"__metadata__": about}
    end = 0
    for name in order:
        tensor = shard[name]
        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}; a version can hold {', '.join(_DTYPES)}")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for name in order:
        if shard[name].nbytes:
            yield shard[name].reshape(-1).view(torch.uint8).numpy().data


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _xxh3(file: Path) -> str:
    """Hash a file through one buffer. Not with mmap: if the file is truncated meanwhile, SIGBUS would kill the process."""
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(_READ_BYTES, file.stat().st_size or 1)))
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
