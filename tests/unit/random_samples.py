"""Samples with random ids, lengths, dtypes and bits, for property tests."""

import numpy as np
from hypothesis import strategies as st

from asyncrl.data.sequence import DTYPES, SequenceSample

# Values of keys with words: the text of each is JSON, and it is read back as the same value
words = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def random_bits(rng: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    """Any bits, so that floats are also NaN, infinite and -0.0. Bools are 0 or 1."""
    high = 2 if dtype == "bool" else 256
    return rng.integers(0, high, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)


@st.composite
def random_samples(draw: st.DrawFn, min_ids: int = 0) -> SequenceSample:
    """Keys: tokens, a prompt_mask (first True, then False), rewards, `x` of any dtype with one value per token, and `y` of any
    dtype with any lengths."""
    groups = draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=min_ids, max_size=5))
    others = [draw(st.lists(st.integers(0, 3), max_size=2)) for _ in groups]
    ids = draw(st.lists(st.text(min_size=1, max_size=4), min_size=len(groups), max_size=len(groups), unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    lengths = [n for group in groups for n in group]
    prompts = [np.arange(n) < rng.integers(0, n + 1) for n in lengths]
    seqlens = {key: groups for key in ("packed_input_ids", "prompt_mask", "x")}
    data = {
        "packed_input_ids": random_bits(rng, "int64", sum(lengths)),
        "prompt_mask": np.concatenate([np.zeros(0, np.bool_), *prompts]),
        "x": random_bits(rng, draw(st.sampled_from(DTYPES)), sum(lengths)),
        "y": random_bits(rng, draw(st.sampled_from(DTYPES)), sum(map(sum, others))),
        "rewards": random_bits(rng, "float32", len(lengths)),
    }
    return SequenceSample(tuple(ids), {**seqlens, "y": others, "rewards": [[1] * len(group) for group in groups]}, data)


def bits_of(sample: SequenceSample) -> tuple:
    """All of a sample, for a comparison that tells one NaN from another, and 0.0 from -0.0."""
    data = {key: (array.dtype.name, array.tobytes()) for key, array in sample.data.items()}
    return sample.ids, sample.seqlens, data
