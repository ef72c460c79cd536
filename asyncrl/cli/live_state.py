"""The state of a run that is running, from name resolve and the end of metrics.jsonl. `status` prints it, and the page shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.cli.progress import TrainingProgress
from asyncrl.cli.run_files import read_records
from asyncrl.launch.rundir import RunRecord
from asyncrl.protocol.names import Names
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.desired_servers import desired_servers
from asyncrl.runtime.metrics import METRICS_FILE
from asyncrl.runtime.names.interface import NameResolver

_METRICS_BYTES = 1 << 18  # bytes read from the end of metrics.jsonl: some 100 steps


@dataclass(frozen=True)
class Seen:
    """A state of a run."""

    training: TrainingProgress
    statuses: list[WorkerStatus]
    desired: int | None  # desired number of generation servers; None: `scale` was not used
    at: float  # time of reading, unix seconds


def read_seen(run_dir: Path, record: RunRecord, resolver: NameResolver, now: float) -> Seen:
    """Read the state. now: unix seconds. Blocks; raises NameResolveError if name resolve does not answer."""
    names = Names(record.experiment, record.trial)
    values = resolver.get_subtree(names.statuses())
    statuses = [msgspec.json.decode(value, type=WorkerStatus) for _, value in sorted(values.items())]
    return Seen(training_of(run_dir, record), statuses, desired_servers(resolver, names), now)


def training_of(run_dir: Path, record: RunRecord) -> TrainingProgress:
    """The progress of the run's newest attempt (`record.attempt`), from the newest steps of that attempt. An earlier attempt may
    have reached a higher step."""
    training = TrainingProgress(record.total_steps)
    for metrics in read_records(run_dir / METRICS_FILE, _METRICS_BYTES)[0]:
        if metrics.get("attempt") == record.attempt:
            training.add(metrics, 0.0)
    return training
