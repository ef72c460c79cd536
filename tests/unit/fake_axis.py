"""A further axis in one row: each rank of a stage has a slice of each sample. test_axes.py adds it to the table."""

from __future__ import annotations

from asyncrl.dataflow.axes import GRADIENTS, LOSSES, NORMS, Axis

SLICES = "slices"
SLICE = Axis("slice", "s", SLICES, order=5, sums=(LOSSES, GRADIENTS, NORMS))
