"""The files of a run that the master itself reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.config.schema import EvalSetConfig, trackers_of
from asyncrl.data.bad_batches import weights_needed
from asyncrl.data.evaluation_files import PromptResult, write_results
from asyncrl.data.prompts import PromptSource
from asyncrl.master.evaluations import EvalPrompt
from asyncrl.master.report import generation_idle_share
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.trajectories import Locator
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.disk import write_file
from asyncrl.runtime.metrics import JsonLinesWriter, MetricsWriter
from asyncrl.runtime.ticket_key import read_key
from asyncrl.runtime.trackers import open_trackers
from asyncrl.runtime.trackers.tracker import TrackedRun, Tracker
from asyncrl.weights.checkpoints import DataIdentity, MasterState, prune, read_state
from asyncrl.weights.versions import prune_versions, role_dir


class MasterFiles:
    """Files in the run's folder, and the prompts. All methods block."""

    def __init__(self, config: MasterWorkerConfig) -> None:
        self._config, self._info = config, config.worker
        self._run_dir = Path(config.worker.run_dir)

    def data(self) -> DataIdentity:
        """Return the identity of the prompts and the number of epochs. Raises PromptError."""
        return DataIdentity.of(PromptSource(self._config.prompts, None, self._info.seed), self._config.train.num_epochs)

    def eval_prompts(self, chosen: EvalSetConfig) -> list[EvalPrompt]:
        """Return the prompts that an evaluation takes from this set, in the set's order. Raises PromptError."""
        assert chosen.prompts is not None, "checked when the config was loaded"
        source = PromptSource(chosen.prompts, None, self._info.seed)
        positions = range(chosen.num_prompts or len(source))
        return [EvalPrompt(source.number_of(at), source.task_of(at)) for at in (Locator(0, one) for one in positions)]

    def write_results(self, name: str, results: Sequence[PromptResult]) -> None:
        """Write the results of an evaluation by prompt. name: the evaluation's id."""
        write_results(self._run_dir, name, results, self._config.eval.keep)

    def state(self) -> MasterState:
        """Read the state in the checkpoint that this attempt continues from."""
        return read_state(Path(self._config.resume))

    def ticket_key(self) -> bytes | None:
        """Return the run's ticket key; None until a manager has created it."""
        return read_key(self._run_dir)

    def journal(self) -> JsonLinesWriter:
        return JsonLinesWriter(self._run_dir / "journal" / "master.jsonl")

    def trackers(self) -> dict[str, Tracker]:
        info = self._info
        run = TrackedRun(self._run_dir, experiment=info.experiment, trial=info.trial, attempt=info.attempt)
        return open_trackers(trackers_of(self._config), run)

    def metrics(self, trackers: Mapping[str, Tracker]) -> MetricsWriter:
        return MetricsWriter(
            self._run_dir, attempt=self._info.attempt, tensorboard=self._config.tensorboard, trackers=trackers
        )

    def generation_idle_share(self, began: float, ended: float) -> float | None:
        """Return the share of this span in which no server generated. began, ended: in seconds since the epoch."""
        return generation_idle_share(self._run_dir, began, ended)

    def prune_versions(self, served: Iterable[WeightVersion]) -> None:
        """Remove the actor's weight versions, except the newest weights.keep, those that servers have loaded (`served`), and those
        that kept bad batches need."""
        in_use = [*served, *weights_needed(self._run_dir)]
        prune_versions(role_dir(self._run_dir, ACTOR), keep=self._config.weights.keep, in_use=in_use)

    def prune_checkpoints(self) -> None:
        prune(self._run_dir, self._config.checkpoint.keep_last)

    def write_summary(self, summary: dict[str, object]) -> None:
        """Write summary.json atomically: the file is complete or absent."""
        write_file(self._run_dir / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=1))
