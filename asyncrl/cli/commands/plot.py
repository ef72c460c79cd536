"""`asyncrl-launch plot`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from asyncrl.cli.advice import advise
from asyncrl.cli.commands.common import Commands, add_command, print_json, say
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.cli.curves import Picture, as_json, of_learning, picture
from asyncrl.cli.page import saved_page
from asyncrl.cli.plotting import write_picture
from asyncrl.cli.run_files import distinct_names, read_runs
from asyncrl.config.schema import ConfigError
from asyncrl.launch.rundir import LaunchError, is_running
from asyncrl.runtime.metrics import METRICS_FILE

_DESCRIPTION = """Draw the learning of one or several runs into a picture that fits a screen: reward, also by task, rewards and
lengths of a batch, groups with equal rewards, entropy, KL, gradient norm, clip share, off-policyness. With --all also the time
of a step, throughput, MFU and memory. A run that has ended also has the distribution of its responses' ages.

With --html it writes one file that a browser opens anywhere, without a server: the page of `asyncrl-launch ui`, with the curves
of learning and time, and the advice. It only reads the files of the runs, so it works while they run and after they have ended."""

_EPILOG = """examples:
  asyncrl-launch plot runs/sloppy-sorter/t0                         writes runs/sloppy-sorter/t0/plot.png
  asyncrl-launch plot runs/sloppy-sorter/t0 runs/sloppy-sorter/t1   both in one picture: runs/sloppy-sorter/plot.png
  asyncrl-launch plot runs/sloppy-sorter/* --out compare.svg        .png, .svg or .pdf
  asyncrl-launch plot configs/quickstart_cpu.yaml trial=b           a run named by its config
  asyncrl-launch plot runs/sloppy-sorter/t0 --html t0.html          one file for a browser; needs no matplotlib
  asyncrl-launch plot runs/sloppy-sorter/t0 --json                  prints the numbers; needs no matplotlib

Drawing needs an extra: pip install 'asyncrl[plot]'. A run that continued from a checkpoint is one curve, without the
steps after that checkpoint, which were trained again. A run that began anew has one curve per beginning. Metrics that a
run has not written are left out; the command lists them.

exit codes: 0 drawn; 1 there is nothing to draw, or matplotlib is missing; 2 a wrong argument."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "plot", plot, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="folder of a run, or the CONFIG that it was started from (default: the only run under ./runs)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the picture file (default: plot.png in the run's folder)"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write one file for a browser instead of a picture")
    parser.add_argument("--all", action="store_true", help="draw the panels of the time, too; the picture is larger")
    parser.add_argument(
        "--metric",
        metavar="KEY",
        action="append",
        default=[],
        help="draw this metric of metrics.jsonl instead, such as a statistic of your own function; may be repeated",
    )


def plot(arguments: argparse.Namespace, console: Console) -> int:
    """Draw reward, off-policyness, lengths, entropy, KL, time and throughput of runs into a picture file."""
    overrides = [target for target in arguments.runs if "=" in target and not Path(target).exists()]
    targets = [target for target in arguments.runs if target not in overrides]
    run_dirs = [run_dir_of(target, overrides) for target in targets or [None]]
    if arguments.html is not None and (arguments.metric or arguments.out is not None):
        raise ConfigError("--html writes the page of the runs; remove --metric and --out")
    shown = picture(read_runs(run_dirs, is_running), arguments.metric)
    if not shown.panels and shown.runs and arguments.metric:
        raise LaunchError(f"nothing to draw: {'; '.join(shown.missing)}")
    if not shown.panels:
        raise LaunchError(
            f"{', '.join(map(str, run_dirs)) or 'no run'}: nothing to draw: no {METRICS_FILE} with a train step or an "
            "evaluation in it (yet); `asyncrl-launch status RUN` shows the state of a run"
        )
    if arguments.html is not None:
        named = dict(zip(distinct_names(run_dirs), run_dirs, strict=True))
        _write_html(saved_page(named, arguments.clock), arguments.html)
    if arguments.json:
        if arguments.out is not None:
            write_picture(shown, arguments.out)
        advice = {run.name: [found.line for found in advise(run)] for run in shown.runs}
        written = arguments.out or arguments.html
        print_json({**as_json(shown), "picture": written and str(written), "advice": advice})
        return 0
    if arguments.html is not None:
        say(console, f"page: {arguments.html}")
        return 0
    out = arguments.out or _default_path(run_dirs)
    write_picture(shown if arguments.all or arguments.metric else of_learning(shown), out)
    for note in _notes(shown, run_dirs):
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    say(console, f"picture: {out}")
    return 0


def _write_html(page: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"the page cannot be written: {error}; choose another file with --html") from error


def _notes(shown: Picture, run_dirs: list[Path]) -> list[str]:
    """Notes about runs that do not learn, and about what is not in the picture."""
    notes = [f"{run.name}: {found.line}" for run in shown.runs for found in advise(run)]
    notes += [f"left out: {text}" for text in shown.missing]
    drawn = {run.run_dir for run in shown.runs}
    notes += [f"{path}: nothing to draw (yet)" for path in run_dirs if path.resolve() not in drawn]
    broken = {run.run_dir: run.num_broken_lines for run in shown.runs if run.num_broken_lines}
    notes += [f"{path / METRICS_FILE}: {count} broken lines skipped" for path, count in broken.items()]
    return notes


def _default_path(run_dirs: list[Path]) -> Path:
    """plot.png in the folder of the run; for several runs in the deepest folder that contains them all."""
    return Path(os.path.commonpath(run_dirs)) / "plot.png"
