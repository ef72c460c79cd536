"""Judges: processes next door in which a user's reward function runs, so that nothing it does costs more than its own rollout.

A reward function reads what a model wrote: a regular expression that takes for ever (and holds the GIL while it does), a formula
that takes all memory, `exit()` in generated code. In a thread the first stops the worker's event loop, with all its rollouts, and
the others end the worker. A judge that outlives its limit is killed and replaced in milliseconds; that is one rejection. A call
whose judge dies is tried again in another one, a bounded number of times. The death of the nursery is no fault of a call: the
calls that it interrupts share one restart, and are made again.

Judges are forks of a nursery (judge_main.py), which has imported the function once: they share its memory, and start in
milliseconds. The nursery is a new interpreter and no fork of the worker, which has threads, sockets and maybe a GPU. As many judges
are started as are needed at the same time; one judges the responses of one call after the other.
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
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.config.schema import ConfigError
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments
Calls = Sequence[Call]

_START_LIMIT_S = 120.0  # of the nursery: it imports the user's module
_FORK_LIMIT_S = 30.0  # of a judge
_MAX_TRIES = 3  # of a call whose judge dies in it: in as many judges
_MAX_LOSSES = 3  # of a call: judges or nurseries that were lost to it through no fault of its own
_LOSS_PAUSE_S = 0.2  # before a call is made again after one
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before a nursery is started again: see RestartPace
_CALM_S = 60.0
_MAX_MESSAGE = 200_000
_LENGTH_BYTES = 8
_MAX_ANSWER = 64_000_000


class JudgeDied(RuntimeError):
    """The function has ended its process, in each of several tries; says how."""


class JudgesLost(RuntimeError):
    """There is no judge for a call, through no fault of the call: the nursery has died, or cannot fork."""


class RestartPace:
    """How long to wait before a nursery is started again (pure).

    The first death costs no pause. Each one that comes within calm_s of the one before doubles it, from first_s up to longest_s.
    """

    def __init__(
        self, *, first_s: float = _FIRST_PAUSE_S, longest_s: float = _LONGEST_PAUSE_S, calm_s: float = _CALM_S
    ) -> None:
        self._first_s, self._longest_s, self._calm_s = first_s, longest_s, calm_s
        self._died_at: float | None = None
        self._pause_s = 0.0

    def died(self, now: float) -> float:
        """A nursery has died. Returns the pause in seconds."""
        if self._died_at is None or now - self._died_at >= self._calm_s + self._pause_s:
            self._pause_s = 0.0
        else:
            self._pause_s = min(self._longest_s, max(self._first_s, 2 * self._pause_s))
        self._died_at = now
        return self._pause_s


class _Judge:
    """One of them, and the socket to it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.lost = False  # it went with its nursery
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # how

    async def ask(self, question: bytes) -> dict[str, Any] | None:
        """None: it is gone."""
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
    """At most `most` judges of one function. What waits for one is bounded by the limits of those ahead."""

    def __init__(
        self,
        spec: str,
        *,
        memory_bytes: int,
        most: int,
        most_async: int,
        logger: logging.Logger,
        output: int | None = None,
        pace: RestartPace | None = None,
        death_limit_s: float = 2.0,
        end_limit_s: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Starts the nursery, and waits for it to have imported the function. Raises ConfigError where there is none.

        memory_bytes: of a judge; 0: no limit. most_async: in place of `most` for an `async def`, which mostly waits. output: the
        file descriptor that takes what the function prints; None: this process's stdout. death_limit_s: from the end of a judge's
        output to the word about its end. end_limit_s: of the nursery, which reads the end of its input, and of all its descendants.
        """
        self.spec = spec
        self._memory_bytes = memory_bytes
        self._logger = logger
        self._output, self._clock = output, clock
        self._free: list[_Judge] = []
        self._judges: dict[int, _Judge] = {}
        self._starting: deque[asyncio.Future[int]] = deque()
        self._control: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that reads what the nursery says
        self._pace = pace or RestartPace()
        self._death_limit_s, self._end_limit_s = death_limit_s, end_limit_s
        self._restart: asyncio.Task[None] | None = None  # one for all calls that wait for it
        self._closed = False
        self.num_started = 0
        self.num_nurseries = 0
        self._nursery, control = self._spawn()
        self.is_async, self.arguments = self._greet(self._nursery, control)
        self._control = control
        self._places = asyncio.Semaphore(most_async if self.is_async else most)

    @property
    def warden(self) -> int:
        """Process id of what has the nursery as its child."""
        return self._nursery.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the judges that live."""
        return tuple(self._judges)

    async def ask(self, calls: Calls, limit_s: float) -> dict[str, Any]:
        """What judge_main answers. Raises TimeoutError (the judge is killed), JudgeDied, JudgesLost, or what pickle has against
        the arguments. limit_s: of one try.

        Cancelling it kills the judge.
        """
        question = pickle.dumps(calls, pickle.HIGHEST_PROTOCOL)
        num_deaths = num_losses = 0
        async with self._places:
            while True:
                try:  # a second try is in a new judge: an earlier call may have left something behind in those that are free
                    judge = self._free.pop() if self._free and not num_deaths else await self._start()
                    answer = await self._ask(judge, question, limit_s)
                    if answer is not None:
                        break
                    await self._raise_end_of(judge)
                except JudgeDied:
                    num_deaths += 1
                    if num_deaths >= _MAX_TRIES:
                        raise
                except JudgesLost:
                    num_losses += 1
                    if self._closed or num_losses >= _MAX_LOSSES:
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
        """End them all."""
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
        control = await self._living()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            loop.add_reader(control.fileno(), self._hear, control)
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
        except BaseException as error:  # cancelled: the judge ends when it reads the end of its input
            if mine is not None:
                mine.close()
            if isinstance(error, (ConnectionError, asyncio.TimeoutError)) and self._control is control:
                self._nursery.terminate()  # it kills all its descendants first
                self._forget_nursery(f"the process that starts judges is gone, or forked none in {_FORK_LIMIT_S:g} s")
            if isinstance(error, (OSError, asyncio.TimeoutError)):
                raise JudgesLost(f"no process for {self.spec} could be started: {error!r}") from error
            raise
        if self._control is not control:  # the nursery has died since it said so
            mine.close()
            raise JudgesLost("the process that starts judges was killed")
        judge = _Judge(pid, mine)
        self._judges[pid] = judge
        self.num_started += 1
        return judge

    def _kill(self, judge: _Judge) -> None:
        judge.connection.close()
        if self._judges.get(judge.pid) is judge and self._control is not None:
            with contextlib.suppress(OSError):  # the nursery is gone, and its judges with it
                self._control.send(json.dumps({"kill": judge.pid}).encode())

    async def _raise_end_of(self, judge: _Judge) -> NoReturn:
        judge.connection.close()
        try:
            async with asyncio.timeout(self._death_limit_s):
                how = await asyncio.shield(judge.died)
        except asyncio.TimeoutError:
            how = "it closed its connection"
        raise JudgesLost(how) if judge.lost else JudgeDied(how)

    # ------------------------------------------------------------------------------------------------------------ nursery

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        self.num_nurseries += 1
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = str(Path(__file__).with_name("judge_main.py"))
        with theirs:
            nursery = subprocess.Popen(
                [sys.executable, program, str(theirs.fileno()), self.spec],  # the last is for `ps`, and fault injection
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # where the worker's group is killed, it lives on to kill what judges have started
            )
        return nursery, mine

    def _greet(self, nursery: subprocess.Popen[bytes], control: socket.socket) -> tuple[bool, tuple[str, ...]]:
        """Blocks until the user's module is imported, as importing it here would."""
        hello = {"spec": self.spec, "sys_path": sys.path, "memory_bytes": self._memory_bytes}
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
            if "config" in reply:
                raise ConfigError(reply["config"])
            told = reply.get("error") or f"its process ended with code {code} within {_START_LIMIT_S:g} s"
            raise ConfigError(f"reward {self.spec!r} cannot be imported: {told}")
        control.setblocking(False)
        is_async, arguments = reply["ready"]
        return is_async, tuple(arguments)

    async def _living(self) -> socket.socket:
        """The socket to a living nursery. Calls that wait for one at the same time share its start."""
        while self._control is None:
            if self._closed:
                raise JudgesLost("the worker has ended")
            if self._restart is None:
                self._restart = asyncio.create_task(self._revive())
            restart = self._restart
            await asyncio.wait({restart})  # at most a pause and _START_LIMIT_S
            if restart.cancelled():
                raise JudgesLost("the worker has ended")
            if (error := restart.exception()) is not None:
                raise JudgesLost(f"the process that starts the judges of {self.spec} did not start: {error}") from error
        return self._control

    async def _revive(self) -> None:
        control = None
        try:
            pause_s = self._pace.died(self._clock.monotonic())
            self._logger.warning(
                "the process that starts the judges of %s has died; starting another after %g s", self.spec, pause_s
            )
            await asyncio.sleep(pause_s)
            nursery, control = self._spawn()  # on this thread: the nursery dies with the thread that made it
            await asyncio.to_thread(self._greet, nursery, control)
            self._nursery, self._control = nursery, control
        except BaseException:
            if control is not None:
                control.close()
            raise
        finally:
            self._restart = None

    def _hear(self, control: socket.socket) -> None:
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
                self._bury(judge, word["how"])
            return
        started = self._starting.popleft()
        if "failed" in word:
            if not started.done():
                started.set_exception(JudgesLost(f"no process for {self.spec} could be forked: {word['failed']}"))
        elif not started.done():
            started.set_result(word["started"])

    def _bury(self, judge: _Judge, how: str) -> None:
        if judge in self._free:
            self._free.remove(judge)
            judge.connection.close()
        if not judge.died.done():
            judge.died.set_result(how)

    def _forget_nursery(self, why: str) -> None:
        """It is gone, or to go; its judges go with it."""
        control, self._control = self._control, None
        if control is None:
            return
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(control.fileno())
        control.close()
        for judge in self._judges.values():
            judge.lost = True
            self._bury(judge, why)
        self._judges.clear()
        for started in self._starting:
            if not started.done():
                started.set_exception(JudgesLost(why))
        self._starting.clear()
        _end_of(self._nursery, self._end_limit_s)  # it kills its judges, and what they have started


def _end_of(nursery: subprocess.Popen[bytes], limit_s: float) -> int:
    """Its exit code, once it has ended; after the limit it is killed."""
    try:
        return nursery.wait(limit_s)
    except subprocess.TimeoutExpired:
        nursery.kill()
        return nursery.wait()
