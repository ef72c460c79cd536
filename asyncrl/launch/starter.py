"""Starts the processes of a run: forked by fork servers, or each in an interpreter of its own."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from pathlib import Path

from asyncrl.launch.children import Child, Forked, config_file, how_it_ended, start_child
from asyncrl.launch.fork_server import ForkServer, ForkServerEnded, adopt_orphans, is_supported
from asyncrl.launch.program import ProcessSpec
from asyncrl.launch.rundir import RUN_DIR_ENV, LaunchError, logs_dir
from asyncrl.runtime.name_resolve import Lease


class Starter:
    """Its fork servers import from the moment it is made, beside whatever the launcher does before it starts the first process.

    produces: children; those that are to be forked have no process until `turn` has taken it in.
    waits for: nothing; `turn` raises LaunchError when a fork server has ended, or has not forked within limit_s.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        selector: selectors.BaseSelector,
        *,
        fork: bool,
        limit_s: float,
    ) -> None:
        """specs: what will be started, as far as it is known. selector: gets something to read when `turn` has work."""
        self._run_dir = run_dir
        self._selector = selector
        self._limit_s = limit_s
        self._servers: dict[str, ForkServer] = {}
        self._unborn: dict[Path, Child] = {}
        self._complete = False
        if not fork or not specs or not is_supported():
            return
        adopt_orphans(True)
        longest_config = max((config_file(spec, run_dir) for spec in specs), key=lambda path: len(path.name))
        for spec in specs:
            kind = _preload_of(spec)
            if kind not in self._servers:
                log = logs_dir(run_dir, spec.config.worker.attempt) / f"fork_server_{kind}.log"
                env = {**spec.env, RUN_DIR_ENV: str(run_dir)}
                env.pop("CUDA_VISIBLE_DEVICES", None)  # of that one process
                self._servers[kind] = ForkServer(kind, log, env, longest_config)
                selector.register(self._servers[kind], selectors.EVENT_READ)

    def start(self, spec: ProcessSpec, lease: Lease) -> Child:
        """Start a process, or ask for it to be forked."""
        server = self._servers.get(_preload_of(spec))
        try:
            child = start_child(spec, self._run_dir, lease, server)
        except ForkServerEnded as error:
            assert server is not None
            raise self._ended(server, error) from None
        if server is not None:
            self._unborn[config_file(spec, self._run_dir)] = child
        return child

    def all_asked_for(self) -> None:
        """There are no more to start: fork servers end when they have forked theirs."""
        self._complete = True

    def turn(self) -> list[Child]:
        """Take in what was forked since the last turn."""
        born: list[Child] = []
        for kind, server in list(self._servers.items()):
            try:
                born.extend(self._take_in(server.forked()))
            except ForkServerEnded as error:
                raise self._ended(server, error) from None
            unborn = [child for child in self._unborn.values() if _preload_of(child.spec) == kind]
            if not unborn and self._complete:
                self._end(kind)
            elif unborn and (waited_s := time.time() - unborn[0].started) > self._limit_s:
                raise LaunchError(
                    f"waited {waited_s:.0f} s for {unborn[0].name} from the fork server of the {kind} processes; giving up "
                    f"(runtime.start_timeout_s). Its log: {server.log}"
                )
        return born

    def close(self) -> list[Child]:
        """End the fork servers. Returns those that have not been forked, and never will be."""
        for kind in list(self._servers):
            self._end(kind)
        unborn = list(self._unborn.values())
        self._unborn.clear()
        return unborn

    def _end(self, kind: str) -> None:
        server = self._servers.pop(kind)
        self._selector.unregister(server)
        self._take_in(server.close())
        if not self._servers:
            adopt_orphans(False)

    def _take_in(self, forked: dict[Path, int]) -> list[Child]:
        born: list[Child] = []
        for config, pid in forked.items():
            child = self._unborn.pop(config)
            child.process = Forked(pid)
            born.append(child)
        return born

    @staticmethod
    def _ended(server: ForkServer, error: ForkServerEnded) -> LaunchError:
        return LaunchError(
            f"the fork server of the {server.kind} processes {how_it_ended(error.code, server.log)}\n\n"
            f"Its log: {server.log}\nruntime.fork_server=false starts a run without fork servers."
        )


def _preload_of(spec: ProcessSpec) -> str:
    return "computing" if spec.computes else "light"
