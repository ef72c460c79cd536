"""Owns the child processes of a launcher or of a host daemon: starts them, reads their status pipes, kills and reaps them.

Each child is forked by a fork server, or has its own interpreter. policy.py and state_machine.py decide which children should
exist.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.launch.program import ProcessSpec
from asyncrl.launch.rundir import LAUNCH_ENV, RUN_DIR_ENV, LaunchError, logs_dir
from asyncrl.launch.supervisor import fork_server
from asyncrl.launch.supervisor.children import (
    Child,
    config_file,
    how_it_ended,
    start_child,
    start_process,
)
from asyncrl.launch.supervisor.fork_server import (
    PRELOADS,
    Forked,
    ForkServer,
    ForkServerEnded,
    adopt_orphans,
    is_supported,
)
from asyncrl.launch.supervisor.pool import Pool
from asyncrl.launch.supervisor.reaper import Reaper
from asyncrl.protocol.names import incarnation
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.names.interface import Lease

_REAPER_LIMIT_S = 5.0
_FORK_LIMIT_S = 10.0  # limit of a fork, if the fork server has forked before, so that its imports are done
_ROOM_FOR_LATER = "0000"  # room in a worker's command line for longer numbers of attempts and servers


class ProcessPool(Pool):
    """consumes: the status lines and exits of children. produces: the records of these children (`children`), up to date.

    waits for: in `turn` a pipe, in `stop` the exit of the children; both waits have limits.
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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """specs: the processes to start, as far as they are known. marker: NAME=value, which all processes of this pool have in
        their environment, and those of no other pool; default: LAUNCH_ENV with a new value. socket_dir: network.socket_dir, removed
        when the launcher ends."""
        marker = marker or f"{LAUNCH_ENV}={incarnation('launcher')}:{run_dir}"
        super().__init__(notice, clock)
        self._selector = selectors.DefaultSelector()
        self._reaper = Reaper(marker, socket_dir)
        name, _, value = marker.partition("=")
        self._starts = _Starts(
            specs,
            run_dir,
            self._selector,
            env={RUN_DIR_ENV: str(run_dir), name: value},
            fork=fork,
            limit_s=start_limit_s,
            notice=notice,
            clock=clock,
        )

    def start(self, spec: ProcessSpec, lease: Lease, *, restarts: int = 0) -> Child:
        """Start a process and add it to `children`. restarts: how often this process has been restarted so far, including this
        start if it is a restart. 0: its first start."""
        child = self._starts.start(spec, lease, restarts=restarts)
        self.children.append(child)
        if child.process is not None:
            self._begin(child)
        return child

    def turn(self, wait_s: float) -> list[Child]:
        for key, _ in self._selector.select(wait_s):
            child: Child | None = key.data  # None: a fork server
            if child is not None and not child.read_status():
                self._selector.unregister(child.pipe)
        for child in self._starts.turn():
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
        """Remove a child that has ended and is no longer needed."""
        if child not in self.children:
            return
        self.children.remove(child)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.pipe)
        os.close(child.pipe)

    def stop(self, limit_s: float, impatient: Callable[[], bool]) -> None:
        """Remove the pending children, and stop the others."""
        for child in self._starts.close():
            self.children.remove(child)
            os.close(child.pipe)
        super().stop(limit_s, impatient)
        for child in self.children:
            os.close(child.pipe)
        self._selector.close()

    def close(self) -> None:
        """End the reaper, which kills all remaining processes."""
        self._reaper.close(_REAPER_LIMIT_S)

    def _begin(self, child: Child) -> None:
        """Register a child that has just got its process."""
        assert child.process is not None
        self._reaper.add(child.process.pid)
        self._selector.register(child.pipe, selectors.EVENT_READ, child)


class _Starts:
    """Starts processes with fork servers, where the system supports them, otherwise each in its own interpreter.

    The fork servers start to import when this object is constructed, in parallel with the launcher's other preparations. They live
    as long as the run, so a restarted process needs no imports either.

    produces: children. A child requested from a fork server is pending: it has no process until `turn` has seen the fork.
    waits for: nothing. If a fork server ends or hangs before its first fork, the launch fails with that as first cause. If it ends
    or hangs after its first fork, the children that it has not forked yet, and all later ones of its kind, get their own
    interpreters.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        selector: selectors.BaseSelector,
        *,
        env: Mapping[str, str],
        fork: bool,
        limit_s: float,
        notice: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """specs: the processes to start, as far as they are known. selector: the fork servers are registered in it, so that it
        wakes up when `turn` has work. env: variables that all processes have."""
        self._run_dir, self._env = run_dir, env
        self._selector = selector
        self._limit_s = limit_s
        self._notice, self._clock = notice, clock
        self._servers: dict[str, ForkServer] = {}
        self._answered: dict[str, float] = {}  # when a fork server of this kind last forked

        # By path of the config: a child that is not forked yet, and when it was requested
        self._pending: dict[Path, tuple[Child, float]] = {}
        self._started: list[Child] = []  # since the last turn
        if not fork or not specs or not is_supported():
            return
        configs = [config_file(spec, run_dir) for spec in specs]
        longest = max(
            (path.with_name(path.name + _ROOM_FOR_LATER) for path in configs), key=lambda path: len(path.name)
        )
        origin = fork_server.inherited
        for kind in PRELOADS:
            its = [spec for spec in specs if _preload_of(spec) == kind]
            if not its and origin is not None:
                continue
            log = logs_dir(run_dir, specs[0].config.worker.attempt) / f"fork_server_{kind}.log"
            server_env = {**(its[0].env if its else {}), **env}
            server_env.pop("CUDA_VISIBLE_DEVICES", None)  # each worker has its own
            adopt_orphans(origin is not None)
            self._servers[kind] = origin = ForkServer.start(kind, log, server_env, longest, origin=origin)
            selector.register(origin, selectors.EVENT_READ)

    def start(self, spec: ProcessSpec, lease: Lease, *, restarts: int = 0) -> Child:
        """Start a process, or request its fork. Raises LaunchError."""
        kind = _preload_of(spec)
        server = self._servers.get(kind)
        if server is not None:
            adopt_orphans(True)  # only while forks are pending, so as not to adopt unrelated orphans
            try:
                child = start_child(spec, self._run_dir, lease, self._env, server, self._clock, restarts=restarts)
            except ForkServerEnded as error:
                self._started.extend(self._do_without(kind, error))
            else:
                self._pending[config_file(spec, self._run_dir)] = child, self._clock.monotonic()
                return child
        return start_child(spec, self._run_dir, lease, self._env, clock=self._clock, restarts=restarts)

    def turn(self) -> list[Child]:
        """Return the children that have got their process since the last turn. Raises LaunchError if a fork server fails."""
        started, self._started = self._started, []
        for kind, server in list(self._servers.items()):
            answered = self._answered.get(kind)
            limit_s = self._limit_s if answered is None else _FORK_LIMIT_S
            error: ForkServerEnded | None = None
            try:
                started.extend(self._assign_pids(server.forked()))
            except ForkServerEnded as ended:
                error = ended
            late = [
                child
                for child, asked in self._pending_of(kind)
                if self._clock.monotonic() - max(asked, answered or 0.0) > limit_s
            ]
            if error is not None or late:
                started.extend(self._do_without(kind, error))
        return started

    def close(self) -> list[Child]:
        """End the fork servers. Returns the pending children, which will never get a process."""
        for kind in list(self._servers):
            self._end(kind)
        pending = [child for child, _ in self._pending.values()]
        self._pending.clear()
        adopt_orphans(False)
        return pending

    def _pending_of(self, kind: str) -> list[tuple[Child, float]]:
        return [(child, asked) for child, asked in self._pending.values() if _preload_of(child.spec) == kind]

    def _do_without(self, kind: str, error: ForkServerEnded | None) -> list[Child]:
        """Give up a fork server that has ended (error), or that hangs (error is None). If it has forked before, start its pending
        children in their own interpreters, and return all children that have got a process now. Otherwise raise LaunchError."""
        server, owed = self._servers[kind], self._pending_of(kind)
        if kind not in self._answered:
            raise self._hangs(server, *owed[0]) if error is None else self._ended(server, error)
        why = "does not answer" if error is None else "has ended"
        self._notice(
            f"the fork server of the {kind} processes {why}; from now on each of them starts in its own interpreter, which takes "
            f"longer (its log: {server.log})"
        )
        started = self._end(kind)
        for config, (child, _) in list(self._pending.items()):
            if _preload_of(child.spec) == kind:
                del self._pending[config]
                os.close(child.pipe)
                start_process(child, self._run_dir, self._env, None)
                started.append(child)
        return started

    def _end(self, kind: str) -> list[Child]:
        server = self._servers.pop(kind)
        self._selector.unregister(server)
        return self._assign_pids(server.close())

    def _assign_pids(self, forked: dict[Path, int]) -> list[Child]:
        started: list[Child] = []
        for config, pid in forked.items():
            child, _ = self._pending.pop(config)
            child.process = Forked(pid)
            self._answered[_preload_of(child.spec)] = self._clock.monotonic()
            started.append(child)
        if not self._pending and all(server.pid is not None for server in self._servers.values()):
            adopt_orphans(False)
        return started

    def _hangs(self, server: ForkServer, child: Child, asked: float) -> LaunchError:
        waited_s = self._clock.monotonic() - asked
        return LaunchError(
            f"waited {waited_s:.0f} s for {child.name} from the fork server of the {server.kind} processes; giving up "
            f"(runtime.start_timeout_s). Its log: {server.log}"
        )

    @staticmethod
    def _ended(server: ForkServer, error: ForkServerEnded) -> LaunchError:
        return LaunchError(
            f"the fork server of the {server.kind} processes {how_it_ended(error.code, server.log)}\n\n"
            f"Its log: {server.log}\nruntime.fork_server=false starts a run without fork servers."
        )


def _preload_of(spec: ProcessSpec) -> str:
    return "computing" if spec.computes else "light"
