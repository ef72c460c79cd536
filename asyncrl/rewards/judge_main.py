"""The program in which users' reward functions run: a nursery that forks judges. judges.py starts it and gives the reasons.

    worker  >  warden  >  nursery  >  guard  >  judge        each the parent of the next; warden, nursery and guard are subreapers
    worker  <-- SEQPACKET: hello, start + a socket, kill | ready, started, died -->  nursery
    worker  <-- STREAM: calls | answers -->  judge, one call at a time

The nursery imports the function once, then runs no user code. Each judge is a fork with limits that the kernel enforces. Its
parent is a guard, a fork of the nursery in its own session. A function that signals its parent thus ends its own judge only, and
the other judges go on. A process that a judge leaves behind, whatever its session and environment, becomes a child of the guard
and, when the guard has ended, of the nursery, which kills it. The warden runs no user code. It kills all descendants when the
nursery or the worker has ended. If the warden is killed, the nursery kills them. Calls from the worker are pickled. Answers are
JSON, because the worker must not unpickle data from a process that runs user code. The program is started as a file, so until the
worker has sent its sys.path, it imports only the standard library. The program of an agent's command (rollout/command_main.py) ends
its descendants with the same functions.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE = 200_000
_MAX_TRACEBACK = 20_000
_LENGTH_BYTES = 8
_KILL_LIMIT_S = 5.0  # time limit for killing all descendants: they may start further processes meanwhile
_KILL_TURN_S = 0.001
_OOM_SCORE = "1000"  # if the machine runs out of memory, the kernel kills judges first


def main() -> None:
    """Run the warden, and the nursery as its child. Both end, with all descendants, when the worker closes its socket or ends."""
    signal.signal(signal.SIGTERM, end_all)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    on_parents_death(signal.SIGTERM)
    adopt_orphans()
    nursery = os.fork()
    if nursery == 0:
        _be_nursery(socket.socket(fileno=int(sys.argv[1])))
    os.close(int(sys.argv[1]))
    status = wait_for(nursery)
    kill_children()
    end_as(status)


def _be_nursery(control: socket.socket) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGTERM ends this process while the user's module is imported
    on_parents_death(signal.SIGTERM)
    adopt_orphans()
    hello = json.loads(control.recv(_MAX_MESSAGE))
    sys.path[:] = hello.get("sys_path") or [*sys.path, hello["package"]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    function = _load(hello["spec"], hello["form"], control)
    if function.is_async:
        import asyncio  # noqa: F401 - imported once, for all judges
    gc.collect()
    gc.freeze()  # the collector never touches existing objects, so judges keep sharing their pages
    wake, ring = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(ring, False)
    signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    control.send(json.dumps({"ready": [function.is_async, list(function.arguments)]}).encode())
    judges: set[int] = set()
    helpers = frozenset(_children())  # processes that the user's module has started during its import; they are kept
    signal.signal(signal.SIGTERM, end_all)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == wake:
                os.read(wake, 4096)
                _reap(control, judges)
                for pid in _children():
                    if pid not in judges and pid not in helpers:  # an orphan: its judge and its guard have ended
                        _kill(pid)
            elif not _carry_out(control, judges, function, hello["memory_bytes"]):
                end_all()


def _load(spec: str, form: dict[str, Any], control: socket.socket) -> Any:
    """Import the user's function. On failure, report the error to the worker and end this process."""
    from asyncrl.config.import_object import no_terminal
    from asyncrl.rewards.reward_function import Form, RewardFunction

    sys.breakpointhook = no_terminal
    try:
        return RewardFunction.import_from(spec, Form(**form))
    except BaseException as error:
        kind = "config" if type(error).__name__ == "ConfigError" else "error"
        text = str(error) if kind == "config" else "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
        control.send(json.dumps({kind: text}).encode())
        os._exit(1)


def _carry_out(control: socket.socket, judges: set[int], function: Any, memory_bytes: int) -> bool:
    """Carry out one order from the worker: start or kill a judge. Returns False if the worker has closed the socket."""
    message, sockets, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 1)
    if not message:
        return False
    order = json.loads(message)
    if "kill" in order:
        if order["kill"] in judges:
            _kill(order["kill"])
        return True
    (connection,) = sockets
    try:
        pid = os.fork()
    except OSError as error:
        os.close(connection)
        control.send(json.dumps({"failed": str(error)}).encode())
        return True
    if pid == 0:
        try:
            control.close()
            _guard(connection, function, memory_bytes)
        finally:
            os._exit(1)
    os.close(connection)
    judges.add(pid)
    control.send(json.dumps({"started": pid}).encode())
    return True


def _reap(control: socket.socket, judges: set[int]) -> None:
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        pid = ended.si_pid
        if pid in judges:  # kill what is left in its group before the wait frees the number, which the system may reuse
            _kill(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if pid not in judges:  # a process that a judge started, or a judge whose guard has ended
            continue
        judges.discard(pid)
        control.send(json.dumps({"died": pid, "how": _how(code)}).encode())


def _how(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"it was killed by signal {-code}"


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # os.kill, because killpg fails for a process that does not lead a group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (subreaper)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> list[int]:
    """Process ids of this process's children, including zombies."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:  # the thread has ended
            continue
    return found


def kill_children() -> None:
    """Kill and reap all descendants: children of a killed child become children of this process. Takes up to _KILL_LIMIT_S."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < deadline:
        for pid in _children():
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_KILL_TURN_S)


def end_all(*_: Any) -> NoReturn:
    """End this process and all its descendants."""
    kill_children()
    os._exit(0)


def wait_for(child: int) -> int:
    """Wait for a child and return its wait status. Reaps adopted processes meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def end_as(status: int) -> NoReturn:
    """End this process with the same exit code or signal as the given wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# --------------------------------------------------------------------------------------------------------------- a judge


def _guard(connection: int, function: Any, memory_bytes: int) -> NoReturn:
    """Start a judge in a new session. When the judge ends, end this guard with the same exit code or signal."""
    on_parents_death(signal.SIGKILL)
    adopt_orphans()
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    judge = os.fork()
    if judge == 0:
        _be_judge(socket.socket(fileno=connection), function, memory_bytes)
    os.close(connection)
    end_as(wait_for(judge))


def _be_judge(connection: socket.socket, function: Any, memory_bytes: int) -> NoReturn:
    """Answer calls, until the worker closes its end or the function ends this process."""
    on_parents_death(signal.SIGKILL)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_OOM_SCORE)
    except OSError:
        pass  # when memory runs out, the kernel then treats judges like other processes
    me = os.getpid()
    loop = None
    if function.is_async:
        import asyncio

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    while True:
        calls = _receive(connection)
        fit = True
        try:
            reply, fit = _judge(calls, function, loop)
        finally:
            if os.getpid() != me:  # the function forked, and its child returned into this code
                os._exit(0)
        connection.sendall(_frame(json.dumps(reply if fit else {**reply, "last": True}).encode()))
        if not fit:
            os._exit(0)


def _judge(calls: bytes, function: Any, loop: Any) -> tuple[dict[str, Any], bool]:
    """Return the answer, and whether this process can take another call."""
    from asyncrl.rewards.reward_function import shown
    from asyncrl.rewards.score import answers_of

    start = time.perf_counter()
    try:
        arguments = pickle.loads(calls)
        if loop is None:
            values = [function.call(*args, **kwargs) for args, kwargs in arguments]
        else:
            values = loop.run_until_complete(_all(function, arguments))
        numbers = [function.returned(value) for value in values]
        for value, number in zip(values, numbers, strict=True):
            if number is None:
                return {"no_number": shown(value)}, True
        seconds = time.perf_counter() - start
        return {"values": numbers, "answers": answers_of(numbers), "seconds": seconds}, True
    except BaseException as error:
        answer = {"error": shown(error), "traceback": "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]}
        return answer, isinstance(error, Exception) and not isinstance(error, MemoryError)


async def _all(function: Any, arguments: list[Any]) -> list[Any]:
    import asyncio

    return await asyncio.gather(*(function.call(*args, **kwargs) for args, kwargs in arguments))


def _receive(connection: socket.socket) -> bytes:
    """Read one message. At the end of the input, end this process."""
    length = int.from_bytes(_read(connection, _LENGTH_BYTES), "little")
    return _read(connection, length)


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _frame(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


def on_parents_death(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
