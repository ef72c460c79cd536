"""Routes (pure): the experts that each layer of a mixture of experts chose for each token.

A row of routes belongs to a position of a sequence: the experts of its token, layer by layer, top_k for each. A sampler computes
every position except that of the last token, which it only samples: the trainer's own router decides there.

The key `routed_experts` of a sample, and `routed_experts` of a server's answer, hold one run of bytes for each sequence: a header
(uint16: number of layers, top_k, number of experts, the numbers of the layers) and the rows, as uint8, or as uint16 if a model has
more than 255 experts. So a run says by itself which layers its rows describe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ROUTES = "routed_experts"
_HEADER = np.dtype("<u2")


@dataclass(frozen=True)
class RouteLayout:
    """What the numbers of a row mean."""

    layers: tuple[int, ...]  # the numbers of the layers with experts, in the order of a row; dense layers are left out
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u1" if self.num_experts <= 0xFF else "<u2")

    @property
    def unknown(self) -> int:
        """Stands for the experts of a token that the sampler has not computed."""
        return int(np.iinfo(self.dtype).max)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return len(self.layers) * self.top_k

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Routes:
    """The routes of a sequence's first tokens."""

    layout: RouteLayout
    rows: npt.NDArray[Any]  # [tokens, layout.width], layout.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def encode(self, *, start: int = 0, length: int = 0) -> npt.NDArray[np.uint8]:
        """The bytes of the rows from `start` on, with unknown rows up to `length`."""
        layout, rows = self.layout, self.rows[start:]
        header = np.array([len(layout.layers), layout.top_k, layout.num_experts, *layout.layers], _HEADER)
        missing = np.full((max(0, length - len(rows)), layout.width), layout.unknown, layout.dtype)
        return np.concatenate(
            [part.reshape(-1).view(np.uint8) for part in (header, np.ascontiguousarray(rows), missing)]
        )

    @classmethod
    def decode(cls, run: npt.NDArray[np.uint8]) -> Routes:
        """Inverse of `encode`. Raises ValueError for other bytes."""
        if len(run) < 6:
            raise ValueError(f"routes of {len(run)} bytes have no header")
        num_layers, top_k, num_experts = run[:6].view(_HEADER).tolist()
        end = 6 + 2 * num_layers
        if len(run) < end or not (num_layers and 0 < top_k <= num_experts):
            raise ValueError(f"routes of {num_layers} layers, {top_k} of {num_experts} experts, in {len(run)} bytes")
        layout = RouteLayout(tuple(run[6:end].view(_HEADER).tolist()), top_k, num_experts)
        if (len(run) - end) % layout.bytes_per_token:
            raise ValueError(f"routes of {len(run) - end} bytes, with {layout.bytes_per_token} bytes for each token")
        rows = run[end:].view(layout.dtype).reshape(-1, layout.width)
        if bool(((rows >= num_experts) & (rows != layout.unknown)).any()):
            raise ValueError(f"routes to expert {rows[rows != layout.unknown].max()}; the model has {num_experts}")
        return cls(layout, rows)

    def joined(self, later: Routes, *, start: int) -> Routes:
        """These rows, and those rows of `later`, which begin at position `start`, that continue them. A token keeps its first row:
        the one with which the token behind it was sampled. Raises ValueError if the rows do not fit together."""
        if later.layout != self.layout or not start <= len(self) <= start + len(later):
            raise ValueError(f"{len(later)} routes from token {start} do not continue {len(self)} of {self.layout}")
        return Routes(self.layout, np.concatenate([self.rows, later.rows[len(self) - start :]]))
