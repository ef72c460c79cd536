"""Steps of a run at a set pace, in no time: servers with slots that emit tokens, and a trainer, both of several devices.

Admission is the asynchronous rule: a prompt begins while fewer than (1 + eta) batches are ahead of the trained version. The result
has what advice reads of a run: records of the steps, and the tokens of each server by tenths of a second.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import cast

from asyncrl.cli.run_files import Run, Tenths
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S
from tests.support.paced_run import response_lengths

ETA, BATCH, GROUP, SLOTS, STEPS = 2, 32, 4, 16, 40
LENGTHS = response_lengths(1, range(BATCH * (STEPS + ETA + 2)), GROUP)
BATCH_TOKENS = BATCH * GROUP * fmean(length for group in LENGTHS for length in group)


@dataclass(frozen=True)
class Workload:
    """Device-seconds of a batch on each side, if all of its devices were busy."""

    generation: float
    training: float

    def run(self, servers: int, trainers: int) -> Run:
        """A run with this split of the devices."""
        rate = BATCH_TOKENS / (SLOTS * self.generation)  # tokens/s of a slot
        slots = [[0.0] * SLOTS for _ in range(servers)]  # when each slot is free
        tokens = [Counter[int]() for _ in range(servers)]
        finished: list[float] = []  # a heap: when each admitted group has ended
        admitted, version, now, steps = 0, 0, 0.0, list[dict[str, float]]()
        while version < STEPS:
            while admitted < (version + 1 + ETA) * BATCH:
                at = min(range(servers), key=lambda server: sum(max(0.0, free - now) for free in slots[server]))
                heapq.heappush(finished, max(_answer(slots[at], tokens[at], now, n, rate) for n in LENGTHS[admitted]))
                admitted += 1
            has_data = max(now, *(heapq.heappop(finished) for _ in range(BATCH)))
            end = has_data + self.training / trainers
            version += 1
            steps.append(_record(version, now, has_data, end, servers, trainers))
            now = end
        generating = Tenths()
        for tenth in sorted({tenth for counts in tokens for tenth in counts if tenth * JOURNAL_BUCKET_S < now}):
            generating.add(tenth)
        newest = tuple(tuple(sorted(counts.items())) for counts in tokens)
        return Run("paced", Path(), 1, steps, [], generating, newest_tokens=newest)

    def step_s(self, servers: int, trainers: int) -> float:
        """The mean time of the later half of the steps."""
        times = [cast(float, step["time"]) for step in self.run(servers, trainers).steps]
        return (times[-1] - times[STEPS // 2]) / (STEPS - 1 - STEPS // 2)


def _answer(slots: list[float], tokens: Counter[int], now: float, length: int, rate: float) -> float:
    """Generate a response in the slot that is free first. Returns its end."""
    begin = max(now, slots[0])
    end = begin + length / rate
    heapq.heapreplace(slots, end)
    first, last = int(begin / JOURNAL_BUCKET_S), int(end / JOURNAL_BUCKET_S)
    for tenth in range(first, last + 1):
        inside = min(end, (tenth + 1) * JOURNAL_BUCKET_S) - max(begin, tenth * JOURNAL_BUCKET_S)
        tokens[tenth] += max(0.0, inside) * rate  # type: ignore[assignment]
    return end


def _record(step: int, begin: float, has_data: float, end: float, servers: int, trainers: int) -> dict[str, float]:
    record = {"step": float(step), "time": end, "time/step_s": end - begin, "reward/mean": step / STEPS}
    record |= {"time/wait_data_s": has_data - begin, "time/train_s": end - has_data, "time/wait_weights_s": 0.0}
    record |= {"reward/min": 0.0, "reward/max": 1.0}
    for kind, devices in (("train", trainers), ("generated", servers)):
        record |= {
            f"throughput/{kind}_tokens_per_s": 10.0 * devices,
            f"throughput/{kind}_tokens_per_s_per_device": 10.0,
        }
    return record
