"""N processes that are the ranks of one torch.distributed world, kept for many calls. For tests of several ranks.

    with RankProcesses(8) as ranks:
        results = ranks.run(function, argument)                # function(rank, argument) on every rank; results in rank order
        results = ranks.run(function, argument, num_ranks=2)   # on the first two

Processes are forked from a server that has torch and the training engine loaded, so that eight ranks are there in seconds.
Functions are sent by name: module-level, in a module that can be imported; a script that makes them guards its main. What a
function leaves in module globals is there for the next call.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

# Loaded before the fork, which is most of a rank's start; importing them starts no threads.
PRELOAD = ["asyncrl.model.engine", "transformers.models.qwen2.modeling_qwen2", "torch.testing"]
_END_LIMIT_S = 30.0  # of a process whose pipe has ended
_GRACE_S = 2.0  # after the first failure: time for the other ranks to fail too, before they are taken to be stuck


class RankError(RuntimeError):
    """A call failed: what each failed rank said. `errors` holds their exceptions, where those could be sent."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class RankProcesses:
    """N ranks. A call waits for them at most its limit; if a rank fails, dies or is late, the call raises RankError.

    Where every rank has answered, also with errors, the processes go on. Else those that wait in a collective for a rank that will
    not come are killed, and the next call starts new processes.
    """

    def __init__(
        self, num_ranks: int, *, backend: str = "gloo", limit_s: float = 60.0, preload: tuple[str, ...] = ()
    ) -> None:
        """limit_s: of a call, and of each collective. preload: more modules for the server to load, if it is not running yet."""
        self.num_ranks = num_ranks
        self.backend = backend
        self.limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._store: Any = None

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Called by run where needed."""
        if self._processes:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # Here and not in rank 0: the port is chosen by binding, and known before anyone connects.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.num_ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(theirs, rank, self.num_ranks, self._store.port, self.backend, self.limit_s),
                daemon=True,
                name=f"rank-{rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        num_ranks: int | None = None,
        limit_s: float | None = None,
        grace_s: float = _GRACE_S,
    ) -> list[T]:
        """function(rank, *args) on the first num_ranks ranks (default: all); what they return, in rank order.

        grace_s: what the other ranks are given once one has failed. More for a call that all are to fail: on a busy machine
        they do not fail together.
        """
        self.start()
        count = self.num_ranks if num_ranks is None else num_ranks
        for rank in range(count):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: seen below
                self._connections[rank].send((function, args))
        limit_s = self.limit_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        results: dict[int, T] = {}
        told: dict[int, str] = {}
        errors: dict[int, BaseException] = {}
        waiting = set(range(count))
        while waiting:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait([self._connections[rank] for rank in waiting], max(0.0, left))
            if not ready:
                break
            for rank in [rank for rank in waiting if self._connections[rank] in ready]:
                waiting.discard(rank)
                try:
                    ok, value, error = self._connections[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(_END_LIMIT_S)
                    told[rank] = f"died with exit code {self._processes[rank].exitcode}"
                    continue
                if ok:
                    results[rank] = value
                    continue
                told[rank] = value
                if error is not None:
                    errors[rank] = error
            if told:
                deadline = min(deadline, time.monotonic() + grace_s)
        if waiting or any(not process.is_alive() for process in self._processes):
            self.close()
        if told or waiting:
            texts = [f"rank {rank}: {text}" for rank, text in sorted(told.items(), key=lambda item: item[0] in errors)]
            if waiting:
                texts.append(f"no answer from ranks {sorted(waiting)}" + ("" if told else f" within {limit_s:g} s"))
            name = f"{function.__module__}.{function.__qualname__}"
            raise RankError("\n".join([f"{name} failed", *texts]), errors) from next(iter(errors.values()), None)
        return [results[rank] for rank in range(count)]

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._connections, self._store = [], [], None


def _serve(connection: Connection, rank: int, num_ranks: int, port: int, backend: str, limit_s: float) -> None:
    """A rank: calls until the connection closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=limit_s)
    store = dist.TCPStore("127.0.0.1", port, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        except Exception:  # a function that this process cannot import
            connection.send((False, traceback.format_exc(), None))
            continue
        try:
            answer: tuple[bool, Any, BaseException | None] = (True, function(rank, *args), None)
        except BaseException as error:
            answer = (False, traceback.format_exc(), _sendable(error))
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            break
        except Exception:
            connection.send((False, f"its result cannot be sent\n{traceback.format_exc()}", None))
    os._exit(0)  # without the farewells of the process group: the others may be gone


def _sendable(error: BaseException) -> BaseException | None:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return None
    return error
