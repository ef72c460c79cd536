"""The events file has a histogram of each distribution, as TensorBoard reads it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.runtime.metrics import MetricsWriter

REWARDS = [0.0, 0.0, 1.0, 0.5]


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and raw values of a protocol buffer."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + size]
        at += size


def histograms(file: Path) -> dict[str, dict[int, list[float]]]:
    data, at, found = file.read_bytes(), 0, {}
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = data[at + 12 : at + 12 + length]
        at += 12 + length + 4
        for summary in (value for field, value in fields(event) if field == 5):
            for _, value in fields(summary):
                entry = dict(fields(value))
                if 5 in entry:
                    raw = dict(fields(entry[5]))
                    found[entry[1].decode()] = {n: list(struct.unpack(f"<{len(v) // 8}d", v)) for n, v in raw.items()}
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = MetricsWriter(tmp_path, attempt=1, tensorboard=True)
    odd = {"distribution/none": [], "distribution/odd": [float("nan"), 2.0]}
    writer.write(3, {"reward/mean": 0.375}, {"distribution/reward": REWARDS, **odd})
    writer.close()
    (path,) = (tmp_path / "tensorboard" / "attempt_1").iterdir()
    return path


def test_a_histogram_counts_every_finite_value(file: Path) -> None:
    found = histograms(file)
    assert list(found) == ["distribution/reward", "distribution/odd"]
    reward = found["distribution/reward"]
    assert [reward[field] for field in range(1, 6)] == [[0.0], [1.0], [4.0], [1.5], [1.25]]
    limits, counts = reward[6], reward[7]
    assert (len(limits), limits[-1], sum(counts)) == (30, 1.0, 4.0)
    assert limits == sorted(limits)
    assert (counts[0], counts[15], counts[-1]) == (2.0, 1.0, 1.0)
    assert (found["distribution/odd"][6], found["distribution/odd"][7]) == ([2.0], [1.0])


def test_tensorboard_reads_it(file: Path) -> None:
    from tensorboard.backend.event_processing import event_file_loader as loader

    (event,) = [event for event in loader.LegacyEventFileLoader(str(file)).Load() if event.step == 3]
    by_tag = {value.tag: value for value in event.summary.value}
    assert by_tag["reward/mean"].simple_value == 0.375
    assert (by_tag["distribution/reward"].histo.num, sum(by_tag["distribution/reward"].histo.bucket)) == (4.0, 4.0)
