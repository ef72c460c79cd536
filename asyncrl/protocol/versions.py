"""Weight versions: the name of a version, and the files that make it up."""

from __future__ import annotations

import re

from msgspec import Struct

_VERSION = re.compile(r"a(\d{4,})-v(\d{8,})")
_VERSION_BITS = 40


class WeightVersion(Struct, frozen=True, order=True, array_like=True):
    """Identifies weights everywhere: the attempt that made them and the number of train steps done (0: the initial model)."""

    attempt: int
    version: int

    def __str__(self) -> str:
        return f"a{self.attempt:04d}-v{self.version:08d}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Inverse of `str`. Raises ValueError for any other text."""
        match = _VERSION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a weight version such as a0001-v00000012")
        return cls(int(match[1]), int(match[2]))

    def pack(self) -> int:
        """The version as one int64 that sorts like the pair. Each sampled token carries its version in this form;
        prompt tokens carry -1.
        """
        return (self.attempt << _VERSION_BITS) | self.version

    @classmethod
    def unpack(cls, packed: int) -> WeightVersion:
        """Inverse of `pack`."""
        if packed < 0:
            raise ValueError(f"{packed} is not a packed weight version (tokens that were not sampled carry -1)")
        return cls(packed >> _VERSION_BITS, packed & ((1 << _VERSION_BITS) - 1))


class WrittenFile(Struct, frozen=True, array_like=True):
    """A file of a weight version, model or checkpoint that is not committed yet."""

    name: str
    size: int
    xxh3: str
    tensors: list[str]  # names of the tensors in the file
