"""Forks workers from a process that has imported what they need, so that torch is imported once a run and not once a process.

The launcher starts a fork server for each kind of import (`PRELOADS`), before etcd, and asks it for one worker after another
over a socket pair; with a request go the worker's log and the writing end of its status pipe. A worker so made is what
a separate interpreter would be: a child of the launcher, which sees its end with waitpid and takes it along by the
parent-death signal; leader of a session; with an environment and a command line of its own. To be the launcher's child it is
forked twice: the process between ends at once, and the kernel gives orphans to the nearest ancestor that is a subreaper, which the
launcher is meanwhile. A fork server ends when the launcher needs no more workers.

multiprocessing's fork server cannot take its place. Its workers are its own children, in the launcher's session. When it is killed,
they are reported as ended (exit code 255) while they live.

This file is both ends: `ForkServer` is the launcher's, `main` the process. What is imported there before a fork may start no
thread, open no socket context, initialise no CUDA (CUDA_VISIBLE_DEVICES is each worker's own) and load no gRPC.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from asyncrl.launch import worker_main
from asyncrl.runtime.clock import wait_until
from asyncrl.runtime.process import die_with_parent
from asyncrl.runtime.system import STATUS_FD_ENV

# What workers import, those parts included that torch and transformers would import at their first use.
_NAME_RESOLVE = ("asyncrl.runtime.names.etcd.resolver", "google.protobuf.internal.builder", "tenacity")  # but for gRPC
_TOKENIZERS = "transformers.tokenization_utils_tokenizers"
PRELOADS: Mapping[str, Sequence[str]] = {
    "light": (
        *_NAME_RESOLVE,
        "asyncrl.rollout.worker",
        "asyncrl.manager.worker",
        "asyncrl.master.worker",
        _TOKENIZERS,
    ),
    "computing": (
        *_NAME_RESOLVE,
        "asyncrl.generation.worker",
        "asyncrl.generation.transformers",
        "asyncrl.model.worker",
        "torch._dynamo",  # the first optimizer step would
        "transformers.generation.utils",  # as all models' own modules do
        "transformers.masking_utils",
        "transformers.modeling_layers",
        "transformers.processing_utils",
        _TOKENIZERS,
    ),
}

Env: TypeAlias = "Mapping[str, str | None]"  # None: not in the environment

_MAX_MESSAGE_BYTES = 100_000
_REPARENT_LIMIT_S = 10.0
_REPARENT_TURN_S = 0.0005  # the process between is ending
_CLOSE_LIMIT_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_STDOUT, _STDERR = 1, 2


# ------------------------------------------------------------------------------------------------------- the launcher's end


class ForkServerEnded(Exception):
    """It has ended before its work was done. `code` is its exit code, or minus the signal that ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the fork server has ended ({code})")
        self.code = code


class ForkServer:
    """A fork server as the launcher sees it. All calls raise ForkServerEnded."""

    def __init__(self, kind: str, log: Path, env: Env, longest_config: Path, program: str = __name__) -> None:
        """env: changes to this process's environment. longest_config: no worker's config has a longer path. program: a
        module whose main is this file's, for tests."""
        self.kind = kind
        self.log = log
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # NumPy's BLAS starts its threads when it is imported, and a process should fork without any
        self._restored: Env = {"OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS")}
        room = f"{longest_config.parent}/".ljust(len(str(longest_config)), "/")  # for a worker's command line: _show_as
        arguments = ["-m", program, kind, str(theirs.fileno()), room]
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_changed(os.environ, {**env, "OPENBLAS_NUM_THREADS": "1"}),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when a worker has been forked, and when the fork server has ended."""
        return self._socket.fileno()

    def ask(self, config: Path, env: Env, *, log: int, status: int) -> None:
        """Have a worker forked: its changes to the environment, its log and its status pipe, both for it to keep."""
        request = json.dumps({"config": str(config), "env": {**self._restored, **env}})
        try:
            socket.send_fds(self._socket, [request.encode()], [log, status])
        except ConnectionError:
            raise ForkServerEnded(self._reap()) from None

    def forked(self) -> dict[Path, int]:
        """Workers forked since the last call: config -> pid, a child of this process. Does not wait."""
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
            found |= _pid_by_config(reply)

    def _reap(self) -> int:
        """Its socket is closed: it has ended, or is about to."""
        try:
            return self._process.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> dict[Path, int]:
        """End it now. Returns the workers that it had forked unseen: there will be no others."""
        self._process.kill()
        self._process.wait()
        found: dict[Path, int] = {}
        self._socket.settimeout(_CLOSE_LIMIT_S)
        with self._socket, contextlib.suppress(TimeoutError, ConnectionError):
            while reply := self._socket.recv(_MAX_MESSAGE_BYTES):  # ends when one just forked has answered, too
                found |= _pid_by_config(reply)
        return found


def _pid_by_config(reply: bytes) -> dict[Path, int]:
    message = json.loads(reply)
    return {Path(message["config"]): message["pid"]}


def _changed(environment: Mapping[str, str], changes: Env) -> dict[str, str]:
    return {name: value for name, value in {**environment, **changes}.items() if value is not None}


def is_supported() -> bool:
    """Whether this system gives orphans to a process that asks for them."""
    return sys.platform == "linux" and adopt_orphans(False)


def adopt_orphans(on: bool) -> bool:
    """Become the parent of descendants that lose theirs, or stop that. False where the system knows no such thing."""
    return ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) == 0  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------------- the process


@dataclass(frozen=True)
class _Request:
    """A worker to be."""

    config: str
    env: Env
    log: int
    status: int


def main(kind: str, socket_fd: int, run: Callable[[Path], int]) -> int:
    """Import, then fork on request. Returns in the workers, with what `run` says, and when the launcher has ended."""
    launcher = os.getppid()
    die_with_parent()
    requests = socket.socket(fileno=socket_fd)
    requests.set_inheritable(False)
    gc.disable()  # there is no garbage yet to be found by looking through a million new objects again and again
    for module in PRELOADS[kind]:
        importlib.import_module(module)
    gc.freeze()  # so that no collection in a worker writes to every page that they share, which would copy it
    request = _serve(requests, launcher)
    if request is None:
        return 0
    return run(Path(request.config))


def _serve(requests: socket.socket, launcher: int) -> _Request | None:
    """Fork a worker for each request. In a worker its request; None when the launcher wants no more.

    waits for: the next request. unblocked by: the launcher; its end (the kernel then kills this process).
    """
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, 2)
        if not data:
            return None
        request = _Request(**json.loads(data), log=fds[0], status=fds[1])
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
    """Turn this process, just forked, into a worker: what a new interpreter would have from its start."""
    os.setsid()
    wait_until(lambda: os.getppid() != between, limit_s=_REPARENT_LIMIT_S, every_s=_REPARENT_TURN_S)
    die_with_parent()
    if os.getppid() != launcher:
        os._exit(1)  # the launcher is gone
    for standard in (_STDOUT, _STDERR):
        os.dup2(request.log, standard)
    os.close(request.log)
    for name, value in {**request.env, STATUS_FD_ENV: str(request.status)}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv = [worker_main.__file__, request.config]
    _show_as([sys.executable, "-m", worker_main.__name__, request.config])
    if "numpy.random" in sys.modules:  # Python's own generator does so by itself; torch's begins alike in every process
        sys.modules["numpy.random"].seed()
    gc.enable()
    requests.send(json.dumps({"config": request.config, "pid": os.getpid()}).encode())
    requests.close()


def _show_as(arguments: Sequence[str]) -> None:
    """What ps and py-spy show of this process: written over the arguments it was started with, as far as they reach."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start == 0:  # the system does not tell
        return
    text = "\0".join(arguments).encode(errors="surrogateescape")[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    worker_main.end_process(main(sys.argv[1], int(sys.argv[2]), partial(worker_main.run_config, launched=True)))
