"""The tensors of a model that has the names of its checkpoint."""

from __future__ import annotations

from torch import nn

from asyncrl.architectures.checkpoint_names import Place
from asyncrl.generation.transformers import LiveTensors


def live_tensors(model: nn.Module) -> LiveTensors:
    state = model.state_dict().items()
    return LiveTensors(model, {name: Place(name, one.shape, one.stride(), 0, is_whole=True) for name, one in state}, {})
