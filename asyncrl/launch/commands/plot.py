"""`asyncrl-launch plot`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from asyncrl.launch.commands.common import Commands, add_command, print_json, run_dir_of
from asyncrl.launch.curves import Picture, as_json, picture, read_runs
from asyncrl.launch.plotting import as_text, require, title, write_picture
from asyncrl.launch.rundir import LaunchError, is_running
from asyncrl.runtime.metrics import METRICS_FILE

_DESCRIPTION = """Draw the curves of one or several runs, in the terminal and as a picture: reward (train batches, and evaluations
sampled and greedy), off-policyness, response lengths, where the time of a step goes, throughput.

It only reads what the runs have written, so it works while they go on and after they have ended."""

_EPILOG = """examples:
  asyncrl-launch plot runs/sloppy-sorter/t0                         in the terminal, and runs/sloppy-sorter/t0/plot.png
  asyncrl-launch plot runs/sloppy-sorter/t0 runs/sloppy-sorter/t1   overlaid; the picture is runs/sloppy-sorter/plot.png
  asyncrl-launch plot runs/sloppy-sorter/* --out compare.svg        .png, .svg or .pdf
  asyncrl-launch plot configs/quickstart_cpu.yaml trial=b --no-png  a run by its config; the terminal only
  asyncrl-launch plot runs/sloppy-sorter/t0 --json                  the numbers; needs no drawing packages

Drawing needs an extra: pip install 'asyncrl[plot]'. A run that went on from a checkpoint is one curve, without the steps
that were void then; each time that it began anew is a curve of its own. What a run has not written yet is left out, and named.

exit code: 0; 1 there is nothing to draw, or nothing to draw it with; 2 a wrong argument."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "plot", plot, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run, or the CONFIG it was started from (with its overrides)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", metavar="FILE", type=Path, help="the picture (default: plot.png in the run's folder)")
    where.add_argument("--no-png", action="store_true", help="draw in the terminal only")


def plot(arguments: argparse.Namespace, console: Console) -> int:
    """Draw reward, off-policyness, lengths, time and throughput of runs, in the terminal and as a picture."""
    overrides = [target for target in arguments.runs if "=" in target and not Path(target).exists()]
    targets = [target for target in arguments.runs if target not in overrides]
    run_dirs = [run_dir_of(target, overrides) for target in targets]
    shown = picture(read_runs(run_dirs, is_running))
    if not shown.panels:
        raise LaunchError(
            f"{', '.join(map(str, run_dirs)) or 'no run'}: nothing to draw: no {METRICS_FILE} with a train step or an "
            "evaluation in it (yet); `asyncrl-launch status RUN` says what a run is at"
        )
    out = None if arguments.no_png else arguments.out or _default_path(run_dirs)
    if arguments.json:
        if arguments.out is not None:
            write_picture(shown, arguments.out)
        print_json({**as_json(shown), "picture": arguments.out and str(arguments.out)})
        return 0
    require("plotext")
    if out is not None:
        require("matplotlib")  # before anything is printed
    _print_text(shown, console)
    for note in _notes(shown, run_dirs):
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_picture(shown, out)
        console.print(f"picture: {out}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _print_text(shown: Picture, console: Console) -> None:
    """Not through rich, which would take the drawing for its own to lay out."""
    colours = console.is_terminal and not console.no_color
    width = console.width if console.is_terminal else int(os.environ.get("COLUMNS") or 100)
    if len(shown.runs) == 1:
        console.print(title(shown), style="bold", markup=False, highlight=False, soft_wrap=True)
    text = as_text(shown, width, colours=colours)
    encoding = getattr(console.file, "encoding", None) or "utf-8"
    console.file.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def _notes(shown: Picture, run_dirs: list[Path]) -> list[str]:
    """What is not in the picture, or not in the terminal."""
    notes = [f"left out: {text}" for text in shown.missing]
    if len(shown.runs) > 1:
        notes.append("of several runs the terminal shows one curve each; the picture and --json have them all")
    drawn = {run.run_dir for run in shown.runs}
    notes += [f"{path}: nothing to draw (yet)" for path in run_dirs if path.resolve() not in drawn]
    broken = {run.run_dir: run.num_broken_lines for run in shown.runs if run.num_broken_lines}
    notes += [f"{path / METRICS_FILE}: {count} broken lines skipped" for path, count in broken.items()]
    return notes


def _default_path(run_dirs: list[Path]) -> Path:
    """In the folder of the run; of several in the deepest that holds them all."""
    return Path(os.path.commonpath(run_dirs)) / "plot.png"
