"""The base class of weight forms: what the files of one version hold, and how a server gets from them to tensors.

The life of a version, and the method that each step asks:

    encode     every rank of the trainer: its share of the tensors, given its share of the version before (`encode`)
    describe   the trainer's first rank: the manifest names the form's kind, and the base if the form has one (`suffix`, `has_base`)
    check      the manager and the servers: checksums of all files, and of the base's manifest (versions.read_chain, not the form);
               a server also compares names, dtypes and shapes with its model's (`read`)
    apply      a server: on the tensors of the base, which it serves or has just loaded (`apply`)
    prune      a version stays as long as another one that is kept has it as its base (versions.with_bases, not the form)

Of a version with a base the folder may also hold whole tensors, as safetensors: of the ranks for which `encode` returned None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.protocol.errors import ErrorClass

if TYPE_CHECKING:
    from torch import Tensor


class WeightsError(ValueError):
    """A weight directory that must not be loaded. The message names the file and the difference.

    Passing, unless stated otherwise: a network file system may show the files late, and the trainer replaces damaged files.
    """

    def __init__(self, text: str, error_class: ErrorClass = ErrorClass.PASSING) -> None:
        super().__init__(text)
        self.error_class = error_class


class TensorChange(msgspec.Struct, frozen=True, array_like=True):
    """The change of one tensor of the base. A form adds its encoding."""

    name: str
    dtype: str  # torch's name
    shape: list[int]  # of the whole tensor

    @property
    def content(self) -> object:
        """Equal if the changes are: tied tensors must change alike."""
        raise NotImplementedError


class WeightForm:
    """The defaults are the form of a full version: it has no base, and safetensors hold each tensor as a whole.

    The module of a form imports no torch, which the manager does not load; its methods may.
    """

    suffix = ""  # of the file of each rank, in the form's own encoding; "": there are only safetensors
    stem = "model"  # of the names of the safetensors
    about = ""  # a side file that versions of this form have, and no others
    has_model = True  # a folder has whole tensors of the whole model, as from_pretrained reads them
    has_base = False  # the files hold changes to the tensors of an older version; the side files are the base's

    def encode(self, base: Mapping[str, Tensor], share: Mapping[str, Tensor]) -> bytes | None:
        """The content of a rank's file. None: the rank writes whole tensors.

        base: the rank's share of the version before. share: CPU tensors with the same names, shapes and dtypes.
        """
        return None

    def read(self, folder: Path) -> Sequence[TensorChange]:
        """The changes in a version's folder. Raises WeightsError, OSError."""
        return ()

    def apply(self, changes: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        """Change the base's tensors in place, on their device. changes: as `read` returns them, for names in `tensors`. Raises
        WeightsError; in that case nothing has changed."""

    def file_name(self, part: int) -> str:
        """Name of a rank's file."""
        return f"part-{part:05d}{self.suffix}"

    def files(self, folder: Path) -> list[Path]:
        """The files in the form's own encoding, sorted by name."""
        return sorted(folder.glob(f"*{self.suffix}")) if self.suffix else []
