"""Weights into a live model of this process: from a version's files, or from memory (weights over the network).

Everything is checked before the first copy: the tensors must be exactly the model's. The generation thread stands still meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.generation.checks import TensorSpec, check_sent, check_tensors
from asyncrl.generation.engine import WeightsRefused
from asyncrl.protocol.messages import TensorSpecs, WeightVersion
from asyncrl.weights import versions as weights

_ALIGNMENT = 64  # what torch gives to tensors of their own on a CPU


class LiveTensors:
    """The tensors of a model, to be overwritten."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._live: dict[str, Tensor] = dict(model.state_dict())
        self._parameters = dict(model.named_parameters())
        self._expected = {
            name: TensorSpec(tuple(tensor.shape), tensor.dtype.is_floating_point) for name, tensor in self._live.items()
        }
        aliases: dict[tuple[int, tuple[int, ...]], list[str]] = {}  # tied weights: several names, one memory
        for name, tensor in self._live.items():
            aliases.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
        self._aliases = list(aliases.values())

    def load_version(self, directory: Path, version: WeightVersion, verified: weights.VerifiedVersion) -> None:
        """Verify a version's directory and load it. Raises WeightsRefused, and then nothing has changed."""
        try:
            verified.verify(directory, version)
            files = weights.tensor_files(directory)
            where = check_tensors(self._expected, self._aliases, files)
            opened: dict[Path, Any] = {file: safe_open(str(file), framework="pt", device="cpu") for file in files}
        except (weights.WeightsError, SafetensorError, OSError) as error:
            raise WeightsRefused(f"{directory}: {error}") from error
        self._copy(lambda name: opened[where[name]].get_tensor(name), set(where), source=str(directory))

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors from memory, which may become the model's: nobody else may write to it while `uses` says so.

        Raises WeightsRefused, and then nothing has changed.
        """
        specs = TensorSpecs(
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        )
        self.check(specs, complete=True)
        self._copy(tensors.__getitem__, set(tensors), source="what was sent", adopt=True)

    def uses(self, flats: Sequence[Tensor]) -> list[bool]:
        """Of each, whether some tensor of the model is in its memory."""
        live = {tensor.untyped_storage().data_ptr() for tensor in self._live.values()}
        return [flat.untyped_storage().data_ptr() in live for flat in flats]

    def check(self, specs: TensorSpecs, *, complete: bool) -> None:
        """Raises WeightsRefused where tensors of these descriptions do not fit, or with `complete` where some are missing."""
        check_sent(self._expected, self._aliases, specs, complete=complete)

    @torch.no_grad()
    def _copy(self, tensor_of: Callable[[str], Tensor], given: set[str], *, source: str, adopt: bool = False) -> None:
        """The last check is of tied weights: two names, one memory, so that what comes must be one tensor too.

        adopt: parameters move into the memory of what comes, instead of having it copied.
        """
        for names in self._aliases:
            first, *others = [name for name in names if name in given]
            for other in others:
                if not torch.equal(tensor_of(first), tensor_of(other)):
                    raise WeightsRefused(
                        f"{source}: {first} and {other} are one tensor in this model (tied) but differ here"
                    )
        for names in self._aliases:
            name = next(name for name in names if name in given)
            tensor, live = tensor_of(name), self._live[name]
            parameters = [self._parameters[alias] for alias in names if alias in self._parameters]
            if adopt and parameters and _is_like(tensor, live):
                for parameter in parameters:
                    parameter.data = tensor
            else:
                live.copy_(tensor)
        if next(iter(self._live.values())).is_cuda:
            torch.cuda.synchronize()  # the passes run on a stream of their own


def _is_like(tensor: Tensor, live: Tensor) -> bool:
    """A model computes with it as with its own, and as fast as memory of torch's own alignment lets it.

    The model's memory may be less aligned: tensors that were loaded from a file lie where they lay in it.
    """
    same = (
        tensor.dtype == live.dtype and tensor.device == live.device and tensor.is_contiguous() and live.is_contiguous()
    )
    return same and tensor.data_ptr() % _ALIGNMENT == 0
