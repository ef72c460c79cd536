"""Sends metrics to a tracker, besides metrics.jsonl and TensorBoard, without delaying training.

Each tracker finds its key itself, in its own environment variables and files. No config contains a key.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from asyncrl.config.schema import TRACKERS, TrackerConfig

MAX_QUEUE = 10_000  # records waiting for the start of a session or for a slow disk
SLACK_S = 5.0  # beyond the tracker's own limits

Metrics = Mapping[str, float | int | str]

_logger = logging.getLogger("asyncrl.trackers")


@dataclass(frozen=True)
class TrackedRun:
    """The attempt of a run whose metrics are sent."""

    run_dir: Path
    experiment: str
    trial: str
    attempt: int

    @property
    def name(self) -> str:
        return self.trial if self.attempt == 1 else f"{self.trial} (attempt {self.attempt})"

    def kept_id(self, tracker: str, make: Callable[[], str] | None = None) -> str:
        """Return the attempt's id at a tracker, created once and kept in the run's folder. So a restarted master continues the run
        of its attempt, and a new folder with the same experiment and trial is a new run there.
        """
        file = self.run_dir / tracker / f"attempt_{self.attempt}.id"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((make or self._new_id)() + "\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()

    def _new_id(self) -> str:
        trial = re.sub(r"[^A-Za-z0-9_-]+", "-", self.trial)
        return f"{trial[:64]}-a{self.attempt}-{uuid.uuid4().hex[:8]}"

    def config(self) -> dict[str, Any]:
        """Return the user's config, which the launcher has written without secrets."""
        file = self.run_dir / "config.yaml"
        if not file.is_file():
            return {}
        config = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(config, dict)
        return {str(key): value for key, value in config.items()}


class Session(Protocol):
    """A run at a tracker. Its constructor opens it; it may block and raise, because only the tracker's own thread calls it."""

    location: str  # where the user finds the run
    remedy: str  # of a failure

    def log(self, step: int, metrics: Metrics) -> None: ...

    def finish(self) -> None: ...


class Tracker:
    """Sends records to a tracker on its own thread.

    consumes: records that `write` puts into a bounded queue. produces: a run at the tracker.
    waits for: records; the start of the session, which has a limit of its own. unblocked by: `write` and `finish`.
    Any failure logs one warning. Further records are then dropped, and no caller waits.
    """

    def __init__(
        self, name: str, config: TrackerConfig, run: TrackedRun, kind: Callable[[Any, TrackedRun], Session]
    ) -> None:
        self.label = TRACKERS[name]
        self.limit_s = config.finish_timeout_s + SLACK_S  # of `finish`
        self._name, self._config, self._run, self._kind = name, config, run, kind
        self._records: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(MAX_QUEUE)
        self._outcome = "nothing was sent"
        self._failed = False
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Metrics) -> None:
        """Queue the metrics. Never blocks."""
        if self._failed:
            return
        try:
            self._records.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._num_dropped += 1

    def finish(self, limit_s: float | None = None) -> str:
        """Give the tracker at most its finish_timeout_s (or limit_s) to process the queued records. Returns the run's URL
        or location, or the error.
        """
        if self._thread.is_alive() and not self._failed:
            try:
                self._records.put_nowait(None)
            except queue.Full:
                self._num_dropped += 1
            self._thread.join(self.limit_s if limit_s is None else limit_s)
            if self._thread.is_alive():
                self._fail("not all records were processed before the end")
        if self._num_dropped:
            _logger.warning("%s: dropped %d records because the queue was full", self.label, self._num_dropped)
            self._num_dropped = 0
        return self._outcome

    def _send(self) -> None:
        """Body of the thread."""
        try:
            session = self._kind(self._config, self._run)
            self._outcome = session.location
            _logger.info("%s: %s", self.label, self._outcome)
            while (record := self._records.get()) is not None:
                session.log(*record)
            session.finish()
        except Exception as error:
            text = str(error).strip().removesuffix(".")
            self._fail(f"{type(error).__name__}{': ' + text if text and text != '<no message>' else ''}")
        except SystemExit as error:  # raised by a library that cannot continue
            self._fail(f"{self._name} tried to end the process: {error}")

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._outcome = f"some or all records were not sent: {reason}"
        mode, remedy = f"{self._name}.mode={self._config.mode}", getattr(self._kind, "remedy", "")
        _logger.warning(
            "%s (%s): %s. Training continues without it; %s, or set %s.mode=disabled",
            *(self.label, mode, reason, remedy, self._name),
        )
