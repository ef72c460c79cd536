"""`asyncrl-launch status`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from asyncrl.cli.commands.common import (
    NOT_RUNNING,
    Commands,
    add_run_command,
    goes_on,
    names_of,
    not_running,
    print_json,
    say,
)
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.cli.live_state import Seen, read_seen
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.launch.rundir import RunRecord, all_logs_dirs, read_record
from asyncrl.launch.standstill import wait_texts
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.clock import Clock
from asyncrl.runtime.names.interface import NameResolveError, NameResolver
from asyncrl.runtime.stacks import ask_all

_WATCH_S = 1.0  # the launcher publishes once a second
_STACKS_LIMIT_S = 3.0  # a process answers in milliseconds unless it is inside a long call

_DESCRIPTION = """Show step, reward and remaining time of a running run, then for every worker: state, age of its last heartbeat,
version of its weights, what it waits for (on which process, for how long, with which limit), and the depth of its queues.

With --stacks: show what each process on this machine is doing, even if it hangs: the stacks of its threads (innermost
call first), then its asyncio tasks (outermost first). This works without name resolve, and reports processes that are
stopped or gone."""

_EPILOG = """examples:
  asyncrl-launch status runs/sloppy-sorter/t0
  asyncrl-launch status configs/quickstart_cpu.yaml trial=second    a run named by its config
  asyncrl-launch status runs/sloppy-sorter/t0 --watch               update every second, until the run ends or Ctrl-C
  asyncrl-launch status runs/sloppy-sorter/t0 --stacks              where does it hang?
  asyncrl-launch status runs/sloppy-sorter/t0 --json | jq '.workers[] | {worker, waits}'

exit codes: 0 the run is running; 1 it is running, but its name resolve does not answer; 3 it is not running."""


def add_to(commands: Commands) -> None:
    parser = add_run_command(commands, "status", status, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--watch", action="store_true", help="update every second, until the run ends")
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="show the stacks of each process's threads, and its asyncio tasks",
    )


def status(arguments: argparse.Namespace, console: Console) -> int:
    """Show step, reward and remaining time, then every worker: state, version, waits, queues."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    record = read_record(run_dir)
    running = goes_on(run_dir, record)
    if record is None or not running:
        failed = [f"it failed: {record.failure}"] if record is not None and record.failure else []
        say(console, not_running(run_dir, record), *failed)
        if arguments.json:
            print_json({"run_dir": str(run_dir), "running": False, "record": record, "workers": []})
        return NOT_RUNNING
    if arguments.stacks:
        _show_stacks(run_dir, record, console, as_json=arguments.json)
        return 0
    with names_of(record) as resolver:
        if arguments.watch:
            _watch(run_dir, record, resolver, console, arguments.clock, as_json=arguments.json)
        else:
            seen = read_seen(run_dir, record, resolver, arguments.clock.time())
            _show(run_dir, record, seen, console, as_json=arguments.json)
    return 0


def _show_stacks(run_dir: Path, record: RunRecord, console: Console, *, as_json: bool) -> None:
    """Show the stacks of the run's processes on this machine. waits for: their answers, at most _STACKS_LIMIT_S."""
    found = ask_all(all_logs_dirs(run_dir), _STACKS_LIMIT_S)
    # A process on another machine looks gone, because its process id means nothing here
    if record.host:
        found = [stacks for stacks in found if stacks.state != "gone"]
    if as_json:
        print_json({"run_dir": str(run_dir), "running": True, "record": record, "stacks": found})
        return
    for stacks in found:
        note = f": {stacks.note}" if stacks.note else ""
        title = f"[bold]== {escape(stacks.name)}[/], process {stacks.pid}{escape(note)}"
        console.print(title, highlight=False, soft_wrap=True)
        say(console, *(f"{text}\n" for text in (stacks.threads, stacks.tasks) if text))


def _show(run_dir: Path, record: RunRecord, seen: Seen, console: Console, *, as_json: bool) -> None:
    if as_json:
        training = seen.training
        progress = {
            "step": training.step or None,
            "total_steps": training.total_steps or None,
            "reward": training.reward if math.isfinite(training.reward) else None,
            "left_s": training.left_s,
        }
        there = {"progress": progress, "workers": seen.statuses, "generation_wanted": seen.desired}
        print_json({"run_dir": str(run_dir), "running": True, "record": record, **there})
    else:
        console.print(_view(run_dir, record, seen))


def _watch(
    run_dir: Path, record: RunRecord, resolver: NameResolver, console: Console, clock: Clock, *, as_json: bool
) -> None:
    """Show the state every second. unblocked by: the end of the run, or Ctrl-C."""
    with Live(console=console, auto_refresh=False) as live:
        while goes_on(run_dir, record):
            try:
                record = read_record(run_dir) or record  # another attempt may have begun
                seen = read_seen(run_dir, record, resolver, clock.time())
            except NameResolveError:
                if goes_on(run_dir, record):
                    raise
                break  # the run has ended meanwhile, and its name resolve with it
            if as_json or not console.is_terminal:
                _show(run_dir, record, seen, console, as_json=as_json)
            elif seen.statuses:
                live.update(_view(run_dir, record, seen), refresh=True)
            clock.sleep(_WATCH_S)
    say(console, f"{run_dir}: the run has ended")


def _view(run_dir: Path, record: RunRecord, seen: Seen) -> Group:
    """A line about training, then the table of workers."""
    title = f"{run_dir}, attempt {record.attempt}, up {seen.at - record.attempt_began:.0f} s"
    servers = [status for status in seen.statuses if status.worker.startswith("generation_server/")]
    num_running = sum(status.state == "running" for status in servers)
    if seen.desired not in (None, num_running):
        title += f"; {seen.desired} generation servers desired, {num_running} running"
    columns = (
        *("worker", Column("state", "text"), "heartbeat", "version", "peak memory"),
        *(Column("waits for", "text"), Column("queues", "text")),
    )
    rows = [[escape(cell) for cell in _status_row(entry, seen.at)] for entry in seen.statuses]
    training = seen.training.text() if seen.training.step else f"no train step yet in attempt {record.attempt}"
    notes = [f"[yellow]{escape(note)}[/]" for status in seen.statuses for note in status.notes]
    return Group(f"[bold]{escape(training)}[/]", FittedTable(escape(title), columns, rows), *notes)


def _status_row(status: WorkerStatus, now: float) -> tuple[str, ...]:
    queues = " ".join(f"{name}={depth}" for name, depth in sorted(status.queues.items()))
    return (
        status.worker + (f" on {status.host}" if status.host else ""),
        status.state + (f", restart {status.restarts}" if status.restarts else ""),
        f"{max(0.0, now - status.time):.1f} s ago",
        status.version,
        f"{status.memory_bytes / 2**30:.1f} GiB",
        "\n".join(wait_texts(status.waits)),
        queues,
    )
