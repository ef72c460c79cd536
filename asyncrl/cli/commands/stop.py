"""`asyncrl-launch stop`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_run_command, goes_on, not_running, print_json, run_dir_of
from asyncrl.launch.rundir import LaunchError, RunRecord, holder, is_running, read_record
from asyncrl.launch.slurm import JobRecord, ask_to_stop, cancel, job_state, read_job
from asyncrl.protocol.names import Names
from asyncrl.runtime.clock import Clock, wait_until
from asyncrl.runtime.names.interface import NameResolveError
from asyncrl.runtime.names.open import open_name_resolver

_STOP_LIMIT_S = 30.0
_JOB_LIMIT_S = 60.0
_LOOK_S = 1.0
_AGAIN_S = 1.2  # sooner it would count as the same one

_DESCRIPTION = """Stop a run, as Ctrl-C in its terminal would, and wait until nothing of it is left.

It ends its train step and writes a checkpoint first, if that takes no longer than checkpoint.on_stop_s; --now: it does not."""

_EPILOG = f"""examples:
  asyncrl-launch stop runs/sloppy-sorter/t0
  asyncrl-launch stop configs/quickstart_cpu.yaml trial=second      by the config it was started from
  asyncrl-launch stop runs/sloppy-sorter/t0 --now                   at once; it goes on from an older checkpoint, if there is one

exit codes: 0 nothing of it runs (any more); 1 it did not stop within checkpoint.on_stop_s and {_STOP_LIMIT_S:g} s more,
what to do is printed."""


def add_to(commands: Commands) -> None:
    parser = add_run_command(commands, "stop", stop, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--now", action="store_true", help="without a last checkpoint")


def stop(arguments: argparse.Namespace, console: Console) -> int:
    """Stop a run and wait until nothing of it is left."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    job = read_job(run_dir)
    if job is not None and not job_state(job.job_id).ended:
        return _stop_job(run_dir, job, arguments, console)
    record = _record(run_dir)
    elsewhere = record is not None and record.host not in ("", socket.gethostname())
    pid = record.pid if record is not None and elsewhere and goes_on(run_dir, record) else None
    if not elsewhere:
        pid = holder(run_dir)
    if pid is None:
        console.print(not_running(run_dir, record), highlight=False, soft_wrap=True)
        if arguments.json:
            print_json({"run_dir": str(run_dir), "was_running": False, "running": False})
        return 0
    limit_s = _STOP_LIMIT_S + (record.on_stop_s if record is not None and not arguments.now else 0.0)
    where = f" on {record.host}" if record is not None and elsewhere else ""
    clock: Clock = arguments.clock
    deadline, ask_at = clock.monotonic() + limit_s, 0.0
    while goes_on(run_dir, record) if elsewhere else is_running(run_dir):
        if clock.monotonic() > ask_at:
            if record is not None and elsewhere:
                _ask_elsewhere(record)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            # more than twice, if need be: two that a busy launcher finds together are one to it
            ask_at = clock.monotonic() + _AGAIN_S if arguments.now else math.inf
        if clock.monotonic() > deadline:
            raise LaunchError(
                f"the launcher, process {pid}{where}, did not stop within {limit_s:g} s; `kill -9 {pid}`{where} ends it, "
                "and with it all processes of the run"
            )
        clock.sleep(0.1)
    console.print(f"{run_dir}: stopped", highlight=False, soft_wrap=True)
    if arguments.json:
        print_json({"run_dir": str(run_dir), "was_running": True, "running": False, "pid": pid})
    return 0


def _record(run_dir: Path) -> RunRecord | None:
    """None where it is damaged, and the launcher runs on this machine: its lock names it."""
    try:
        return read_record(run_dir)
    except LaunchError:
        if is_running(run_dir):
            return None
        raise


def _stop_job(run_dir: Path, job: JobRecord, arguments: argparse.Namespace, console: Console) -> int:
    """A job that runs is asked through Slurm, from whichever host; one that waits, or with --now, is cancelled."""
    record = read_record(run_dir)
    gently = not arguments.now and job_state(job.job_id).state == "RUNNING"
    if gently:
        ask_to_stop(job.job_id)
    else:
        cancel(job.job_id)
    limit_s = _JOB_LIMIT_S + (record.on_stop_s if record is not None and gently else 0.0)
    if not wait_until(lambda: job_state(job.job_id).ended, limit_s=limit_s, every_s=_LOOK_S, clock=arguments.clock):
        raise LaunchError(
            f"job {job.job_id} did not end within {limit_s:g} s; `scancel --full --signal=KILL {job.job_id}` ends it"
        )
    console.print(f"{run_dir}: stopped, with job {job.job_id}", highlight=False, soft_wrap=True)
    if arguments.json:
        print_json({"run_dir": str(run_dir), "was_running": True, "running": False, "job_id": job.job_id})
    return 0


def _ask_elsewhere(record: RunRecord) -> None:
    """The launcher is on another host: it is told through name resolve."""
    try:
        with open_name_resolver(record.names_at) as resolver:
            resolver.add(Names(record.experiment, record.trial).stop_request(), socket.gethostname(), replace=True)
    except NameResolveError as error:
        raise LaunchError(
            f"the run goes on on {record.host}, but its name resolve at {record.names_at.where} does not answer: {error}"
        ) from error
