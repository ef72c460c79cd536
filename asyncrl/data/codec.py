"""SequenceSample as it crosses a wire: one typed header (MessagePack) and one raw frame per key.

The header says ids, keys, dtypes and lengths; frames are the arrays' bytes, not copied when sending. Nothing is unpickled.
The receiver believes nothing: the header is decoded into typed fields, dtypes come from a fixed list, and what the header
promises is compared with the sizes of the frames that really arrived before a single byte is allocated. Each frame is then
copied once, into memory of its own: received frames are read-only and often misaligned, and would pin a larger message.

Byte order is little-endian on the wire; asyncrl runs on little-endian machines only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from asyncrl.data.sequence import DTYPE_NAMES, DTYPES, KEY_SPECS, Array, DType, SeqLens, SequenceSample

FORMAT = 1
DEFAULT_MAX_BYTES = 1_000_000_000
MAX_HEADER_BYTES = 4_000_000  # thousands of groups; decoded, a hostile header takes up to 64 times its size
_DTYPES = {name: np.dtype(name) for name in DTYPES}
_MAX_REMEMBERED_BYTES = 4096  # encoded keys longer than these are read anew each time: nobody hostile fills our memory
_BOOL = _DTYPES["bool"]


class CodecError(ValueError):
    """What arrived is not a sample. Says what is wrong with it."""


class _Key(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    lengths: int  # index into _Header.lengths: most keys share theirs


class _Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    ids: list[str]
    lengths: list[SeqLens]
    keys: msgspec.Raw  # list[_Key]


class _Layout(NamedTuple):
    """The keys of a header. They are the same in every sample of a run, so what can be checked of them is checked once."""

    names: tuple[str, ...]
    dtypes: tuple[DType, ...]
    lengths: tuple[int, ...]
    item_bytes: tuple[int, ...]
    distinct: tuple[str, ...]  # keys of different layouts or lengths: what is true of these is true of all


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)
_keys_decoder = msgspec.msgpack.Decoder(list[_Key])


def encode_sample(sample: SequenceSample) -> tuple[bytes, list[memoryview]]:
    """Header and frames. The frames are views of the sample's arrays: keep the sample unchanged until they are sent."""
    lengths: list[SeqLens] = []
    keys, frames = [], []
    for key, array in sample.data.items():
        seqlens = sample.seqlens[key]
        if seqlens not in lengths:
            lengths.append(seqlens)
        keys.append(_Key(key, DTYPE_NAMES[array.dtype], lengths.index(seqlens)))
        frames.append(np.ascontiguousarray(array).data)
    header = _Header(FORMAT, list(sample.ids), lengths, msgspec.Raw(_encoder.encode(keys)))
    return _encoder.encode(header), frames


def decode_sample(header: Any, frames: Sequence[Any], *, max_bytes: int = DEFAULT_MAX_BYTES) -> SequenceSample:
    """The sample, in arrays that own their memory, aligned and writable. Raises CodecError for anything that does not fit.

    `header` and `frames` are bytes or anything with the buffer protocol (a zmq.Frame, say).
    """
    head = _decode_header(header, max_bytes)
    layout = _layout(bytes(head.keys))
    buffers = [_as_bytes(frame, i) for i, frame in enumerate(frames)]
    counts = _check_sizes(head, layout, buffers, max_bytes)
    data = dict(zip(layout.names, map(_own, layout.names, layout.dtypes, counts, buffers), strict=True))
    seqlens = {name: head.lengths[i] for name, i in zip(layout.names, layout.lengths, strict=True)}
    try:
        return SequenceSample.of_decoded(tuple(head.ids), seqlens, data, layout.distinct)
    except ValueError as error:
        raise CodecError(str(error)) from error


def _decode_header(header: Any, max_bytes: int) -> _Header:
    buffer = _as_bytes(header, "header")
    limit = min(max_bytes, MAX_HEADER_BYTES)
    if buffer.nbytes > limit:
        raise CodecError(f"the header has {buffer.nbytes} bytes, at most {limit} are accepted")
    try:
        head = _header_decoder.decode(buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"the header cannot be read: {error}") from error
    if head.format != FORMAT:
        raise CodecError(f"format {head.format}, expected {FORMAT}: both sides must run the same release")
    return head


def _layout(encoded: bytes) -> _Layout:
    return _known_layout(encoded) if len(encoded) <= _MAX_REMEMBERED_BYTES else _read_layout(encoded)


def _read_layout(encoded: bytes) -> _Layout:
    try:
        keys = _keys_decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"the header cannot be read: {error}") from error
    names = tuple(key.name for key in keys)
    if len(set(names)) != len(names):
        raise CodecError(f"a key occurs twice: {sorted(names)}")
    distinct: dict[tuple[str, int], str] = {}
    for key in keys:
        if key.dtype not in DTYPES:
            raise CodecError(f"key {key.name!r}: dtype {key.dtype!r} is unknown; known are {', '.join(DTYPES)}")
        if key.lengths < 0:
            raise CodecError(f"key {key.name!r}: no lengths number {key.lengths}")
        spec = KEY_SPECS.get(key.name)
        if spec is not None and _DTYPES[key.dtype] != spec.dtype:
            raise CodecError(f"key {key.name!r}: expected dtype {spec.dtype}, found {key.dtype}")
        distinct.setdefault((spec.layout if spec is not None else "", key.lengths), key.name)
    dtypes = tuple(_DTYPES[key.dtype] for key in keys)
    item_bytes = tuple(dtype.itemsize for dtype in dtypes)
    return _Layout(names, dtypes, tuple(key.lengths for key in keys), item_bytes, tuple(distinct.values()))


_known_layout = lru_cache(maxsize=16)(_read_layout)


def _check_sizes(head: _Header, layout: _Layout, buffers: Sequence[memoryview], max_bytes: int) -> list[int]:
    """Number of values of each key. The arithmetic is on Python's integers: no length overflows."""
    if len(buffers) != len(layout.names):
        raise CodecError(f"{len(buffers)} frames for {len(layout.names)} keys")
    found = [buffer.nbytes for buffer in buffers]
    if sum(found) > max_bytes:
        raise CodecError(f"the frames have {sum(found)} bytes, at most {max_bytes} are accepted")
    totals = [_count(seqlens, len(head.ids)) for seqlens in head.lengths]
    if max(layout.lengths, default=-1) < len(totals):
        counts = [totals[i] for i in layout.lengths]
        if -1 not in counts and found == [n * size for n, size in zip(counts, layout.item_bytes, strict=True)]:
            return counts
    raise CodecError(
        next(filter(None, map(partial(_objection, head), layout.names, layout.dtypes, layout.lengths, found)))
    )


def _count(seqlens: SeqLens, num_ids: int) -> int:
    """How many values these lengths promise; -1 where they cannot be right."""
    if len(seqlens) != num_ids:
        return -1
    for group in seqlens:
        if group and min(group) < 0:
            return -1
    return sum(map(sum, seqlens))


def _objection(head: _Header, name: str, dtype: DType, lengths: int, found: int) -> str:
    """What is wrong with the size of a key's frame; "" where nothing is."""
    if lengths >= len(head.lengths):
        return f"key {name!r}: no lengths number {lengths}; there are {len(head.lengths)}"
    seqlens = head.lengths[lengths]
    if any(n < 0 for group in seqlens for n in group):
        return f"key {name!r}: a length is negative"
    count = sum(map(sum, seqlens))
    expected = count * dtype.itemsize
    if found != expected:
        return f"key {name!r}: {count} values of {dtype} take {expected} bytes, its frame has {found}"
    if len(seqlens) != len(head.ids):
        return f"key {name!r}: lengths of {len(seqlens)} ids, expected {len(head.ids)}"
    return ""


def _own(name: str, dtype: DType, count: int, buffer: memoryview) -> Array:
    array: Array = np.empty(count, dtype)
    if count:
        array.data.cast("B")[:] = buffer
        # A bool of 2 is neither True nor False to numpy.
        if dtype is _BOOL and (largest := np.maximum.reduce(array.view(np.uint8))) > 1:
            raise CodecError(f"key {name!r}: a bool is {largest}; only 0 and 1 are bools")
    return array


def _as_bytes(frame: Any, which: int | str) -> memoryview:
    try:
        view = memoryview(frame)
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else memoryview(view.tobytes())
    except (TypeError, ValueError) as error:
        raise CodecError(f"frame {which}: expected bytes, found {type(frame).__name__}") from error
