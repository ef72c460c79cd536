"""Forks workers from a process that has already imported their modules, so that a run imports torch once and not once per process.

The launcher starts one fork server for each set of imports (`PRELOADS`), before it starts etcd. The first one has its own
interpreter and forks the second one after its own imports, so both need these only once. The launcher requests workers one after
another over a socket pair. Each request carries two file descriptors: the worker's log and the write end of its status pipe. A
forked worker behaves like a process with its own interpreter:
- It is a child of the launcher, which sees its exit with waitpid. The parent-death signal ends it with the launcher.
- It leads its own session and has its own environment and command line.

On several hosts, the host daemons take the launcher's place: each starts the fork servers and the workers of its host.

The fork server forks twice to make the worker a child of the launcher. The intermediate process exits at once, and the kernel
reparents the orphan to the nearest ancestor that is a subreaper. The launcher is a subreaper while forks are pending. A fork server
ends when the launcher needs no more workers.

multiprocessing's fork server does not fit: its workers are its own children, in the launcher's session, and when it is killed, it
reports them as ended (exit code 255) although they are alive.

This file contains both ends: `ForkServer` runs in the launcher, `main` in the fork server. Modules imported before a fork must not
start threads, open socket contexts, initialise CUDA (each worker has its own CUDA_VISIBLE_DEVICES) or load gRPC.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from asyncrl.launch import worker_main
from asyncrl.runtime.clock import wait_until
from asyncrl.runtime.process import die_with_parent, python_module
from asyncrl.runtime.system import STATUS_FD_ENV

# Modules that workers import, including those that torch and transformers import lazily at first use.
PRELOADS: Mapping[str, Sequence[str]] = {
    "light": (
        "asyncrl.runtime.names.etcd.resolver",  # with the next two: name resolve without gRPC
        "google.protobuf.internal.builder",
        "tenacity",
        "asyncrl.rollout.worker",
        "asyncrl.manager.worker",
        "asyncrl.master.worker",
        "transformers.tokenization_utils_tokenizers",
    ),
    "computing": (  # in addition to the imports of "light"
        "asyncrl.generation.worker",
        "asyncrl.generation.transformers",
        "asyncrl.model.worker",
        "torch._dynamo",  # otherwise imported by the first optimizer step
        "transformers.generation.utils",  # imported by every model's module
        "transformers.masking_utils",
        "transformers.modeling_layers",
        "transformers.processing_utils",
    ),
}

Env: TypeAlias = "Mapping[str, str | None]"  # None: remove the variable

_PROGRAM = "asyncrl.launch.supervisor.fork_server"  # this module, which is __main__ in the fork server
# NumPy's BLAS starts threads on import, and a process should not fork while it has several threads
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_MAX_MESSAGE_BYTES = 100_000
_REPARENT_LIMIT_S = 10.0
_REPARENT_TURN_S = 0.0005  # short, because the intermediate process is already exiting
_CLOSE_LIMIT_S = 5.0
_END_TURN_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
_STDOUT, _STDERR = 1, 2


# ------------------------------------------------------------------------------------------------------- the launcher's end


class ForkServerEnded(Exception):
    """The fork server has ended although it is still needed. `code` is its exit code, or minus the number of the signal that killed
    it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the fork server has ended ({code})")
        self.code = code


@dataclass
class Forked:
    """A child of this process that a fork server has forked, so it has no Popen object."""

    pid: int
    _code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the number of the signal that killed the process. Raises subprocess.TimeoutExpired."""

        def has_ended() -> bool:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

        if self._code is None:
            if timeout is not None and not wait_until(has_ended, limit_s=timeout, every_s=_END_TURN_S):
                raise subprocess.TimeoutExpired("a forked process", timeout)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        """Send SIGKILL, unless `wait` has returned."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The launcher's handle of a fork server. `ask` and `forked` raise ForkServerEnded."""

    def __init__(
        self,
        kind: str,
        log: Path,
        connection: socket.socket,
        process: subprocess.Popen[bytes] | Forked | None = None,
        origin: ForkServer | None = None,
    ) -> None:
        """process: the fork server; None: `origin` has not forked it yet."""
        self.kind = kind
        self.log = log
        self._socket, self._process, self._origin = connection, process, origin
        self._restored: Env = {_BLAS_THREADS: os.environ.get(_BLAS_THREADS)}

    @classmethod
    def start(
        cls,
        kind: str,
        log: Path,
        env: Env,
        longest_config: Path,
        program: str = _PROGRAM,
        origin: ForkServer | None = None,
    ) -> ForkServer:
        """env: changes to the launcher's environment for the fork server. longest_config: the longest path that a worker's config
        can have. program: the module to run; tests pass their own, which calls this file's `main`. origin: the fork server that
        forks this one, which then has the imports of both; this process must adopt orphans until `pid` is known, and must close the
        origin first. None: it gets its own interpreter."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Reserves space for a worker's command line, see _show_as
        room = f"{longest_config.parent}/".ljust(len(str(longest_config)), "/")
        with theirs, log.open("ab") as output:
            if origin is not None:
                with contextlib.suppress(ForkServerEnded):  # `forked` then raises it, because `theirs` is closed
                    origin._request({"kind": kind, "config": room, "env": env}, output.fileno(), theirs.fileno())
                return cls(kind, log, ours, origin=origin)
            process = subprocess.Popen(
                python_module(program, kind, str(theirs.fileno()), room),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_changed(os.environ, {**env, _BLAS_THREADS: "1"}),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            return cls(kind, log, ours, process)

    @property
    def pid(self) -> int | None:
        """None: its origin has not forked it yet."""
        return self._process.pid if self._process is not None else None

    def fileno(self) -> int:
        """A descriptor that becomes readable when a worker was forked, or when the fork server ended."""
        return self._socket.fileno()

    def ask(self, config: Path, env: Env, *, log: int, status: int) -> None:
        """Request a worker. env: changes to its environment. log, status: descriptors of its log and its status pipe, which the
        worker inherits. Does not wait for the fork."""
        self._request({"kind": "", "config": str(config), "env": {**self._restored, **env}}, log, status)

    def _request(self, request: Mapping[str, object], *fds: int) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        except ConnectionError:
            raise ForkServerEnded(self._reap()) from None

    def forked(self) -> dict[Path, int]:
        """Return the workers forked since the last call: path of the worker's config -> its pid. They are children of this process.
        Does not wait."""
        found: dict[Path, int] = {}
        while True:
            try:
                reply = self._socket.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except ConnectionError:
                reply = b""
            if not reply:
                raise ForkServerEnded(self._reap())
            found |= self._pid_by_config(reply)

    def _reap(self) -> int:
        """Return the fork server's exit code; its origin's if that has not forked it. Called when its socket is closed, so it has
        ended or is about to end. Kills it if it has not ended after _CLOSE_LIMIT_S."""
        if self._process is None:
            assert self._origin is not None
            return self._origin._reap()
        try:
            return self._process.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> dict[Path, int]:
        """Kill the fork server. Returns, as `forked` does, the workers that were forked but that `forked` has not returned yet. No
        others will appear."""
        found: dict[Path, int] = {}
        self._socket.settimeout(_CLOSE_LIMIT_S)
        with self._socket, contextlib.suppress(TimeoutError, ConnectionError):
            if self._process is None:
                found |= self._pid_by_config(self._socket.recv(_MAX_MESSAGE_BYTES))
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            # A worker that was forked a moment ago still holds the socket. It sends its pid before it closes the socket
            while reply := self._socket.recv(_MAX_MESSAGE_BYTES):
                found |= self._pid_by_config(reply)
        return found

    def _pid_by_config(self, reply: bytes) -> dict[Path, int]:
        """Read a message of the fork server. Its first one, if it has an origin, has its own pid. b"": it has ended."""
        message = json.loads(reply or "{}")
        if self._process is None and reply:
            self._process = Forked(message["pid"])
            return {}
        return {Path(message["config"]): message["pid"]} if reply else {}


# A fork server that this process had from its start, which forks the others (tests)
inherited: ForkServer | None = None


def _changed(environment: Mapping[str, str], changes: Env) -> dict[str, str]:
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}


def is_supported() -> bool:
    """Whether this system supports child subreapers."""
    return sys.platform == "linux" and adopt_orphans(False)


def adopt_orphans(on: bool) -> bool:
    """Make this process a subreaper, which adopts its orphaned descendants (on=False: no longer). Returns False if the system does
    not support that."""
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------------- the process


@dataclass(frozen=True)
class _Request:
    """A requested worker, or a requested fork server."""

    kind: str  # of the fork server; "": a worker
    config: str  # of the worker; of a fork server the last argument, which reserves space
    env: Env
    log: int
    channel: int  # the worker's status pipe; the fork server's socket


def main(kind: str, socket_fd: int, run: Callable[[Path], int]) -> int:
    """Import the modules, then fork on request. Returns several times: in each worker the result of `run`; in each fork server 0,
    when the launcher has closed its socket."""
    launcher = os.getppid()
    die_with_parent()
    while True:
        requests = socket.socket(fileno=socket_fd)
        requests.set_inheritable(False)
        gc.disable()  # the imports create a million objects and no garbage: collecting would only cost time
        for module in PRELOADS[kind]:
            importlib.import_module(module)
        gc.freeze()  # otherwise a collection in a worker would write to all shared pages, and so copy them
        request = _serve(requests, launcher)
        if request is None:
            return 0
        if not request.kind:
            return run(Path(request.config))
        kind, socket_fd = request.kind, request.channel


def _serve(requests: socket.socket, launcher: int) -> _Request | None:
    """Fork a process for each request. Returns the request in that process, and None in the fork server when the socket is closed.

    waits for: the next request. unblocked by: the launcher; the launcher's death (the kernel then kills this process).
    """
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 2)
        if not data:
            return None
        request = _Request(**json.loads(data), log=fds[0], channel=fds[1])
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            _become(request, requests, between, launcher)
            return request
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become(request: _Request, requests: socket.socket, between: int, launcher: int) -> None:
    """Turn this newly forked process into a worker or a fork server: give it the state that a new interpreter would start with."""
    os.setsid()
    wait_until(lambda: os.getppid() != between, limit_s=_REPARENT_LIMIT_S, every_s=_REPARENT_TURN_S)
    die_with_parent()
    if os.getppid() != launcher:
        os._exit(1)  # the launcher is gone
    for standard in (_STDOUT, _STDERR):
        os.dup2(request.log, standard)
    os.close(request.log)
    status = {} if request.kind else {STATUS_FD_ENV: str(request.channel)}
    for name, value in {**request.env, **status}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    message = json.dumps({"config": request.config, "pid": os.getpid()}).encode()
    if request.kind:
        _show_as(python_module(_PROGRAM, request.kind, str(request.channel), request.config), request.env)
        os.write(request.channel, message)
        requests.close()
        return
    sys.argv = [worker_main.__file__, request.config]
    _show_as(python_module(worker_main.__name__, request.config), request.env)
    # Only NumPy's random generator needs a new seed: Python's reseeds itself after a fork, and torch's has the same seed at the
    # start of every process anyway
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    gc.enable()
    requests.send(message)
    requests.close()


def _show_as(arguments: Sequence[str], newest: Iterable[str]) -> None:
    """Change the command line and the environment that ps, py-spy and the reaper see. They overwrite the original ones and are cut
    off at their length. newest: the variables that come first."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    _overwrite(int(fields[45]), int(fields[46]), arguments)
    for name, value in os.environ.items():
        os.putenv(name, value)  # a copy elsewhere replaces the original, so that the C library no longer reads that
    environment = {name: os.environ[name] for name in (*newest, *os.environ) if name in os.environ}
    _overwrite(int(fields[47]), int(fields[48]), [f"{name}={value}" for name, value in environment.items()])


def _overwrite(start: int, end: int, texts: Sequence[str]) -> None:
    if start == 0:  # the kernel hides the address
        return
    text = "\0".join(texts).encode(errors="surrogateescape")[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    worker_main.end_process(main(sys.argv[1], int(sys.argv[2]), partial(worker_main.run_config, launched=True)))
