"""Trackers: programs outside a run that collect its metrics. Each is one file with one class, and one row here.

Its section of the config has its name, as do its package and the extra that installs it (config/schema.py, TRACKERS).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.config.schema import TrackerConfig
from asyncrl.runtime.trackers.mlflow import MlflowSession
from asyncrl.runtime.trackers.tracker import Session, TrackedRun, Tracker
from asyncrl.runtime.trackers.trackio import TrackioSession
from asyncrl.runtime.trackers.wandb import WandbSession

KINDS: dict[str, Callable[[Any, TrackedRun], Session]] = {
    "wandb": WandbSession,
    "trackio": TrackioSession,
    "mlflow": MlflowSession,
}


def open_trackers(configs: dict[str, TrackerConfig], run: TrackedRun) -> dict[str, Tracker]:
    """Start to send the metrics of this run to these trackers. configs: by name, those that are not disabled."""
    return {name: Tracker(name, config, run, KINDS[name]) for name, config in configs.items()}
