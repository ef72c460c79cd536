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

from asyncrl.cli.commands.common import Commands, add_run_command, goes_on, names_of, not_running, print_json, say
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.launch.rundir import LaunchError, RunRecord, has_lock, holder, is_running, read_record
from asyncrl.launch.slurm import JobRecord, ask_to_stop, cancel, job_state, read_job
from asyncrl.protocol.names import Names
from asyncrl.runtime.clock import Clock, wait_until

_STOP_LIMIT_S = 30.0
_JOB_LIMIT_S = 60.0
_LOOK_S = 1.0
_AGAIN_S = 1.2  # between two signals; if the second came within 1 s, the launcher would take both for one

_DESCRIPTION = """Stop a run, like Ctrl-C in its terminal, and wait until all its processes have ended.

The run first finishes its train step and writes a checkpoint, if both take at most checkpoint.on_stop_s. With --now it
stops at once."""

_EPILOG = f"""examples:
  asyncrl-launch stop runs/sloppy-sorter/t0
  asyncrl-launch stop configs/quickstart_cpu.yaml trial=second      a run named by its config
  asyncrl-launch stop runs/sloppy-sorter/t0 --now                   at once; `resume` continues from an older checkpoint

exit codes: 0 the run is not running (any more); 1 it did not stop within checkpoint.on_stop_s plus {_STOP_LIMIT_S:g} s,
the remedy is printed."""


def add_to(commands: Commands) -> None:
    parser = add_run_command(commands, "stop", stop, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--now", action="store_true", help="stop at once, without a last checkpoint")


def stop(arguments: argparse.Namespace, console: Console) -> int:
    """Stop a run and wait until all its processes have ended."""
    run_dir = run_dir_of(arguments.run, arguments.overrides, running=True)
    job = read_job(run_dir)
    if job is not None and not job_state(job.job_id).ended:
        return _stop_job(run_dir, job, arguments, console)
    record = _record(run_dir)
    elsewhere = record is not None and record.host not in ("", socket.gethostname())
    pid = record.pid if record is not None and elsewhere and goes_on(run_dir, record) else None
    if not elsewhere:
        pid = holder(run_dir)
    if pid is None:
        say(console, not_running(run_dir, record))
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
            elif has_lock(pid, run_dir):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            elif holder(run_dir) == pid:
                raise LaunchError(
                    f"{run_dir} is in use by a launcher whose process {pid} is not one of this machine or container: stop the run "
                    "where it was started"
                )
            # With --now repeat the request until the run ends: the second one makes the launcher kill all processes at once, but a
            # busy launcher may handle two signals together and take them for one
            ask_at = clock.monotonic() + _AGAIN_S if arguments.now else math.inf
        if clock.monotonic() > deadline:
            raise LaunchError(
                f"the launcher, process {pid}{where}, did not stop within {limit_s:g} s; `kill -9 {pid}`{where} ends it and "
                "all processes of the run"
            )
        clock.sleep(0.1)
    say(console, f"{run_dir}: stopped")
    if arguments.json:
        print_json({"run_dir": str(run_dir), "was_running": True, "running": False, "pid": pid})
    return 0


def _record(run_dir: Path) -> RunRecord | None:
    """The run's record. If it is damaged: None if a launcher runs on this machine (the lock file then has its process id), else
    raises LaunchError."""
    try:
        return read_record(run_dir)
    except LaunchError:
        if is_running(run_dir):
            return None
        raise


def _stop_job(run_dir: Path, job: JobRecord, arguments: argparse.Namespace, console: Console) -> int:
    """Ask a running job to stop, through Slurm, because that works from any host. With --now, or if the job is not running yet,
    cancel it instead. Wait until it has ended."""
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
    say(console, f"{run_dir}: stopped, with job {job.job_id}")
    if arguments.json:
        print_json({"run_dir": str(run_dir), "was_running": True, "running": False, "job_id": job.job_id})
    return 0


def _ask_elsewhere(record: RunRecord) -> None:
    """Ask a launcher on another host to stop, through name resolve."""
    with names_of(record) as resolver:
        resolver.add(Names(record.experiment, record.trial).stop_request(), socket.gethostname(), replace=True)
