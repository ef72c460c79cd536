"""N processes that are the ranks of one torch.distributed process group, kept for many calls. For tests with several ranks.

    with RankProcesses(8) as ranks:
        results = ranks.run(function, argument)                # function(rank, argument) on every rank; results in rank order
        results = ranks.run(function, argument, num_ranks=2)   # on the first two

Processes are forked from a server that has torch and the training engine loaded, so eight ranks start within seconds. Functions are
sent by name, so they must be at module level in an importable module. A script that uses this class must guard its main. Module
globals that a function sets are still there in the next call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

# Imported before the fork, because importing them takes most of a rank's start. Importing them starts no threads.
PRELOAD = ["asyncrl.model.engine", "transformers.models.qwen2.modeling_qwen2", "torch.testing"]
_END_LIMIT_S = 30.0  # for a process to end after its pipe has been closed
_DUMP_S = 0.2  # for a late rank to write its stack
_GRACE_S = 2.0  # after the first failure: time for the other ranks to fail, too, before they count as stuck


class RankError(RuntimeError):
    """A call failed. The message has the error of each failed rank; `errors` has their exceptions, if they could be pickled."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class RankProcesses:
    """N ranks. A call waits for them up to its limit. If a rank fails, dies or is late, the call raises RankError.

    If every rank has answered, even with errors, the processes stay. Otherwise some may wait in a collective for a rank that never
    joins it; the error has the stack of each late rank, all are killed, and the next call starts new processes.
    """

    def __init__(
        self, num_ranks: int, *, backend: str = "gloo", limit_s: float = 60.0, preload: tuple[str, ...] = ()
    ) -> None:
        """limit_s: time limit of a call, and of each collective. preload: further modules that the fork server imports when it
        starts. A fork server that already runs does not import them."""
        self.num_ranks = num_ranks
        self.backend = backend
        self.limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._store: Any = None
        self._stacks: Any = None

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes if they are not running. `run` calls this."""
        if self._processes:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # The store runs here and not in rank 0: binding chooses the port, which must be known before any rank connects.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 (late ranks write there until close)
        for rank in range(self.num_ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(theirs, rank, self.num_ranks, self._store.port, self.backend, self.limit_s, self._stacks.name),
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
        """Call function(rank, *args) on the first num_ranks ranks (default: all). Returns their results in rank order.

        grace_s: time for the other ranks after one has failed. Use more for a call that must fail on all ranks: on a busy machine
        they do not fail at the same time.
        """
        self.start()
        count = self.num_ranks if num_ranks is None else num_ranks
        for rank in range(count):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead rank is reported below
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
        stacks = self._stacks_of(waiting) if waiting else ""
        if waiting or any(not process.is_alive() for process in self._processes):
            self.close()
        if told or waiting:
            texts = [f"rank {rank}: {text}" for rank, text in sorted(told.items(), key=lambda item: item[0] in errors)]
            if waiting:
                texts.append(f"no answer from ranks {sorted(waiting)}" + ("" if told else f" within {limit_s:g} s"))
                texts.append(stacks)
            name = f"{function.__module__}.{function.__qualname__}"
            raise RankError("\n".join([f"{name} failed", *texts]), errors) from next(iter(errors.values()), None)
        return [results[rank] for rank in range(count)]

    def _stacks_of(self, ranks: set[int]) -> str:
        """The stacks of these ranks, one after the other, so that their lines do not mix."""
        for process in (self._processes[rank] for rank in sorted(ranks)):
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(_DUMP_S)
        self._stacks.seek(0)
        return str(self._stacks.read())

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        if self._stacks is not None:
            self._stacks.close()
        self._processes, self._connections, self._store, self._stacks = [], [], None, None


def _serve(
    connection: Connection, rank: int, num_ranks: int, port: int, backend: str, limit_s: float, stacks: str
) -> None:
    """Main function of a rank: execute calls until the connection closes."""
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, open(stacks, "a"), all_threads=False)  # noqa: SIM115 (for the process's life)
    torch.set_num_threads(1)
    _share_gloo_device()
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
    os._exit(0)  # skip the shutdown of the process group, because other ranks may be gone


def _share_gloo_device() -> None:
    """Let all groups of this process use one device of gloo. By default each group has its own, whose thread wakes 100 times a
    second: with the hundreds of groups that tests of layouts make, eight idle ranks keep two cores busy."""
    from torch.distributed import distributed_c10d

    device = distributed_c10d.ProcessGroupGloo.create_device(interface="lo")

    class OnSharedDevice(distributed_c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = self._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]


def _sendable(error: BaseException) -> BaseException | None:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return None
    return error
