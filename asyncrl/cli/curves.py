"""Curves of one or several runs, from the files of their masters and servers. Only prepares data; plotting.py draws.

summary.json has the distributions over all trained responses of a run that has ended.

metrics.jsonl has one line per train step and per evaluation. The servers' journals have the tenths of a second in which tokens
were generated. A run may still be running, its last line may be incomplete, and values may be missing or not finite: all other
values are shown.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from asyncrl.algorithms.metrics import METRICS, EvalName, at_most_k
from asyncrl.config.nearest import did_you_mean
from asyncrl.launch.rundir import SUMMARY_FILE
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S, METRICS_FILE, read_json_lines
from asyncrl.weights.lineage import Lineage, Stretch, lineages_of, read_attempts

NAN = float("nan")
TRAIN_STEP, VERSIONS, TOKENS = "train step", "versions behind", "response length from (tokens)"  # labels of axes
_WHOLE_STEP = ("step", "train", "wait_data", "wait_weights")  # times that other panels show

Record = Mapping[str, object]


@dataclass(frozen=True)
class Run:
    """The data for the curves of one lineage. A lineage is the chain of attempts, from one that began anew to the newest, that its
    newest weights come from. A run that began anew has several lineages."""

    name: str  # unique among the runs shown
    run_dir: Path
    attempt: int  # the newest of these attempts
    steps: Sequence[Record]  # by step, ascending
    evaluations: Sequence[Record]  # by step, ascending

    # The tenths of a second in which at least one server generated: unix time in tenths of a second, ascending. They are those of
    # the whole run, not only of this lineage
    generating: Sequence[int] = ()
    ages: Mapping[str, Any] | None = None  # `offpolicyness` of summary.json; None: not written (yet)
    going_on: bool = False
    num_broken_lines: int = 0


@dataclass(frozen=True)
class Curve:
    """y over the panel's x; NaN if there is no value."""

    run: str
    name: str  # e.g. `evaluation, greedy`
    role: int  # selects line style or marker; the same measure has the same role in all runs
    x: tuple[float, ...]
    y: tuple[float, ...]
    points: bool = False  # draw points without a line, because only some steps have a value


@dataclass(frozen=True)
class Panel:
    """Curves that share both axes."""

    name: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    bottom: float | None = 0.0  # lowest value of the axis; None: chosen from the data
    top: float | None = None
    stacked: bool = False  # draw those curves that are parts of a whole as areas (for a single run)
    x: str = TRAIN_STEP  # label of the horizontal axis


@dataclass(frozen=True)
class Picture:
    runs: tuple[Run, ...]
    panels: tuple[Panel, ...]
    missing: tuple[str, ...]  # one text for each panel or curve that has no data, with the reason


# ------------------------------------------------------------------------------------------------------------------ reading


def read_runs(run_dirs: Sequence[Path], is_running: Callable[[Path], bool] = lambda _: False) -> list[Run]:
    """Read these runs, in the order given. Equal folders count once.

    A run that began anew becomes one Run per beginning. If a run continued from a checkpoint, the earlier attempt's steps after
    that checkpoint are void and left out.
    """
    folders = list({path.resolve(): path for path in run_dirs}.values())
    runs = []
    for name, run_dir in zip(distinct_names(folders), folders, strict=True):
        records, num_broken = read_records(run_dir / METRICS_FILE)
        found = [
            (lineage, _steps(records, lineage), _evaluations(records, lineage))
            for lineage in _lineages(run_dir, {_attempt(record) for record in records})
        ]
        shown = [entry for entry in found if entry[1] or entry[2]]
        going_on = is_running(run_dir)
        generating = _generating(run_dir) if records else []
        summary = _summary_so_far(run_dir)
        for lineage, steps, evaluations in shown:
            runs.append(
                Run(
                    name=name if len(shown) == 1 else f"{name}, attempt {lineage.newest}",
                    run_dir=run_dir,
                    attempt=lineage.newest,
                    steps=steps,
                    evaluations=evaluations,
                    generating=generating,
                    ages=summary.get("offpolicyness") if summary.get("attempt") == lineage.newest else None,
                    going_on=going_on and lineage is shown[-1][0],
                    num_broken_lines=num_broken,
                )
            )
    return runs


def read_records(path: Path, newest_bytes: int | None = None) -> tuple[list[Record], int]:
    """Read a file of JSON lines. Returns the records that have a step, and the number of other lines.

    newest_bytes: read only the lines that begin within this many bytes before the file's end.
    """
    broken: list[str] = []
    found: list[Record] = [*read_json_lines(path, broken.append, newest_bytes)]
    records = [record for record in found if math.isfinite(number(record, "step"))]
    return records, len(broken) + len(found) - len(records)


def number(record: Record, key: str) -> float:
    """The number under this key; NaN if there is none, or if it is not finite."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else NAN


def distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Name each run by its trial, with as many parent folders as needed to distinguish runs with the same trial."""
    parts = [path.absolute().parts for path in run_dirs]
    names = []
    for own in parts:
        length = next(
            (n for n in range(1, len(own)) if sum(other[-n:] == own[-n:] for other in parts) == 1),
            len(own),
        )
        names.append("/".join(own[-length:]))
    return names


def _attempt(record: Record) -> int:
    value = record.get("attempt", 1)
    return value if isinstance(value, int) else 1


def is_evaluation(record: Record) -> bool:
    """Whether the record is an evaluation's; otherwise it is a train step's."""
    return any(key.startswith("eval/") for key in record)


def _lineages(run_dir: Path, attempts: Iterable[int]) -> list[Lineage]:
    """The lineages of the run. Each of `attempts` that is not in the master's journal is a lineage of its own."""
    try:
        known = read_attempts(run_dir)
    except ValueError:
        known = []
    others = sorted(set(attempts) - {attempt.number for attempt in known})
    found = [Lineage(stretches=[Stretch(attempt=number, first=1, last=None)]) for number in others]
    return sorted([*found, *lineages_of(known)], key=lambda lineage: lineage.newest)


def _steps(records: Iterable[Record], lineage: Lineage) -> list[Record]:
    """The train steps in the lineage, by step."""
    steps = [record for record in records if not is_evaluation(record) and lineage.has(_attempt(record), _step(record))]
    return sorted(steps, key=_step)


def _evaluations(records: Iterable[Record], lineage: Lineage) -> list[Record]:
    """Of each step in the lineage, the newest values of its evaluations. A step may have several: of other sets, of the moving
    average, and one that was unfinished at a checkpoint and is repeated."""
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        if is_evaluation(record) and lineage.has_weights(_attempt(record), _step(record)):
            by_step.setdefault(_step(record), {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


def _step(record: Record) -> int:
    return int(number(record, "step"))


def _generating(run_dir: Path) -> list[int]:
    """The tenths of a second in which any generation server of the run generated."""
    buckets = set()
    for journal in (run_dir / "journal").glob("generation_server_*.jsonl"):
        for record in read_json_lines(journal, lambda _: None):
            if number(record, "tokens") > 0 and math.isfinite(number(record, "time")):
                buckets.add(round(number(record, "time") / JOURNAL_BUCKET_S))
    return sorted(buckets)


def read_summary(run_dir: Path) -> Mapping[str, Any]:
    """The summary of a complete run. Raises OSError or one of DECODE_ERRORS."""
    return msgspec.json.decode((run_dir / SUMMARY_FILE).read_bytes(), type=dict[str, Any])


def _summary_so_far(run_dir: Path) -> Mapping[str, Any]:
    """The summary of the run's newest attempt; empty while the run is running, or if the file is broken."""
    try:
        return read_summary(run_dir)
    except (OSError, *DECODE_ERRORS):
        return {}


# ------------------------------------------------------------------------------------------------------------------ shaping

Value = Callable[[Run, Record], float]


@dataclass(frozen=True)
class _Measure:
    """A value per step or per evaluation, which becomes one curve of a run."""

    name: str
    value: Value
    of_evaluations: bool = False
    optional: bool = False  # written by some configs only


def picture(runs: Sequence[Run], metrics: Sequence[str] = ()) -> Picture:
    """All panels that have data. One run: the shares of a step's time are stacked areas. Several runs: each has a curve for the
    time that its trainer waits, and one for the time without generation. metrics: a panel for each of these instead."""
    missing: list[str] = []
    panels = []
    own = [(key, key, "", None, [_Measure("", _metric(key))]) for key in metrics]
    for name, title, unit, top, measures in own or _plan(runs):
        curves = [
            curve
            for role, measure in enumerate(measures)
            for run in runs
            if (curve := _curve(run, measure, role)) is not None
        ]
        shown = {curve.name for curve in curves}
        absent = [
            measure.name
            for measure in measures
            if measure.name not in shown and not (measure.optional or measure.of_evaluations)
        ]
        if not curves and not all(measure.optional for measure in measures):
            hint = did_you_mean(title, _keys(runs)).strip() if own else ""
            missing.append(f"{title}: no step or evaluation has it{f'; {hint}' if hint else ''}")
        elif absent:
            missing.append(f"{title}, {' and '.join(absent)}: no step has it")
        if curves:
            lowest = min(y for curve in curves for y in curve.y if math.isfinite(y))
            bottom = 0.0 if lowest >= 0 else None
            stacked = len(runs) == 1 and name == "time_shares"
            panels.append(Panel(name, title, unit, tuple(curves), bottom, top, stacked))
    return Picture(tuple(runs), (*panels, *([] if metrics else _age_panels(runs))), tuple(missing))


def _keys(runs: Sequence[Run]) -> list[str]:
    """The names of all metrics of the runs."""
    records = [record for run in runs for record in (*run.steps, *run.evaluations)]
    return sorted({key for record in records for key in record})


def _age_panels(runs: Sequence[Run]) -> list[Panel]:
    """Distributions over all trained responses, of the runs whose summary has them."""
    shares: list[Curve] = []
    lengths: list[Curve] = []
    for run in runs:
        if run.ages is None or not run.ages["head"]:
            continue
        for role, (name, key) in enumerate((("first token", "head"), ("last token", "tail"))):
            counts = run.ages[key]
            total = sum(counts.values())
            y = tuple(100 * count / total for count in counts.values())
            shares.append(Curve(run.name, name, role, tuple(map(float, counts)), y))
        bins = run.ages["by_length"]
        x = tuple(float(entry["tokens_min"]) for entry in bins)
        for role, (name, key) in enumerate((("mean", "head_mean"), ("oldest", "head_max"))):
            lengths.append(Curve(run.name, name, role, x, tuple(float(entry[key]) for entry in bins)))
    if not shares:
        return []
    return [
        Panel("ages", "Age of trained responses", "% of responses", tuple(shares), x=VERSIONS),
        Panel("age_by_length", "Age of first tokens by length", "versions behind", tuple(lengths), x=TOKENS),
    ]


# (name, title, unit, top of the axis) of each panel. METRICS (algorithms/metrics.py) has the curves of a panel; those that are
# computed from several values or from names that differ between runs are in _derived
PANELS: tuple[tuple[str, str, str, float | None], ...] = (
    ("reward", "Reward", "mean reward", None),
    ("at_k", "pass@k and majority@k", "share of prompts", None),
    ("off_policyness", "Off-policyness of first tokens", "versions behind", None),
    ("mixed_versions", "Responses of several versions", "% of the batch", None),
    ("response_length", "Response length", "tokens", None),
    ("without_signal", "Without a signal", "% of the batch", 100.0),
    ("entropy", "Entropy", "nats a token", None),
    ("kl", "KL divergence (estimates)", "nats a token", None),
    ("grad_norm", "Gradient norm", "norm before clipping", None),
    ("clip_share", "Clip share", "% of trained tokens", None),
    ("time_shares", "Time of a step", "% of the step", 100.0),
    ("time_parts", "Parts of a step", "% of the step", None),
    ("tokens", "Throughput", "trained tokens/s", None),
    ("device_tokens", "Throughput of a device", "tokens/s", None),
    ("mfu", "Model FLOPs utilisation", "% of peak FLOP/s", None),
    ("memory", "Peak memory of a model worker", "GiB", None),
    ("steps", "Train steps", "steps/s", None),
)


def _plan(runs: Sequence[Run]) -> list[tuple[str, str, str, float | None, list[_Measure]]]:
    """(name, title, unit, top of the axis, measures) of each panel."""
    derived = _derived(runs)
    plan = []
    for name, title, unit, top in PANELS:
        measures = [
            _Measure(
                metric.curve,
                (_percent if metric.percent else _metric)(key),
                key.startswith("eval/"),
                metric.optional,
            )
            for key, metric in METRICS.items()
            if metric.panel == name
        ]
        shown = "Idle time" if name == "time_shares" and len(runs) > 1 else title
        plan.append((name, shown, unit, top, [*measures, *derived.get(name, ())]))
    return plan


def _derived(runs: Sequence[Run]) -> dict[str, list[_Measure]]:
    """The measures of panels that METRICS lacks."""
    waits = [
        _Measure("training", _share("time/train_s")),
        _Measure("waits for data", _share("time/wait_data_s")),
        _Measure("waits for weights", _share("time/wait_weights_s")),
    ]
    if len(runs) > 1:
        waits = [_Measure("trainer waits", lambda run, record: 100 - _share("time/train_s")(run, record))]
    # MFCs may run at the same time, and weights are published while the next step runs, so these shares have no common sum
    parts = [part for part in _names(runs, r"time/(\w+)_s") if part not in _WHOLE_STEP]
    keys = dict.fromkeys(key for run in runs for record in run.evaluations for key in record)
    rewards = [name for name in filter(None, map(EvalName.parse, keys)) if name.value == "reward" and not name.task]
    return {
        "reward": [_evaluated(name, "") for name in rewards if name.eval_set],
        "at_k": [_evaluated(best, best.value) for name in rewards for best in at_most_k(keys, name)],
        "mixed_versions": [_Measure("", _mixed)],
        "time_shares": [*waits, _Measure("no generation", _generation_idle)],
        "time_parts": [_Measure(part, _share(f"time/{part}_s"), optional=True) for part in parts],
        "mfu": [_Measure(mfc, _percent(f"mfu/{mfc}"), optional=True) for mfc in _names(runs, r"mfu/(\w+)")],
        "memory": [_Measure("largest", _memory, optional=True)],
        "steps": [_Measure("", _steps_per_s)],
    }


def _evaluated(name: EvalName, shown: str) -> _Measure:
    """A metric of evaluations. shown: what the legend adds to set and mode."""
    label = ", ".join(filter(None, (name.eval_set, name.mode, shown)))
    return _Measure(label, _metric(str(name)), of_evaluations=True, optional=True)


def _curve(run: Run, measure: _Measure, role: int) -> Curve | None:
    """The curve of a measure; None if it has no finite value."""
    records = run.evaluations if measure.of_evaluations else run.steps
    y = tuple(measure.value(run, record) for record in records)
    if not any(map(math.isfinite, y)):
        return None
    x = tuple(number(record, "step") for record in records)
    return Curve(run.name, measure.name, role, x, y, points=measure.of_evaluations)


def _names(runs: Sequence[Run], pattern: str) -> list[str]:
    """The names in the keys of the runs' steps that match the pattern, in their first order."""
    keys = dict.fromkeys(key for run in runs for record in run.steps for key in record)
    return [match[1] for key in keys if (match := re.fullmatch(pattern, key))]


def _memory(_: Run, record: Record) -> float:
    peaks = [number(record, key) for key in record if key.startswith("memory/model_worker_")]
    return max((peak / 2**30 for peak in peaks if math.isfinite(peak)), default=NAN)


def _metric(key: str) -> Value:
    return lambda _, record: number(record, key)


def _percent(key: str) -> Value:
    return lambda _, record: 100 * number(record, key)


def _share(key: str) -> Value:
    def percent(_: Run, record: Record) -> float:
        seconds = number(record, "time/step_s")
        return 100 * number(record, key) / seconds if seconds > 0 else NAN

    return percent


def _mixed(_: Run, record: Record) -> float:
    responses = number(record, "batch/num_sequences")
    return 100 * number(record, "batch/num_sequences_of_two_versions") / responses if responses > 0 else NAN


def _steps_per_s(_: Run, record: Record) -> float:
    seconds = number(record, "time/step_s")
    return 1 / seconds if seconds > 0 else NAN


def _generation_idle(run: Run, record: Record) -> float:
    """The share of a step's duration, in percent, in which no server generated; measured in tenths of a second.

    NaN if unknown. Servers write their journals once a second, so while the run is running, a step that ended after the newest
    entry is unknown.
    """
    end, seconds = number(record, "time"), number(record, "time/step_s")
    if not run.generating or not seconds > 0 or not math.isfinite(end):
        return NAN
    first = math.floor((end - seconds) / JOURNAL_BUCKET_S)
    last = max(math.floor(end / JOURNAL_BUCKET_S), first + 1)
    if run.going_on and last > run.generating[-1]:
        return NAN
    num_busy = bisect_left(run.generating, last) - bisect_left(run.generating, first)
    return 100 * (1 - num_busy / (last - first))


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Running mean over the finite values in a window around each value; NaN stays NaN."""
    half = window // 2
    means = []
    for i, value in enumerate(values):
        near = [entry for entry in values[max(0, i - half) : i + half + 1] if math.isfinite(entry)]
        means.append(fmean(near) if math.isfinite(value) else NAN)
    return means


def as_json(shown: Picture) -> dict[str, object]:
    """The output of `asyncrl-launch plot --json`; null for a missing value."""
    return {
        "runs": [
            {
                "name": run.name,
                "run_dir": str(run.run_dir),
                "attempt": run.attempt,
                "steps": len(run.steps),
                "evaluations": len(run.evaluations),
                "going_on": run.going_on,
                "broken_lines": run.num_broken_lines,
            }
            for run in shown.runs
        ],
        "panels": [
            {
                "name": panel.name,
                "title": panel.title,
                "unit": panel.unit,
                "x": panel.x,
                "series": [
                    {
                        "run": curve.run,
                        "name": curve.name,
                        "x": curve.x,
                        "y": [y if math.isfinite(y) else None for y in curve.y],
                    }
                    for curve in panel.curves
                ],
            }
            for panel in shown.panels
        ],
        "missing": shown.missing,
    }
