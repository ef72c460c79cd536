"""asyncrl-launch: run, check, prepare, status, stop."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.config import ConfigError, ExperimentConfig, NameResolveConfig, load_experiment
from asyncrl.launch.local import LaunchError, LocalLauncher
from asyncrl.launch.preflight import preflight
from asyncrl.launch.program import plan, run_directory, total_steps
from asyncrl.launch.progress import MetricsTail, make_console, print_summary
from asyncrl.launch.rundir import RunBusyError, RunRecord, is_running, read_record
from asyncrl.messages import WorkerStatus
from asyncrl.names import Names
from asyncrl.runtime.name_resolve import NameResolveError, open_name_resolver

_STOP_LIMIT_S = 30.0

_EPILOG = """examples:
  asyncrl-launch check configs/quickstart_cpu.yaml
  asyncrl-launch run configs/quickstart_cpu.yaml trial=second train.optimizer.lr=1e-4
  asyncrl-launch status runs/sloppy-sorter/second
  asyncrl-launch stop runs/sloppy-sorter/second
"""


def main() -> int:
    arguments = _parser().parse_args()
    console = make_console()
    try:
        return int(arguments.command(arguments, console))
    except ConfigError as error:
        console.print(f"[bold red]config:[/] {error}", highlight=False, markup=True)
        return 2
    except (RunBusyError, LaunchError) as error:
        console.print("[bold red]failed:[/]", end=" ")
        console.print(str(error), markup=False, highlight=False)
        return 1


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run to the end, with a line per train step."""
    config = load_experiment(arguments.config, arguments.overrides)
    num_prompts = preflight(config)
    run_dir = run_directory(config)
    steps = total_steps(config, num_prompts)
    console.print(f"{run_dir}: up to {steps} train steps; logs in {run_dir}/logs/latest", highlight=False)
    tail = MetricsTail(run_dir, steps, console)
    code = LocalLauncher(config, num_prompts, tail.turn).run()
    tail.turn()
    if code == 0:
        print_summary(run_dir, console)
    else:
        console.print(f"stopped; nothing of the run is left running. Logs: {run_dir}/logs/latest", highlight=False)
    return code


def check(arguments: argparse.Namespace, console: Console) -> int:
    """Validate a config and the files it names, print the processes, start nothing."""
    config = load_experiment(arguments.config, arguments.overrides)
    num_prompts = preflight(config)
    specs = plan(config, attempt=1, num_prompts=num_prompts)
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
    return subprocess.run(command, check=False).returncode


def status(arguments: argparse.Namespace, console: Console) -> int:
    """Every worker: state, heartbeat, what it waits for and for how long, queue depths, version."""
    run_dir = _run_dir(arguments)
    record = read_record(run_dir)
    if record is None or not is_running(run_dir):
        console.print(f"{run_dir}: no run is going on here", highlight=False)
        return 3
    statuses = _read_statuses(record)
    table = Table(
        title=f"{run_dir}, attempt {record.attempt}, up {time.time() - record.started:.0f} s", title_justify="left"
    )
    for column in ("worker", "state", "heartbeat", "version", "waits for", "queues"):
        table.add_column(column)
    for entry in statuses:
        waits = "; ".join(f"{w.what} from {w.on} ({w.since_s:.0f} of {w.limit_s:.0f} s)" for w in entry.waits)
        queues = " ".join(f"{name}={depth}" for name, depth in sorted(entry.queues.items()))
        table.add_row(entry.worker, entry.state, f"{time.time() - entry.time:.1f} s ago", entry.version, waits, queues)
    console.print(table)
    return 0


def stop(arguments: argparse.Namespace, console: Console) -> int:
    """Stop a run and wait until nothing of it is left."""
    run_dir = _run_dir(arguments)
    record = read_record(run_dir)
    if record is None or not is_running(run_dir):
        console.print(f"{run_dir}: no run is going on here", highlight=False)
        return 0
    os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_LIMIT_S
    while is_running(run_dir):
        if time.monotonic() > deadline:
            console.print(
                f"the launcher, process {record.pid}, did not stop within {_STOP_LIMIT_S:g} s", highlight=False
            )
            return 1
        time.sleep(0.1)
    console.print(f"{run_dir}: stopped", highlight=False)
    return 0


def _run_dir(arguments: argparse.Namespace) -> Path:
    """A run's folder, given as such or by its config."""
    target = Path(arguments.run)
    if target.is_dir():
        return target.absolute()
    config: ExperimentConfig = load_experiment(target, arguments.overrides)
    return run_directory(config)


def _read_statuses(record: RunRecord) -> list[WorkerStatus]:
    try:
        with open_name_resolver(NameResolveConfig(endpoints=record.endpoints)) as resolver:
            values = resolver.get_subtree(Names(record.experiment, record.trial).statuses())
    except NameResolveError as error:
        raise LaunchError(f"name resolve at {', '.join(record.endpoints)} does not answer: {error}") from error
    return [msgspec.json.decode(value, type=WorkerStatus) for _, value in sorted(values.items())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-launch",
        description="Asynchronous reinforcement learning of language models, without Ray.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function in (("run", run), ("check", check), ("prepare", prepare)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("config", metavar="CONFIG", help="YAML file; configs/ has examples")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", help="dotted overrides, e.g. train.batch_size=32"
        )
        command.set_defaults(command=function)
    for name, function in (("status", status), ("stop", stop)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("run", metavar="RUN", help="folder of the run, or the CONFIG it was started from")
        command.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides it was started with")
        command.set_defaults(command=function)
    return parser


if __name__ == "__main__":
    sys.exit(main())
