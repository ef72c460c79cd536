"""`asyncrl-launch trace`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_run_command, print_json, say
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.launch.rundir import LaunchError
from asyncrl.runtime.trace import merge, trace_dir

_DESCRIPTION = """Merge the timelines of a run's processes into one file for https://ui.perfetto.dev or chrome://tracing.

A run started with trace=true records timelines, and writes this file itself when it ends. Use this command for a
run that is still running, that was killed, or for an earlier attempt. The file shows all processes on one clock:
forward passes and weight loads of each generation server; rollouts with their generation and push; train steps with
their model function calls; writing, verifying and loading of weights; every wait, with the process waited for; and
the depth of every queue."""

_EPILOG = """examples:
  asyncrl-launch run   configs/quickstart_cpu.yaml trace=true train.max_steps=10
  asyncrl-launch trace runs/sloppy-sorter/t0
  asyncrl-launch trace runs/sloppy-sorter/t0 --attempt 2 --out /tmp/second.json

exit codes: 0 written; 1 nothing was recorded; 2 there is no such run."""


def add_to(commands: Commands) -> None:
    parser = add_run_command(commands, "trace", trace, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--attempt", type=int, help="number of the attempt (default: the newest with a recording)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write (default: trace/attempt_N.json in the run's folder)"
    )


def trace(arguments: argparse.Namespace, console: Console) -> int:
    """Merge the timelines that a run's processes recorded into one file."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    attempts = sorted(int(path.name.removeprefix("attempt_")) for path in run_dir.glob("trace/attempt_*/"))
    if not attempts:
        raise LaunchError(f"{run_dir}: no timelines are recorded here; start the run with trace=true")
    attempt = arguments.attempt or attempts[-1]
    if attempt not in attempts:
        raise LaunchError(
            f"{run_dir}: attempt {attempt} recorded nothing; attempts with timelines: {', '.join(map(str, attempts))}"
        )
    out = arguments.out or run_dir / "trace" / f"attempt_{attempt}.json"
    try:
        num_events = merge(trace_dir(run_dir, attempt), out)
    except OSError as error:
        raise LaunchError(f"{out} cannot be written: {error}; choose another with --out") from error
    if arguments.json:
        print_json({"file": str(out), "events": num_events, "attempt": attempt})
    else:
        say(console, f"{out}: {num_events} events; open it in https://ui.perfetto.dev")
    return 0
