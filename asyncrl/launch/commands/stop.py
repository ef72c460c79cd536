"""`asyncrl-launch stop`."""

from __future__ import annotations

import argparse
import os
import signal
import time

from rich.console import Console

from asyncrl.launch.commands.common import Commands, add_run_command, not_running, print_json, run_dir_of
from asyncrl.launch.rundir import LaunchError, holder, is_running, read_record

_STOP_LIMIT_S = 30.0

_DESCRIPTION = """Stop a run, as Ctrl-C in its terminal would, and wait until nothing of it is left."""

_EPILOG = f"""examples:
  asyncrl-launch stop runs/sloppy-sorter/t0
  asyncrl-launch stop configs/quickstart_cpu.yaml trial=second      by the config it was started from

exit codes: 0 nothing of it runs (any more); 1 it did not stop within {_STOP_LIMIT_S:g} s, what to do is printed."""


def add_to(commands: Commands) -> None:
    add_run_command(commands, "stop", stop, description=_DESCRIPTION, epilog=_EPILOG)


def stop(arguments: argparse.Namespace, console: Console) -> int:
    """Stop a run and wait until nothing of it is left."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    pid = holder(run_dir)
    if pid is None:
        console.print(not_running(run_dir, read_record(run_dir)), highlight=False, soft_wrap=True)
        if arguments.json:
            print_json({"run_dir": str(run_dir), "was_running": False, "running": False})
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
    if arguments.json:
        print_json({"run_dir": str(run_dir), "was_running": True, "running": False, "pid": pid})
    return 0
