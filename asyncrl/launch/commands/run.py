"""`asyncrl-launch run`."""

from __future__ import annotations

import argparse
import logging

from rich.console import Console

from asyncrl.config import load_experiment
from asyncrl.launch.commands.common import Commands, add_config_command
from asyncrl.launch.local import LocalLauncher
from asyncrl.launch.preflight import preflight
from asyncrl.launch.program import run_directory, total_steps
from asyncrl.launch.progress import RunView, print_summary

_EPILOG = """

exit code: 0 the run is complete; 1 it failed, the first cause is printed; 2 the config cannot work;
130, 143 it was stopped (Ctrl-C, SIGTERM). A second Ctrl-C kills at once. However it ends, no process of it
is left. In another terminal: asyncrl-launch status|stop RUN."""


def add_to(commands: Commands) -> None:
    add_config_command(commands, "run", run, epilog=_EPILOG)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Start a run, show a line per train step, end all its processes."""
    config = load_experiment(arguments.config, arguments.overrides)
    num_prompts = preflight(config)
    run_dir = run_directory(config)
    steps = total_steps(config, num_prompts)
    console.print(
        f"{run_dir}: up to {steps} train steps; logs in {run_dir}/logs/latest", highlight=False, soft_wrap=True
    )
    view = RunView(run_dir, steps, console)
    handler = _NoticeHandler(view)
    logging.getLogger("asyncrl").addHandler(handler)
    try:
        code = LocalLauncher(config, num_prompts, view).run()
    finally:
        view.close()
        logging.getLogger("asyncrl").removeHandler(handler)
    if code == 0:
        print_summary(run_dir, console)
    else:
        console.print(
            f"stopped; nothing of the run is left running. Logs: {run_dir}/logs/latest",
            highlight=False,
            soft_wrap=True,
        )
    return code


class _NoticeHandler(logging.Handler):
    """Warnings of the launcher's own parts, such as its session with etcd."""

    def __init__(self, view: RunView) -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.notice(self.format(record))
