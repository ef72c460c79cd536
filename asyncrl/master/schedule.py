"""Schedules of saving, evaluation and checkpoints, by steps, epochs or seconds; and the end of training. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.config.schema import AUTO, TrainConfig
from asyncrl.weights.checkpoints import ScheduleState

REWARD_WINDOW = 5  # steps that target_reward is averaged over
_WRITING_SHARE = 0.02  # most of a run's time in which checkpoints are being written
_LEAST_PERIOD_S, _MOST_PERIOD_S = 600.0, 7200.0  # between two checkpoints; a crash loses at most this much work


def checkpoint_period_s(asked: float | str, write_s: float) -> float:
    """Return the seconds between two checkpoints: `asked`, or for auto write_s / _WRITING_SHARE within the bounds.

    write_s: seconds that the newest checkpoint took; 0: none was written yet. A write above 144 s takes more than the share,
    because the upper bound holds.
    """
    if asked != AUTO:
        return float(asked)
    return min(max(write_s / _WRITING_SHARE, _LEAST_PERIOD_S), _MOST_PERIOD_S)


def ended_by(train: TrainConfig, *, step: int, recent_rewards: Sequence[float], num_done: int, num_total: int) -> str:
    """Return the field of `train` that ends training with this step; "" if another step follows.

    recent_rewards: mean rewards of the newest steps, at most REWARD_WINDOW. num_done: done prompts over all epochs.
    """
    mean = sum(recent_rewards) / REWARD_WINDOW if len(recent_rewards) == REWARD_WINDOW else -math.inf
    if train.target_reward is not None and mean >= train.target_reward:
        return "target_reward"
    if train.max_steps and step >= train.max_steps:
        return "max_steps"
    return "num_epochs" if num_done >= num_total else ""


class Schedule:
    """Due when any of its counters is due. 0 disables a counter. Checking a due schedule resets all its counters."""

    def __init__(self, *, every_steps: int = 0, every_epochs: int = 0, every_s: float = 0.0, now: float = 0.0) -> None:
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self.every_s = every_s
        self._last_step = 0
        self._last_epoch = 0
        self._last_time = now

    def check(self, *, step: int, epochs: float, now: float) -> bool:
        """Whether the schedule is due. step: train steps done; epochs: with fraction; now: seconds of a monotonic clock."""
        epoch = math.floor(epochs)
        due = (
            (self._every_steps > 0 and step - self._last_step >= self._every_steps)
            or (self._every_epochs > 0 and epoch - self._last_epoch >= self._every_epochs)
            or (self.every_s > 0 and now - self._last_time >= self.every_s)
        )
        if due:
            self._last_step, self._last_epoch, self._last_time = step, epoch, now
        return due

    def state(self, now: float) -> ScheduleState:
        return ScheduleState(step=self._last_step, epoch=self._last_epoch, elapsed_s=now - self._last_time)

    def restore(self, state: ScheduleState, now: float) -> None:
        """Continue from a result of `state`. The time between `state` and this call does not count."""
        self._last_step, self._last_epoch, self._last_time = state.step, state.epoch, now - state.elapsed_s
