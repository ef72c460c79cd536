"""Tensor parallel layers on one rank, without weights and without other ranks."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from asyncrl.dataflow.axes import MATRICES, ParallelGrid
from asyncrl.model.sharding import Skeleton, apply_tensor_parallel


def test_an_incomplete_forward_pass_leaves_no_shared_input():
    """Checkpointing's recomputation stops a layer by an exception once backward has its inputs. A shared input that a layer keeps
    holds the layer's graph until the next step."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = AutoConfig.for_model("qwen2", **sizes, num_attention_heads=4, num_key_value_heads=2)
    skeleton = Skeleton.of(config, "lm", torch.float32)
    placement = SimpleNamespace(grid=ParallelGrid(), name="actor")
    mesh = SimpleNamespace(placement=placement, parts={MATRICES: 0}, group_that_sums=lambda what: None)
    apply_tensor_parallel(skeleton, mesh, "model")
    mlp = skeleton.model.model.layers[0].mlp
    gate, given = mlp.gate_proj.forward, torch.zeros(3, 32, device="meta", requires_grad=True)

    def stop(x: torch.Tensor) -> torch.Tensor:
        gate(x)
        raise InterruptedError

    hidden = given * 2
    kept = weakref.ref(hidden)
    mlp.gate_proj.forward = stop
    with pytest.raises(InterruptedError):
        mlp(hidden)
    del hidden
    assert kept() is None
