"""Numbers of layers from which the counts of a rank are extrapolated: a large model is run with two smaller numbers.

Everything that is counted is linear in the number of a stage's layers, if they are alike: bytes that stay, costs, and the peak of
each moment (shard._mark_moments). The largest of the peaks is not linear: for example, logits may exceed the optimizer's step in a
small model only. Layers that differ may repeat after a period, as the three layers of linear attention and the one of attention of
Qwen3.5 do. Then everything is linear in the number of periods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.attention import layers_of
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.model.pipeline import layers_of_stage
from asyncrl.model.sharding import shard_units
from asyncrl.plan.ranks import ShardTask

_LEAST_UNITS = 3  # of FSDP: the first, an inner and the last one
_LEAST_PERIODS = 2  # so that there are inner layers of each kind


def sampled_layers(task: ShardTask, model: PreTrainedModel) -> tuple[int, int, int] | None:
    """Two numbers of layers of the task's stage, and how many more steps from the first to the second lead to its real number.
    None if that saves nothing, or if the layers are not alike and do not repeat.

    FSDP gathers several small layers at once. Then both numbers have whole units more than the real one has beside them.
    """
    grid = ModelPlacement.of(task.model).grid
    layers = layers_of(model)
    of_stage = layers_of_stage(len(layers), grid.num_stages, task.stage)
    own, period = len(of_stage), _period([_signature(layer) for layer in layers])
    units = shard_units(model) if grid.uses_fsdp else []
    each = len(units[0]) if units and len(units[0]) < own else 1
    if period > 1 and (each > 1 or (grid.num_stages > 1 and (own % period or of_stage.start % period))):
        return None  # a unit, or a stage, does not begin where a period does
    each, least = max(each, period), _LEAST_UNITS if period == 1 else _LEAST_PERIODS
    first = least * each + own % each
    second = first + each
    return (first, second, (own - second) // each) if first + second < own else None


def _period(signatures: Sequence[object]) -> int:
    """The least number of layers after which they repeat, from the first one on; all of them if they do not."""
    last = len(signatures)
    return next((n for n in range(1, last) if signatures[n:] == signatures[:-n]), max(last, 1))


def set_layers(config: PreTrainedConfig, num_layers: int) -> None:
    """Give the config fewer layers: the first ones."""
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # one entry for each layer
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers that run the same operations: modules, shapes, and settings such as the size of an attention window."""
    return tuple(
        (
            name,
            type(module),
            tuple(parameter.shape for parameter in module._parameters.values() if parameter is not None),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if key != "layer_idx" and isinstance(value, (int, float, str, type(None)))
            ),
        )
        for name, module in layer.named_modules()
    )
