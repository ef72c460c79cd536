"""How old the trained responses of a run were (pure): distributions for the run's report.

The age of a response is its head off-policyness: the version that the step trained from, minus the version that sampled the first
token. Its tail off-policyness is the same for the last token. Both are in weight versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion


@dataclass
class Ages:
    """Counts of all responses that the run has trained. They are part of the master's state, so a continued run keeps the counts of
    the steps before its checkpoint. Memory: one number for each tail off-policyness, and for each pair of length bin and age."""

    by_length: dict[int, dict[int, int]] = field(default_factory=dict)  # bits of the length -> age -> responses
    tails: dict[int, int] = field(default_factory=dict)  # tail off-policyness -> responses

    def add(self, metas: Sequence[TrajectoryMeta], version: int) -> None:
        """Count the responses of a batch. version: the step trains from it."""
        for meta in metas:
            versions = zip(meta.response_lengths, meta.version_start, meta.version_end, strict=True)
            for length, first, last in versions:
                ages = self.by_length.setdefault(length.bit_length(), {})
                head, tail = (version - WeightVersion.unpack(packed).version for packed in (first, last))
                ages[head] = ages.get(head, 0) + 1
                self.tails[tail] = self.tails.get(tail, 0) + 1

    def as_dict(self) -> dict[str, object]:
        """Return the report for summary.json. `head` and `tail` map an off-policyness (as text, for JSON) to a number of responses.
        `by_length` has one entry for each length bin with responses: lengths from `tokens_min` to `tokens_max`, where the bins are
        the powers of two, with the mean and the largest age."""
        heads: Counter[int] = Counter()
        for ages in self.by_length.values():
            heads.update(ages)
        return {
            "head": _by_age(heads),
            "tail": _by_age(self.tails),
            "by_length": [_bin(bits, ages) for bits, ages in sorted(self.by_length.items())],
        }


def _by_age(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(age): count for age, count in sorted(counts.items())}


def _bin(bits: int, ages: Mapping[int, int]) -> dict[str, float]:
    count = sum(ages.values())
    return {
        "tokens_min": (1 << bits) >> 1,
        "tokens_max": (1 << bits) - 1,
        "responses": count,
        "head_mean": sum(age * number for age, number in ages.items()) / count,
        "head_max": max(ages),
    }
