"""The names that a model's tensors have in its checkpoint.

Some architectures have other names in their modules than in their checkpoints, or fuse several tensors of the checkpoint into one
parameter (experts). transformers converts when it loads and saves. Both sides here only need to know where each tensor of the
checkpoint lies in the model: the trainer exports from there, the embedded engine loads to there. So transformers' conversion runs
once, on tensors without values, and each result is remembered as a part of one of the model's tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from asyncrl.config.schema import ConfigError


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint lies in the model."""

    name: str  # of the model's tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements
    is_whole: bool  # it is that tensor

    def within(self, tensor: Tensor) -> Tensor:
        """The part of the model's tensor; shares its memory."""
        if self.is_whole:
            return tensor
        assert tensor.is_contiguous()
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """The first and the last row of the model's tensor of this shape that the part has elements of."""
        row = math.prod(shape[1:])
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset // row, last // row

    def within_rows(self, rows: Tensor, first: int) -> Tensor:
        """The part, from those rows of the model's tensor that begin with row `first`. They have the whole part."""
        assert rows.is_contiguous()
        offset = rows.storage_offset() + self.offset - first * math.prod(rows.shape[1:])
        return rows.as_strided(self.shape, self.stride, offset)


class _NoCopies(TorchFunctionMode):
    """In this context `contiguous` returns its argument, so that the results of a conversion stay parts of its inputs."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def adopt_names(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Give a model that was made without weights the prefixes of a checkpoint with these tensors, as from_pretrained does: some
    checkpoints of a class have them, and others do not. Returns name in the model -> name in the checkpoint, for each tensor that
    is only renamed. It may have names that are not the model's."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    renamed = {name: rename_source_key(name, renamings, converters) for name in stored}
    used: Any = [one for one in conversions if one.was_used() or not isinstance(one, PrefixChange)]
    model._weight_conversions = used
    return {own: name for name, (own, converter) in renamed.items() if converter is None}


def places_of(model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> dict[str, Place]:
    """Return the place of each tensor of the checkpoint. shapes: of the model's tensors, by their names in the module.

    Raises ConfigError if a tensor of the checkpoint is not a part of one tensor of the model.
    """
    inputs = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in inputs.items()}
    with _NoCopies():
        converted: dict[str, Tensor] = revert_weight_conversion(model, dict(inputs))
    places: dict[str, Place] = {}
    covered: Counter[str] = Counter()
    for name, tensor in converted.items():
        owner = owners.get(tensor.untyped_storage()._cdata, "")
        if not owner:
            raise ConfigError(
                f"model_path: architecture {model.config.model_type!r} computes {name} of its checkpoints from several tensors of"
                " the model; weights of such a model cannot be exported or loaded. Support would take a Place of several parts in"
                " asyncrl/architectures/checkpoint_names.py; until then use another model"
            )
        whole = tensor.shape == inputs[owner].shape and tensor.stride() == inputs[owner].stride()
        places[name] = Place(owner, tensor.shape, tensor.stride(), int(tensor.storage_offset()), whole)
        covered[owner] += tensor.numel()
    if lost := [name for name, tensor in inputs.items() if covered[name] != tensor.numel()]:
        raise ConfigError(
            f"model_path: architecture {model.config.model_type!r} loses elements of {lost[0]} when its weights are converted to"
            " the format of its checkpoints; use another model, or another version of transformers"
        )
    order = {name: i for i, name in enumerate(inputs)}  # transformers sorts the names
    return dict(sorted(places.items(), key=lambda item: order[item[1].name]))
