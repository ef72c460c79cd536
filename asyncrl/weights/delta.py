"""Changed elements of tensors: the encoding of a delta version's files, and the way back to whole tensors.

    write_part: encode(tensors of the base, new tensors) --> part-00000.delta: for each tensor the changed positions and new values
    a server that serves the base: changes() of each tensor --> apply, in the model's memory
    another reader (SGLang): whole(path): the full version, then every delta of the chain

Elements count as changed if their bits differ: -0.0 and NaN payloads are elements like all others. Positions are stored as
differences to the position before, in the smallest unsigned dtype that fits, and compressed. Values are stored as they are, because
they hardly compress.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.protocol.messages import DECODE_ERRORS
from asyncrl.weights.update_group import dtype_of
from asyncrl.weights.versions import DELTA, WeightsError, delta_files, read_chain, tensor_files, write_version

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by an element's bytes
# A delta whose positions and values take more than this share of the tensors' bytes is not made: it would save less time than it
# costs
_WORTH = 0.5
_FAST = 1  # zlib's level: higher ones compress positions hardly better, and take several times as long


class TensorDelta(msgspec.Struct, frozen=True, array_like=True):
    """The changed elements of one tensor, encoded."""

    name: str
    dtype: str  # torch's name
    shape: list[int]
    gap_bytes: int  # bytes of one difference of positions
    gaps: bytes  # differences of ascending positions, the first from 0; compressed
    values: bytes  # in the tensor's dtype

    def changes(self) -> tuple[Tensor, Tensor]:
        """Positions (N,) int64 in the flattened tensor, ascending, and their new values (N,) in the tensor's dtype. Raises
        WeightsError if the content does not fit name, dtype and shape."""
        try:
            dtype, gap = dtype_of(self.dtype), np.dtype(f"<u{self.gap_bytes}")
            values = (
                torch.frombuffer(bytearray(self.values), dtype=dtype) if self.values else torch.empty(0, dtype=dtype)
            )
            # Not more than the values demand, whatever the file holds
            unpacked = zlib.decompressobj().decompress(self.gaps, len(values) * gap.itemsize + 1)
            gaps = np.frombuffer(unpacked, gap).astype(np.int64)
        except (zlib.error, TypeError, ValueError) as error:
            raise WeightsError(f"the changes of {self.name} cannot be read: {error}") from error
        positions = np.cumsum(gaps)
        within = positions.min(initial=0) >= 0 and positions.max(initial=-1) < math.prod(self.shape)
        if len(gaps) != len(values) or not within or not (gaps[1:] > 0).all():
            raise WeightsError(f"the changes of {self.name} do not fit it: {len(gaps)} positions, {len(values)} values")
        return torch.from_numpy(positions), values


def encode(old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, worth: float = _WORTH) -> bytes | None:
    """Encode the elements of `new` that differ from `old`: CPU tensors with equal names, shapes and dtypes. Tensors without changes
    are listed too. Returns None if there are no tensors, or if a delta is not worthwhile (see _WORTH)."""
    if _raw_bytes(old, new) > worth * sum(tensor.nbytes for tensor in new.values()):
        return None
    deltas = []
    for name, tensor in new.items():
        before, after = _bits(old[name]), _bits(tensor)
        positions = np.flatnonzero(before != after)
        gaps = np.diff(positions, prepend=0)
        gaps = gaps.astype(np.min_scalar_type(gaps.max(initial=0)).newbyteorder("<"))
        deltas.append(
            TensorDelta(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                gap_bytes=gaps.itemsize,
                gaps=zlib.compress(gaps.tobytes(), _FAST),
                values=after[positions].tobytes(),
            )
        )
    return msgspec.msgpack.encode(deltas) if deltas else None


def _raw_bytes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> int:
    """The least bytes that a delta takes without compression. In a pass of its own, because positions cost much more than it if all
    elements have changed."""
    counts = ((int(np.count_nonzero(_bits(old[name]) != _bits(tensor))), tensor) for name, tensor in new.items())
    return sum(count * (tensor.element_size() + 1) for count, tensor in counts)


def _bits(tensor: Tensor) -> np.ndarray:
    """The elements as integers, flattened. In numpy, which compares 16-bit integers in a quarter of torch's time."""
    bits: np.ndarray = tensor.reshape(-1).view(_BITS[tensor.element_size()]).numpy()
    return bits


def file_name(part: int) -> str:
    """Name of the file with the changes of one rank's share."""
    return f"part-{part:05d}{DELTA}"


def read_deltas(folder: Path) -> list[TensorDelta]:
    """The changed elements in a version's folder; none in that of a full version. Raises WeightsError, OSError."""
    try:
        files = [msgspec.msgpack.decode(file.read_bytes(), type=list[TensorDelta]) for file in delta_files(folder)]
    except DECODE_ERRORS as error:
        raise WeightsError(f"a {DELTA} file in {folder} cannot be read: {error}") from error
    return list(chain.from_iterable(files))


@torch.no_grad()
def apply(deltas: Iterable[TensorDelta], tensors: Mapping[str, Tensor]) -> None:
    """Change elements of these tensors in place, on their device, with the new values in the tensors' own dtypes. Reads all deltas
    before the first change. Raises WeightsError."""
    changes = [(tensors[delta.name], *delta.changes()) for delta in deltas]
    for tensor, positions, values in changes:
        bits = _BITS[tensor.element_size()]
        tensor.view(bits).put_(positions.to(tensor.device), values.to(tensor).view(bits))


def whole(path: Path) -> dict[str, Tensor]:
    """All tensors of a version, full or delta. Verifies no checksums. Raises WeightsError, OSError."""
    tensors: dict[str, Tensor] = {}
    for folder, _ in read_chain(path):
        for file in tensor_files(folder):
            tensors |= {name: tensor.clone() for name, tensor in load_file(file).items()}
        deltas = read_deltas(folder)
        for part in deltas:
            if part.name not in tensors or list(tensors[part.name].shape) != part.shape:
                raise WeightsError(f"{folder} changes {part.name} of shape {part.shape}, which its base does not have")
        apply(deltas, tensors)
    return tensors


def write_whole(path: Path, target: Path, *, fsync: bool = True) -> None:
    """Write a version as a full one, which `from_pretrained` loads. Raises WeightsError, OSError."""
    links = read_chain(path)
    source_dir, version = links[0][0], links[-1][1].weight_version
    write_version(target, whole(path).items(), source_dir=source_dir, version=version, fsync=fsync)
