"""Curves of one or several runs, from their records (run_files.py). Only prepares data; plotting.py and the page draw it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from statistics import fmean

import numpy as np

from asyncrl.algorithms.metrics import METRICS, EvalName, at_most_k
from asyncrl.cli.run_files import NAN, Columns, Numbers, Run, RunFiles
from asyncrl.config.nearest import did_you_mean
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S

# Labels of axes
TRAIN_STEP, VERSIONS, TOKENS = "train step", "versions behind", "response length from (tokens)"
SECONDS = "seconds since the run began"
NO_GENERATION = "no generation"  # a curve over the shares of a step's time, of which it is none
_WHOLE_STEP = ("step", "train", "wait_data", "wait_weights")  # times that other panels show


@dataclass(frozen=True)
class Curve:
    """y over the panel's x; NaN if there is no value."""

    run: str
    name: str  # e.g. `evaluation, greedy`
    role: int  # selects line style or marker; the same measure has the same role in all runs
    x: Numbers
    y: Numbers
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


Value = Callable[[Run, Columns], Numbers]  # of each record of these columns; NaN if it has none


@dataclass(frozen=True)
class _Measure:
    """A value per step or per evaluation, which becomes one curve of a run."""

    name: str
    value: Value
    of_evaluations: bool = False
    optional: bool = False  # written by some configs only


def of_learning(shown: Picture) -> Picture:
    """The picture without the panels of the time."""
    others = {name for name, *_ in TIME}
    return replace(shown, panels=tuple(panel for panel in shown.panels if panel.name not in others))


def picture(runs: Sequence[Run], metrics: Sequence[str] = ()) -> Picture:
    """All panels that have data, those of the learning first. One run: the ages of a batch's groups, and the shares of a step's
    time, are stacked areas. Several runs: each has a curve for the time that its trainer waits, and one for the time without
    generation. metrics: a panel for each of these instead."""
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
            lowest = min(np.fmin.reduce(curve.y) for curve in curves)
            bottom = 0.0 if lowest >= 0 else None
            stacked = len(runs) == 1 and name in _STACKED
            panels.append(Panel(name, title, unit, tuple(curves), bottom, top, stacked))
    num_learning = sum(panel.name in {name for name, *_ in LEARNING} for panel in panels)
    ages = [] if metrics else _age_panels(runs)
    return Picture(tuple(runs), (*panels[:num_learning], *ages, *panels[num_learning:]), tuple(missing))


def _keys(runs: Sequence[Run]) -> list[str]:
    """The names of all metrics of the runs."""
    return sorted({key for run in runs for columns in (run.columns, run.evaluated) for key in columns})


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
            shares.append(_points(run.name, name, role, [(float(age), 100 * n / total) for age, n in counts.items()]))
        bins = run.ages["by_length"]
        for role, (name, key) in enumerate((("mean", "head_mean"), ("oldest", "head_max"))):
            lengths.append(_points(run.name, name, role, [(entry["tokens_min"], entry[key]) for entry in bins]))
    if not shares:
        return []
    return [
        Panel("ages", "Age of trained responses", "% of responses", tuple(shares), x=VERSIONS),
        Panel("age_by_length", "Age of first tokens by length", "versions behind", tuple(lengths), x=TOKENS),
    ]


# (name, title, unit, top of the axis) of each panel: those of the learning, then those of the time. METRICS
# (algorithms/metrics.py) has the curves of a panel; those that are computed from several values or from names that differ between
# runs are in _derived
LEARNING: tuple[tuple[str, str, str, float | None], ...] = (
    ("reward", "Reward", "mean reward", None),
    ("reward_by_task", "Reward by task", "mean reward", None),
    ("at_k", "pass@k and majority@k", "share of prompts", None),
    ("rewards", "Rewards of a batch", "reward", None),
    ("response_length", "Response length", "tokens", None),
    ("without_signal", "Without a signal", "% of the batch", 100.0),
    ("entropy", "Entropy", "nats a token", None),
    ("kl", "KL divergence (estimates)", "nats a token", None),
    ("grad_norm", "Gradient norm", "norm before clipping", None),
    ("clip_share", "Clip share", "% of trained tokens", None),
    ("off_policyness", "Off-policyness of first tokens", "versions behind", None),
    ("group_ages", "Age of groups", "% of the batch", 100.0),
    ("mixed_versions", "Responses of several versions", "% of the batch", None),
)
TIME: tuple[tuple[str, str, str, float | None], ...] = (
    ("time_shares", "Time of a step", "% of the step", 100.0),
    ("time_parts", "Parts of a step", "% of the step", None),
    ("tokens", "Throughput", "trained tokens/s", None),
    ("device_tokens", "Throughput of a device", "tokens/s", None),
    ("mfu", "Model FLOPs utilisation", "% of peak FLOP/s", None),
    ("memory", "Peak memory of a model worker", "GiB", None),
    ("steps", "Train steps", "steps/s", None),
)
PANELS = (*LEARNING, *TIME)
_STACKED = ("group_ages", "time_shares")  # of one run: parts of a whole
_SPREADS = (("90 % are below", "p90"), ("median", "p50"), ("10 % are below", "p10"))


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
        waits = [_Measure("trainer waits", lambda run, columns: 100 - _share("time/train_s")(run, columns))]
    # MFCs may run at the same time, and weights are published while the next step runs, so these shares have no common sum
    parts = [part for part in _names(runs, r"time/(\w+)_s") if part not in _WHOLE_STEP]
    ages = sorted(map(int, _names(runs, r"offpolicy/head_count/(\d+)"))) if len(runs) == 1 else []
    keys = dict.fromkeys(key for run in runs for key in run.evaluated)
    rewards = [name for name in filter(None, map(EvalName.parse, keys)) if name.value == "reward" and not name.task]
    return {
        "reward": [_evaluated(name, "") for name in rewards if name.eval_set],
        "reward_by_task": [
            *(_Measure(task, _metric(f"reward/{task}"), optional=True) for task in _names(runs, r"count/(.+)")),
            *(_evaluated(name, name.task) for name in filter(None, map(EvalName.parse, keys)) if _is_of_task(name)),
        ],
        "at_k": [_evaluated(best, best.value) for name in rewards for best in at_most_k(keys, name)],
        "rewards": [_Measure(name, _metric(f"reward/{key}"), optional=True) for name, key in _SPREADS],
        "response_length": [_Measure(name, _metric(f"length/response_{key}"), optional=True) for name, key in _SPREADS],
        "group_ages": [_Measure(f"{age} behind", _of_age(age), optional=True) for age in ages],
        "mixed_versions": [_Measure("", _mixed)],
        "time_shares": [*waits, _Measure(NO_GENERATION, _generation_idle)],
        "time_parts": [_Measure(part, _share(f"time/{part}_s"), optional=True) for part in parts],
        "mfu": [_Measure(mfc, _percent(f"mfu/{mfc}"), optional=True) for mfc in _names(runs, r"mfu/(\w+)")],
        "memory": [_Measure("largest", _memory, optional=True)],
        "steps": [_Measure("", _steps_per_s)],
    }


def _is_of_task(name: EvalName) -> bool:
    return name.value == "reward" and bool(name.task)


def _evaluated(name: EvalName, shown: str) -> _Measure:
    """A metric of evaluations. shown: what the legend adds to set and mode."""
    label = ", ".join(filter(None, (name.eval_set, name.mode, shown)))
    return _Measure(label, _metric(str(name)), of_evaluations=True, optional=True)


def _curve(run: Run, measure: _Measure, role: int) -> Curve | None:
    """The curve of a measure over the steps; None if it has no finite value."""
    columns = run.evaluated if measure.of_evaluations else run.columns
    y = measure.value(run, columns)
    if not np.isfinite(y).any():
        return None
    return Curve(run.name, measure.name, role, columns["step"], y, points=measure.of_evaluations)


def _names(runs: Sequence[Run], pattern: str) -> list[str]:
    """The names in the keys of the runs' steps that match the pattern, in their first order."""
    keys = dict.fromkeys(key for run in runs for key in run.columns)
    return [match[1] for key in keys if (match := re.fullmatch(pattern, key))]


def _metric(key: str) -> Value:
    return lambda _, columns: columns[key]


def _percent(key: str) -> Value:
    return lambda _, columns: 100 * columns[key]


def _ratio(part: Numbers, whole: Numbers) -> Numbers:
    """NaN where the whole is not positive."""
    return np.divide(part, whole, out=np.full_like(whole, NAN), where=whole > 0)


def _share(key: str) -> Value:
    return lambda _, columns: _ratio(100 * columns[key], columns["time/step_s"])


def _memory(_: Run, columns: Columns) -> Numbers:
    peaks = [columns[key] for key in columns if key.startswith("memory/model_worker_")]
    return reduce(np.fmax, peaks, np.full_like(columns["step"], NAN)) / 2**30


def _of_age(age: int) -> Value:
    def percent(_: Run, columns: Columns) -> Numbers:
        ages = (columns[key] for key in columns if key.startswith("offpolicy/head_count/"))
        counts = columns[f"offpolicy/head_count/{age}"]
        return _ratio(100 * np.nan_to_num(counts), sum(map(np.nan_to_num, ages), np.zeros_like(counts)))

    return percent


def _mixed(_: Run, columns: Columns) -> Numbers:
    return _ratio(100 * columns["batch/num_sequences_of_two_versions"], columns["batch/num_sequences"])


def _steps_per_s(_: Run, columns: Columns) -> Numbers:
    seconds = columns["time/step_s"]
    return _ratio(np.ones_like(seconds), seconds)


def _generation_idle(run: Run, columns: Columns) -> Numbers:
    """The share of a step's duration, in percent, in which no server generated; measured in tenths of a second.

    NaN if unknown. Servers write their journals once a second, so while the run is running, a step that ended after the newest
    entry is unknown.
    """
    end, seconds = columns["time"], columns["time/step_s"]
    first = np.floor((end - seconds) / JOURNAL_BUCKET_S)
    last = np.maximum(np.floor(end / JOURNAL_BUCKET_S), first + 1)
    newest = run.generating.newest
    known = (newest >= 0) & (seconds > 0) & (last <= (newest if run.going_on else np.inf))
    spans = zip(first[known].astype(int).tolist(), last[known].astype(int).tolist(), strict=True)
    idle = np.full_like(end, NAN)
    idle[known] = [100 * (1 - run.generating.count(begin, to) / (to - begin)) for begin, to in spans]
    return idle


# ------------------------------------------------------------------------------------------------------------ over time


def timeline(files: RunFiles, run: Run | None) -> list[Panel]:
    """The panels of a run over the time since its first event: throughput and idle time of the steps of `run` (None: it has none),
    and of all attempts the tokens and versions of each server, and rejections with attempts, restarts and faults."""
    timed = run.columns.at(np.flatnonzero(np.isfinite(run.columns["time"]))) if run is not None else Columns()
    ended = timed["time"]
    times = [*ended[:1].tolist(), *(time for time, _ in (*files.events, *files.published))]
    begin = min(times, default=0.0)
    rates, versions, rejected = [], [], []
    for role, (name, server) in enumerate(sorted(files.servers.items()), 1):
        width_s = server.tokens.width_s
        rates.append(_over_time(name, role, begin, [(time, total / width_s) for time, total in server.tokens.points()]))
        versions.append(_over_time(name, role, begin, server.versions))
    versions.append(_over_time("published", 0, begin, files.published))
    for role, (reason, sums) in enumerate(sorted(files.rejected.items()), 1):
        counts = accumulate(sums.points(), lambda before, point: (point[0], before[1] + point[1]))
        rejected.append(_over_time(reason, role, begin, list(counts)))
    marks = [(time, 0.0) for time, _ in files.events]
    rejected.append(replace(_over_time("attempts, restarts, faults", 0, begin, marks), points=True))
    panels = [
        Panel("generated", "Tokens generated", "tokens/s", tuple(rates), x=SECONDS),
        Panel("versions", "Weight versions of the servers", "version", tuple(versions), x=SECONDS),
        Panel("rejected", "Rejected prompts; faults as points", "prompts so far", tuple(rejected), x=SECONDS),
    ]
    if run is not None:
        run = replace(run, columns=timed)
        for name, title, unit, top, measures in _plan([run]):
            curves = (
                replace(curve, x=ended - begin)
                for role, measure in enumerate(measures)
                if name in ("tokens", "time_shares") and (curve := _curve(run, measure, role)) is not None
            )
            panels.append(Panel(name, title, unit, tuple(curves), top=top, x=SECONDS))
    shown = [replace(panel, curves=tuple(curve for curve in panel.curves if len(curve.x))) for panel in panels]
    return [panel for panel in shown if panel.curves]


def _over_time(name: str, role: int, begin: float, points: Sequence[tuple[float, float]]) -> Curve:
    return _points("", name, role, [(time - begin, value) for time, value in points])


def _points(run: str, name: str, role: int, points: Sequence[tuple[float, float]]) -> Curve:
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    return Curve(run, name, role, x, y)


def thinned(shown: Panel, most: int) -> Panel:
    """The panel with at most about `most` points a curve: of each stretch of a longer curve the lowest and the highest value."""
    return replace(shown, curves=tuple(_thinned(curve, most) for curve in shown.curves))


def _thinned(curve: Curve, most: int) -> Curve:
    if len(curve.x) <= most:
        return curve
    width = math.ceil(2 * len(curve.x) / most)
    begins = np.arange(0, len(curve.x), width)
    padded = np.full(len(begins) * width, NAN)
    padded[: len(curve.y)] = curve.y
    stretches = padded.reshape(-1, width)
    there = np.isfinite(stretches)
    ends = (np.where(there, stretches, np.inf).argmin(axis=1), np.where(there, stretches, -np.inf).argmax(axis=1))
    kept = np.unique([begins + end for end in ends])
    return replace(curve, x=curve.x[kept], y=curve.y[kept])


def smoothed(values: Sequence[float] | Numbers, window: int) -> list[float]:
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
        "panels": [panel_object(panel) for panel in shown.panels],
        "missing": shown.missing,
    }


def panel_object(panel: Panel) -> dict[str, object]:
    """A panel, for JSON; null for a missing value."""
    return {
        "name": panel.name,
        "title": panel.title,
        "unit": panel.unit,
        "x": panel.x,
        "series": [
            {
                "run": curve.run,
                "name": curve.name,
                "x": curve.x.tolist(),
                "y": [y if math.isfinite(y) else None for y in curve.y.tolist()],
            }
            for curve in panel.curves
        ],
    }
