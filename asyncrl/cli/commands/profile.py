"""`asyncrl-launch profile`."""

from __future__ import annotations

import argparse
import contextlib
import uuid
from pathlib import Path

import msgspec
from omegaconf import OmegaConf
from rich.console import Console

from asyncrl.cli.commands.common import (
    NOT_RUNNING,
    Commands,
    add_run_command,
    goes_on,
    names_of,
    print_json,
    record_of_running,
    say,
)
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError
from asyncrl.launch.rundir import LaunchError, RunRecord
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.names import Names
from asyncrl.protocol.profiling import MOST_PROFILED_STEPS, ProfileAnswer, ProfileRequest
from asyncrl.protocol.run_folder import path_of
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.interface import NameEntryExists, NameEntryNotFound, NameResolveError, NameResolver
from asyncrl.runtime.trace import merge, span_of, trace_dir

_LIMIT_S = 1800.0
_LOOK_S = 0.5

_DESCRIPTION = f"""Record the next train steps of a running run with torch's profiler, in every model worker of the trainer group,
and merge the recordings into one file for https://ui.perfetto.dev. If the run has a timeline (trace=true), the file
shows it for the same time, on the same clock.

Recording slows the run down a little and stops by itself. Ctrl-C stops it at once. A worker's file has at most 64 MB:
the shortest events beyond that are left out. The run keeps its newest 3 profiles, of at most {MOST_PROFILED_STEPS} steps each."""

_EPILOG = """examples:
  asyncrl-launch profile runs/sloppy-sorter/t0
  asyncrl-launch profile runs/sloppy-sorter/t0 --steps 1 --out /tmp/profile

exit codes: 0 written; 1 the run ended first, or --limit passed; 2 the run cannot be profiled; 3 it is not running."""


def add_to(commands: Commands) -> None:
    parser = add_run_command(commands, "profile", profile, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="number of train steps (default: 2)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the merged file (default: profile/ in the run's folder)"
    )
    parser.add_argument("--limit", type=float, default=_LIMIT_S, metavar="S", help="longest wait (default: 1800 s)")


def profile(arguments: argparse.Namespace, console: Console) -> int:
    """Record the next train steps of a running run with torch's profiler."""
    if not 1 <= arguments.steps <= MOST_PROFILED_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: use a number from 1 to {MOST_PROFILED_STEPS}")
    run_dir = run_dir_of(arguments.run, arguments.overrides, running=True)
    record = record_of_running(run_dir, console, as_json=arguments.json)
    if record is None:
        return NOT_RUNNING
    mode = OmegaConf.load(run_dir / "config.yaml").mode
    if not mode_of(mode).trains:
        raise ConfigError(f"mode={mode}: {run_dir} trains nothing, so there is no step to record")
    answer = _recorded(run_dir, record, arguments, console)
    if len(answer.failed) == answer.num_workers:
        raise LaunchError(f"no worker could record: {run_dir}/logs/latest/model_worker_*.log has the reason")
    folder = path_of(run_dir, answer.folder)
    out = (arguments.out or folder) / "profile.json"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        span = span_of(folder)
        timeline = trace_dir(run_dir, record.attempt)
        num_events = merge(folder, out, timeline=timeline, span=span)
    except OSError as error:
        raise LaunchError(f"{out} cannot be written: {error}; choose another folder with --out") from error
    if arguments.json:
        print_json({"file": str(out), "events": num_events, "answer": answer})
        return 0
    steps = f"train steps {answer.first_step} to {answer.last_step}"
    say(
        console,
        *(f"{name} has no recording: its log has the reason" for name in answer.failed),
        f"{out}: {steps}, {num_events} events; open it in https://ui.perfetto.dev",
    )
    return 0


def _recorded(run_dir: Path, record: RunRecord, arguments: argparse.Namespace, console: Console) -> ProfileAnswer:
    """Ask the run's master for a recording, and wait for it."""
    names = Names(record.experiment, record.trial)
    request = ProfileRequest(id=uuid.uuid4().hex, steps=arguments.steps)
    try:
        with names_of(record) as resolver:
            try:
                resolver.add(names.profile_request(), msgspec.json.encode(request).decode())
            except NameEntryExists:
                busy = f"{run_dir}: another profile is being recorded; wait for it, or interrupt it"
                raise LaunchError(busy) from None
            try:
                return _wait(resolver, names, request.id, run_dir, record, arguments, console)
            finally:  # also after Ctrl-C: without its request the master stops the recording
                with contextlib.suppress(NameResolveError):
                    resolver.delete(names.profile_request())
    except LaunchError as error:
        if not goes_on(run_dir, record):
            raise LaunchError(f"{run_dir}: the run ended before the profile was complete") from error
        raise


def _wait(
    resolver: NameResolver,
    names: Names,
    request_id: str,
    run_dir: Path,
    record: RunRecord,
    arguments: argparse.Namespace,
    console: Console,
) -> ProfileAnswer:
    """Wait for the complete answer. unblocked by: the master; the end of the run; the limit."""
    clock: Clock = arguments.clock
    deadline, shown = clock.monotonic() + arguments.limit, False
    while clock.monotonic() < deadline:
        with contextlib.suppress(NameEntryNotFound, *DECODE_ERRORS):
            answer = msgspec.json.decode(resolver.get(names.profile_answer()), type=ProfileAnswer)
            if answer.id == request_id and answer.is_complete:
                return answer
            if answer.id == request_id and not shown:
                say(console, f"recording train steps {answer.first_step} to {answer.last_step}")
                shown = True
        if not goes_on(run_dir, record):
            raise LaunchError(f"{run_dir}: the run ended before the profile was complete")
        clock.sleep(_LOOK_S)
    state = "the steps that are being recorded did not end" if shown else "no train step began"
    raise LaunchError(f"{run_dir}: {state} within {arguments.limit:g} s; --limit allows more")
