"""The axes of a model's layout, one row each: what its ranks share out, and what is summed over them (pure).

    d2p1m2      two replicas (data), one pipeline stage (pipe), matrices split among two ranks (tensor)
    d4p1m1r2    two copies of the weights, each split among four ranks; all eight ranks share out the samples

Layouts are parsed and written, ranks are numbered, and process groups are made from the table. Other code asks a grid, a placement
or a mesh: for the parts of the samples, layers or matrices, or for the group that sums losses. It names no axis, so a further axis
takes a row here, and changes only the code that computes along it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

# What the ranks along an axis share out
SAMPLES = "samples"  # of a batch: each rank has the weights, or a part of them that is gathered before its use
LAYERS = "layers"  # of the model: each rank has a pipeline stage
MATRICES = "matrices"  # of each layer: each rank has some rows or columns
# What is summed over the ranks along an axis
LOSSES = "losses"  # losses, statistics and counts of a batch
GRADIENTS = "gradients"  # of the weights
PARTIALS = "partials"  # products with a part of a matrix, and gradients of what all these products read
NORMS = "norms"  # the squares of the gradient's norm
SUMS = (LOSSES, GRADIENTS, PARTIALS, NORMS)

_CPU = re.compile(r"cpu([1-9]\d*)")


@dataclass(frozen=True)
class Axis:
    """One axis of a layout."""

    name: str  # of its coordinate, and of its process groups
    letter: str  # in layouts
    splits: str  # what its ranks share out
    order: int  # in training: the coordinate of the axis with the highest order varies fastest from rank to rank
    sums: tuple[str, ...]  # what is summed over its ranks
    # Coordinate of the rank that stores the outputs of a replica; -1: the last one. Unused if the axis splits samples
    head: int = 0
    # Its ranks hold equal weights and gradients. Only grids with several copies have such an axis
    copies: bool = False


TABLE = (  # in the order of layouts such as d2p1m1, in which generation servers get their GPUs, too
    Axis("data", "d", SAMPLES, order=2, sums=(LOSSES, GRADIENTS, NORMS)),
    Axis("pipe", "p", LAYERS, order=0, sums=(NORMS,), head=-1),
    Axis("tensor", "m", MATRICES, order=3, sums=(PARTIALS, NORMS)),
    # Hybrid sharding (FSDP2): the ranks of a copy have successive numbers, so a copy may fill a host
    Axis("copy", "r", SAMPLES, order=1, sums=(LOSSES, GRADIENTS, NORMS), copies=True),
)
AXES = tuple(axis for axis in TABLE if not axis.copies)  # of a layout with one copy of the weights


@dataclass(frozen=True)
class ParallelGrid:
    """The sizes of a layout's axes, in the order of the table, written as in `d2p1m1`. `cpu2` shares the samples between two
    workers that have no GPU and no model."""

    sizes: tuple[int, ...] = (1,) * len(AXES)
    on_cpu: bool = False
    axes: tuple[Axis, ...] = AXES

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def parts(self, what: str) -> int:
        """The number of parts into which samples, layers or matrices are split."""
        return math.prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis.splits == what)

    @property
    def num_replicas(self) -> int:
        return self.parts(SAMPLES)

    @property
    def num_stages(self) -> int:
        return self.parts(LAYERS)

    @property
    def replica_size(self) -> int:
        """The number of ranks of a replica."""
        return self.only(*{axis.splits for axis in self.axes} - {SAMPLES}).size

    def summed(self, what: str) -> tuple[str, ...]:
        """The names of the axes along which losses, gradients, partials or norms are summed, in training order."""
        return tuple(axis.name for axis in sorted(self.axes, key=lambda axis: axis.order) if what in axis.sums)

    @property
    def num_copies(self) -> int:
        """The number of copies of the weights, each of which is split among the other ranks."""
        return math.prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis.copies)

    def with_parts(self, parts: Mapping[str, int]) -> ParallelGrid:
        """Return the grid with other numbers of parts of samples, layers or matrices. The weights have one copy if the number of
        parts of the samples is given."""
        sizes = dict(zip(self.axes, self.sizes, strict=True))
        given = {axis: parts.get(axis.splits, size) for axis, size in sizes.items() if not axis.copies}
        kept = {axis: size for axis, size in sizes.items() if axis.copies and axis.splits not in parts}
        return replace(self, sizes=(*given.values(), *kept.values()), axes=(*given, *kept))

    def only(self, *kept: str) -> ParallelGrid:
        """Return the grid that splits nothing else."""
        return self.with_parts({axis.splits: 1 for axis in self.axes if axis.splits not in kept})

    @classmethod
    def of_size(cls, size: int, axes: tuple[Axis, ...] = AXES) -> Iterator[ParallelGrid]:
        """All grids with this number of ranks and one copy of the weights. The size of the table's first axis varies fastest."""
        for sizes in _factors(size, len(axes)):
            yield cls(sizes, axes=axes)

    @classmethod
    def parse(cls, text: str, axes: tuple[Axis, ...] = TABLE) -> ParallelGrid:
        """Parse e.g. `d2p1m1`, `d4r2` or `cpu2`. Axes may come in any order; omitted sizes are 1. Raises ValueError with the
        expected form."""
        if found := _CPU.fullmatch(text):
            return cls((1,) * len(axes), on_cpu=True, axes=axes).with_parts({SAMPLES: int(found[1])})
        letters = "".join(axis.letter for axis in axes)
        if not re.fullmatch(rf"(?:[{letters}][1-9]\d*){{1,{len(axes)}}}", text):
            meanings = ", ".join(f"{axis.letter}: {axis.name}" for axis in axes)
            raise ValueError(f"{text!r} is not a grid such as d2p1m1 ({meanings}, each at most once, >= 1)")
        sizes = re.findall(rf"([{letters}])(\d+)", text)
        given = {letter: int(size) for letter, size in sizes}
        if len(given) != len(sizes):
            raise ValueError(f"{text!r} names an axis twice; write a grid such as d2p1m1")
        axes = tuple(axis for axis in axes if not axis.copies or given.get(axis.letter, 1) > 1)
        return cls(tuple(given.get(axis.letter, 1) for axis in axes), axes=axes)

    def __str__(self) -> str:
        if self.on_cpu:
            return f"cpu{self.num_replicas}"
        return "".join(f"{axis.letter}{size}" for axis, size in zip(self.axes, self.sizes, strict=True))


def _factors(size: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of `count` numbers, by the last number."""
    if count == 1:
        yield (size,)
        return
    for last in _divisors(size):
        yield from ((*others, last) for others in _factors(size // last, count - 1))


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)
