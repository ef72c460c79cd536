"""Weights & Biases."""

from __future__ import annotations

from asyncrl.config.schema import WandbConfig
from asyncrl.runtime.trackers.tracker import Metrics, TrackedRun

STEP = "train_step"  # horizontal axis. W&B's own step may not decrease, but evaluations of earlier steps end later


class WandbSession:
    """A run at W&B, or offline files in <run>/wandb for `wandb sync`."""

    remedy = (
        "log in with `wandb login` or WANDB_API_KEY, or set wandb.mode=offline (`wandb sync` in the run's wandb/ folder "
        "sends what is there)"
    )

    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=config.project or run.experiment,
            entity=config.entity or None,
            group=config.group or None,
            tags=list(config.tags),
            name=run.name,
            id=run.kept_id("wandb"),
            resume="allow",
            dir=str(run.run_dir),
            mode="offline" if config.mode == "offline" else "online",
            config=run.config(),
            settings=wandb.Settings(
                init_timeout=config.init_timeout_s,
                finish_timeout=config.finish_timeout_s,
                silent=True,
                console="off",  # the master's output is not captured
                save_code=False,
                disable_git=True,
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self.location = self._run.url or f"offline; upload it with `wandb sync {self._run.settings.sync_dir}`"

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({STEP: step, **metrics})

    def finish(self) -> None:
        self._run.finish()
