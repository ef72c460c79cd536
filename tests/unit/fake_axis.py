"""A fourth axis in one row: each rank of a stage has a part of the tokens of each sample. test_axes.py adds it to the table."""

from __future__ import annotations

from asyncrl.dataflow.axes import GRADIENTS, LOSSES, NORMS, Axis

TOKENS = "tokens"
CONTEXT = Axis("context", "c", TOKENS, order=4, sums=(LOSSES, GRADIENTS, NORMS))
