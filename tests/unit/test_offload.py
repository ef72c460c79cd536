"""Offloaded tensors come back unchanged, and a model's turns use the same pinned memory of the host."""

from __future__ import annotations

import pytest
import torch

from asyncrl.model import offload
from asyncrl.model.offload import HostMemory, Offloaded


@pytest.fixture
def pinned(monkeypatch):
    """The memory that is pinned; on a machine without a GPU it is ordinary memory."""
    made: list[torch.Tensor] = []

    def make(num_bytes: int) -> torch.Tensor:
        made.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(offload, "pinned", make)
    return made


def test_turns_use_the_same_host_memory_and_tensors_come_back_unchanged(pinned):
    whole = torch.randn(37)
    tensors = [whole[3:9], whole, torch.arange(5, dtype=torch.int64), torch.tensor(2.5), torch.empty(0)]  # two share
    num_bytes = (37 * 4) + (5 * 8) + 4
    host = HostMemory(chunk_bytes=64)
    for turn in range(3):
        tensors[3].fill_(turn)  # weights change between the turns
        expected = [tensor.clone() for tensor in tensors]
        offloaded = Offloaded(tensors, host)
        assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
        offloaded.restore()
        assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
        assert tensors[0].data_ptr() == whole[3:].data_ptr()
        assert num_bytes <= sum(map(len, pinned)) < num_bytes + 64
        assert len(pinned) == 3


def test_a_larger_turn_keeps_what_is_pinned_and_adds_to_it(pinned):
    """The first turn of a trained model comes before its optimizer has state."""
    weights, moments = torch.randn(20), torch.randn(40)
    host, expected = HostMemory(chunk_bytes=64), (weights.clone(), moments.clone())
    Offloaded([weights], host).restore()
    assert len(pinned) == 2
    Offloaded([weights, moments], host).restore()
    assert len(pinned) == 4
    Offloaded([weights], host).restore()
    assert len(pinned) == 4
    assert torch.equal(weights, expected[0])
    assert torch.equal(moments, expected[1])
