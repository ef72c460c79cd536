"""Moves tensors off their device and back, without replacing them: parameters, views and references stay valid."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from asyncrl.runtime.process import return_freed_memory


class Offloaded:
    """Storages that have no data now, and their bytes: in CPU memory, or in a file without a name.

    A model on the CPU leaves its device, which is the memory, only for a file.
    """

    def __init__(self, tensors: Iterable[Tensor], *, folder: Path | None = None) -> None:
        """Free the storages of these tensors, each once. folder: of the file; None: CPU memory. Raises OSError if the file
        cannot be written."""
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._in_file: list[tuple[torch.UntypedStorage, int]] = []
        self._file: IO[bytes] | None = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        for storage in storages.values():
            if not storage.nbytes():
                continue
            if self._file is None:
                self._kept.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            else:
                self._file.write(_bytes_of(storage).clone().numpy().data)  # numpy() makes its own storage unresizable
                self._in_file.append((storage, storage.nbytes()))
            storage.resize_(0)
        if self._file is not None:
            return_freed_memory()

    def restore(self) -> None:
        """Give the storages their bytes back."""
        for storage, kept in self._kept:
            storage.resize_(kept.numel())
            _bytes_of(storage).copy_(kept)
        if self._file is not None:
            with self._file as file:
                file.seek(0)
                for storage, num_bytes in self._in_file:
                    storage.resize_(num_bytes)
                    _bytes_of(storage).copy_(torch.frombuffer(bytearray(file.read(num_bytes)), dtype=torch.uint8))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
