"""A weight form that no run uses: each tensor's bits combined with those of its base by exclusive or. One file, and one row in
FORMS, as a new form needs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.weights.form import TensorChange, WeightForm, WeightsError

KIND = "mask"


class Mask(TensorChange, frozen=True, array_like=True):
    bits: bytes

    @property
    def content(self) -> bytes:
        return self.bits


class MaskForm(WeightForm):
    suffix = ".mask"
    has_base = True

    def encode(self, base: Mapping[str, Tensor], share: Mapping[str, Tensor]) -> bytes | None:
        masks = []
        for name, tensor in share.items():
            mask = _bytes(base[name].clone()).bitwise_xor(_bytes(tensor.clone()))
            content = mask.numpy().tobytes()
            masks.append(Mask(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content))
        return msgspec.msgpack.encode(masks)

    def read(self, folder: Path) -> list[Mask]:
        try:
            files = [msgspec.msgpack.decode(file.read_bytes(), type=list[Mask]) for file in self.files(folder)]
        except DECODE_ERRORS as error:
            raise WeightsError(f"a {self.suffix} file in {folder} cannot be read: {error}") from error
        return [mask for file in files for mask in file]

    def apply(self, changes: Sequence[Mask], tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for mask in changes:
                flat = _bytes(tensors[mask.name])
                flat.bitwise_xor_(torch.frombuffer(bytearray(mask.bits), dtype=torch.uint8))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
