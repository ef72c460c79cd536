"""Changed elements of tensors: the encoding of a delta version's files, and the way back to whole tensors.

    write_part: encode(tensors of the base, new tensors) --> part-00000.delta: for each tensor the changed positions and new values
    a server that serves the base: changes() of each tensor --> apply, in the model's memory
    another reader (SGLang): whole.py: the full version, then every delta of the chain

Elements count as changed if their bits differ: -0.0 and NaN payloads are elements like all others. Positions are stored as
differences to the position before, in the smallest unsigned dtype that fits, and compressed. Values are stored as they are, because
they hardly compress.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.weights.form import TensorChange, WeightForm, WeightsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A delta whose positions and values take more than this share of the tensors' bytes is not made: it would save less time than it
# costs
_WORTH = 0.5
_FAST = 1  # zlib's level: higher ones compress positions hardly better, and take several times as long


class TensorDelta(TensorChange, frozen=True, array_like=True):
    """The changed elements of one tensor, encoded."""

    gap_bytes: int  # bytes of one difference of positions
    gaps: bytes  # differences of ascending positions, the first from 0; compressed
    values: bytes  # in the tensor's dtype

    def changes(self) -> tuple[Tensor, Tensor]:
        """Positions (N,) int64 in the flattened tensor, ascending, and their new values (N,) in the tensor's dtype. Raises
        WeightsError if the content does not fit name, dtype and shape."""
        import torch  # the manager, which computes no tensors, imports this module

        from asyncrl.weights.update_group import dtype_of

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

    @property
    def content(self) -> tuple[bytes, bytes]:
        return self.gaps, self.values


class DeltaForm(WeightForm):
    suffix = ".delta"
    has_base = True

    def encode(self, base: Mapping[str, Tensor], share: Mapping[str, Tensor], *, worth: float = _WORTH) -> bytes | None:
        """Encode the elements of `share` that differ from `base`. Tensors without changes are listed too. Returns None if there are
        no tensors, or if a delta is not worthwhile (see _WORTH)."""
        if _raw_bytes(base, share) > worth * sum(tensor.nbytes for tensor in share.values()):
            return None
        deltas = []
        for name, tensor in share.items():
            before, after = _bits(base[name]), _bits(tensor)
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

    def read(self, folder: Path) -> list[TensorDelta]:
        try:
            files = [msgspec.msgpack.decode(file.read_bytes(), type=list[TensorDelta]) for file in self.files(folder)]
        except DECODE_ERRORS as error:
            raise WeightsError(f"a {self.suffix} file in {folder} cannot be read: {error}") from error
        return list(chain.from_iterable(files))

    def apply(self, changes: Sequence[TensorDelta], tensors: Mapping[str, Tensor]) -> None:
        """With the new values in the tensors' own dtypes. Reads all deltas before the first change."""
        import torch

        read = [(tensors[delta.name], *delta.changes()) for delta in changes]
        with torch.no_grad():
            for tensor, positions, values in read:
                bits = _bits_dtype(tensor)
                tensor.view(bits).put_(positions.to(tensor.device), values.to(tensor).view(bits))


def _raw_bytes(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> int:
    """The least bytes that a delta takes without compression. In a pass of its own, because positions cost much more than it if all
    elements have changed."""
    counts = ((int(np.count_nonzero(_bits(old[name]) != _bits(tensor))), tensor) for name, tensor in new.items())
    return sum(count * (tensor.element_size() + 1) for count, tensor in counts)


def _bits(tensor: Tensor) -> np.ndarray:
    """The elements as integers, flattened. In numpy, which compares 16-bit integers in a quarter of torch's time."""
    bits: np.ndarray = tensor.reshape(-1).view(_bits_dtype(tensor)).numpy()
    return bits


def _bits_dtype(tensor: Tensor) -> torch.dtype:
    """The integers of an element's size."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
