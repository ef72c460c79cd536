"""Forks the launchers of runs from a process that has imported everything, so that the runs of a pytest session import once.

    pytest
      the session's fork server     the module's `main`; started with the first run
        a launcher                  `_launch`
          its own fork server       forked before the launcher begins; forks the fork servers of the run, which import nothing

Each process has the parent, the session, the environment and the log that it has in an ordinary run. Tests with the mark
`real_start` start an ordinary run, and so do all runs with another environment than that of the session's fork server.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from asyncrl.cli import main as cli
from asyncrl.launch import worker_main
from asyncrl.launch.supervisor import children, fork_server
from asyncrl.launch.supervisor.fork_server import PRELOADS, Forked, ForkServer, adopt_orphans
from asyncrl.runtime.system import STATUS_FD_ENV
from asyncrl.testing.runs import LAUNCHED_ENV

_ROOT = Path(__file__).resolve().parents[2]
_ROOM = "ROOM_FOR_VARIABLES"  # reserves space for the variables of launchers and workers, see fork_server._show_as
_START_LIMIT_S = 120.0
_MODELS = ("transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama")
_OF_ONE_TEST = {"PYTEST_CURRENT_TEST", LAUNCHED_ENV}  # variables that no import reads


class ForkedLauncher(Forked):
    """The part of subprocess.Popen that RunHandle uses."""

    @property
    def returncode(self) -> int | None:
        return self._code

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkedLaunchers:
    """Starts the launchers of a pytest session."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._environment: Mapping[str, str] = {}  # of the fork server
        self._folder = tempfile.TemporaryDirectory()
        self._started = 0

    def start(self, command: Sequence[str], *, stdout: IO[bytes], **options: Any) -> Any:
        """Stands for subprocess.Popen in RunHandle. Commands other than asyncrl-launch have an interpreter of their own."""
        module = ["-m", "asyncrl.cli.main"]
        at = next((at for at in (1, 2) if list(command[at : at + 2]) == module), 0)
        environment = {**options["env"]}
        if self._server is None:
            self._environment = dict(os.environ)
        if not at or command[0] != sys.executable or _imported_with(environment) != _imported_with(self._environment):
            return subprocess.Popen(command, stdout=stdout, **options)
        folder = Path(self._folder.name)
        if self._server is None:
            path = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
            changes = {_ROOM: "x" * 4000, "PYTHONPATH": path}
            self._server = ForkServer.start(
                "computing", folder / "fork_server.log", changes, folder / ("x" * 500), __name__
            )
        self._started += 1
        request = folder / f"{self._started}.json"
        request.write_text(json.dumps({"words": command[at + 2 :], "folder": str(options["cwd"] or os.getcwd())}))
        changes_of_it = {name: environment.get(name) for name in (*_OF_ONE_TEST, _ROOM)}
        with open(os.devnull) as null:
            adopt_orphans(True)
            try:
                self._server.ask(request, changes_of_it, log=stdout.fileno(), status=null.fileno())
                assert select.select([self._server], [], [], _START_LIMIT_S)[0], "the session's fork server hangs"
                return ForkedLauncher(self._server.forked()[request])
            finally:
                adopt_orphans(False)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()


def _imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _OF_ONE_TEST}


def _launch(request: Path) -> int:
    """Run asyncrl-launch in this newly forked process, after forking the fork server that forks those of the run."""
    wanted = json.loads(request.read_text())
    del os.environ[STATUS_FD_ENV]
    os.chdir(wanted["folder"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        return fork_server.main("computing", theirs.detach(), partial(worker_main.run_config, launched=True))
    theirs.close()
    fork_server.inherited = ForkServer("computing", Path(os.devnull), ours, Forked(pid))
    children._oom.kills_lately(-math.inf)  # kills of earlier tests are not those of this run
    sys.argv = [str(cli.__file__), *wanted["words"]]
    return cli.main()


if __name__ == "__main__":
    if rest := os.environ["PYTHONPATH"].partition(os.pathsep)[2]:
        os.environ["PYTHONPATH"] = rest
    else:
        del os.environ["PYTHONPATH"]
    sys.path.remove(str(_ROOT))
    for name in (*PRELOADS["light"], *PRELOADS["computing"], *_MODELS):
        importlib.import_module(name)
    worker_main.end_process(fork_server.main("computing", int(sys.argv[2]), _launch))
