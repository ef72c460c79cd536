"""trackio: a database of one file per project, on this machine, or a Space of Hugging Face."""

from __future__ import annotations

from asyncrl.config.schema import TrackioConfig
from asyncrl.runtime.trackers.tracker import Metrics, TrackedRun


class TrackioSession:
    """A run of trackio. Its name is unique, because trackio resumes runs by their names."""

    remedy = "set TRACKIO_DIR to a folder that can be written; for trackio.space log in with `hf auth login`"

    def __init__(self, config: TrackioConfig, run: TrackedRun) -> None:
        import trackio

        project = config.project or run.experiment
        self._run = trackio.init(
            project=project,
            name=run.kept_id("trackio"),
            group=config.group or None,
            space_id=config.space or None,
            config=run.config(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.location = f"{self._run.name}: {config.space or f'`trackio show --project {project}`'}"

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        self._run.finish()
