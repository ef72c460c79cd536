"""Sends metrics to Weights & Biases (extra `wandb`), besides metrics.jsonl and TensorBoard, without delaying training.

wandb finds its API key itself: WANDB_API_KEY in the environment, or the file that `wandb login` has written. No config
contains it.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from asyncrl.config.schema import WandbConfig

STEP = "train_step"  # horizontal axis. W&B's own step may not decrease, but evaluations of earlier steps end later
MAX_QUEUE = 10_000  # records waiting for wandb.init or for a slow disk
SLACK_S = 5.0  # beyond wandb's own limits

_logger = logging.getLogger("asyncrl.wandb")


class WandbWriter:
    """Sends records to W&B on its own thread.

    consumes: records that `write` puts into a bounded queue. produces: a run at W&B, or offline files in <run>/wandb
    for `wandb sync`.
    waits for: records; wandb.init, at most wandb.init_timeout_s. unblocked by: `write` and `finish`.
    Any failure logs one warning. Further records are then dropped, and no caller waits.
    """

    def __init__(self, config: WandbConfig, run_dir: Path, *, experiment: str, trial: str, attempt: int) -> None:
        self._config = config
        self._run_dir = run_dir
        self._experiment = experiment
        self._trial = trial
        self._attempt = attempt
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUE)
        self._outcome = "nothing was sent"
        self._failed = False
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        """Queue the metrics. Never blocks."""
        if self._failed:
            return
        try:
            self._records.put_nowait({STEP: step, **metrics})
        except queue.Full:
            self._num_dropped += 1

    def finish(self, limit_s: float | None = None) -> str:
        """Give W&B at most wandb.finish_timeout_s (or limit_s) to process the queued records. Returns the run's URL or
        location, or the error.
        """
        if self._thread.is_alive() and not self._failed:
            try:
                self._records.put_nowait(None)
            except queue.Full:
                self._num_dropped += 1
            self._thread.join(self._config.finish_timeout_s + SLACK_S if limit_s is None else limit_s)
            if self._thread.is_alive():
                self._fail(
                    "not all records were processed before the end; `wandb sync` in the run's wandb/ folder sends the rest"
                )
        if self._num_dropped:
            _logger.warning("W&B: dropped %d records because the queue was full", self._num_dropped)
            self._num_dropped = 0
        return self._outcome

    def _run(self) -> None:
        """Body of the thread."""
        try:
            run = self._open()
            while (record := self._records.get()) is not None:
                run.log(record)
            run.finish()
        except Exception as error:
            text = str(error).strip().removesuffix(".")
            self._fail(f"{type(error).__name__}{': ' + text if text and text != '<no message>' else ''}")
        except SystemExit as error:  # raised by wandb when it cannot continue
            self._fail(f"wandb tried to end the process: {error}")

    def _open(self) -> Any:
        import wandb

        config = self._config
        name = self._trial if self._attempt == 1 else f"{self._trial} (attempt {self._attempt})"
        run = wandb.init(
            project=config.project or self._experiment,
            entity=config.entity or None,
            group=config.group or None,
            tags=list(config.tags),
            name=name,
            id=self._run_id(),
            resume="allow",  # a restarted master continues the run of its attempt
            dir=str(self._run_dir),
            mode="offline" if config.mode == "offline" else "online",
            config=_resolved_config(self._run_dir),
            settings=wandb.Settings(
                init_timeout=config.init_timeout_s,
                finish_timeout=config.finish_timeout_s,
                silent=True,
                console="off",  # the master's output is not captured
                save_code=False,
                disable_git=True,
            ),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        self._outcome = run.url or f"offline; upload it with `wandb sync {run.settings.sync_dir}`"
        _logger.info("W&B: %s", self._outcome)
        return run

    def _run_id(self) -> str:
        """Return the attempt's id, created once and kept in the run's folder. So a new folder with the same experiment and
        trial is a new W&B run.
        """
        file = self._run_dir / "wandb" / f"attempt_{self._attempt}.id"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            trial = re.sub(r"[^A-Za-z0-9_-]+", "-", self._trial)
            file.write_text(f"{trial[:64]}-a{self._attempt}-{uuid.uuid4().hex[:8]}\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._outcome = f"some or all records were not sent: {reason}"
        remedy = "log in with `wandb login` or WANDB_API_KEY, or set wandb.mode=offline (or disabled)"
        _logger.warning("W&B (wandb.mode=%s): %s. Training continues without it; %s", self._config.mode, reason, remedy)


def _resolved_config(run_dir: Path) -> dict[str, Any]:
    """Return the user's config, which the launcher has written without secrets."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        return {}
    config = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}
