"""The master's books: trained and rejected prompts, measurements and due schedules; in memory, the journal and checkpoints."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from asyncrl.config.modes import mode_of
from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.config.schema import CheckpointConfig, EvalSetConfig, evaluation_sets
from asyncrl.dataflow.evaluation import EvaluationResult
from asyncrl.master.buffer import PromptProgress
from asyncrl.master.curriculum import Curriculum
from asyncrl.master.report import RunSummary, rejection_lines
from asyncrl.master.schedule import REWARD_WINDOW, Schedule, checkpoint_period_s, ended_by
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.manager import RejectedPrompt
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import TASK_CLOSED
from asyncrl.runtime.metrics import JsonLinesWriter, MetricsWriter
from asyncrl.runtime.services import Services
from asyncrl.weights.checkpoints import DataIdentity, MasterState

_REJECTION_WINDOW = 4  # batches: max_rejected_share applies to the last 4 * batch_size trained or rejected prompts


class RejectedShareError(RunEndedError):
    """Too many prompts were rejected to continue. The message lists the reasons and their counts."""


class Books:
    """consumes: trajectories, steps, rejections, evaluations.  produces: lines of the journal, metrics, the summary, the state."""

    def __init__(
        self,
        config: MasterWorkerConfig,
        data: DataIdentity | None,
        services: Services,
        *,
        journal: JsonLinesWriter,
        metrics: MetricsWriter,
        state: MasterState | None = None,
    ) -> None:
        """data: None for a replay, which has no prompts. state: from the checkpoint that this attempt continues from."""
        self._config, self._data = config, data
        self.journal, self._metrics = journal, metrics
        self._board, self._logger, self._clock = services.board, services.logger, services.clock
        self.attempt = config.worker.attempt
        self.trains = mode_of(config.mode).trains
        self.step = config.first_step  # batches done
        self.progress = (
            PromptProgress(data.num_prompts, data.num_epochs) if data else PromptProgress(config.num_replayed, 1)
        )
        self.summary = RunSummary()
        self.parent: tuple[int, int] | None = None  # (attempt, step) that this attempt continues from
        self._first_details: dict[str, str] = {}  # reason -> detail of the first rejection for it
        self.curriculum = Curriculum(config.tasks, config.gates, state.curriculum if state is not None else None)
        self._released: Counter[str] = Counter()  # rollouts that did not end, by reason, since this process has begun
        self._recent_outcomes: deque[bool] = deque(maxlen=_REJECTION_WINDOW * config.train.batch_size)
        self._recent_rewards: deque[float] = deque(maxlen=REWARD_WINDOW)
        self._started = self._clock.time()  # if continued: minus the seconds of previous attempts
        now, train = self._clock.monotonic(), config.train
        self._schedules = {
            "save": Schedule(
                every_steps=train.save_every_steps,
                every_epochs=train.save_every_epochs,
                every_s=train.save_every_s,
                now=now,
            ),
            **{eval_schedule(name): _schedule(chosen, now) for name, chosen in evaluation_sets(config.eval).items()},
            "checkpoint": _schedule(config.checkpoint, now),
        }
        if state is not None:
            self._go_on_from(state)

    @property
    def version(self) -> WeightVersion:
        """Version of the newest weights."""
        return WeightVersion(self.attempt, self.step if self.trains else 0)

    def is_due(self, schedule: str) -> bool:
        """Whether the schedule `save`, `checkpoint` or `eval_schedule` of a set is due. Checking a due schedule resets it."""
        epochs = self.progress.epochs_done()
        return self._schedules[schedule].check(step=self.step, epochs=epochs, now=self._clock.monotonic())

    def pace_checkpoints(self, write_s: float) -> float:
        """Set the period of checkpoints by the seconds that the newest one took to write, and return it in seconds."""
        period_s = checkpoint_period_s(self._config.checkpoint.every_s, write_s)
        self._schedules["checkpoint"].every_s = period_s
        return period_s

    def is_over(self) -> bool:
        """Whether the step that just ended was the last one."""
        train = self._config.train
        field = ended_by(
            train,
            step=self.step,
            recent_rewards=self._recent_rewards,
            num_done=self.progress.num_done,
            num_total=self.progress.num_total,
        )
        if field:
            self._logger.info("step %d was the last step: train.%s=%s", self.step, field, getattr(train, field))
        return bool(field)

    # ------------------------------------------------------------------------------------------------------------- the journal

    def note(self, event: str, **fields: object) -> None:
        self.journal.write({"event": event, "attempt": self.attempt, **fields, "time": self._clock.time()})

    def begin(self) -> None:
        """Record the start of the attempt, with all that an audit of the following records needs."""
        config = self._config
        about = {
            "mode": config.mode,
            "first_step": config.first_step,
            "num_prompts": self.progress.num_prompts,
            "num_epochs": self.progress.num_epochs,
            "max_head_offpolicyness": None if config.overdue == "train" else config.max_head_offpolicyness,
        }
        self.note("begun", **{"from": self.parent}, **about)

    def store(self, meta: TrajectoryMeta) -> None:
        """Record a trajectory that has entered the buffer."""
        self.summary.add_trajectory(meta)
        self.note("stored", ticket=meta.ticket_id, prompt=meta.locator)

    def drop(self, tickets: Sequence[str]) -> None:
        """Record trajectories that will not be trained. Their prompts are rolled out again."""
        self.summary.num_dropped += len(tickets)
        self.note("dropped", tickets=list(tickets))

    def reject(self, prompts: Iterable[RejectedPrompt], is_stored: Callable[[Locator], bool]) -> None:
        """Record rejected prompts, except those that are done or stored. Raises RejectedShareError if more than max_rejected_share
        of the prompts in the window (_REJECTION_WINDOW batches, once there are that many) were rejected."""
        for rejected in prompts:
            if self.progress.is_done(rejected.locator) or is_stored(rejected.locator):
                continue  # recorded already (a new manager repeats them), or a trajectory came after the rejection
            self.progress.mark_rejected(rejected.locator, rejected.reason)
            if rejected.reason != TASK_CLOSED:
                self._recent_outcomes.append(False)
            if rejected.detail:
                self._first_details.setdefault(rejected.reason, rejected.detail)
            self.note("rejected", prompt=rejected.locator, reason=rejected.reason, detail=rejected.detail)
        window = self._recent_outcomes
        share = window.count(False) / max(len(window), 1)
        if len(window) == window.maxlen and share > self._config.max_rejected_share:
            raise RejectedShareError(
                f"{share:.0%} of the last {len(window)} prompts were rejected; manager.max_rejected_share="
                f"{self._config.max_rejected_share:g} is the limit: {self.rejections()}"
            )

    def release(self, counts: Mapping[str, int]) -> None:
        """Count rollouts that were taken back, by reason. Their prompts are issued again."""
        self._released.update(counts)

    def rejections(self) -> str:
        """Describe the rejections: number and remedy by reason, and the log with more details."""
        lines = rejection_lines(self.progress.rejected, self._first_details)
        process = "model_worker" if mode_of(self._config.mode).workers_generate else "rollout_worker"
        folder = Path(self._config.worker.run_dir, "logs", "latest")
        return "\n  ".join(["", *lines, f"{folder}/{process}_*.log has the full first rejection of each kind"])

    # ------------------------------------------------------------------------------------------------------------------- steps

    def train(self, metas: Sequence[TrajectoryMeta]) -> None:
        """Record a step that has trained these groups."""
        self.summary.ages.add(metas, self.version.version)
        self.step += 1
        self._board.version = str(self.version.version)
        self.progress.mark_trained(meta.locator for meta in metas)
        self._recent_outcomes.extend([True] * len(metas))
        for task in self.curriculum.train(metas):
            self.note("task_opened", task=task, step=self.step)
            self._logger.info("task %s is open from step %d on", task, self.step)

    def write_step(
        self,
        metas: Sequence[TrajectoryMeta],
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        train_span: tuple[float, float],
    ) -> None:
        """Write a step to metrics and journal. seconds: duration of each MFC. train_span: start and end of the step's dataflow, in
        seconds since the epoch."""
        self.summary.add_step(metrics)
        self._recent_rewards.append(metrics["reward/mean"])
        ends = {"rejected": self.progress.rejected, "released": self._released}
        counted = {f"{end}/{reason}": float(count) for end, by in ends.items() for reason, count in by.items()}
        times = {f"time/{name}_s": value for name, value in seconds.items()}
        about = {"time": self._clock.time(), "version": self.version.version}
        distributions: dict[str, list[float]] = {
            "distribution/reward": [reward for meta in metas for reward in meta.rewards],
            "distribution/response_length": [length for meta in metas for length in meta.response_lengths],
        }
        self._metrics.write(
            self.step, {**about, **metrics, **times, **counted, **self.curriculum.metrics()}, distributions
        )
        start, end = train_span
        groups = [
            {
                "ticket": meta.ticket_id,
                "prompt": meta.locator,
                "head": meta.head,
                "versions": [
                    (WeightVersion.unpack(first).version, WeightVersion.unpack(last).version)
                    for first, last in zip(meta.version_start, meta.version_end, strict=True)
                ],
            }
            for meta in metas
        ]
        record = {"event": "trained", "attempt": self.attempt, "step": self.step, "start": start, "end": end}
        self.journal.write({**record, "groups": groups})

    def write_evaluation(self, step: int, results: Sequence[EvaluationResult], prefix: str = "") -> None:
        """Write the results of an evaluation. step: the step that produced the evaluated weights. prefix: of the modes' names."""
        self._metrics.write(step, self.summary.add_evaluation(step, results, prefix))

    def summarize(self, ended: float, generation_idle: float | None) -> dict[str, object]:
        """Return the content of summary.json. ended: the end of the run, in seconds since the epoch."""
        return self.summary.as_dict(
            mode=self._config.mode,
            attempt=self.attempt,
            wall_s=ended - self._started,
            version=self.version.version,
            rejected=self.progress.rejected,
            generation_idle=generation_idle,
        )

    # -------------------------------------------------------------------------------------------------------------- checkpoints

    def state(self, *, evaluating: bool, mfcs: dict[str, dict[str, float]]) -> MasterState:
        """Return the state from which a later attempt continues. mfcs: FunctionExecutor.states."""
        assert self._data is not None  # a replay writes no checkpoints
        now = self._clock.monotonic()
        return MasterState(
            attempt=self.attempt,
            step=self.step,
            time=self._clock.time(),
            parent=self.parent,
            data=self._data,
            done_cursor=self.progress.cursor,
            done_beyond=self.progress.beyond_cursor,
            num_trained=self.progress.num_trained,
            rejected=dict(self.progress.rejected),
            schedules={name: schedule.state(now) for name, schedule in self._schedules.items()},
            summary=msgspec.to_builtins(self.summary, str_keys=True),
            recent_rewards=list(self._recent_rewards),
            recent_outcomes=list(self._recent_outcomes),
            batch_size=self._config.train.batch_size,
            wall_s=self._clock.time() - self._started,
            evaluating=evaluating,
            mfcs=mfcs,
            curriculum=self.curriculum.state(),
        )

    def _go_on_from(self, state: MasterState) -> None:
        self.parent = (state.attempt, state.step)
        self.step = state.step
        self._board.version = str(self.version.version)
        self.progress.restore(state.done_cursor, state.done_beyond, state.num_trained, state.rejected)
        self.summary = msgspec.convert(state.summary, RunSummary, str_keys=True)
        self._recent_rewards.extend(state.recent_rewards)
        self._recent_outcomes.extend(state.recent_outcomes)
        self._started -= state.wall_s
        for name, schedule in self._schedules.items():
            if name in state.schedules:
                schedule.restore(state.schedules[name], self._clock.monotonic())


def eval_schedule(eval_set: str) -> str:
    """The name of an evaluation set's schedule."""
    return f"eval/{eval_set}" if eval_set else "eval"


def _schedule(config: EvalSetConfig | CheckpointConfig, now: float) -> Schedule:
    every_s = checkpoint_period_s(config.every_s, 0.0)
    return Schedule(every_steps=config.every_steps, every_epochs=config.every_epochs, every_s=every_s, now=now)
