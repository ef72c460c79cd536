"""SequenceSample: the packed container for trajectories and the data of MFCs.

Rollout workers build one with a single id (a group: one prompt's n responses) and push it to a head. Heads gather their groups.
MFCs read keys and add keys. No padding: per key, all sequences of all ids lie one after another in a 1-D numpy array, and
`seqlens` has the length of each. No torch here: model workers turn the arrays into tensors themselves.

Samples are immutable: every operation returns a new one. Results share memory with their source if that avoids a copy, so do not
write into the arrays of a sample that other code uses.

Layouts of the known keys (KEY_SPECS), for a group of n sequences with full lengths L_1..L_n (prompt + response):

    token     n runs; run i has L_i values, and its value t describes token t of sequence i
    prompt    one run: the tokens of the prompt
    sequence  n values
    group     one value
    words     n runs of any lengths; run i is the JSON text (UTF-8) of a string or object that belongs to sequence i
    runs      n runs of any lengths; run i is bytes of a form that the key defines

Words are keys named `words_NAME` (layout words) and `prompt_words_NAME` (layout prompt: one text for the group). To all code that
moves samples they are bytes. `from_groups` encodes them and `words` decodes them.

Wire format (`encode_sample`, `decode_sample`): one typed header (MessagePack) and one raw frame per key. The header has ids, keys,
dtypes and lengths. Frames are the arrays' bytes, not copied when sending. Nothing is unpickled. The receiver trusts nothing: the
header is decoded into typed fields, dtypes come from a fixed list, and the announced lengths of a key are compared with the size of
its frame before its array is allocated. Each frame is then copied once, into memory of its own: received frames are read-only
and often misaligned, and would keep a larger message alive.

Byte order is little-endian on the wire; asyncrl runs on little-endian machines only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from asyncrl.protocol.errors import CodecError

Array = npt.NDArray[Any]
DType = np.dtype[Any]
SeqLens = list[list[int]]  # per id, the length of each of its sequences
Layout = Literal["token", "prompt", "sequence", "group", "words", "runs"]


@dataclass(frozen=True)
class KeySpec:
    """Dtype and layout of a known key."""

    dtype: np.dtype[Any]
    layout: Layout


def _spec(dtype: str, layout: Layout) -> KeySpec:
    return KeySpec(np.dtype(dtype), layout)


# The contract between rollout workers, MFCs and losses. Other keys are allowed, with explicit lengths and any numeric dtype.
KEY_SPECS: Mapping[str, KeySpec] = {
    # From the rollout worker.
    "packed_input_ids": _spec("int64", "token"),
    "packed_prompts": _spec("int64", "prompt"),
    "packed_logprobs": _spec("float32", "token"),  # behaviour logprob of token t; 0 where loss_mask is False
    "prompt_mask": _spec("bool", "token"),
    "loss_mask": _spec("bool", "token"),  # the policy sampled the token and it is to be trained
    "seq_no_eos_mask": _spec("bool", "sequence"),  # truncated: ends without EOS
    "rewards": _spec("float32", "sequence"),
    "task_ids": _spec("int64", "group"),
    "versions": _spec("int64", "token"),  # WeightVersion.pack() of the version that sampled the token, else -1
    "version_start": _spec("int64", "sequence"),  # oldest and newest of the sampled tokens' versions
    "version_end": _spec("int64", "sequence"),
    # Seconds since 1970: when the rollout worker got the ticket; with mode=sync when the generation of the batch began.
    "birth_time": _spec("float64", "group"),
    # With train.branches: the sequence's session, an index among those of its seat in the group, and its seat. The sequences of a
    # seat lie one after another
    "sessions": _spec("int64", "sequence"),
    "seats": _spec("int64", "sequence"),
    "routed_experts": _spec("uint8", "runs"),  # the experts of each token, as data/routes.py has them (train.routes)
    # From MFCs.
    "proximal_logprobs": _spec("float32", "token"),
    "packed_ref_logprobs": _spec("float32", "token"),
    "packed_teacher_logprobs": _spec("float32", "token"),
    "values": _spec("float32", "token"),  # value of the state after token t, in the critic's units
    "model_rewards": _spec("float32", "sequence"),  # scores of the reward model; model_rewards_NAME: of one with a name
    # a reward at any token: from the rollout worker with train.dense_rewards, or from an MFC of train.mfcs
    "dense_rewards": _spec("float32", "token"),
    "advantages": _spec("float32", "token"),  # advantage of sampling token t; 0 where trained_mask is False
    "supervised_mask": _spec("bool", "token"),  # in actor_train only: the supervised tokens of the texts of train.ptx
    "trained_mask": _spec("bool", "token"),  # loss_mask without the tokens that train.ppo excludes
    "returns": _spec("float32", "token"),  # targets of `values`, in the same units; 0 where value_mask is False
    "value_mask": _spec("bool", "token"),  # the next token is trained: `values` has a target here
}


# Known keys with a name of the user's after the prefix
_PREFIXES: Mapping[str, KeySpec] = {
    "model_rewards_": KEY_SPECS["model_rewards"],  # of a reward model with a name
    "words_": _spec("uint8", "words"),
    "prompt_words_": _spec("uint8", "prompt"),
}


def spec_of(key: str) -> KeySpec | None:
    """The KeySpec of a known key: one of KEY_SPECS, `model_rewards_NAME`, `words_NAME` or `prompt_words_NAME`. None: not known."""
    if (spec := KEY_SPECS.get(key)) is not None:
        return spec
    return next((spec for prefix, spec in _PREFIXES.items() if key.startswith(prefix)), None)


def is_words(key: str) -> bool:
    """Whether the key holds strings and objects as JSON."""
    return key.startswith(("words_", "prompt_words_"))


def encode_words(value: Any) -> Array:
    """The JSON text of a string, number, bool, None, list, or dict with string keys: uint8.

    Raises ValueError if JSON would change the value (NaN, a tuple, a key that is no string), or has no form for it.
    """
    try:
        text = msgspec.json.encode(value)
        is_same = msgspec.json.decode(text) == value
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"it has no form in JSON: {error}") from error
    if not is_same:
        raise ValueError("JSON would change it; use strings, finite numbers, lists and dicts with string keys")
    return np.frombuffer(text, np.uint8)


def decode_words(run: Array) -> Any:
    """The value that `encode_words` encoded. Raises ValueError for bytes that are no JSON."""
    try:
        return msgspec.json.decode(run.tobytes())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"its bytes are no JSON: {error}") from error


DTYPES = tuple(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()  # noqa: SIM905
)  # dtypes allowed in arrays, by name
DTYPE_NAMES = {np.dtype(name): name for name in DTYPES}  # cached: numpy builds dtype.name anew each time, 3 us


class SampleSizes(TypedDict):
    """Result of SequenceSample.sizes. Bytes are those of the arrays, without the lengths and the ids."""

    num_ids: int
    num_sequences: int  # of packed_input_ids, as num_tokens; 0 without this key
    num_tokens: int
    num_bytes: int  # of all keys
    num_bytes_by_key: dict[str, int]
    mean_bytes_of_id: float  # of all keys; 0 without ids
    max_bytes_of_id: int


@dataclass(frozen=True, eq=False)
class SequenceSample:
    """A batch of groups. Lengths, dtypes and ids are validated at construction; ValueError names the key and id that do not fit."""

    ids: tuple[str, ...]  # one per group, unique: the ticket ids
    seqlens: dict[str, SeqLens]
    data: dict[str, Array]  # 1-D, the ids one after another in the order of `ids`

    # ------------------------------------------------------------------------------------------------------------- making

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        _check_ids(self.ids)
        if self.seqlens.keys() != self.data.keys():
            raise ValueError(
                f"seqlens has the keys {sorted(self.seqlens)}, data has {sorted(self.data)}: they must be the same"
            )
        lengths: dict[int, tuple[SeqLens, int]] = {}  # by id of a given list: keys that share it also share the result
        seqlens = {}
        for key, array in self.data.items():
            given = self.seqlens[key]
            if id(given) not in lengths:
                plain = _plain_lengths(key, self.ids, given)
                lengths[id(given)] = plain, sum(map(sum, plain))
            seqlens[key], num_values = lengths[id(given)]
            _check_array(key, array, num_values)
        _check_layouts(self.ids, seqlens)
        object.__setattr__(self, "seqlens", seqlens)
        object.__setattr__(self, "data", dict(self.data))

    @classmethod
    def of_decoded(cls, ids: tuple[str, ...], seqlens: dict[str, SeqLens], data: dict[str, Array]) -> SequenceSample:
        """Make a sample without repeating the checks of the codec: dtypes and numbers of values are right, and lengths are plain
        integers, one list per id. Only ids and layouts are checked here."""
        _check_ids(ids)
        _check_layouts(ids, seqlens)
        sample = object.__new__(cls)
        sample.__dict__.update(ids=ids, seqlens=seqlens, data=data)
        return sample

    @classmethod
    def from_groups(cls, ids: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> SequenceSample:
        """Build a sample from plain Python or numpy values, one mapping per group, all with the same keys.

        Per key: `token` (and unknown keys) a list of runs, one per sequence; `prompt` one run; `sequence` one value per sequence;
        `group` one value; `words` one value per sequence, and `prompt_words_NAME` one value, which JSON can hold.
        Lists are converted to the key's dtype; arrays must have it already.
        """
        if len(ids) != len(groups):
            raise ValueError(f"{len(ids)} ids for {len(groups)} groups: pass one id per group")
        keys = tuple(groups[0]) if groups else ()
        runs: dict[str, list[Array]] = {key: [] for key in keys}
        seqlens: dict[str, SeqLens] = {key: [] for key in keys}
        for group_id, group in zip(ids, groups, strict=True):
            if group.keys() != runs.keys():
                raise ValueError(f"group {group_id!r} has the keys {sorted(group)}, the first one {sorted(keys)}")
            for key in keys:
                group_runs = _runs_of(key, group_id, group[key])
                runs[key].extend(group_runs)
                seqlens[key].append([len(run) for run in group_runs])
        return cls(tuple(ids), seqlens, {key: _concatenate(key, runs[key]) for key in keys})

    @classmethod
    def gather(cls, samples: Sequence[SequenceSample]) -> SequenceSample:
        """Join samples with the same keys and distinct ids into one. The order is that of `samples`."""
        if not samples:
            raise ValueError("gather needs at least one sample (an empty one is enough: it defines the keys)")
        first = samples[0]
        for sample in samples[1:]:
            if sample.data.keys() != first.data.keys():
                raise ValueError(
                    f"ids {_few(sample.ids)} have the keys {sorted(sample.data)}, {_few(first.ids)} {sorted(first.data)}"
                )
            for key, array in sample.data.items():
                if array.dtype != first.data[key].dtype:
                    raise ValueError(
                        f"key {key!r} is {first.data[key].dtype} for ids {_few(first.ids)}, {array.dtype} for {_few(sample.ids)}"
                    )
        return cls(
            tuple(group_id for sample in samples for group_id in sample.ids),
            {key: [lengths for sample in samples for lengths in sample.seqlens[key]] for key in first.data},
            {key: np.concatenate([sample.data[key] for sample in samples]) for key in first.data},
        )

    def derive(self, data: Mapping[str, Array], like: str = "packed_input_ids") -> SequenceSample:
        """Return a sample of the same ids that has only the new keys, each with the lengths of the key `like`. MFCs make their
        results with this method."""
        return SequenceSample(self.ids, {key: self._lengths_of(like) for key in data}, dict(data))

    # ------------------------------------------------------------------------------------------------------------- looking

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.data)

    @property
    def num_ids(self) -> int:
        return len(self.ids)

    def num_sequences(self, key: str = "packed_input_ids") -> int:
        return sum(len(lengths) for lengths in self._lengths_of(key))

    def total_tokens(self, key: str = "packed_input_ids") -> int:
        return sum(map(sum, self._lengths_of(key)))

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.data.values())

    def sizes(self) -> SampleSizes:
        """Return how large the sample is, as a mapping that JSON can hold. `str(sample)` is the same for people."""
        num_bytes_by_id = np.zeros(self.num_ids, np.int64)
        for key, array in self.data.items():
            num_bytes_by_id += np.array([sum(lengths) for lengths in self.seqlens[key]], np.int64) * array.itemsize
        has_tokens = "packed_input_ids" in self.data
        return {
            "num_ids": self.num_ids,
            "num_sequences": self.num_sequences() if has_tokens else 0,
            "num_tokens": self.total_tokens() if has_tokens else 0,
            "num_bytes": self.num_bytes,
            "num_bytes_by_key": {key: array.nbytes for key, array in self.data.items()},
            "mean_bytes_of_id": float(num_bytes_by_id.mean()) if self.num_ids else 0.0,
            "max_bytes_of_id": int(num_bytes_by_id.max(initial=0)),
        }

    def __str__(self) -> str:
        """The sizes, and a line for each key, the largest first."""
        sizes = self.sizes()
        by_key = sorted(sizes["num_bytes_by_key"].items(), key=lambda item: -item[1])
        return "\n".join(
            [
                f"{sizes['num_ids']:,} ids, {sizes['num_sequences']:,} sequences, {sizes['num_tokens']:,} tokens, "
                f"{sizes['num_bytes']:,} bytes; of an id: mean {sizes['mean_bytes_of_id']:,.0f}, max {sizes['max_bytes_of_id']:,}",
                *(f"{key}: {num_bytes:,} bytes of {self.data[key].dtype}" for key, num_bytes in by_key),
            ]
        )

    def cu_seqlens(self, key: str = "packed_input_ids") -> npt.NDArray[np.int64]:
        """The start of each sequence of a key, followed by the end of the last: int64 of num_sequences + 1."""
        lengths = [n for group in self._lengths_of(key) for n in group]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

    def slices(self, key: str = "packed_input_ids") -> list[list[Array]]:
        """Per id, a view of each of its sequences."""
        seqlens, views, start = self._lengths_of(key), [], 0
        array = self.data[key]
        for lengths in seqlens:
            group = []
            for n in lengths:
                group.append(array[start : start + n])
                start += n
            views.append(group)
        return views

    def words(self, key: str) -> list[list[Any]]:
        """Per id, the values of its sequences; under `prompt_words_NAME` one value. Raises ValueError, with key and id, for bytes
        that are no JSON."""
        if not is_words(key):
            raise ValueError(
                f"key {key!r} has no words; the names of keys with words begin with words_ or prompt_words_"
            )
        found = []
        for group_id, runs in zip(self.ids, self.slices(key), strict=True):
            try:
                found.append([decode_words(run) for run in runs])
            except ValueError as error:
                raise ValueError(f"key {key!r}, id {group_id!r}: {error}") from error
        return found

    def __eq__(self, other: object) -> bool:
        """The same ids in the same order, keys (in any order), lengths, dtypes and values; NaN equals NaN."""
        if not isinstance(other, SequenceSample):
            return NotImplemented
        return (
            self.ids == other.ids
            and self.seqlens == other.seqlens
            and all(_same(a, other.data[k]) for k, a in self.data.items())
        )

    __hash__ = None  # type: ignore[assignment]

    # ------------------------------------------------------------------------------------------------------------ choosing

    def select_ids(self, ids: Sequence[str]) -> SequenceSample:
        """These ids, in this order. Raises ValueError for unknown ids."""
        positions = {group_id: i for i, group_id in enumerate(self.ids)}
        unknown = [group_id for group_id in ids if group_id not in positions]
        if unknown:
            raise ValueError(f"ids {_few(unknown)} are not in the sample; it has {_few(self.ids)}")
        return self._take([positions[group_id] for group_id in ids])[0]

    def select_keys(self, keys: Iterable[str]) -> SequenceSample:
        """Only these keys."""
        keys = list(keys)
        for key in keys:
            self._lengths_of(key)
        return SequenceSample(self.ids, {key: self.seqlens[key] for key in keys}, {key: self.data[key] for key in keys})

    def unpack(self) -> list[SequenceSample]:
        """One sample per id, in order."""
        return self._take(*([i] for i in range(self.num_ids)))

    def repeat(self, n: int, *, interleave: bool = True) -> SequenceSample:
        """Each id n times. The copies of id `x` are named `x#0` .. `x#(n-1)`, also with n = 1.

        interleave: the copies of an id lie together (a#0 a#1 b#0 b#1); otherwise the whole sample is repeated (a#0 b#0 a#1 b#1).
        Raises ValueError if n is less than 1, or if a copy would get the name of an id of this sample.
        """
        _check_positive(n, "the number of copies")
        names = [[f"{group_id}#{copy}" for group_id in self.ids] for copy in range(n)]
        taken = sorted({name for copy in names for name in copy} & set(self.ids))
        if taken:
            raise ValueError(
                f"copies would get the names {_few(taken)}, which are ids of the sample; give it other ids"
            )
        copies = [SequenceSample(tuple(copy), self.seqlens, self.data) for copy in names]
        whole = SequenceSample.gather(copies)
        return whole.select_ids([name for of_id in zip(*names, strict=True) for name in of_id]) if interleave else whole

    # ----------------------------------------------------------------------------------------------------------- splitting

    def split(self, n: int) -> list[SequenceSample]:
        """n runs of consecutive ids; their counts differ by at most one (with fewer ids than n the last ones are empty)."""
        _check_positive(n, "the number of parts")
        size, longer = divmod(self.num_ids, n)
        cuts = [i * size + min(i, longer) for i in range(n + 1)]
        return self._take(*(range(cuts[i], cuts[i + 1]) for i in range(n)))

    def split_tokens(self, max_tokens: int, key: str = "packed_input_ids") -> list[SequenceSample]:
        """Cut into the fewest runs of consecutive ids of at most max_tokens each. An id with more tokens gets a run of its own."""
        _check_positive(max_tokens, "max_tokens")
        parts: list[list[int]] = []
        room = -1
        for i, lengths in enumerate(self._lengths_of(key)):
            tokens = sum(lengths)
            if tokens > room or not parts:
                parts.append([])
                room = max_tokens
            parts[-1].append(i)
            room -= tokens
        return self._take(*parts)

    def split_balanced(self, n: int, key: str = "packed_input_ids") -> list[SequenceSample]:
        """n parts with similar numbers of tokens: ids with the most tokens first, each to the part with the fewest tokens so far.

        Within a part ids keep their order. The same sample always splits the same way.
        """
        _check_positive(n, "the number of parts")
        tokens = [sum(lengths) for lengths in self._lengths_of(key)]
        parts: list[list[int]] = [[] for _ in range(n)]
        heap = [(0, 0, part) for part in range(n)]  # tokens so far, ids so far, part
        for i in sorted(range(self.num_ids), key=lambda i: -tokens[i]):
            load, count, part = heapq.heappop(heap)
            parts[part].append(i)
            heapq.heappush(heap, (load + tokens[i], count + 1, part))
        return self._take(*(sorted(part) for part in parts))

    # ---------------------------------------------------------------------------------------------------------- joining keys

    def update(self, other: SequenceSample) -> SequenceSample:
        """This sample with other's keys added or replaced. The ids must be the same; other is reordered to match this sample.

        `update` is for new values of a key, such as recomputed logprobs. `union` refuses different values.
        """
        aligned = other._in_order_of(self.ids, "update")
        return SequenceSample(self.ids, {**self.seqlens, **aligned.seqlens}, {**self.data, **aligned.data})

    def union(self, other: SequenceSample) -> SequenceSample:
        """This sample with the keys that only other has. The ids must be the same; other is reordered to match this sample.

        A key of both must have the same dtype, lengths and bits in both (so NaN equals the same NaN, and 0.0 differs from -0.0).
        Otherwise ValueError names the key and the first id that differs. `update` replaces such keys.
        """
        aligned = other._in_order_of(self.ids, "union")
        for key in self.data:
            if key in aligned.data:
                self._check_same_bits(key, aligned)
        return self.update(aligned)

    def remap_keys(self, names: Mapping[str, str]) -> SequenceSample:
        """Rename keys, old -> new; other keys keep their names."""
        for key in names:
            self._lengths_of(key)
        renamed = [names.get(key, key) for key in self.data]
        if len(set(renamed)) != len(renamed):
            raise ValueError(f"renaming {dict(names)} gives two keys the same name: {sorted(renamed)}")
        pairs = list(zip(self.data, renamed, strict=True))
        return SequenceSample(
            self.ids, {new: self.seqlens[old] for old, new in pairs}, {new: self.data[old] for old, new in pairs}
        )

    # ------------------------------------------------------------------------------------------------------------- inside

    def _in_order_of(self, ids: tuple[str, ...], operation: str) -> SequenceSample:
        """This sample with its ids in the order of `ids`, which must be the same ids."""
        if set(ids) != set(self.ids):
            missing, extra = set(ids) - set(self.ids), set(self.ids) - set(ids)
            raise ValueError(
                f"{operation} needs the same ids: missing {_few(sorted(missing))}, unknown {_few(sorted(extra))}"
            )
        return self if self.ids == ids else self.select_ids(ids)

    def _check_same_bits(self, key: str, other: SequenceSample) -> None:
        """Raise ValueError if the other sample, which has the same ids, has other data under the key."""
        dtype, other_dtype = self.data[key].dtype, other.data[key].dtype
        if dtype != other_dtype:
            raise ValueError(
                f"key {key!r}, ids {_few(self.ids)}: this sample has {dtype}, the other sample has {other_dtype}"
            )
        for group_id, ours, theirs in zip(self.ids, self.slices(key), other.slices(key), strict=True):
            lengths, other_lengths = list(map(len, ours)), list(map(len, theirs))
            if lengths != other_lengths:
                raise ValueError(
                    f"key {key!r}, id {group_id!r}: this sample has lengths {lengths}, the other sample {other_lengths}"
                )
            if any(a.tobytes() != b.tobytes() for a, b in zip(ours, theirs, strict=True)):
                raise ValueError(
                    f"key {key!r}, id {group_id!r}: the two samples have different values; update would replace them"
                )

    def _lengths_of(self, key: str) -> SeqLens:
        try:
            return self.seqlens[key]
        except KeyError:
            raise ValueError(f"key {key!r} is not in the sample; it has {sorted(self.data)}") from None

    def _take(self, *parts: Sequence[int]) -> list[SequenceSample]:
        """One sample per part, with the ids at its positions. A consecutive run is a view, anything else a copy."""
        bounds = {
            key: [0, *np.cumsum([sum(lengths) for lengths in seqlens], dtype=np.int64).tolist()]
            for key, seqlens in self.seqlens.items()
        }
        return [self._part(part, bounds) for part in parts]

    def _part(self, part: Sequence[int], bounds: Mapping[str, list[int]]) -> SequenceSample:
        run = len(part) > 0 and list(part) == list(range(part[0], part[-1] + 1))
        data = {}
        for key, array in self.data.items():
            at = bounds[key]
            if run:
                data[key] = array[at[part[0]] : at[part[-1] + 1]]
            else:
                data[key] = np.concatenate([array[:0], *(array[at[i] : at[i + 1]] for i in part)])
        seqlens = {key: [lengths[i] for i in part] for key, lengths in self.seqlens.items()}
        return SequenceSample(tuple(self.ids[i] for i in part), seqlens, data)


# ---------------------------------------------------------------------------------------------------------------- checks


def _few(items: Sequence[str]) -> str:
    """Shorten a list for an error message."""
    return f"{list(items[:4])}" + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def _check_positive(n: int, what: str) -> None:
    if n < 1:
        raise ValueError(f"{what} is {n}; it must be at least 1")


def _check_ids(ids: tuple[str, ...]) -> None:
    for group_id in ids:
        if not isinstance(group_id, str) or not group_id:
            raise ValueError(f"id {group_id!r}: an id is a non-empty string")
    if len(set(ids)) != len(ids):
        seen: set[str] = set()
        doubled = sorted({group_id for group_id in ids if group_id in seen or seen.add(group_id)})  # type: ignore[func-returns-value]
        raise ValueError(f"ids {_few(doubled)} occur more than once; ids must be unique")


def _plain_lengths(key: str, ids: tuple[str, ...], seqlens: SeqLens) -> SeqLens:
    """The lengths of a key as plain non-negative integers, one list per id."""
    if len(seqlens) != len(ids):
        raise ValueError(f"key {key!r}: lengths of {len(seqlens)} ids, expected {len(ids)}")
    checked = []
    for group_id, lengths in zip(ids, seqlens, strict=True):
        try:
            plain = list(map(index, lengths))
        except TypeError:
            raise ValueError(
                f"key {key!r}, id {group_id!r}: lengths must be a list of integers, found {lengths!r}"
            ) from None
        if plain and min(plain) < 0:
            raise ValueError(f"key {key!r}, id {group_id!r}: a length is negative: {plain}")
        checked.append(plain)
    return checked


def _check_array(key: str, array: Array, expected: int) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        found = f"shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"key {key!r}: expected a 1-D numpy array, found {found}")
    dtype, spec = array.dtype, spec_of(key)
    if spec is not None and dtype != spec.dtype:
        raise ValueError(f"key {key!r}: expected dtype {spec.dtype}, found {dtype}")
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"key {key!r}: dtype {dtype!r} cannot be sent; use one of {', '.join(DTYPES)}")
    if len(array) != expected:
        raise ValueError(f"key {key!r}: its lengths add up to {expected}, but the array has {len(array)} values")


def _check_layouts(ids: tuple[str, ...], seqlens: Mapping[str, SeqLens]) -> None:
    """Check that the known keys fit each other: token keys are aligned, sequence keys have one value per sequence."""
    layouts = {key: spec.layout for key in seqlens if (spec := spec_of(key)) is not None}
    token_key = next((key for key in ("packed_input_ids", *layouts) if layouts.get(key) == "token"), "")
    counted = token_key or next((key for key, layout in layouts.items() if layout in ("sequence", "words", "runs")), "")
    counts = [len(lengths) for lengths in seqlens[counted]] if counted else []
    expected: dict[Layout, SeqLens] = {
        "token": seqlens.get(token_key, []),
        "sequence": [[1] * count for count in counts],
        "group": [[1]] * len(ids),
    }
    for key, layout in layouts.items():
        found = seqlens[key]
        if layout == "prompt":
            for group_id, lengths in zip(ids, found, strict=True):
                if len(lengths) != 1:
                    raise ValueError(
                        f"key {key!r}, id {group_id!r}: expected one prompt per group, found {len(lengths)}"
                    )
        elif layout in ("words", "runs"):
            for group_id, lengths, count in zip(ids, found, counts, strict=True):
                if len(lengths) != count:
                    raise ValueError(
                        f"key {key!r}, id {group_id!r}: expected one run for each of the {count} sequences of {counted!r}, "
                        f"found {len(lengths)}"
                    )
        elif found != expected[layout]:
            i = next(i for i, lengths in enumerate(found) if lengths != expected[layout][i])
            if layout == "token":
                wanted = f"the lengths of {token_key!r}, {seqlens[token_key][i]}, found {found[i]}"
            elif layout == "sequence":
                wanted = f"one value for each of the {counts[i]} sequences of {counted!r}, found lengths {found[i]}"
            else:
                wanted = f"one value per group, found lengths {found[i]}"
            raise ValueError(f"key {key!r}, id {ids[i]!r}: expected {wanted}")


def _runs_of(key: str, group_id: str, value: Any) -> list[Array]:
    """Convert from_groups' value for one key of one group to runs of the key's dtype."""
    spec = spec_of(key)
    layout = spec.layout if spec is not None else "token"
    dtype = spec.dtype if spec is not None else None
    if is_words(key):
        return [_as_words(key, group_id, each) for each in ([value] if layout == "prompt" else value)]
    if layout == "prompt":
        return [_as_run(key, group_id, value, dtype)]
    if layout == "group":
        return [_as_run(key, group_id, value if isinstance(value, np.ndarray) and value.ndim else [value], dtype)]
    if layout == "sequence":
        run = _as_run(key, group_id, value, dtype)
        return [run[i : i + 1] for i in range(len(run))]
    return [_as_run(key, group_id, run, dtype) for run in value]


def _as_words(key: str, group_id: str, value: Any) -> Array:
    try:
        return encode_words(value)
    except ValueError as error:
        raise ValueError(f"key {key!r}, id {group_id!r}: a value of type {type(value).__name__}: {error}") from error


def _as_run(key: str, group_id: str, value: Any, dtype: np.dtype[Any] | None) -> Array:
    array: Array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"key {key!r}, id {group_id!r}: expected a flat list or 1-D array, found shape {array.shape}")
    if dtype is None or array.dtype == dtype:
        return array
    convertible = array.size == 0 or np.can_cast(array.dtype, dtype, "same_kind")
    if isinstance(value, np.ndarray) or not convertible:
        raise ValueError(f"key {key!r}, id {group_id!r}: expected {dtype}, found {array.dtype}")
    return array.astype(dtype)


def _concatenate(key: str, runs: list[Array]) -> Array:
    if runs:
        dtypes = {run.dtype for run in runs if run.size}
        if len(dtypes) > 1:
            raise ValueError(f"key {key!r}: runs of several dtypes: {sorted(map(str, dtypes))}")
        return np.concatenate(runs) if not dtypes else np.concatenate(runs, dtype=dtypes.pop(), casting="unsafe")
    spec = spec_of(key)
    return np.zeros(0, spec.dtype if spec is not None else np.float32)


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


# -------------------------------------------------------------------------------------------------------- across a wire

FORMAT = 1  # of the header
DEFAULT_MAX_BYTES = 1_000_000_000
MAX_HEADER_BYTES = 4_000_000  # enough for thousands of groups; a hostile header takes up to 64 times its size in memory
_DTYPES = {name: np.dtype(name) for name in DTYPES}
_MAX_REMEMBERED_BYTES = 4096  # longer encoded keys are not cached, so that a hostile sender cannot fill our memory
_BOOL = _DTYPES["bool"]


class _Key(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    lengths: int  # index into _Header.lengths: most keys share an entry


class _Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    ids: list[str]
    lengths: list[SeqLens]
    keys: msgspec.Raw  # list[_Key]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)
_keys_decoder = msgspec.msgpack.Decoder(list[_Key])


def shared_lengths(seqlens: Mapping[str, SeqLens]) -> tuple[list[SeqLens], dict[str, int]]:
    """The distinct lengths, and for each key the index of its own: most keys share an entry."""
    lengths: list[SeqLens] = []
    for entry in seqlens.values():
        if entry not in lengths:
            lengths.append(entry)
    return lengths, {key: lengths.index(entry) for key, entry in seqlens.items()}


def encode_sample(sample: SequenceSample) -> tuple[bytes, list[memoryview]]:
    """Header and frames. The frames are views of the sample's arrays: keep the sample unchanged until they are sent."""
    lengths, index_of = shared_lengths(sample.seqlens)
    keys = [_Key(key, DTYPE_NAMES[array.dtype], index_of[key]) for key, array in sample.data.items()]
    frames = [np.ascontiguousarray(array).data for array in sample.data.values()]
    header = _Header(FORMAT, list(sample.ids), lengths, msgspec.Raw(_encoder.encode(keys)))
    return _encoder.encode(header), frames


def decode_sample(header: Any, frames: Sequence[Any], *, max_bytes: int = DEFAULT_MAX_BYTES) -> SequenceSample:
    """Decode a sample into arrays that own their memory, aligned and writable. Raises CodecError for invalid input.

    `header` and `frames` are bytes or anything with the buffer protocol (e.g. a zmq.Frame).
    """
    head = _decode_header(header, max_bytes)
    ids, encoded = tuple(head.ids), bytes(head.keys)
    keys = _read_keys(encoded) if len(encoded) <= _MAX_REMEMBERED_BYTES else _read_keys.__wrapped__(encoded)
    buffers = [_as_bytes(frame, i) for i, frame in enumerate(frames)]
    if len(buffers) != len(keys):
        raise CodecError(f"{len(buffers)} frames for {len(keys)} keys")
    num_bytes = sum([buffer.nbytes for buffer in buffers])
    if num_bytes > max_bytes:
        raise CodecError(f"the frames have {num_bytes} bytes, at most {max_bytes} are accepted")
    data: dict[str, Array] = {}
    seqlens: dict[str, SeqLens] = {}
    counts: dict[int, int] = {}  # by index into the header's lengths
    try:
        for (name, dtype, at), buffer in zip(keys, buffers, strict=True):
            if at >= len(head.lengths):
                raise CodecError(
                    f"key {name!r}: the lengths index {at} is out of range; the header has {len(head.lengths)} lengths"
                )
            seqlens[name] = head.lengths[at]
            if at not in counts:
                counts[at] = sum(map(sum, _plain_lengths(name, ids, head.lengths[at])))
            data[name] = _own(name, dtype, counts[at], buffer)
        return SequenceSample.of_decoded(ids, seqlens, data)
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(str(error)) from error


@lru_cache(maxsize=16)  # a run has only a few combinations of keys
def _read_keys(encoded: bytes) -> list[tuple[str, DType, int]]:
    """Name, dtype and index into the header's lengths of each key."""
    try:
        keys = _keys_decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"the header cannot be read: {error}") from error
    if len({key.name for key in keys}) != len(keys):
        raise CodecError(f"a key occurs twice: {sorted(key.name for key in keys)}")
    for key in keys:
        spec = spec_of(key.name)
        if key.dtype not in _DTYPES:
            raise CodecError(f"key {key.name!r}: dtype {key.dtype!r} is unknown; known are {', '.join(DTYPES)}")
        if key.lengths < 0:
            raise CodecError(f"key {key.name!r}: the lengths index {key.lengths} is out of range")
        if spec is not None and _DTYPES[key.dtype] != spec.dtype:
            raise CodecError(f"key {key.name!r}: expected dtype {spec.dtype}, found {key.dtype}")
    return [(key.name, _DTYPES[key.dtype], key.lengths) for key in keys]


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


def _own(name: str, dtype: DType, count: int, buffer: memoryview) -> Array:
    """Copy the values of a key. The frame has their size before memory is allocated; Python's integers do not overflow."""
    expected = count * dtype.itemsize
    if buffer.nbytes != expected:
        raise CodecError(
            f"key {name!r}: {count} values of {dtype} take {expected} bytes, its frame has {buffer.nbytes}"
        )
    array: Array = np.empty(count, dtype)
    if count:
        array.data.cast("B")[:] = buffer
        # A bool must be stored as 0 or 1: numpy treats a stored 2 as neither True nor False.
        if dtype is _BOOL and (largest := np.maximum.reduce(array.view(np.uint8))) > 1:
            raise CodecError(f"key {name!r}: a bool is {largest}; only 0 and 1 are bools")
    return array


def _as_bytes(frame: Any, which: int | str) -> memoryview:
    try:
        view = memoryview(frame)
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else memoryview(view.tobytes())
    except (TypeError, ValueError) as error:
        raise CodecError(f"frame {which}: expected bytes, found {type(frame).__name__}") from error
