"""SequenceSample as it crosses a wire: one typed header (MessagePack) and one raw frame per key.

The header says ids, keys, dtypes and lengths; frames are the arrays' bytes, not copied when sending. Nothing is unpickled.
The receiver believes nothing: the header is decoded into typed fields, dtypes come from a fixed list, and what the header
promises is compared with the sizes of the frames that really arrived before a single byte is allocated. Each frame is then
copied once, into memory of its own: received frames are read-only and often misaligned, and would pin a larger message.

Byte order is little-endian on the wire; asyncrl runs on little-endian machines only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from asyncrl.data.sequence import DTYPES, Array, SeqLens, SequenceSample

FORMAT = 1
DEFAULT_MAX_BYTES = 1_000_000_000
MAX_HEADER_BYTES = 4_000_000  # thousands of groups; decoded, a hostile header takes up to 64 times its size
_ITEM_BYTES = {name: np.dtype(name).itemsize for name in DTYPES}


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
    keys: list[_Key]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_sample(sample: SequenceSample) -> tuple[bytes, list[memoryview]]:
    """Header and frames. The frames are views of the sample's arrays: keep the sample unchanged until they are sent."""
    lengths: list[SeqLens] = []
    keys = []
    for key, array in sample.data.items():
        seqlens = sample.seqlens[key]
        if seqlens not in lengths:
            lengths.append(seqlens)
        keys.append(_Key(key, array.dtype.name, lengths.index(seqlens)))
    header = _encoder.encode(_Header(FORMAT, list(sample.ids), lengths, keys))
    return header, [np.ascontiguousarray(array).view(np.uint8).data for array in sample.data.values()]


def decode_sample(header: Any, frames: Sequence[Any], *, max_bytes: int = DEFAULT_MAX_BYTES) -> SequenceSample:
    """The sample, in arrays that own their memory, aligned and writable. Raises CodecError for anything that does not fit.

    `header` and `frames` are bytes or anything with the buffer protocol (a zmq.Frame, say).
    """
    layout = _decode_header(header, max_bytes)
    buffers = [_as_bytes(frame, i) for i, frame in enumerate(frames)]
    counts = _check_sizes(layout, buffers, max_bytes)
    data = {key.name: _own(key, count, buffer) for key, count, buffer in zip(layout.keys, counts, buffers, strict=True)}
    try:
        return SequenceSample(tuple(layout.ids), {key.name: layout.lengths[key.lengths] for key in layout.keys}, data)
    except ValueError as error:
        raise CodecError(str(error)) from error


def _decode_header(header: Any, max_bytes: int) -> _Header:
    buffer = _as_bytes(header, "header")
    limit = min(max_bytes, MAX_HEADER_BYTES)
    if buffer.nbytes > limit:
        raise CodecError(f"the header has {buffer.nbytes} bytes, at most {limit} are accepted")
    try:
        layout = _decoder.decode(buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"the header cannot be read: {error}") from error
    if layout.format != FORMAT:
        raise CodecError(f"format {layout.format}, expected {FORMAT}: both sides must run the same release")
    return layout


def _check_sizes(layout: _Header, buffers: Sequence[memoryview], max_bytes: int) -> list[int]:
    """Number of values of each key. The arithmetic is on Python's integers: no length overflows."""
    if len(buffers) != len(layout.keys):
        raise CodecError(f"{len(buffers)} frames for {len(layout.keys)} keys")
    if len({key.name for key in layout.keys}) != len(layout.keys):
        raise CodecError(f"a key occurs twice: {sorted(key.name for key in layout.keys)}")
    total = sum(buffer.nbytes for buffer in buffers)
    if total > max_bytes:
        raise CodecError(f"the frames have {total} bytes, at most {max_bytes} are accepted")
    counts = []
    for key, buffer in zip(layout.keys, buffers, strict=True):
        if key.dtype not in _ITEM_BYTES:
            raise CodecError(f"key {key.name!r}: dtype {key.dtype!r} is unknown; known are {', '.join(DTYPES)}")
        if not 0 <= key.lengths < len(layout.lengths):
            raise CodecError(f"key {key.name!r}: no lengths number {key.lengths}; there are {len(layout.lengths)}")
        seqlens = layout.lengths[key.lengths]
        if any(n < 0 for group in seqlens for n in group):
            raise CodecError(f"key {key.name!r}: a length is negative")
        count = sum(map(sum, seqlens))
        expected = count * _ITEM_BYTES[key.dtype]
        if buffer.nbytes != expected:
            raise CodecError(
                f"key {key.name!r}: {count} values of {key.dtype} take {expected} bytes, its frame has {buffer.nbytes}"
            )
        counts.append(count)
    return counts


def _own(key: _Key, count: int, buffer: memoryview) -> Array:
    array: Array = np.empty(count, dtype=key.dtype)
    raw = array.view(np.uint8)
    raw[:] = np.frombuffer(buffer, dtype=np.uint8)
    if key.dtype == "bool" and count and raw.max() > 1:  # a bool of 2 is neither True nor False to numpy
        raise CodecError(f"key {key.name!r}: a bool is {raw.max()}; only 0 and 1 are bools")
    return array


def _as_bytes(frame: Any, which: int | str) -> memoryview:
    try:
        view = memoryview(frame)
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else memoryview(view.tobytes())
    except (TypeError, ValueError) as error:
        raise CodecError(f"frame {which}: expected bytes, found {type(frame).__name__}") from error
