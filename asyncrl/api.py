"""Runs from a script or a notebook: start, follow, stop.

    from asyncrl import Run

    with Run("my_run.yaml", ["trial=second", "train.max_steps=50"]) as run:
        for step in run.steps():
            print(step["step"], step["reward/mean"])
    print(run.summary["wall_s"])

A Run is a launcher in a process of its own, as `asyncrl-launch run CONFIG key=value ... --json` starts it: the same config, checks,
folder and exit code. Every command works with it: status, logs, ui, stop. Leaving the block stops the run, and no process is left.
The kernel kills the launcher if this process ends in any other way, and the launcher's processes end with it.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from asyncrl.config.errors import ConfigError
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.runtime.metrics import METRICS_FILE, JsonLinesReader
from asyncrl.runtime.process import dying_with_parent, python_module

_POLL_S = 0.5  # between two looks at metrics.jsonl without an event
_AGAIN_S = 1.2  # between two signals, which the launcher would otherwise take for one
_MOST_NOTICES = 1000  # the newest are kept
_COMPLETE, _STOPPED = 0, 128 + signal.SIGTERM


class RunFailed(RuntimeError):
    """The run has failed; the message is its first cause. `exit_code` is that of the launcher."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Run:
    """A run of this process. The constructor returns when the run has been checked and starts. It waits as long as the launcher
    checks, which may download the model; Ctrl-C ends the wait and the launcher. Raises ConfigError, RunFailed."""

    def __init__(self, config: str | Path, overrides: Sequence[str] = (), *, command: str = "run") -> None:
        """config: a YAML file. overrides: `key=value`. command: `resume` continues the run whose folder `config` is."""
        self.notices: deque[str] = deque(maxlen=_MOST_NOTICES)  # warnings, advice, long waits
        self.summary: Mapping[str, Any] = {}  # summary.json of a complete run
        self._error: dict[str, Any] = {}
        self._started: Mapping[str, Any] | None = None
        self._code: int | None = None
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_requested = False
        words = (command, str(config), *overrides, "--json")
        # The kernel kills the launcher when the thread that started it ends, so that a thread of its own starts it
        self._thread = threading.Thread(target=self._follow, args=(words,), name="run", daemon=True)
        self._thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._started is not None or self._code is not None)
        except BaseException:  # Ctrl-C: the caller has no Run that it could stop
            self.stop(now=True)
            raise
        if self._started is None:
            self._raise()
            raise RunFailed(f"the launcher ended with code {self._code}: {' '.join(self.notices)}", self._code or 1)
        self.run_dir = Path(self._started["run_dir"])
        self._reader: JsonLinesReader = JsonLinesReader(self.run_dir / METRICS_FILE, newest_bytes=0)

    @classmethod
    def resume(cls, run_dir: str | Path, overrides: Sequence[str] = ()) -> Run:
        """Continue a run from its newest checkpoint, as `asyncrl-launch resume` does."""
        return cls(run_dir, overrides, command="resume")

    @property
    def exit_code(self) -> int | None:
        """Of the launcher; None: the run is running."""
        return self._code

    def steps(self) -> Iterator[dict[str, Any]]:
        """The metrics of each train step, as soon as it is written, to the end of the run. Raises RunFailed if the run fails."""
        return (record for record in self.records() if "reward/mean" in record)

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl that this run writes: train steps and evaluations. Each is given once. Raises RunFailed."""
        while True:
            ended = self._code is not None  # read first: the last line may be written just before the end
            yield from self._reader.new_records()
            if ended:
                return self._raise()
            with self._changed:
                self._changed.wait(_POLL_S)

    def wait(self) -> Mapping[str, Any]:
        """Wait for the end of the run, and return its summary; empty if it was stopped. Raises RunFailed."""
        self._thread.join()
        self._raise()
        return self.summary

    def stop(self, *, now: bool = False, limit_s: float = 600.0) -> int:
        """Stop the run, as Ctrl-C does: it finishes its step and writes a checkpoint; with `now` it stops at once. Returns the exit
        code. After limit_s the launcher and all processes of the run are killed."""
        self._stop_requested = True
        deadline = time.monotonic() + limit_s
        self._signal(signal.SIGTERM)
        while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            self._thread.join(min(_AGAIN_S if now else limit_s, left_s))
            if now:
                self._signal(signal.SIGTERM)
        self._signal(signal.SIGKILL)
        self._thread.join()
        assert self._code is not None
        return self._code

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # does nothing if the launcher has ended

    def _raise(self) -> None:
        """Raise the error of a run that has failed."""
        if self._code in (None, _COMPLETE) or self._stop_requested:
            return
        assert self._code is not None
        text = self._error.get("message") or f"the run ended with code {self._code}"
        if self._error.get("kind") in ("config", "usage"):
            raise ConfigError(text)
        raise RunFailed(text, self._code)

    def _follow(self, words: Sequence[str]) -> None:
        """Body of the thread: start the launcher, read its events, wait for its end."""
        command = dying_with_parent(python_module("asyncrl.cli.main", *words))
        code = 1
        try:
            with subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process, which stops the run
            ) as process:
                self._process = process
                if self._stop_requested:  # before there was a process that stop() could signal
                    process.terminate()
                assert process.stdout is not None
                for line in process.stdout:
                    with self._changed:
                        self._take(line)
                        self._changed.notify_all()
            code = process.returncode
        except OSError as error:
            self._error = {"message": f"the launcher cannot be started: {error}"}
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def _take(self, line: bytes) -> None:
        """Take a line of the launcher's output: an event, an error, or text."""
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
        except DECODE_ERRORS:
            self.notices.append(line.decode(errors="replace").rstrip())
            return
        if "error" in event:
            self._error = event["error"]
        if event.get("event") == "start":
            self._started = event
        elif event.get("event") == "notice":
            self.notices.append(str(event.get("text")))
        elif event.get("event") == "end":
            self.summary = event.get("summary") or {}
