"""What the calls of a train step report: statistics, and seconds of each MFC. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncrl.dataflow.statistics import merge_stats
from asyncrl.master.handles import Call


@dataclass
class StepResult:
    """Statistics of all MFCs of a step, and the seconds that each took at its slowest worker. The parts of a batch add to one
    result."""

    stats: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_s: dict[str, float] = field(default_factory=dict)  # the seconds that an MFC's model FLOPs take at peak FLOP/s
    trained: set[str] = field(default_factory=set)  # groups that a function which trains was called with
    _reports: dict[str, tuple[dict[str, float], frozenset[str]]] = field(
        default_factory=dict
    )  # by MFC; with its groups
    _shares: dict[str, tuple[int, int]] = field(default_factory=dict)  # statistic -> numerator, denominator

    def count(self, calls: Iterable[Call]) -> None:
        """Add the statistics and the seconds of the calls of a part. A call's statistics are those of all calls of its MFC in the
        step so far (`Interface.stats_of_step`). Those of several MFCs with one name are merged."""
        for call in sorted(calls, key=lambda call: call.number):
            mfc = call.mfc
            if call.number:
                stats, groups = self._reports.get(mfc.name, ({}, frozenset()))
                self._reports[mfc.name] = {**stats, **call.stats}, groups | call.ids
            if mfc.kind == "train_step":
                self.trained |= call.ids
            for total, seconds in ((self.seconds, call.seconds), (self.peak_s, call.peak_s)):
                if seconds is not None:
                    total[mfc.name] = total.get(mfc.name, 0.0) + seconds
        self.stats |= merge_stats([(stats, len(groups)) for stats, groups in self._reports.values()])

    def add(self, name: str, number: float) -> None:
        """Add to a sum over the step."""
        self.stats[name] = self.stats.get(name, 0.0) + number

    def add_share(self, name: str, part: int, whole: int) -> None:
        """Add to the numerator and the denominator of a share. A step without any group has no share."""
        parts, wholes = self._shares.get(name, (0, 0))
        self._shares[name] = parts + part, wholes + whole
        if wholes + whole:
            self.stats[name] = (parts + part) / (wholes + whole)
