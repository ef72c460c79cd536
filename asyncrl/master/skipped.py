"""Steps that were skipped because their loss or gradient was not finite: counts them, saves their batches, limits their number.

The engines decide to skip, all ranks of a model alike (model/engine.py). A train step has several optimizer steps. If only some of
them are skipped, that is counted and saved too. Only train steps without any completed optimizer step count towards the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config.schema import TrainConfig
from asyncrl.data.bad_batches import folder_of, prune_bad_batches, write_why
from asyncrl.dataflow.redistribution import members, plan_redistribution
from asyncrl.master.buffer import StorageTracker
from asyncrl.master.calls import WorkerCaller
from asyncrl.protocol.calls import Redistribute, SaveBatch
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.run_folder import name_of
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.runtime.services import Services

_SKIPPED, _TRIED = "/skipped_steps", "/optimizer_steps"  # statistics of a trained role


class SkippedStepsError(RunEndedError):
    """Training makes no progress: loss or gradient is not finite in too many consecutive steps."""


def num_skipped(stats: Mapping[str, float]) -> int:
    """Return the number of skipped optimizer steps of a train step, over all roles."""
    return int(sum(value for name, value in stats.items() if name.endswith(_SKIPPED)))


class SkippedSteps:
    """Counts skipped steps, saves their batches and checks the limit. Pure, except for `save`."""

    def __init__(self, train: TrainConfig, run_dir: Path, attempt: int, services: Services) -> None:
        self._train, self._run_dir, self._attempt = train, run_dir, attempt
        self._logger, self._clock = services.logger, services.clock
        self._in_row: dict[str, int] = {}  # role -> consecutive skipped train steps
        self._saved = ""

    def add(self, stats: Mapping[str, float]) -> bool:
        """Count a train step. Returns whether any optimizer step was skipped."""
        for name, tried in stats.items():
            if not name.endswith(_TRIED) or not tried:
                continue
            role = name.removesuffix(_TRIED)
            nothing_made = stats.get(role + _SKIPPED, 0.0) >= tried
            self._in_row[role] = self._in_row.get(role, 0) + 1 if nothing_made else 0
        return num_skipped(stats) > 0

    def check(self) -> None:
        """Raises SkippedStepsError after train.max_skipped_steps consecutive train steps in which a role skipped all its optimizer
        steps. 0: no limit."""
        most = self._train.max_skipped_steps
        for role, count in self._in_row.items():
            if most and count >= most:
                raise SkippedStepsError(
                    f"the last {count} train steps of the {role} were skipped: loss or gradient were not finite in all of them "
                    f"(train.max_skipped_steps={most}). {self._saved or 'No batch was saved (train.keep_bad_batches=0).'}"
                    f" If the weights are the cause, try a lower train.{'critic.' if role == 'critic' else ''}optimizer.lr,"
                    " train.dtype=float32, or resume from an earlier checkpoint"
                )

    async def save(
        self,
        metas: Sequence[TrajectoryMeta],
        step: int,
        stats: Mapping[str, float],
        *,
        heads: Sequence[int],
        tracker: StorageTracker,
        caller: WorkerCaller,
    ) -> None:
        """Have the heads write the batch, with all keys, before it is discarded. A disk error is only a warning."""
        if not self._train.keep_bad_batches:
            return
        folder = folder_of(self._run_dir, self._attempt, step)
        # Groups differ in their keys if a step function selects groups, or if a worker group was missing in a part of the batch
        writers: dict[int, list[str]] = {}
        by_keys: dict[frozenset[str], dict[int, list[str]]] = {}
        for meta in metas:
            head, keys = heads[meta.head % len(heads)], frozenset(tracker.holders.get(meta.ticket_id, ()))
            writers.setdefault(head, []).append(meta.ticket_id)
            by_keys.setdefault(keys, {}).setdefault(head, []).append(meta.ticket_id)
        moves = [
            move for keys, of in by_keys.items() for move in plan_redistribution(of, sorted(keys), tracker.holders)
        ]
        if moves:
            tracker.apply(moves)
            await caller.call("a bad batch to be gathered", members(moves), Redistribute(steps=moves))
        body = SaveBatch(folder=name_of(self._run_dir, folder), version=step - 1, metas=list(metas))
        await caller.call("a bad batch to be saved", list(writers), body)
        try:
            await asyncio.to_thread(write_why, folder, self._clock.time(), stats)
            await asyncio.to_thread(prune_bad_batches, self._run_dir, self._train.keep_bad_batches)
        except OSError as error:
            self._logger.warning("%s could not be written: %s", folder, error)
        self._saved = f"To find the sequences: `python examples/bad_batch/examine.py {self._run_dir} {step}`."
        self._logger.warning(
            "step %d: %d optimizer steps skipped, loss or gradient not finite; the batch is in %s. %s",
            step,
            num_skipped(stats),
            folder,
            self._saved,
        )
