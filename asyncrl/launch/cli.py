"""asyncrl-launch: run, check, prepare, status, stop."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.config import ConfigError, NameResolveConfig, load_experiment
from asyncrl.launch.local import LocalLauncher
from asyncrl.launch.preflight import preflight, visible_devices
from asyncrl.launch.program import plan, run_directory, total_steps
from asyncrl.launch.progress import RunView, make_console, print_summary
from asyncrl.launch.rundir import LaunchError, RunRecord, holder, is_running, read_record
from asyncrl.messages import WorkerStatus
from asyncrl.names import Names
from asyncrl.runtime.name_resolve import NameResolveError, open_name_resolver

_STOP_LIMIT_S = 30.0
_INTERRUPTED = 130

_DESCRIPTION = """Asynchronous reinforcement learning of language models, without Ray.

A run is a config (YAML) and overrides; `run` starts its processes on this machine, prints a line per train
step, and ends them all when it ends. Everything it makes is in <fileroot>/<experiment>/<trial>/."""

_EPILOG = """examples:
  asyncrl-launch check  configs/quickstart_cpu.yaml                 what would run, and whether it can
  asyncrl-launch run    configs/quickstart_cpu.yaml trial=second train.optimizer.lr=1e-4
  asyncrl-launch status runs/sloppy-sorter/second                   from another terminal: who waits for whom
  asyncrl-launch stop   runs/sloppy-sorter/second                   as Ctrl-C would

`asyncrl-launch COMMAND --help` says more of each."""

_CONFIG_EPILOG = """overrides are dotted fields of the config, for instance:
  trial=second                        another folder: <fileroot>/<experiment>/second
  allocation=transformers.d2+d2       generation servers + data-parallel model workers
  train.batch_size=32 train.max_steps=100 train.optimizer.lr=1e-4
  manager.max_head_offpolicyness=0    how many versions generation may lag behind; 0: synchronous
  rollout.group_size=8 rollout.sampling.max_new_tokens=256
  name_resolve.endpoints=[host:2379]  your etcd instead of a private one
All fields, their meaning and defaults: asyncrl/config.py. A wrong name is answered with the nearest right one."""

_RUN_EPILOG = """

exit code: 0 the run is complete; 1 it failed, the first cause is printed; 2 the config cannot work;
130, 143 it was stopped (Ctrl-C, SIGTERM). A second Ctrl-C kills at once. However it ends, no process of it
is left. In another terminal: asyncrl-launch status|stop RUN."""


def main(argv: Sequence[str] | None = None) -> int:
    """argv: instead of the command line's."""
    arguments = _parser().parse_args(argv)
    console = make_console()
    try:
        return int(arguments.command(arguments, console))
    except ConfigError as error:
        console.print("[bold red]config:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    except LaunchError as error:
        console.print("[bold red]failed:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:  # before there was a run to stop
        return _INTERRUPTED


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


def check(arguments: argparse.Namespace, console: Console) -> int:
    """Validate a config and the files it names, print the processes, start nothing."""
    config = load_experiment(arguments.config, arguments.overrides)
    num_prompts = preflight(config)
    specs = plan(config, attempt=1, num_prompts=num_prompts, devices=visible_devices())
    table = Table(title=f"{run_directory(config)}", title_justify="left")
    for column in ("process", "uses", "environment"):
        table.add_column(column)
    for spec in specs:
        env = " ".join(f"{key}={value}" for key, value in sorted(spec.env.items()))
        table.add_row(spec.name, "a core or device" if spec.computes else "little", env)
    console.print(table)
    eta, batch_size = config.manager.max_head_offpolicyness, config.train.batch_size
    steps = total_steps(config, num_prompts)
    console.print(
        f"{num_prompts} prompts x {config.train.num_epochs} epochs, {steps} steps of {batch_size} prompts x "
        f"{config.rollout.group_size} responses; eta = {eta}: at most {(1 + eta) * batch_size} prompts live",
        highlight=False,
    )
    console.print("[green]ok[/]: this config can run")
    return 0


def prepare(arguments: argparse.Namespace, console: Console) -> int:
    """Where the model is missing, run the config's own `prepare` command."""
    config = load_experiment(arguments.config, arguments.overrides)
    if (Path(config.model_path).expanduser() / "config.json").is_file():
        return 0
    if not config.prepare:
        raise ConfigError(
            f"model_path={config.model_path!r}: there is no model, and the config has no `prepare` command to make it"
        )
    console.print(f"no model in {config.model_path}: running `{config.prepare}`", highlight=False)
    command = shlex.split(config.prepare)
    if command[0] in {"python", "python3"}:
        command[0] = sys.executable
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise ConfigError(f"prepare={config.prepare!r}: {error}") from error


def status(arguments: argparse.Namespace, console: Console) -> int:
    """Show every worker: state, heartbeat, version, what it waits for, on whom and for how long, queue depths."""
    run_dir = _run_dir(arguments)
    record = read_record(run_dir)
    if record is None or not is_running(run_dir):
        console.print(_not_running(run_dir, record), highlight=False, soft_wrap=True)
        return 3
    statuses = _read_statuses(record)
    table = Table(
        title=f"{run_dir}, attempt {record.attempt}, up {time.time() - record.started:.0f} s", title_justify="left"
    )
    for column in ("worker", "state", "heartbeat", "version", "waits for", "queues"):
        table.add_column(column)
    for entry in statuses:
        table.add_row(*_status_row(entry))
    console.print(table, markup=False)
    return 0


def _status_row(status: WorkerStatus) -> tuple[str, ...]:
    waits: dict[str, int] = {}
    for wait in sorted(status.waits, key=lambda wait: -wait.since_s):
        text = f"{wait.what} from {wait.on} ({wait.since_s:.0f} of {wait.limit_s:.0f} s)"
        waits[text] = waits.get(text, 0) + 1
    queues = " ".join(f"{name}={depth}" for name, depth in sorted(status.queues.items()))
    return (
        status.worker,
        status.state,
        f"{max(0.0, time.time() - status.time):.1f} s ago",
        status.version,
        "\n".join(text if count == 1 else f"{text} x{count}" for text, count in waits.items()),
        queues,
    )


def stop(arguments: argparse.Namespace, console: Console) -> int:
    """Stop a run and wait until nothing of it is left."""
    run_dir = _run_dir(arguments)
    pid = holder(run_dir)
    if pid is None:
        console.print(_not_running(run_dir, read_record(run_dir)), highlight=False, soft_wrap=True)
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


def _not_running(run_dir: Path, record: RunRecord | None) -> str:
    if record is None:
        return f"{run_dir}: no run is going on here, and none has been"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))
    return f"{run_dir}: no run is going on here; the last one was attempt {record.attempt}, begun {began}"


def _run_dir(arguments: argparse.Namespace) -> Path:
    """A run's folder, given as such or by its config."""
    target = Path(arguments.run)
    if target.is_dir():
        return target.absolute()
    if not target.is_file():
        raise ConfigError(f"{arguments.run!r} is neither the folder of a run nor a config")
    return run_directory(load_experiment(target, arguments.overrides))


def _read_statuses(record: RunRecord) -> list[WorkerStatus]:
    try:
        with open_name_resolver(NameResolveConfig(endpoints=record.endpoints)) as resolver:
            values = resolver.get_subtree(Names(record.experiment, record.trial).statuses())
    except NameResolveError as error:
        raise LaunchError(
            f"the run goes on (process {record.pid}), but its name resolve at {', '.join(record.endpoints)} does not answer: "
            f"{error}"
        ) from error
    return [msgspec.json.decode(value, type=WorkerStatus) for _, value in sorted(values.items())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-launch",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for name, function in (("run", run), ("check", check), ("prepare", prepare)):
        command = commands.add_parser(
            name,
            help=function.__doc__,
            description=function.__doc__,
            epilog=_CONFIG_EPILOG + (_RUN_EPILOG if name == "run" else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("config", metavar="CONFIG", help="YAML file; configs/ has examples")
        command.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the file's fields")
        command.set_defaults(command=function)
    for name, function in (("status", status), ("stop", stop)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("run", metavar="RUN", help="folder of the run, or the CONFIG it was started from")
        command.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides it was started with")
        command.set_defaults(command=function)
    return parser


if __name__ == "__main__":
    sys.exit(main())
