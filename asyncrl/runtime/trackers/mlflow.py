"""MLflow: a tracking server, or a database."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.config.schema import MlflowConfig
from asyncrl.runtime.trackers.tracker import Metrics, TrackedRun

_NOT_IN_NAMES = re.compile(r"[^-/\w. ]")
_MOST_PARAMS = 100  # of one request
_LONGEST_VALUE = 500  # characters of a parameter that every version of MLflow takes


class MlflowSession:
    """A run of MLflow. It asks a client of its own, so MLflow's global state stays as it is."""

    remedy = "look at mlflow.uri and at MLFLOW_TRACKING_TOKEN (or _USERNAME and _PASSWORD)"

    def __init__(self, config: MlflowConfig, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(config.uri or None), Metric
        project = config.project or run.experiment
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(project)
        params: list[Any] = []

        def begin() -> str:
            params.extend(Param(key, text[:_LONGEST_VALUE]) for key, text in _leaves(run.config()))
            return str(self._client.create_run(experiment, run_name=run.name).info.run_id)

        self._run_id = run.kept_id("mlflow", begin)
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])
        self.location = f"experiment {project}, run {self._run_id}"

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the numbers: MLflow's metrics have no texts."""
        now = int(time.time() * 1000)
        numbers = [(key, value) for key, value in metrics.items() if not isinstance(value, str)]
        sent = [self._metric(_NOT_IN_NAMES.sub("_", key), float(value), now, step) for key, value in numbers]
        self._client.log_batch(self._run_id, metrics=sent)

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a config, each with its whole name."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif not isinstance(value, Sequence) or value:
        yield _NOT_IN_NAMES.sub("_", name), str(value)
