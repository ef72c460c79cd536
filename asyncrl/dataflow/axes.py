"""The axes of a model's layout, one row each: what its ranks share out, and what is summed over them (pure).

    d2p1m2      two replicas (data), one pipeline stage (pipe), matrices split among two ranks (tensor)
    d4p1m1r2    two copies of the weights, each split among four ranks; all eight ranks share out the samples
    d2p1m1c2    two replicas; the two ranks of each have successive parts of every packed row (context)
    d4p1m1e2    four replicas; each two successive ranks share out the experts of a mixture of experts (expert)

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
TOKENS = "tokens"  # of each packed row: each rank has successive ones, and in attention some heads of all of them
EXPERTS = "experts"  # of each layer: each rank has some, and tokens travel to the ranks that have theirs
# What is summed over the ranks along an axis
LOSSES = "losses"  # losses, statistics and counts of a batch
GRADIENTS = "gradients"  # of the weights
PARTIALS = "partials"  # products with a part of a matrix, and gradients of what all these products read
NORMS = "norms"  # the squares of the gradient's norm
SUMS = (LOSSES, GRADIENTS, PARTIALS, NORMS)

PEERS = "peers"  # the group of the ranks of a copy of the weights that have the same part of what an axis inside others splits

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
    copies: bool = False  # its ranks hold equal weights and gradients
    optional: bool = False  # a grid has this axis only if its size is above 1
    # Adds no ranks: its groups are runs of successive ranks among those that share out a copy of the weights
    inside: bool = False


TABLE = (  # in the order of layouts such as d2p1m1, in which generation servers get their GPUs, too
    Axis("data", "d", SAMPLES, order=2, sums=(LOSSES, GRADIENTS, NORMS)),
    Axis("pipe", "p", LAYERS, order=0, sums=(NORMS,), head=-1),
    Axis("tensor", "m", MATRICES, order=4, sums=(PARTIALS, NORMS)),
    # Ulysses (arXiv:2309.14509). Its ranks compute the loss of the same samples, so losses are not summed over them
    Axis("context", "c", TOKENS, order=3, sums=(GRADIENTS, NORMS), optional=True),
    # Hybrid sharding (FSDP2): the ranks of a copy have successive numbers, so a copy may fill a host
    Axis("copy", "r", SAMPLES, order=1, sums=(LOSSES, GRADIENTS, NORMS), copies=True, optional=True),
    # Neighbours exchange tokens. They share out data and context alike: both only say whose tokens a rank has
    Axis("expert", "e", EXPERTS, order=3, sums=(), optional=True, inside=True),
)
AXES = tuple(axis for axis in TABLE if not axis.optional)


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
        return math.prod(size for _, size in self.ranked)

    @property
    def ranked(self) -> tuple[tuple[Axis, int], ...]:
        """The axes that number the ranks, with their sizes: all but those inside others."""
        return tuple(entry for entry in zip(self.axes, self.sizes, strict=True) if not entry[0].inside)

    @property
    def inside(self) -> tuple[tuple[Axis, int], ...]:
        """The other axes, with their sizes."""
        return tuple(entry for entry in zip(self.axes, self.sizes, strict=True) if entry[0].inside)

    def parts(self, what: str) -> int:
        """The number of parts into which samples, layers, matrices, rows of tokens or experts are split."""
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
        return math.prod(size for axis, size in self.ranked if axis.splits != SAMPLES)

    def summed(self, what: str) -> tuple[str, ...]:
        """The names of the axes along which losses, gradients, partials or norms are summed, in training order."""
        return tuple(axis.name for axis in sorted(self.axes, key=lambda axis: axis.order) if what in axis.sums)

    @property
    def sharding(self) -> tuple[str, ...]:
        """The names of the axes whose ranks share out each copy of the weights (FSDP), in training order. They are neighbours."""
        copies = {axis.name for axis in self.axes if axis.copies}
        return tuple(name for name in self.summed(GRADIENTS) if name not in copies)

    @property
    def num_shards(self) -> int:
        """The number of parts into which FSDP splits each copy of the weights."""
        return math.prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis.name in self.sharding)

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP holds the weights: several ranks share them out, or have copies of them."""
        return self.num_shards * self.num_copies > 1

    @property
    def num_copies(self) -> int:
        """The number of copies of the weights, each of which is split among the other ranks."""
        return math.prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis.copies)

    def with_parts(self, parts: Mapping[str, int]) -> ParallelGrid:
        """Return the grid with other numbers of parts of samples, layers, matrices or rows of tokens. The weights have one copy if
        the number of parts of the samples is given."""
        sizes = dict(zip(self.axes, self.sizes, strict=True))
        new = {
            axis: sizes.get(axis, 1) if axis.splits not in parts else 1 if axis.copies else parts[axis.splits]
            for axis in dict.fromkeys((*TABLE, *self.axes))
            if axis in sizes or axis.optional
        }
        new = {axis: size for axis, size in new.items() if size != 1 or not axis.optional}
        return replace(self, sizes=tuple(new.values()), axes=tuple(new))

    def only(self, *kept: str) -> ParallelGrid:
        """Return the grid that splits nothing else."""
        return self.with_parts({axis.splits: 1 for axis in self.axes if axis.splits not in kept})

    @classmethod
    def of_size(cls, size: int, axes: tuple[Axis, ...] = AXES) -> Iterator[ParallelGrid]:
        """All grids with this number of ranks along these axes. The size of the table's first axis varies fastest."""
        inside = [axis for axis in axes if axis.inside]
        axes = tuple(axis for axis in axes if not axis.inside)
        for sizes in _factors(size, len(axes)):
            found = {axis: size for axis, size in zip(axes, sizes, strict=True) if size > 1 or not axis.optional}
            grid = cls(tuple(found.values()), axes=tuple(found))
            yield grid
            for axis in inside:
                yield from (grid.with_parts({axis.splits: part}) for part in _divisors(grid.num_shards) if part > 1)

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
        axes = tuple(axis for axis in axes if not axis.optional or given.get(axis.letter, 1) > 1)
        grid = cls(tuple(given.get(axis.letter, 1) for axis in axes), axes=axes)
        for axis, size in grid.inside:
            if grid.num_shards % size:
                fitting = ", ".join(f"{axis.letter}{part}" for part in _divisors(grid.num_shards))
                raise ValueError(
                    f"{text!r}: {axis.letter}{size} are successive ranks among the {grid.num_shards} that share out a copy of "
                    f"the weights, and must divide them; use {fitting}"
                )
        return grid

    def __str__(self) -> str:
        if self.on_cpu:
            return f"cpu{self.num_replicas}"
        return "".join(f"{axis.letter}{size}" for axis, size in zip(self.axes, self.sizes, strict=True))


def problem_of_heads(query_heads: int, key_heads: int, size: int) -> str:
    """Why so many context ranks cannot share out these heads; "": they can."""
    if query_heads % size:
        return f"{query_heads} attention heads do not divide evenly among {size} context ranks"
    if key_heads % size and size % key_heads:
        return f"{size} context ranks and {key_heads} heads of keys and values: neither divides the other evenly"
    return ""


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
