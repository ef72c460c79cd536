"""`asyncrl-launch stop`."""

from __future__ import annotations

import argparse
import os
import signal
import time

from rich.console import Console

from asyncrl.launch.commands.common import Commands, add_command, not_running, run_dir_of
from asyncrl.launch.rundir import LaunchError, holder, is_running, read_record

_STOP_LIMIT_S = 30.0


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "stop", stop)
    parser.add_argument("run", metavar="RUN", help="folder of the run, or the CONFIG it was started from")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides it was started with")


def stop(arguments: argparse.Namespace, console: Console) -> int:
    """Stop a run and wait until nothing of it is left."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    pid = holder(run_dir)
    if pid is None:
        console.print(not_running(run_dir, read_record(run_dir)), highlight=False, soft_wrap=True)
        return 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_LIMIT_S
    while is_running(run_dir):
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the launcher, process {pid}, did not stop within {_STOP_LIMIT_S:g} s; `kill -9 {pid}` ends it, and "
                "with it all processes of the run"
            )
        time.sleep(0.1)
    console.print(f"{run_dir}: stopped", highlight=False, soft_wrap=True)
    return 0
