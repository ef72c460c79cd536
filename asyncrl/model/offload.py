"""Moves tensors off their device and back, without replacing them: parameters, views and references stay valid."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from asyncrl.runtime.process import return_freed_memory

CHUNK_BYTES = 1 << 28  # a power of two, to which torch rounds pinned memory up


class HostMemory:
    """Pinned memory of the host that is kept from turn to turn, since pinning it takes as long as several copies.

    It grows to the bytes of the largest turn, rounded up to a chunk, and stays until the process ends.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    def pieces(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """Memory for each of these numbers of bytes, in pieces. Each call gives the same memory again."""
        ends = list(itertools.accumulate(sizes, initial=0))
        while len(self._chunks) * self._chunk_bytes < ends[-1]:
            self._chunks.append(pinned(self._chunk_bytes))
        return [self._between(start, end) for start, end in itertools.pairwise(ends)]

    def _between(self, start: int, end: int) -> list[Tensor]:
        found = []
        while start < end:
            number, at = divmod(start, self._chunk_bytes)
            found.append(self._chunks[number][at : at + end - start])  # ends with its chunk
            start += found[-1].numel()
        return found


def pinned(num_bytes: int) -> Tensor:
    """Memory from which and to which a GPU copies by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Offloaded:
    """Storages that have no data now, and their bytes: in host memory, or in a file without a name.

    A model on the CPU leaves its device, which is the memory, only for a file.
    """

    def __init__(self, tensors: Iterable[Tensor], host: HostMemory, *, folder: Path | None = None) -> None:
        """Free the storages of these tensors, each once. folder: of the file; None: `host` takes the bytes, until its next turn.
        Raises OSError if the file cannot be written."""
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]
        self._pieces: list[list[Tensor]] = []
        self._file: IO[bytes] | None = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        if self._file is None:
            self._pieces = host.pieces([num_bytes for _, num_bytes in self._storages])
            for there, here in self._pairs():
                here.copy_(there, non_blocking=True)
            _finish_copies()
            for storage, _ in self._storages:
                storage.resize_(0)
            return
        for storage, _ in self._storages:
            self._file.write(_bytes_of(storage).clone().numpy().data)  # numpy() makes its own storage unresizable
            storage.resize_(0)
        return_freed_memory()

    def restore(self) -> None:
        """Give the storages their bytes back."""
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        for there, here in self._pairs():
            there.copy_(here, non_blocking=True)
        _finish_copies()  # the host's memory may be written again
        if self._file is not None:
            with self._file as file:
                file.seek(0)
                for storage, num_bytes in self._storages:
                    _bytes_of(storage).copy_(torch.frombuffer(bytearray(file.read(num_bytes)), dtype=torch.uint8))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Equal parts of the storages and of the host's memory."""
        for (storage, _), pieces in zip(self._storages, self._pieces, strict=False):  # a file: no pieces
            yield from zip(torch.split(_bytes_of(storage), [piece.numel() for piece in pieces]), pieces, strict=True)


def _finish_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
