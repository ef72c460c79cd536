"""Metrics to Weights & Biases (extra `wandb`), beside metrics.jsonl and TensorBoard, at no cost to the training.

The API key is wandb's own business: WANDB_API_KEY in the environment, or what `wandb login` has written. It is in no config.
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

STEP = "train_step"  # the horizontal axis: evaluations end later than the steps that they belong to, and W&B's own step only grows
MAX_QUEUE = 10_000  # records that wait for wandb.init, or for a slow disk
SLACK_S = 5.0  # beyond wandb's own limits

_logger = logging.getLogger("asyncrl.wandb")


class WandbWriter:
    """Hands records to W&B on a thread of its own.

    consumes: what `write` leaves in a bounded queue. produces: a run at W&B, or offline files in <run>/wandb for `wandb sync`.
    waits for: records; wandb.init, at most wandb.init_timeout_s. unblocked by: the master; the end of `finish`.
    Whatever fails is one warning: from then on records are dropped, and nobody waits.
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
        """Never waits."""
        if self._failed:
            return
        try:
            self._records.put_nowait({STEP: step, **metrics})
        except queue.Full:
            self._num_dropped += 1

    def finish(self, limit_s: float | None = None) -> str:
        """Let W&B take in what was written, for at most wandb.finish_timeout_s (or limit_s). Gives where the run is to be seen, or
        what went wrong."""
        if self._thread.is_alive() and not self._failed:
            try:
                self._records.put_nowait(None)
            except queue.Full:
                self._num_dropped += 1
            self._thread.join(self._config.finish_timeout_s + SLACK_S if limit_s is None else limit_s)
            if self._thread.is_alive():
                self._fail(
                    "not everything was taken in before the end; `wandb sync` in the run's wandb/ folder sends the rest"
                )
        if self._num_dropped:
            _logger.warning("W&B: %d records were dropped: its queue was full", self._num_dropped)
            self._num_dropped = 0
        return self._outcome

    def _run(self) -> None:
        """The thread."""
        try:
            run = self._open()
            while (record := self._records.get()) is not None:
                run.log(record)
            run.finish()
        except Exception as error:
            text = str(error).strip().removesuffix(".")
            self._fail(f"{type(error).__name__}{': ' + text if text and text != '<no message>' else ''}")
        except SystemExit as error:  # wandb's way of saying that it cannot go on
            self._fail(f"wandb wants to end the process: {error}")

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
            resume="allow",  # the same attempt, if its master comes back
            dir=str(self._run_dir),
            mode="offline" if config.mode == "offline" else "online",
            config=_resolved_config(self._run_dir),
            settings=wandb.Settings(
                init_timeout=config.init_timeout_s,
                finish_timeout=config.finish_timeout_s,
                silent=True,
                console="off",  # no output of the master's goes anywhere
                save_code=False,
                disable_git=True,
            ),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        self._outcome = run.url or f"offline, `wandb sync {run.settings.sync_dir}` sends it"
        _logger.info("W&B: %s", self._outcome)
        return run

    def _run_id(self) -> str:
        """Made once for an attempt and kept in its folder: another folder of the same name is another run."""
        file = self._run_dir / "wandb" / f"attempt_{self._attempt}.id"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            trial = re.sub(r"[^A-Za-z0-9_-]+", "-", self._trial)
            file.write_text(f"{trial[:64]}-a{self._attempt}-{uuid.uuid4().hex[:8]}\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._outcome = f"nothing was sent, or not all: {reason}"
        remedy = "log in with `wandb login` or WANDB_API_KEY, or set wandb.mode=offline (or disabled)"
        _logger.warning("W&B (wandb.mode=%s): %s. The training goes on without; %s", self._config.mode, reason, remedy)


def _resolved_config(run_dir: Path) -> dict[str, Any]:
    """What the user asked for; the launcher has written it without secrets."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        return {}
    config = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}
