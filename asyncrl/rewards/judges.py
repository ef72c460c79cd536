"""Judges: processes in which a user's reward function runs, so that a failure of the function costs only its own rollout.

A reward function processes generated text. It may meet a regular expression that never finishes (and holds the GIL meanwhile), a
formula that takes all memory, or `exit()` in generated code. In a thread, the first would block the worker's event loop with all
its rollouts, and the others would end the worker. A judge that exceeds its time limit is killed and replaced within milliseconds,
and the rollout is rejected. If a judge dies, its call is retried in another judge, a bounded number of times. If the nursery
(the process that forks the judges) dies, the interrupted calls are not at fault: they share one restart of the nursery, and are
made again, a bounded number of times.

Judges are forks of a nursery (judge_main.py), which has imported the function once. They share its memory and start in
milliseconds. The nursery is a new interpreter, not a fork of the worker, because the worker has threads, sockets and maybe a GPU.
Judges are started on demand, one per concurrent call. A judge works on one call at a time. It judges the responses of the call one
after another, or, if the function is async, at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pickle
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.config.schema import ConfigError
from asyncrl.config.sources import code_of
from asyncrl.protocol.errors import MAX_UNKNOWN
from asyncrl.rewards.reward_function import REWARD, Form
from asyncrl.runtime.background import on_thread
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.user_output import MAX_BYTES, Pump

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
Calls = Sequence[Call]

_START_LIMIT_S = 120.0  # limit for the nursery to start, including the import of the user's module
_FORK_LIMIT_S = 30.0  # limit for the nursery to fork a judge
_MAX_TRIES = 3  # tries of a call whose judge dies in each try
_MAX_LOSSES = 3  # losses of a judge or nursery during one call, through no fault of it; then JudgesLost is raised
_MAX_FAILED_STARTS = MAX_UNKNOWN  # of a nursery in a row; then its calls are rejected
_LOSS_PAUSE_S = 0.2  # delay between such a loss and the next try
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # delay before a nursery restarts: see RestartPace
_CALM_S = 60.0
_MAX_MESSAGE = 200_000
_LENGTH_BYTES = 8
_OUTPUT_LIMIT_S = 1.0  # for the last output of a nursery that has ended
_MAX_ANSWER = 64_000_000


class JudgeDied(RuntimeError):
    """The function ended its process in each of several tries. The message says how."""


class JudgesLost(RuntimeError):
    """No judge is available, through no fault of the call: the nursery has died or cannot fork."""


class JudgesGone(RuntimeError):
    """No judge will be available: the nursery did not start, several times in a row. The message has the last reason."""


class CodeChangedError(RuntimeError):
    """The function's source has changed since the first nursery imported it, so another nursery would run other code. The worker
    ends with this error."""


class RestartPace:
    """Delay before a nursery restarts (pure).

    After the first death there is no delay. A death within calm_s of the latest restart doubles the delay, from first_s up to
    longest_s. After a later death there is no delay again.
    """

    def __init__(
        self, *, first_s: float = _FIRST_PAUSE_S, longest_s: float = _LONGEST_PAUSE_S, calm_s: float = _CALM_S
    ) -> None:
        self._first_s, self._longest_s, self._calm_s = first_s, longest_s, calm_s
        self._died_at: float | None = None
        self._pause_s = 0.0

    def died(self, now: float) -> float:
        """Record the death of a nursery. Returns the delay in seconds."""
        if self._died_at is None or now - self._died_at >= self._calm_s + self._pause_s:
            self._pause_s = 0.0
        else:
            self._pause_s = min(self._longest_s, max(self._first_s, 2 * self._pause_s))
        self._died_at = now
        return self._pause_s


class _Judge:
    """A judge process, and the socket to it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.lost = False  # it ended because its nursery ended
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # result: how it ended

    async def ask(self, question: bytes) -> dict[str, Any] | None:
        """Send the pickled calls and return the judge's answer. None: the judge is gone, or its answer exceeds _MAX_ANSWER."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.connection, len(question).to_bytes(_LENGTH_BYTES, "little") + question)
            data = bytearray()
            while len(data) < _LENGTH_BYTES or len(data) < _LENGTH_BYTES + int.from_bytes(
                data[:_LENGTH_BYTES], "little"
            ):
                part = await loop.sock_recv(self.connection, 1 << 16)
                if not part or len(data) > _MAX_ANSWER:
                    return None
                data += part
        except ConnectionError:
            return None
        answer: dict[str, Any] = json.loads(data[_LENGTH_BYTES:])
        return answer


class Judges:
    """At most `most` judges of one function.

    waits for: a free judge; the wait is bounded by the time limits of the earlier calls.  unblocked by: the end of a call.
    """

    def __init__(
        self,
        spec: str,
        *,
        memory_bytes: int,
        most: int,
        most_async: int,
        logger: logging.Logger,
        form: Form = REWARD,
        python: str = "",
        max_tries: int = _MAX_TRIES,
        waits: bool = True,
        output: int | None = None,
        max_output_bytes: int = MAX_BYTES,
        pace: RestartPace | None = None,
        death_limit_s: float = 2.0,
        end_limit_s: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start the nursery, on this thread, because the nursery dies with it. waits: block until it has imported the function. If
        not, the caller awaits `started`. Raises ConfigError if the import fails.

        form: how the function is called. memory_bytes: limit for each judge; 0: no limit. most_async: replaces `most` for an
        `async def`, which mostly waits. python: the interpreter of the processes, which then has its own packages; "": this one.
        max_tries: of a call whose judge dies, or is lost, in each try. output: the file descriptor for what the function prints;
        None: this process's stdout. max_output_bytes: of a nursery and its judges; the rest is dropped and counted. death_limit_s:
        after a judge has closed its connection, wait this long for the nursery's report of how it ended. end_limit_s: after the
        socket to the nursery is closed, wait this long until the nursery and all its descendants have ended.
        """
        self.spec = spec
        self._memory_bytes = memory_bytes
        self._form, self._python, self._max_tries = form, python, max_tries
        self._logger = logger
        self._output, self._max_output_bytes, self._clock = output, max_output_bytes, clock
        self._free: list[_Judge] = []
        self._judges: dict[int, _Judge] = {}
        self._starting: deque[asyncio.Future[int]] = deque()
        self._control: socket.socket | None
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that reads the nursery's messages
        self._pace = pace or RestartPace()
        self._death_limit_s, self._end_limit_s = death_limit_s, end_limit_s
        self._restart: asyncio.Task[None] | None = None  # shared by all calls that wait for it
        self._num_failed_starts = 0  # in a row
        self._closed = False
        self._code = code_of(spec)
        self.num_started = 0
        self.num_nurseries = 0
        self._places = {True: asyncio.Semaphore(most_async), False: asyncio.Semaphore(most)}
        self._nursery, self._control = self._spawn()
        self._imported = on_thread(partial(self._wait_for_import, self._nursery, self._control), "import")
        if waits:
            self._imported.result()

    async def started(self) -> None:
        """Wait until the nursery has imported the function. Raises ConfigError if the import fails."""
        await asyncio.wrap_future(self._imported)

    @property
    def is_async(self) -> bool:
        return self._imported.result()[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The optional arguments that the function takes."""
        return self._imported.result()[1]

    @property
    def warden(self) -> int:
        """Process id of the warden, the nursery's parent."""
        return self._nursery.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running judges."""
        return tuple(self._judges)

    async def ask(self, calls: Calls, limit_s: float) -> dict[str, Any]:
        """Run the calls in a judge and return its answer. limit_s: limit of one try.

        Raises TimeoutError (the judge is killed), JudgeDied, JudgesLost, CodeChangedError, or pickle's error if the arguments
        cannot be pickled. Cancelling it kills the judge.
        """
        question = pickle.dumps(calls, pickle.HIGHEST_PROTOCOL)
        num_deaths = num_losses = 0
        async with self._places[self.is_async]:
            while True:
                try:  # retry in a new judge: earlier calls may have left a free judge in a bad state
                    judge = self._free.pop() if self._free and not num_deaths else await self._start()
                    answer = await self._ask(judge, question, limit_s)
                    if answer is not None:
                        break
                    await self._raise_end_of(judge)
                except JudgeDied:
                    num_deaths += 1
                    if num_deaths >= self._max_tries:
                        raise
                except JudgesLost:
                    num_losses += 1
                    if self._closed or num_losses >= min(_MAX_LOSSES, self._max_tries):
                        raise
                    await asyncio.sleep(_LOSS_PAUSE_S)
            if answer.get("last") or judge.died.done():
                judge.connection.close()
            else:
                self._free.append(judge)
            return answer

    async def _ask(self, judge: _Judge, question: bytes, limit_s: float) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(limit_s):
                return await judge.ask(question)
        except BaseException:
            self._kill(judge)
            raise

    def close(self) -> None:
        """End the nursery and all judges."""
        self._closed = True
        self._forget_nursery("the worker has ended")
        if self._restart is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._restart.cancel()

    def __del__(self) -> None:
        if getattr(self, "_control", None) is not None:
            self.close()

    # ------------------------------------------------------------------------------------------------------------- judges

    async def _start(self) -> _Judge:
        control = await self._running_nursery()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            loop.add_reader(control.fileno(), self._read_control, control)
            self._loop = loop
        mine: socket.socket | None = None
        started: asyncio.Future[int] = loop.create_future()
        try:
            mine, theirs = socket.socketpair()
            mine.setblocking(False)
            with theirs:
                socket.send_fds(control, [json.dumps({"start": True}).encode()], [theirs.fileno()])
            self._starting.append(started)
            async with asyncio.timeout(_FORK_LIMIT_S):
                pid = await asyncio.shield(started)
        except BaseException as error:  # if cancelled: the judge ends when it reads the end of its input
            if mine is not None:
                mine.close()
            if isinstance(error, (ConnectionError, asyncio.TimeoutError)) and self._control is control:
                self._nursery.terminate()  # it kills all its descendants first
                self._forget_nursery(
                    f"the process that starts judges is gone, or forked no judge in {_FORK_LIMIT_S:g} s"
                )
            if isinstance(error, (OSError, asyncio.TimeoutError)):
                raise JudgesLost(f"no process for {self.spec} could be started: {error!r}") from error
            raise
        if self._control is not control:  # the nursery has died since it reported the judge's start
            mine.close()
            raise JudgesLost("the process that starts judges was killed")
        judge = _Judge(pid, mine)
        self._judges[pid] = judge
        self.num_started += 1
        return judge

    def _kill(self, judge: _Judge) -> None:
        judge.connection.close()
        if self._judges.get(judge.pid) is judge and self._control is not None:
            with contextlib.suppress(OSError):  # the nursery and its judges are gone
                self._control.send(json.dumps({"kill": judge.pid}).encode())

    async def _raise_end_of(self, judge: _Judge) -> NoReturn:
        judge.connection.close()
        try:
            async with asyncio.timeout(self._death_limit_s):
                how = await asyncio.shield(judge.died)
        except TimeoutError:
            how = "it closed its connection"
        raise JudgesLost(how) if judge.lost else JudgeDied(how)

    # ------------------------------------------------------------------------------------------------------------ nursery

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        self.num_nurseries += 1
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = str(Path(__file__).with_name("judge_main.py"))
        # A pipe bounds what users' code prints, also below Python and in processes that it starts
        pump = self._pump = Pump(self._output, f"the {self._form.what} {self.spec}", self._max_output_bytes)
        with theirs, contextlib.closing(pump):
            nursery = subprocess.Popen(
                # The spec is for `ps` and fault injection
                [self._python or sys.executable, "-P", program, str(theirs.fileno()), self.spec],
                stdin=subprocess.DEVNULL,
                stdout=pump.writer,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                # If the worker's process group is killed, this program survives and kills the judges and their descendants
                start_new_session=True,
            )
        return nursery, mine

    def _wait_for_import(
        self, nursery: subprocess.Popen[bytes], control: socket.socket
    ) -> tuple[bool, tuple[str, ...]]:
        """Wait until the nursery has imported the user's module. Blocks the thread."""
        # Another interpreter has its own path, and imports only asyncrl from this one
        package = str(Path(__file__).parents[2])
        hello = {"spec": self.spec, "form": asdict(self._form), "memory_bytes": self._memory_bytes, "package": package}
        hello |= {} if self._python else {"sys_path": sys.path}
        control.settimeout(_START_LIMIT_S)
        try:
            control.send(json.dumps(hello).encode())
            message = control.recv(_MAX_MESSAGE)
        except TimeoutError:
            message = b""
            nursery.terminate()
        except OSError:
            message = b""
        reply = json.loads(message or b"{}")
        if "ready" not in reply:
            control.close()
            code = _end_of(nursery, self._end_limit_s)
            self._pump.join(_OUTPUT_LIMIT_S)
            if "config" in reply:
                raise ConfigError(reply["config"])
            text = reply.get("error") or f"its process ended with code {code} within {_START_LIMIT_S:g} s"
            raise ConfigError(f"{self._form.what} {self.spec!r} cannot be imported: {text}")
        control.setblocking(False)
        is_async, arguments = reply["ready"]
        return is_async, tuple(arguments)

    async def _running_nursery(self) -> socket.socket:
        """Return the socket to a running nursery. Calls that wait for one at the same time share one restart."""
        while self._control is None:
            if self._closed:
                raise JudgesLost("the worker has ended")
            if self._restart is None:
                self._restart = asyncio.create_task(self._restart_nursery())
            restart = self._restart
            await asyncio.wait({restart})  # at most a restart delay plus _START_LIMIT_S
            if restart.cancelled():
                raise JudgesLost("the worker has ended")
            if isinstance(error := restart.exception(), CodeChangedError):
                raise error
            if error is not None and self._num_failed_starts >= _MAX_FAILED_STARTS:
                last_line = str(error).strip().rpartition("\n")[2]
                raise JudgesGone(f"it did not start {self._num_failed_starts} times in a row: {last_line}") from error
            if error is not None:
                raise JudgesLost(f"the process that starts the judges of {self.spec} did not start: {error}") from error
        return self._control

    async def _restart_nursery(self) -> None:
        control = None
        try:
            pause_s = self._pace.died(self._clock.monotonic())
            self._logger.warning(
                "the process that starts the judges of %s has died; starting another after %g s", self.spec, pause_s
            )
            await asyncio.sleep(pause_s)
            await self._check_code()
            nursery, control = self._spawn()  # on this thread, because the nursery dies with the thread that started it
            await asyncio.to_thread(self._wait_for_import, nursery, control)
            await self._check_code()  # again: the import may have read what was written meanwhile
            self._nursery, self._control, self._num_failed_starts = nursery, control, 0
        except BaseException as error:
            self._num_failed_starts += isinstance(error, Exception)
            if control is not None:
                control.close()
            raise
        finally:
            self._restart = None

    async def _check_code(self) -> None:
        if await asyncio.to_thread(code_of, self.spec) != self._code:
            raise CodeChangedError(f"the source of {self.spec} has changed since this process imported it")

    def _read_control(self, control: socket.socket) -> None:
        try:
            message = control.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._forget_nursery("the process that starts judges was killed")
            return
        word = json.loads(message)
        if "died" in word:
            judge = self._judges.pop(word["died"], None)
            if judge is not None:
                self._mark_ended(judge, word["how"])
            return
        started = self._starting.popleft()
        if "failed" in word:
            if not started.done():
                started.set_exception(JudgesLost(f"no process for {self.spec} could be forked: {word['failed']}"))
        elif not started.done():
            started.set_result(word["started"])

    def _mark_ended(self, judge: _Judge, how: str) -> None:
        if judge in self._free:
            self._free.remove(judge)
            judge.connection.close()
        if not judge.died.done():
            judge.died.set_result(how)

    def _forget_nursery(self, why: str) -> None:
        """End the nursery and its judges, or clean up after a nursery that has died."""
        control, self._control = self._control, None
        if control is None:
            return
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(control.fileno())
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the import
        control.close()
        for judge in self._judges.values():
            judge.lost = True
            self._mark_ended(judge, why)
        self._judges.clear()
        for started in self._starting:
            if not started.done():
                started.set_exception(JudgesLost(why))
        self._starting.clear()
        _end_of(self._nursery, self._end_limit_s)  # it kills its judges and their descendants
        self._pump.join(_OUTPUT_LIMIT_S)


def _end_of(nursery: subprocess.Popen[bytes], limit_s: float) -> int:
    """Wait for the nursery to end and return its exit code; kill it after the limit."""
    try:
        return nursery.wait(limit_s)
    except subprocess.TimeoutExpired:
        nursery.kill()
        return nursery.wait()
