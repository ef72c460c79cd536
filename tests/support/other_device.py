"""A device beside the CPU, simulated: its tensors have their values on the CPU, and each copy between the two devices is listed.

As on a GPU, an operation with tensors of both devices is refused, and a function that needs a value on the host copies it. To
torch's C++ code these tensors are on its device "meta", so that it asks for such a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

DEVICE = torch.device("maia", 0)  # a name that torch knows, and has no code for


class Copy(NamedTuple):
    to: str  # "device" or "host"
    blocking: bool


class FarTensor(Tensor):
    """A tensor of DEVICE; `near` has its values."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        form = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        make: Any = Tensor._make_wrapper_subclass
        made: FarTensor = make(cls, near.shape, **form, device="meta")
        made.near = near
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise RuntimeError(f"{function} outside of the context OtherDevice")


class OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context, of one thread, in which DEVICE works."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # torch.tensor(..., device=DEVICE) makes a tensor on the host and copies it
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        far = {id(tensor.near): tensor for tensor in tensors if isinstance(tensor, FarTensor)}
        if any(tensor.is_meta and not isinstance(tensor, FarTensor) for tensor in tensors):
            raise NotImplementedError(f"{function}: a tensor without values")
        aten, wanted = torch.ops.aten, kwargs.get("device")
        is_far = bool(far) if wanted is None else wanted == DEVICE
        if function in (aten.copy_.default, aten._to_copy.default):
            to, source = (args[0], args[1]) if function is aten.copy_.default else (None, args[0])
            is_far = is_far if to is None else isinstance(to, FarTensor)
            if is_far != isinstance(source, FarTensor):
                does_not_wait = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
                self.copies.append(Copy("device" if is_far else "host", not does_not_wait))
        elif function is aten._local_scalar_dense.default:
            self.copies += [Copy("host", True)] * len(far)
        elif far and any(tensor.dim() and not isinstance(tensor, FarTensor) for tensor in tensors):
            raise RuntimeError(f"{function}: tensors of both devices")
        if wanted == DEVICE:
            kwargs["device"] = torch.device("cpu")
        found = function(*tree_map_only(FarTensor, _near, args), **tree_map_only(FarTensor, _near, kwargs))
        if not is_far:
            return found
        return tree_map_only(Tensor, lambda made: far[id(made)] if id(made) in far else FarTensor(made), found)


def _near(tensor: FarTensor) -> Tensor:
    return tensor.near
