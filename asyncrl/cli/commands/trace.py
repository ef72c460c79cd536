"""`asyncrl-launch trace`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_command, print_json, run_dir_of
from asyncrl.launch.rundir import LaunchError
from asyncrl.runtime.trace import merge, trace_dir

_DESCRIPTION = """Put the timelines of a run's processes into one file, which https://ui.perfetto.dev and chrome://tracing open.

A run started with trace=true writes them, and makes this file itself when it ends. This command makes it for a
run that goes on, that was killed, or for an earlier attempt. What it shows, of all processes, on one clock: the
passes and weight loads of each generation server; rollouts, their generation and their push; train steps with
their model function calls; weights being written, verified and loaded; every wait, with whom it was for; and
the depth of every queue."""

_EPILOG = """examples:
  asyncrl-launch run   configs/quickstart_cpu.yaml trace=true train.max_steps=10
  asyncrl-launch trace runs/sloppy-sorter/t0
  asyncrl-launch trace runs/sloppy-sorter/t0 --attempt 2 --out /tmp/second.json

exit code: 0 written; 1 nothing was recorded; 2 there is no such run."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "trace", trace, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN", help="folder of the run, or the CONFIG it was started from")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides it was started with")
    parser.add_argument("--attempt", type=int, help="which attempt (default: the newest that recorded something)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: trace/attempt_N.json in the run's folder")


def trace(arguments: argparse.Namespace, console: Console) -> int:
    """Make one timeline of what a run's processes recorded."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    attempts = sorted(int(path.name.removeprefix("attempt_")) for path in run_dir.glob("trace/attempt_*/"))
    if not attempts:
        raise LaunchError(f"{run_dir}: nothing is recorded here; start the run with trace=true")
    attempt = arguments.attempt or attempts[-1]
    if attempt not in attempts:
        raise LaunchError(f"{run_dir}: attempt {attempt} recorded nothing; there are {', '.join(map(str, attempts))}")
    out = arguments.out or run_dir / "trace" / f"attempt_{attempt}.json"
    try:
        num_events = merge(trace_dir(run_dir, attempt), out)
    except OSError as error:
        raise LaunchError(f"{out} cannot be written: {error}; choose another with --out") from error
    if arguments.json:
        print_json({"file": str(out), "events": num_events, "attempt": attempt})
    else:
        console.print(
            f"{out}: {num_events} events; open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True
        )
    return 0
