"""Counts the memory, FLOPs and traffic of the operations that run under it. Tensors may be fake.

Each storage is one record, from the operation that makes it until nothing refers to it. A storage has the kind of the span in which
it is made: torch's record_function gives FSDP, the optimizer and asyncrl's own code named spans. Gradients and parameters get their
kind later, by identity.

Memory within a kernel is invisible, except that of attention's backward pass on a GPU, which `_workspace` adds.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn  # registers the operations  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from asyncrl.model.kernels import uses_gpu_kernels
from asyncrl.model.logprobs import SPAN as LOGPROBS
from asyncrl.plan.counts import Cost, Moment
from asyncrl.plan.result import collective_name

aten, varlen = torch.ops.aten, torch.ops.torch_attn
_SDPA_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
GPU_ROUNDING = 512  # bytes: the CUDA allocator rounds each block up to a multiple
_OPTIMIZER = "Optimizer.step"
_KIND_OF_SPAN = {  # by the beginning of a span's name
    LOGPROBS: "logits",
    "FSDP::all_gather_copy_out": "gathered",
    "FSDP::all_gather": "transfer",
    "FSDP::post_backward_reduce": "transfer",
    "FSDP::post_backward_accumulate": "gradients",
    _OPTIMIZER: "optimizer",
}
_REDUCED = "FSDP::post_backward_reduce"  # when this span ends, FSDP has new gradients
_COLLECTIVES = {  # c10d operation -> name in a plan
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}


REST = "outside the layers"  # the moment outside of all others


class Memory:
    """Bytes of the living storages, and the largest of them since the last `restart`, separately for each moment."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()  # by kind
        self.total = 0
        self.restart()

    @property
    def peak(self) -> int:
        return max(moment.peak for moment in self.moments.values())

    def restart(self) -> None:
        self.moments: dict[str, Moment] = {}
        self.enter(REST)

    def enter(self, name: str) -> None:
        """What happens from now on belongs to this moment."""
        self._moment = self.moments.setdefault(name, Moment())
        for kind in self.now:
            self._look(kind)

    def add(self, kind: str, num_bytes: int) -> None:
        self.now[kind] += num_bytes
        self.total += num_bytes
        if num_bytes > 0:
            self._look(kind)

    def move(self, kind: str, to: str, num_bytes: int) -> None:
        self.now[kind] -= num_bytes
        self.now[to] += num_bytes
        self._look(to)

    def _look(self, kind: str) -> None:
        moment = self._moment
        moment.kinds[kind] = max(moment.kinds.get(kind, 0), self.now[kind])
        if self.total > moment.peak:
            moment.peak = self.total
            moment.at_peak = {name: num_bytes for name, num_bytes in self.now.items() if num_bytes}


@dataclass
class _Record:
    kind: str
    num_bytes: int


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it inside FakeTensorMode, if tensors are to be made: FakeTensorMode answers the operations that the tracker has seen.

    Enter it as often as needed; the records stay. A process should have one.
    """

    def __init__(self, *, rounding: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.cost = Memory(), Cost()
        self._rounding = rounding
        self._records: Any = WeakIdKeyDictionary()  # storage -> _Record
        self._spans: list[str] = []  # names
        self._kinds = ["other"]  # of the open spans that have one
        self.on_reduced: Callable[[], None] = lambda: None  # called when FSDP has reduced gradients
        self.labels: dict[str, str] = {}  # torch's name of a process group -> its name in a plan

    # ------------------------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its wrapper claims the whole tensor. The operations on the local tensors come here, too
            return NotImplemented
        kwargs = kwargs or {}
        namespace = func.namespace
        if namespace == "prim":
            return func(*args, **kwargs)
        if namespace == "profiler":
            return self._span(func, args, kwargs)
        if namespace == "c10d":
            self._count_collective(func, args)
        try:
            out = (_grouped_mm if func is aten._grouped_mm.default else func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = _guess(func, args)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        self._count_flops(func, args, kwargs, out)
        if func is varlen._varlen_attn_backward.default:
            query, key, starts = args[1], args[2], args[6]
            self._passing("workspace", _workspace(query, key, len(query), len(starts) - 1))
        elif func is _SDPA_BACKWARD and uses_gpu_kernels(out[0].device) and out[0].element_size() == 2:
            query, key = (each.transpose(1, 2) for each in args[1:3])
            self._passing("workspace", _workspace(query, key, query.shape[0] * query.shape[1], len(query)))
        return out

    def _span(self, func: Any, args: Any, kwargs: Any) -> Any:
        if "enter" in func.__name__:
            self._spans.append(str(args[0]))
            self._kinds.append(next((k for s, k in _KIND_OF_SPAN.items() if args[0].startswith(s)), self._kinds[-1]))
            if args[0].startswith(_OPTIMIZER):
                self.memory.enter("the optimizer's step")
        elif self._spans:
            self._kinds.pop()
            span = self._spans.pop()
            if span.startswith(_REDUCED):
                self.on_reduced()
            if span.startswith(_OPTIMIZER):
                self.memory.enter(REST)
        return func(*args, **kwargs)

    @contextmanager
    def within(self, kind: str) -> Iterator[None]:
        """Storages made in this context are of this kind, unless a span inside has another one."""
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._kinds.pop()

    def _count_collective(self, func: Any, args: Any) -> None:
        name = _COLLECTIVES.get(func._schema.name.removeprefix("c10d::"))
        if name is None:
            raise NotImplementedError(f"traffic of {func}")
        sides = [
            sum(_bytes_of(tensor) for tensor in tree_iter(side) if isinstance(tensor, Tensor)) for side in args[:2]
        ]
        # A process group comes before other objects, such as the operation of a reduction
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        name = collective_name(self.labels.get(group.group_name, ""), name)
        self.cost.counts[name] += 1
        self.cost.bytes[name] += max(sides)

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if (own := _FLOPS.get(func._schema.name)) is not None:
            self.cost.flops += own(args, kwargs)
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.cost.flops += int(formula(*args, **kwargs, out_val=out))

    # --------------------------------------------------------------------------------------------------------------- storages

    def _note(self, tensor: Tensor) -> None:
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage in self._records:
            return
        record = _Record(self._kinds[-1], self._rounded(storage.nbytes()))
        self._records[storage] = record
        self.memory.add(record.kind, record.num_bytes)
        weakref.finalize(storage, self._free, record).atexit = False

    def _free(self, record: _Record) -> None:
        self.memory.add(record.kind, -record.num_bytes)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rounding) * self._rounding

    def _passing(self, kind: str, num_bytes: int) -> None:
        """Memory that an operation takes and returns."""
        self.memory.add(kind, num_bytes)
        self.memory.add(kind, -num_bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Called after UntypedStorage.resize_: FSDP frees and allocates its gathered parameters in this way."""
        record = self._records.get(storage)
        if record is None:
            return
        self.memory.add(record.kind, -record.num_bytes)
        record.num_bytes = self._rounded(storage.nbytes())
        self.memory.add(record.kind, record.num_bytes)

    def reclassify(self, tensors: Iterable[Tensor], kind: str) -> None:
        """The storages of these tensors are of this kind from now on."""
        for tensor in tensors:
            record = self._records.get(tensor.untyped_storage())
            if record is not None and record.kind != kind:
                self.memory.move(record.kind, kind, record.num_bytes)
                record.kind = kind


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _grouped_mm(first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Its kernels compute in float32, too, but torch's rule for the shape of fake results accepts only bfloat16."""
    halves = (tensor.to(torch.bfloat16) for tensor in (first, second))
    return aten._grouped_mm.default(*halves, *args, **kwargs).to(first.dtype)  # type: ignore[no-any-return]


def _guess(func: Any, args: Any) -> Any:
    """The result of an operation that depends on values, which fake tensors lack: all elements are nonzero, all tensors equal."""
    first = args[0]
    if func is aten._local_scalar_dense.default:
        return False if first.dtype == torch.bool else 1.0 if first.dtype.is_floating_point else 1
    if func is aten.nonzero.default:
        return first.new_empty((first.numel(), first.ndim), dtype=torch.int64)
    if func in (aten.allclose.default, aten.equal.default):
        return True
    raise NotImplementedError(f"the result of {func} depends on values")


# -------------------------------------------------------------------------------------------------------------------- FLOPs


def _pairs(of_queries: Tensor, of_keys: Tensor) -> int:
    """Twice the pairs of a query and a key in causal attention: sum of Q * (2 K - Q) over the sequences, whose queries are the last
    Q of K tokens. The arguments are the starts of the sequences."""
    queries, keys = _lengths(of_queries), _lengths(of_keys)
    return int((queries * (2 * keys - queries)).sum())


def _lengths(cu_seqlens: Tensor) -> Tensor:
    """The starts of sequences are constants: few enough for FakeTensorMode to keep their values."""
    values = cu_seqlens.constant if isinstance(cu_seqlens, FakeTensor) else cu_seqlens
    if values is None:
        raise NotImplementedError("attention over sequences of unknown lengths")
    return values.to(torch.int64).diff()


def _varlen_flops(args: Any, kwargs: Any) -> int:
    """4 * H * D for each pair."""
    _, num_heads, width = args[0].shape
    return int(2 * num_heads * width * _pairs(args[3], args[4]))


def _varlen_backward_flops(args: Any, kwargs: Any) -> int:
    _, num_heads, width = args[1].shape
    return int(5 * num_heads * width * _pairs(args[6], args[7]))  # five matrix products instead of two


def _sdpa_flops(args: Any, kwargs: Any) -> int:
    causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    return _products(*args[:3], widths=1, value_widths=1) // (2 if causal else 1)


def _sdpa_backward_flops(args: Any, kwargs: Any) -> int:
    causal = args[7] if len(args) > 7 else kwargs.get("is_causal", False)
    return _products(*args[1:4], widths=3, value_widths=2) // (2 if causal else 1)


def _products(query: Tensor, key: Tensor, value: Tensor, *, widths: int, value_widths: int) -> int:
    """FLOPs of so many products of matrices [queries, keys] with one as wide as a key, or as a value. torch 2.11 has the same
    formula only for as many key heads as query heads."""
    width = widths * query.shape[-1] + value_widths * value.shape[-1]
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * width


def _triangular_flops(args: Any, kwargs: Any) -> int:
    """Substitution takes half of the products of a matrix [C, C] with the other one."""
    return int(math.prod(args[1].shape) * args[0].shape[-1])


def _grouped_flops(args: Any, kwargs: Any) -> int:
    """Each row of the first matrix is multiplied by the matrix of one expert."""
    rows, inner = args[0].shape[-2:]
    return int(2 * rows * inner * args[1].shape[-1])


_FLOPS: dict[str, Callable[[Any, Any], int]] = {  # by operation; the others are in torch's registry
    "torch_attn::_varlen_attn": _varlen_flops,
    "torch_attn::_varlen_attn_backward": _varlen_backward_flops,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _sdpa_flops,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward_flops,
    "aten::linalg_solve_triangular": _triangular_flops,
    "aten::_grouped_mm": _grouped_flops,
    "transformers::grouped_mm_fallback": _grouped_flops,
    "transformers::grouped_mm_fallback_backward": lambda args, kwargs: 2 * _grouped_flops(args, kwargs),
}


def _workspace(query: Tensor, key: Tensor, num_tokens: int, num_sequences: int) -> int:
    """Bytes that FlashAttention-2's backward pass takes: the gradient of the queries and one sum per token in float32, padded by
    128 tokens a sequence, and with grouped queries the gradients of keys and values for all query heads. sdpa's other kernels are
    taken to need the same. query: [..., H, D]."""
    num_heads, width = query.shape[-2:]
    padded = num_tokens + 128 * num_sequences
    rounded = 32 * math.ceil(width / 32)
    is_grouped = key.shape[-2] != num_heads
    grouped = 2 * num_tokens * num_heads * width * key.element_size() if is_grouped else 0
    return 4 * num_heads * padded * (rounded + 1) + grouped
