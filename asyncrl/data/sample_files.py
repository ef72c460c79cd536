"""SequenceSamples in files: `save_sample`, `load_sample`, and the file format that recorded trajectories share with them.

A safetensors file: the sample's arrays as tensors under their keys, and in its metadata a typed header (JSON) and a checksum of
both. A file is written under a temporary name and renamed, so a reader never sees a partial file. It is not synced to disk: if a
power cut damages it, its checksum fails. Any reader of safetensors can read the arrays.

A reader trusts nothing. safetensors compares offsets with the size of the file. The checksum shows damage. A forged file has a
valid checksum, so header, dtypes, lengths and bools are checked as in `decode_sample`. Nothing is unpickled. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.numpy import load, save

from asyncrl.data.sequence import Array, SeqLens, SequenceSample, shared_lengths
from asyncrl.protocol.errors import DECODE_ERRORS

_CHECKSUM = "xxh3"  # in the file's metadata
_SAFETENSORS_METADATA = "__metadata__"  # safetensors keeps its metadata under this name, so no key can have it
_MAX_HEADER_BYTES = 16_000_000
_LENGTH_BYTES = 8  # safetensors begins with the length of its own header


class _Versioned(Protocol):
    @property
    def format(self) -> int: ...


Header = TypeVar("Header", bound=_Versioned)


@dataclass(frozen=True)
class FileFormat(Generic[Header]):
    """How files of one kind are written, read and verified."""

    kind: str  # one word; part of the file's metadata, so that no file is taken for one of another kind
    header: type[Header]  # a msgspec.Struct
    version: int  # value of the header's `format` that this release reads
    error: type[ValueError]  # raised for a file that cannot be read or is broken

    def write(self, path: Path, header: Header, data: Mapping[str, Array]) -> None:
        """Write a file, completely or not at all. It replaces an older one. One process at a time may write to a path.

        Raises OSError, and ValueError for a key or a header that a file cannot hold.
        """
        if _SAFETENSORS_METADATA in data:
            raise ValueError(f"key {_SAFETENSORS_METADATA!r} has a meaning in safetensors files; rename it")
        # safetensors stores strided arrays wrongly
        arrays = {key: np.ascontiguousarray(array) for key, array in data.items()}
        text = msgspec.json.encode(header).decode()
        content = save(arrays, {self._header_name: text, _CHECKSUM: _checksum(text, arrays)})
        if _length(content) > _MAX_HEADER_BYTES:
            raise ValueError(
                f"{path}: ids, keys and lengths take {_length(content)} bytes, at most {_MAX_HEADER_BYTES} fit; "
                "write several files"
            )
        temporary = path.with_name(f".{path.name}.writing")
        try:
            temporary.write_bytes(content)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, path: Path) -> tuple[Header, dict[str, Array]]:
        """Read and verify a whole file. The arrays are writable and share no memory. Raises `error`."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self.error(f"{path} cannot be read: {error}") from error
        text, checksum = self._metadata(path, content)
        try:
            arrays = load(content)
        except KeyError as error:
            raise self.error(f"{path} has an array of dtype {error}, which is no dtype of a sample") from error
        except (SafetensorError, TypeError, ValueError) as error:
            raise self.error(f"{path} is broken or cut short: {error}") from error
        if _checksum(text, arrays) != checksum:
            raise self.error(f"{path} is broken: its content does not match its checksum")
        for key, array in arrays.items():
            # A bool must be stored as 0 or 1: numpy treats a stored 2 as neither True nor False.
            if array.dtype == np.bool_ and (largest := array.view(np.uint8).max(initial=0)) > 1:
                raise self.error(f"{path}: key {key!r}: a bool is {largest}; only 0 and 1 are bools")
        return self._decode(path, text), arrays

    def read_header(self, path: Path) -> Header:
        """Read only the header, without reading (or verifying) the arrays. Raises `error`."""
        try:
            with path.open("rb") as file:
                start = file.read(_LENGTH_BYTES)
                content = start + file.read(min(_length(start), _MAX_HEADER_BYTES))
        except OSError as error:
            raise self.error(f"{path} cannot be read: {error}") from error
        return self._decode(path, self._metadata(path, content)[0])

    @property
    def _header_name(self) -> str:
        return f"asyncrl_{self.kind}"

    def _metadata(self, path: Path, content: bytes) -> tuple[str, str]:
        """Return our header as text and the checksum, from the first bytes of a file."""
        length = _length(content)
        if len(content) < _LENGTH_BYTES + length or length > _MAX_HEADER_BYTES:
            raise self.error(
                f"{path} is broken or cut short: its header needs {length} bytes, the file has {len(content)}"
            )
        try:
            raw = content[_LENGTH_BYTES : _LENGTH_BYTES + length]
            metadata = msgspec.json.decode(raw, type=_SafetensorsHeader).metadata
            return metadata[self._header_name], metadata[_CHECKSUM]
        except KeyError:
            raise self.error(f"{path} is a safetensors file, but not a {self.kind} of asyncrl") from None
        except DECODE_ERRORS as error:
            raise self.error(f"{path} is not a safetensors file: {error}") from error

    def _decode(self, path: Path, text: str) -> Header:
        try:
            header = msgspec.json.decode(text, type=self.header)
        except DECODE_ERRORS as error:
            raise self.error(f"{path}: its header cannot be read: {error}") from error
        if header.format != self.version:
            raise self.error(f"{path} has format {header.format}, this release reads {self.version}")
        return header


class _SafetensorsHeader(Struct):
    metadata: dict[str, str] = msgspec.field(name=_SAFETENSORS_METADATA, default_factory=dict)


def _length(start: bytes) -> int:
    return int.from_bytes(start[:_LENGTH_BYTES], "little")


def _checksum(text: str, data: Mapping[str, Array]) -> str:
    digest = xxhash.xxh3_64(text.encode())
    for key in sorted(data):
        digest.update(f"\0{key}\0{data[key].dtype.str}\0{data[key].shape}\0".encode())
        digest.update(data[key].tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------- whole samples


class SampleFileError(ValueError):
    """A file is not a complete sample; the message names the file and the cause."""


class _SampleHeader(Struct, frozen=True, kw_only=True):
    format: int = 1
    ids: list[str]
    lengths: list[SeqLens]
    keys: dict[str, int]  # key -> index into lengths: most keys share an entry


_SAMPLES = FileFormat("sample", _SampleHeader, 1, SampleFileError)


def save_sample(sample: SequenceSample, path: str | Path) -> None:
    """Write a sample to a safetensors file, completely or not at all. It replaces an older file; the folder must exist.

    All dtypes of a sample are kept, and all bits. While it writes, the call needs the size of the sample once more in memory. One
    process at a time may write to a path. Raises OSError, and ValueError for the key `__metadata__` or for ids and lengths of
    more than 16 MB.
    """
    lengths, keys = shared_lengths(sample.seqlens)
    _SAMPLES.write(Path(path), _SampleHeader(ids=list(sample.ids), lengths=lengths, keys=keys), sample.data)


def load_sample(path: str | Path) -> SequenceSample:
    """Read and verify a sample that `save_sample` has written: equal ids, keys in the same order, lengths, dtypes and bits.

    The arrays are writable and share no memory. Raises SampleFileError if the file is missing, cut short, damaged, forged, or no
    sample; the message names the file and the cause.
    """
    path = Path(path)
    header, arrays = _SAMPLES.read(path)
    if header.keys.keys() != arrays.keys():
        raise SampleFileError(f"{path} holds the keys {sorted(arrays)}, its header names {sorted(header.keys)}")
    for key, i in header.keys.items():
        if not 0 <= i < len(header.lengths):
            raise SampleFileError(
                f"{path}: key {key!r}: the lengths index {i} is out of range; the header has {len(header.lengths)} lengths"
            )
    seqlens = {key: header.lengths[i] for key, i in header.keys.items()}
    try:
        return SequenceSample(tuple(header.ids), seqlens, {key: arrays[key] for key in header.keys})
    except ValueError as error:
        raise SampleFileError(f"{path} holds no sample: {error}") from error
