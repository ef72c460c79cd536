"""The launcher's children: they are started, listened to, killed and reaped here. Who is wanted is decided elsewhere."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.launch.program import ProcessSpec
from asyncrl.launch.rundir import RUN_DIR_ENV
from asyncrl.launch.supervisor.children import Child
from asyncrl.launch.supervisor.reaper import Reaper
from asyncrl.launch.supervisor.starter import Starter
from asyncrl.runtime.names.interface import Lease

_SAY_AFTER_S = 2.0  # whom a stop waits for
KILL_LIMIT_S = 60.0  # of what was killed: a process inside the kernel (a disk that hangs) ends only when that lets it
_STOP_TURN_S = 0.02
_REAPER_LIMIT_S = 5.0


class Crew:
    """consumes: status lines and ends of children. produces: the same children, up to date.

    waits for: in `turn` for a pipe, in `stop` for ends; both bounded.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        *,
        fork: bool,
        start_limit_s: float,
        notice: Callable[[str], None],
        marker: str = "",
        socket_dir: str = "",
    ) -> None:
        """specs: what will be started, as far as it is known. marker: NAME=value that all of them have in their environment, and
        no process of another crew; default: the run's folder. socket_dir: network.socket_dir, which goes with the launcher."""
        self.children: list[Child] = []
        self._notice = notice
        self._selector = selectors.DefaultSelector()
        self._reaper = Reaper(marker or f"{RUN_DIR_ENV}={run_dir}", socket_dir)
        self._starter = Starter(specs, run_dir, self._selector, fork=fork, limit_s=start_limit_s, notice=notice)

    @property
    def alive(self) -> list[Child]:
        """Those that have not ended, and those that are being forked."""
        return [child for child in self.children if child.returncode is None]

    def start(self, spec: ProcessSpec, lease: Lease) -> Child:
        child = self._starter.start(spec, lease)
        self.take_in(child)
        return child

    def ask(self, spec: ProcessSpec, lease: Lease) -> Child:
        """Start a process that its owner hands over with `take_in`."""
        return self._starter.start(spec, lease)

    def take_in(self, child: Child) -> None:
        """A child that was started, or asked for."""
        self.children.append(child)
        if child.process is not None:
            self._begin(child)

    def turn(self, wait_s: float) -> list[Child]:
        """Take in statuses and ends. Unblocked by those. Returns the children that have ended since the last turn."""
        for key, _ in self._selector.select(wait_s):
            child: Child | None = key.data  # None: a fork server
            if child is not None and not child.read_status():
                self._selector.unregister(child.pipe)
        for child in self._starter.turn():
            self._begin(child)
        ended: list[Child] = []
        for child in self.children:
            if child.returncode is None and child.poll():
                assert child.process is not None
                self._reaper.gone(child.process.pid)
                ended.append(child)
        self._reaper.turn()
        return ended

    def forget(self, child: Child) -> None:
        """A child that has ended, and is no matter any more."""
        if child not in self.children:
            return
        self.children.remove(child)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.pipe)
        os.close(child.pipe)

    def stop(self, limit_s: float, impatient: Callable[[], bool]) -> None:
        """Ask, then kill. Rollout workers first: they have things to report to the others, who then have nothing more to do."""
        for child in self._starter.close():
            self.children.remove(child)
            os.close(child.pipe)
        rollout_workers = [child for child in self.children if child.spec.kind == "rollout_worker"]
        self._ask_and_wait(rollout_workers, limit_s / 3, impatient)
        self._ask_and_wait(self.children, limit_s * 2 / 3, impatient)
        deadline = time.monotonic() + KILL_LIMIT_S
        while (alive := [child for child in self.children if not child.poll()]) and time.monotonic() < deadline:
            for child in alive:
                child.kill()
            time.sleep(_STOP_TURN_S)
        for child in self.children:
            os.close(child.pipe)
        self._selector.close()

    def close(self) -> None:
        """The last line of defence goes too, with whatever is left."""
        self._reaper.close(_REAPER_LIMIT_S)

    def _begin(self, child: Child) -> None:
        """It has a process now."""
        assert child.process is not None
        self._reaper.add(child.process.pid)
        self._selector.register(child.pipe, selectors.EVENT_READ, child)

    def _ask_and_wait(self, children: Sequence[Child], limit_s: float, impatient: Callable[[], bool]) -> None:
        """Waits for: their exit. Unblocked by: that, the limit, or impatience."""
        for child in children:
            child.ask_to_stop()
        start = time.monotonic()
        said = False
        while alive := [child for child in children if not child.poll()]:
            waited_s = time.monotonic() - start
            if impatient() or waited_s > limit_s:
                return
            if waited_s > _SAY_AFTER_S and not said:
                said = True
                names = ", ".join(child.name for child in alive)
                self._notice(f"waiting up to {limit_s:g} s for {names} to stop; a second Ctrl-C kills at once")
            time.sleep(_STOP_TURN_S)
