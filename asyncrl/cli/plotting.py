"""Draw the curves of curves.py into a picture file, with matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from asyncrl.cli.curves import NO_GENERATION, TOKENS, TRAIN_STEP, Curve, Panel, Picture, smoothed
from asyncrl.cli.run_files import Numbers
from asyncrl.config.schema import ConfigError
from asyncrl.launch.rundir import LaunchError

_SMOOTH_FROM = 150  # a curve with at least this many points is drawn pale, with its running mean over it
_SMOOTH_SHARE = 40  # the window of the running mean has 1/40 of the curve's points
_MARKERS_UP_TO = 25  # a curve with more points than this has no markers
_NAMED_RUNS = 10  # the legend names at most this many runs; there are as many colours, and further runs reuse them

_KEYS_IN_A_ROW = 3  # of a panel's legend
_COLOURS = (
    "#0b6fb8",
    "#e07b00",
    "#1a936f",
    "#c03a2b",
    "#7b5ea7",
    "#7a4f3a",
    "#d35d9e",
    "#6b6b6b",
    "#a3a500",
    "#00a3b4",
)
_AREA_COLOURS = ("#9cc9e3", "#f5c07a", "#b9d8b0", "#e6a6a1", "#c9b8dd", "#d3bfae", "#eec1da", "#c4c4c4")
_PANEL_INCHES, _DPI = (4.0, 2.6), 120  # twelve panels are 1,920 x 1,020 pixels
_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "D", "^")


def require(module: str) -> Any:
    """Import a module of the extra `plot`. Raises LaunchError with the command that installs the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise LaunchError(
            f"drawing needs the package {package}, which cannot be imported ({error}): pip install 'asyncrl[plot]'"
        ) from error


def write_picture(shown: Picture, path: Path) -> None:
    """Write the picture, in the format of the file's extension.

    Raises ConfigError if matplotlib does not know the extension; LaunchError if the file cannot be written.
    """
    figures = require("matplotlib.figure")
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with require("matplotlib").rc_context(style):
        columns = min(max(2, math.ceil(math.sqrt(len(shown.panels)))), len(shown.panels) + 1)
        rows = math.ceil(len(shown.panels) / columns)
        width, height = _PANEL_INCHES
        figure = figures.Figure(figsize=(width * columns, 0.7 + height * rows), dpi=_DPI, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(shown.panels) :]:
            axes.remove()
        steps = _step_range(shown)
        for axes, panel in zip(grid.flat, shown.panels, strict=False):
            _draw_panel(axes, panel, [run.name for run in shown.runs], steps)
        _draw_title(figure, shown)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path)
        except ValueError as error:
            raise ConfigError(f"--out {str(path)!r}: {error}; use .png, .svg or .pdf") from error
        except OSError as error:
            raise LaunchError(f"the picture cannot be written: {error}; choose another file with --out") from error


def _draw_title(figure: Any, shown: Picture) -> None:
    """Draw the title: for one run its name, for several runs a legend with the colour of each."""
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    if len(shown.runs) == 1:
        figure.suptitle(_title(shown), fontsize=12, fontweight="bold")
        return
    lines = require("matplotlib.lines")
    handles = [
        lines.Line2D([], [], color=_COLOURS[i % len(_COLOURS)], linewidth=3, label=run.name)
        for i, run in enumerate(shown.runs[:_NAMED_RUNS])
    ]
    columns = max(1, min(len(handles), 100 // (6 + max(len(run.name) for run in shown.runs))))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=11)


def _step_range(shown: Picture) -> tuple[float, float]:
    """First and last step of all curves. All panels over train steps share this range, so that they can be compared."""
    steps = [x for panel in shown.panels if panel.x == TRAIN_STEP for curve in panel.curves for x in curve.x]
    return min(steps), max(steps)


def _draw_panel(axes: Any, panel: Panel, runs: Sequence[str], steps: tuple[float, float]) -> None:
    rows = math.ceil(len(_keys(panel)) / _KEYS_IN_A_ROW)
    axes.set_title(panel.title, loc="left", fontweight="bold", fontsize=10, pad=8 + 11 * rows if rows else 6)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    lines: Sequence[Curve] = panel.curves
    if panel.stacked:
        lines = _draw_areas(axes, panel.curves)
    for curve in lines:
        _draw_curve(axes, curve, panel, _colour(curve, panel, runs))
    highest = max(y for curve in panel.curves for y in curve.y if math.isfinite(y))
    if panel.bottom is not None:
        axes.set_ylim(panel.bottom, panel.top or 1.06 * highest or 1.0)
    ticker = require("matplotlib.ticker")
    if panel.x == TOKENS:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    if panel.x == TRAIN_STEP:
        room = 0.02 * (steps[1] - steps[0]) or 0.5
        axes.set_xlim(steps[0] - room, steps[1] + room)
    _draw_keys(axes, panel, len(runs))


def _colour(curve: Curve, panel: Panel, runs: Sequence[str]) -> str:
    """The colour of a curve. With several runs each run has a colour, and line styles and markers tell the roles. With one run each
    role has a colour. A line over stacked areas is dark grey."""
    if panel.stacked:
        return "#333333"
    return _COLOURS[(runs.index(curve.run) if len(runs) > 1 else curve.role) % len(_COLOURS)]


def _draw_curve(axes: Any, curve: Curve, panel: Panel, colour: str) -> None:
    if curve.points:
        axes.plot(
            curve.x,
            curve.y,
            linestyle="none",
            marker=_MARKERS[curve.role % len(_MARKERS)],
            color=colour,
            markersize=6.5,
            markeredgecolor="white",
            markeredgewidth=0.8,
            zorder=4,
            clip_on=False,
        )
        return
    style = {"color": colour, "linestyle": _line(curve, panel), "linewidth": 1.2 if panel.stacked else 1.6}
    if len(curve.x) >= _SMOOTH_FROM:
        axes.plot(curve.x, curve.y, color=colour, linewidth=0.6, alpha=0.3)
        axes.plot(curve.x, _steadied(curve), **style)
    else:
        marker = "." if len(curve.x) <= _MARKERS_UP_TO else None
        axes.plot(curve.x, curve.y, marker=marker, markersize=6, clip_on=False, **style)


def _line(curve: Curve, panel: Panel) -> str:
    return "-" if panel.stacked else _LINES[curve.role % len(_LINES)]


def _draw_areas(axes: Any, curves: Sequence[Curve]) -> list[Curve]:
    """Draw the parts of a whole as stacked areas. Return the other curves."""
    parts = [curve for curve in curves if _is_area(curve)]
    colours = [_AREA_COLOURS[curve.role] for curve in parts]
    heights = [[y if math.isfinite(y) else 0.0 for y in _steadied(curve)] for curve in parts]
    if parts and len(parts[0].x) > 1:
        axes.stackplot(parts[0].x, heights, colors=colours, linewidth=0)
    else:
        bottoms = [sum(height[0] for height in heights[:i]) for i in range(len(parts))]
        for curve, height, bottom, colour in zip(parts, heights, bottoms, colours, strict=True):
            axes.bar(curve.x, height, bottom=bottom, width=0.5, color=colour)
    return [curve for curve in curves if not _is_area(curve)]


def _is_area(curve: Curve) -> bool:
    """Of a stacked panel: whether the curve is a part of the whole."""
    return curve.name != NO_GENERATION and curve.role < len(_AREA_COLOURS)


def _steadied(curve: Curve) -> Sequence[float] | Numbers:
    """The running mean of a long curve; a short curve as it is."""
    return smoothed(curve.y, len(curve.y) // _SMOOTH_SHARE) if len(curve.y) >= _SMOOTH_FROM else curve.y


def _keys(panel: Panel) -> list[Curve]:
    """One curve for each role, as a sample for the legend. A role is left out if its first curve has no name."""
    kinds = groupby(sorted(panel.curves, key=lambda curve: curve.role), key=lambda curve: curve.role)
    return [curve for _, of_kind in kinds if (curve := next(of_kind)).name]


def _draw_keys(axes: Any, panel: Panel, num_runs: int) -> None:
    """Draw the panel's legend between title and data."""
    lines, patches = require("matplotlib.lines"), require("matplotlib.patches")
    handles = []
    for curve in _keys(panel):
        colour = "#333333" if num_runs > 1 or panel.stacked else _COLOURS[curve.role % len(_COLOURS)]
        if panel.stacked and _is_area(curve):
            handles.append(patches.Patch(color=_AREA_COLOURS[curve.role], label=curve.name))
        elif curve.points:
            marker = _MARKERS[curve.role % len(_MARKERS)]
            handles.append(lines.Line2D([], [], linestyle="none", marker=marker, color=colour, label=curve.name))
        else:
            handles.append(lines.Line2D([], [], linestyle=_line(curve, panel), color=colour, label=curve.name))
    if handles:
        legend = axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=min(len(handles), _KEYS_IN_A_ROW),
            frameon=False,
            fontsize=7,
            borderaxespad=0.1,
            handlelength=1.5,
            handletextpad=0.4,
            columnspacing=0.8,
        )
        legend.set_in_layout(False)  # a wide legend must not make the panel narrow


def _title(shown: Picture) -> str:
    """The title of a picture of one run: its name, number of steps, and whether it is running."""
    run = shown.runs[0]
    steps = f"{len(run.steps)} train step{'' if len(run.steps) == 1 else 's'}"
    return f"{run.run_dir.parent.name}/{run.name}, {steps}{', running' if run.going_on else ''}"
