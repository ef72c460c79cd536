"""`asyncrl-launch status`."""

from __future__ import annotations

import argparse
import time

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.config import NameResolveConfig
from asyncrl.launch.commands.common import NOT_RUNNING, Commands, add_command, not_running, run_dir_of
from asyncrl.launch.rundir import LaunchError, RunRecord, is_running, read_record
from asyncrl.messages import WorkerStatus
from asyncrl.names import Names
from asyncrl.runtime.name_resolve import NameResolveError, open_name_resolver


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "status", status)
    parser.add_argument("run", metavar="RUN", help="folder of the run, or the CONFIG it was started from")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides it was started with")


def status(arguments: argparse.Namespace, console: Console) -> int:
    """Show every worker: state, heartbeat, version, what it waits for, on whom and for how long, queue depths."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    record = read_record(run_dir)
    if record is None or not is_running(run_dir):
        console.print(not_running(run_dir, record), highlight=False, soft_wrap=True)
        return NOT_RUNNING
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
