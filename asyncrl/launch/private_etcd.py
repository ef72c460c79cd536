"""Keeps a run's private etcd running: restarts it after it has ended, or has not answered for about 12 s.

etcd restarts with its data if it can, otherwise without them. Then nothing is lost either, because every session puts its entries
again. So the outage lasts about a second if etcd ends, and about 12 s if it freezes. The first restart is immediate; repeated
restarts are delayed by up to 30 s.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from asyncrl.launch.rundir import LaunchError
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.names.etcd.server import EtcdServer, EtcdServerError

_WINDOW_S = 3600.0  # window for counting restarts
_START_LIMIT_S = 15.0
_LOOK_EVERY_S = 1.0
_LOOK_LIMIT_S = 2.0  # limit of one health probe; a healthy server answers in milliseconds

# After this many failed probes in a row the server counts as frozen. Counted, not timed, because the launcher itself may have
# frozen meanwhile
_FROZEN_LOOKS = 4
# So many restarts are allowed even if runtime.max_restarts is lower, because etcd holds no data that the run could lose
_MIN_RESTARTS = 3
_LONGEST_PAUSE_S = 30.0


class PrivateEtcd:
    """Monitors and restarts a running server.

    waits for: nothing. Its own thread waits for the server's exit, its answers and its starts.
    unblocked by: the server, the limits of these waits, `close`. `turn` raises an error from which the thread could not recover.
    """

    def __init__(
        self,
        server: EtcdServer,
        log: Path,
        max_restarts: int,
        notice: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """server: already started. max_restarts: limit of restarts within an hour. notice: shows a message to the user; called from
        any thread."""
        self._server = server
        self._log = log
        self._max_restarts = max(max_restarts, _MIN_RESTARTS)
        self._notice = notice
        self._clock = clock
        self._restarts: deque[float] = deque()  # times of the restarts within the window
        self._failure: LaunchError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="private etcd", daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Raise LaunchError if the server could not be restarted, or has ended too often."""
        if self._failure is not None:
            raise self._failure

    def close(self, limit_s: float) -> None:
        self._closed.set()
        self._thread.join(_START_LIMIT_S)
        self._server.stop(limit_s)

    def _monitor(self) -> None:
        in_vain = 0
        while not self._closed.is_set():
            try:
                if self._server.wait_for_exit(_LOOK_EVERY_S):
                    self._start_again("has ended")
                    in_vain = 0
                elif self._server.answers(_LOOK_LIMIT_S):
                    in_vain = 0
                elif self._server.running:
                    in_vain += 1
                    if in_vain == _FROZEN_LOOKS:
                        self._server.kill()
                        self._start_again(
                            f"has not answered for {_FROZEN_LOOKS * (_LOOK_EVERY_S + _LOOK_LIMIT_S):g} s and was killed"
                        )
                        in_vain = 0
            except (EtcdServerError, OSError) as error:
                self._failure = LaunchError(f"etcd ended and could not be started again: {error}")
                return
            except LaunchError as error:
                self._failure = error
                return

    def _start_again(self, how: str) -> None:
        """Restart the server. Raises LaunchError if restarts were necessary too often, EtcdServerError if the server does not
        start."""
        if self._closed.is_set():
            return
        now = self._clock.monotonic()
        while self._restarts and now - self._restarts[0] > _WINDOW_S:
            self._restarts.popleft()
        before = len(self._restarts)
        if before >= self._max_restarts:
            raise LaunchError(
                f"etcd {how}, and had been started again {before} times within the hour (runtime.max_restarts); its log: "
                f"{self._log}"
            )
        self._restarts.append(now)
        pause_s = 0.0 if before == 0 else min(_LONGEST_PAUSE_S, 0.5 * 2.0**before)
        self._notice(f"etcd {how}; it is started again on its data (its log: {self._log})")
        if self._closed.wait(pause_s):
            return
        try:
            self._server.start(_START_LIMIT_S)
        except EtcdServerError as error:
            if self._closed.is_set():
                return
            self._notice(f"etcd does not start on its data, so it is started without: {error}")
            with contextlib.suppress(OSError):  # the start below reports a folder that cannot be removed
                shutil.rmtree(self._server.data_dir)
            self._server.start(_START_LIMIT_S)
        self._notice("etcd runs again")
