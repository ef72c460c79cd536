"""Buckets of given tensors, as a trainer holds them (asyncrl/weights/update_group.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from asyncrl.weights.update_group import Bucket, empty_buckets, views


@torch.no_grad()
def pack(tensors: Iterable[tuple[str, Tensor, torch.dtype]], bucket_bytes: int) -> list[Bucket]:
    """Copy tensors into buckets on the CPU, each converted to the dtype given with it."""
    given = list(tensors)
    buckets = empty_buckets(((name, dtype, tensor.shape) for name, tensor, dtype in given), bucket_bytes)
    room = (view for bucket in buckets for view in views(bucket.flat, bucket.specs))
    for (_, tensor, _), view in zip(given, room, strict=True):
        view.copy_(tensor)
    return buckets
