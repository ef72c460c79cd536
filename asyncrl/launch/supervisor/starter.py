"""Starts the processes of a run: forked by fork servers, or each in an interpreter of its own."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.launch.program import ProcessSpec
from asyncrl.launch.rundir import RUN_DIR_ENV, LaunchError, logs_dir
from asyncrl.launch.supervisor.children import Child, Forked, config_file, how_it_ended, start_child, start_process
from asyncrl.launch.supervisor.fork_server import ForkServer, ForkServerEnded, adopt_orphans, is_supported
from asyncrl.runtime.names.interface import Lease

_ROOM_FOR_LATER = "0000"  # in a worker's command line: attempts and servers whose numbers have more digits

_FORK_LIMIT_S = 10.0  # for a fork, when all is imported


class Starter:
    """Its fork servers import from the moment it is made, beside whatever the launcher does before it starts the first process.
    They live as long as the run, so that a process that is started again does not import either.

    produces: children; those that are to be forked have no process until `turn` has taken it in.
    waits for: nothing. A fork server that ends or hangs before it has forked anybody is the first cause of a failure; later, its
    children are interpreters of their own.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        selector: selectors.BaseSelector,
        *,
        fork: bool,
        limit_s: float,
        notice: Callable[[str], None],
    ) -> None:
        """specs: what will be started, as far as it is known. selector: gets something to read when `turn` has work."""
        self._run_dir = run_dir
        self._selector = selector
        self._limit_s = limit_s
        self._notice = notice
        self._servers: dict[str, ForkServer] = {}
        self._answered: dict[str, float] = {}  # kinds of which one was forked, and when last
        self._unborn: dict[Path, tuple[Child, float]] = {}  # and when they were asked for
        self._born: list[Child] = []  # since the last turn
        if not fork or not specs or not is_supported():
            return
        configs = [config_file(spec, run_dir) for spec in specs]
        longest = max(
            (path.with_name(path.name + _ROOM_FOR_LATER) for path in configs), key=lambda path: len(path.name)
        )
        for spec in specs:
            kind = _preload_of(spec)
            if kind not in self._servers:
                log = logs_dir(run_dir, spec.config.worker.attempt) / f"fork_server_{kind}.log"
                env = {**spec.env, RUN_DIR_ENV: str(run_dir)}
                env.pop("CUDA_VISIBLE_DEVICES", None)  # of that one process
                self._servers[kind] = ForkServer(kind, log, env, longest)
                selector.register(self._servers[kind], selectors.EVENT_READ)

    def start(self, spec: ProcessSpec, lease: Lease) -> Child:
        """Start a process, or ask for it to be forked. Raises LaunchError."""
        kind = _preload_of(spec)
        server = self._servers.get(kind)
        if server is not None:
            adopt_orphans(True)  # only as long as somebody is to be adopted: others' orphans are none of ours
            try:
                child = start_child(spec, self._run_dir, lease, server)
            except ForkServerEnded as error:
                self._born.extend(self._do_without(kind, error))
            else:
                self._unborn[config_file(spec, self._run_dir)] = child, time.monotonic()
                return child
        return start_child(spec, self._run_dir, lease)

    def turn(self) -> list[Child]:
        """Those that have got their process since the last turn. Raises LaunchError."""
        born, self._born = self._born, []
        for kind, server in list(self._servers.items()):
            answered = self._answered.get(kind)
            limit_s = self._limit_s if answered is None else _FORK_LIMIT_S
            error: ForkServerEnded | None = None
            try:
                born.extend(self._take_in(server.forked()))
            except ForkServerEnded as ended:
                error = ended
            late = [
                child
                for child, asked in self._unborn_of(kind)
                if time.monotonic() - max(asked, answered or 0.0) > limit_s
            ]
            if error is not None or late:
                born.extend(self._do_without(kind, error))
        return born

    def close(self) -> list[Child]:
        """End the fork servers. Returns those that have not been forked, and never will be."""
        for kind in list(self._servers):
            self._end(kind)
        unborn = [child for child, _ in self._unborn.values()]
        self._unborn.clear()
        adopt_orphans(False)
        return unborn

    def _unborn_of(self, kind: str) -> list[tuple[Child, float]]:
        return [(child, asked) for child, asked in self._unborn.values() if _preload_of(child.spec) == kind]

    def _do_without(self, kind: str, error: ForkServerEnded | None) -> list[Child]:
        """A fork server has ended, or hangs. Those that it owes get interpreters of their own, if it is not to be blamed."""
        server, owed = self._servers[kind], self._unborn_of(kind)
        if kind not in self._answered:
            raise self._hangs(server, *owed[0]) if error is None else self._ended(server, error)
        why = "does not answer" if error is None else "has ended"
        self._notice(
            f"the fork server of the {kind} processes {why}; from now on they are interpreters of their own, which takes longer "
            f"to start (its log: {server.log})"
        )
        born = self._end(kind)
        for config, (child, _) in list(self._unborn.items()):
            if _preload_of(child.spec) == kind:
                del self._unborn[config]
                os.close(child.pipe)
                start_process(child, self._run_dir, None)
                born.append(child)
        return born

    def _end(self, kind: str) -> list[Child]:
        server = self._servers.pop(kind)
        self._selector.unregister(server)
        return self._take_in(server.close())

    def _take_in(self, forked: dict[Path, int]) -> list[Child]:
        born: list[Child] = []
        for config, pid in forked.items():
            child, _ = self._unborn.pop(config)
            child.process = Forked(pid)
            self._answered[_preload_of(child.spec)] = time.monotonic()
            born.append(child)
        if forked and not self._unborn:
            adopt_orphans(False)
        return born

    @staticmethod
    def _hangs(server: ForkServer, child: Child, asked: float) -> LaunchError:
        return LaunchError(
            f"waited {time.monotonic() - asked:.0f} s for {child.name} from the fork server of the {server.kind} processes; giving "
            f"up (runtime.start_timeout_s). Its log: {server.log}"
        )

    @staticmethod
    def _ended(server: ForkServer, error: ForkServerEnded) -> LaunchError:
        return LaunchError(
            f"the fork server of the {server.kind} processes {how_it_ended(error.code, server.log)}\n\n"
            f"Its log: {server.log}\nruntime.fork_server=false starts a run without fork servers."
        )


def _preload_of(spec: ProcessSpec) -> str:
    return "computing" if spec.computes else "light"
