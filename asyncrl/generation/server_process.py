"""The server of another program behind a generation server: a child process (ServerProcess), or one that runs elsewhere
(AttachedServer).

    GenerationServer (our process) -- owns --> python -m sglang.launch_server -- its own --> scheduler of each rank, detokenizer

The program, SGLang or vLLM, runs with the interpreter of its own environment, so its pins of torch and transformers cannot conflict
with the trainer's. It listens on loopback or on a socket in its private folder, serves only this process, and ends with it: the
kernel kills it when the thread that started it ends (parent-death signal). SGLang requests the same signal for its children. The
rest of its process group is killed after its end.

SGLang never removes the file in /dev/shm in which its schedulers report their load, and the name of the file is random. While
SGLang runs, its open files there are recorded, because their owner cannot be determined later. After its end this process or the
guard removes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from asyncrl.config.engines import ServerProgram
from asyncrl.config.schema import ConfigError
from asyncrl.generation.server_client import UNIX
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.ports import free_ports
from asyncrl.runtime.process import dying_with_parent, tail_of

logger = logging.getLogger(__name__)

IsReady = Callable[[str], Awaitable[bool]]

LOOPBACK = "127.0.0.1"

_START_TRIES = 3  # another process may take a port between its choice and its use
POLL_S = 0.1
_TRACKER_LIMIT_S, _SWEEP_S = 2.0, 0.05
_TMP_PREFIX = "asyncrl-{}-"  # with the program's package
SOCKET = "http.sock"  # in TMPDIR, which no other user can enter
_SHARED_MEMORY = Path("/dev/shm")
_NOTED = "shared_memory"  # subfolder of TMPDIR: an empty file for each of the program's in /dev/shm, with the same name
_IN_USE = "in_use.lock"  # in TMPDIR
_NOTE_S = 1.0  # seconds between two recordings during a start; repeated, because the start may fail at any time
_SPAWN_LIMIT_S = 30.0
_KILL_LIMIT_S = 10.0
# From SIGTERM to SIGKILL, by on_gpu. On a GPU the program first releases its memory; on a CPU it has nothing to release
_GRACE_S = {True: 7.0, False: 0.5}
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ALL_LINES = 1_000_000
_SHOWN_CHARS = 60
_TIMED, _TIME_FORMAT = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\](.*)"), "%Y-%m-%d %H:%M:%S"
_NUM_STEPS = 3  # of a start that failed, in the error
_LINE_CHARS = 300  # characters shown of a log line: a program prints all its arguments in one line

# The guard, a process beside the program. When our process has ended for any reason, it kills the program's process group and
# removes its shared memory. The parent-death signal is not enough: SGLang's children request that signal only after their imports.
_GUARD = """
import os, signal, sys
from contextlib import suppress
sys.stdin.read()
group, noted, shared_memory = sys.argv[1:]
with suppress(ProcessLookupError):
    os.killpg(int(group), signal.SIGKILL)
for name in os.listdir(noted):
    with suppress(OSError):
        os.unlink(os.path.join(shared_memory, name))
"""


@dataclass(frozen=True)
class ServerCommand:
    """How a program is started, and what is its own on this host."""

    program: ServerProgram
    module: str  # python -m MODULE
    own_processes: str  # the command lines of its processes begin with this
    shared_memory: tuple[str, ...] = ()  # prefixes of its files in /dev/shm that it may leave behind
    has_socket: bool = False  # it listens on a Unix socket instead of a port


class ServerLink(ABC):
    """The engine's interface to a server. The defaults are those of a server that another program runs."""

    url: str
    api_key = ""  # the key that the server requires; "": none
    can_sleep = False  # whether the server can release its memory and get it back

    @abstractmethod
    async def start(self, is_ready: IsReady, limit_s: float) -> None:
        """Returns when `is_ready(url)` is true. Raises ConfigError with the reason if the start fails."""

    def progress(self) -> str:
        """How far the start has come, for a status line."""
        return ""

    def how_it_ended(self) -> str | None:
        """How the server ended. None while it runs, or if its end cannot be observed from here."""
        return None

    @abstractmethod
    def log_text(self) -> str:
        """Where its log is, and the log's last lines if this process can read it; for an error message."""

    async def wait_ended(self, limit_s: float) -> None:
        """Returns when it has ended, or after limit_s at the latest."""
        await asyncio.sleep(limit_s)

    async def close(self) -> None:  # noqa: B027
        """Stop the server within a limit, if this process owns it."""


# ------------------------------------------------------------------------------------------------------------- our own


@dataclass
class _Running:
    """A server process from its start to its end."""

    process: subprocess.Popen[bytes]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    code: int | None = None  # its exit code, or minus the signal that ended it; set before `ended`
    # Set when the process is reaped and its group and shared memory are removed
    exited: threading.Event = field(default_factory=threading.Event)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, number)  # the pid is not reused yet: the owning thread reaps the process last

    async def wait_ended(self, limit_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.ended.wait()


class ServerProcess(ServerLink):
    """Starts one server, watches it and its children, and stops it. Call all methods on one event loop.

    waits for: readiness and end of the server, each within a limit. unblocked by: the server, or its end, which a thread waits for.
    """

    def __init__(
        self,
        command: ServerCommand,
        *,
        python: str,
        arguments: Callable[[int], list[str]],
        environment: Callable[[str], dict[str, str]],
        log: Path,
        on_gpu: bool,
        can_sleep: bool = False,
        api_key: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """arguments: returns the server's arguments, given its port (0: it listens on the socket SOCKET of its folder, in which it
        runs).
        environment: returns its environment variables, given its folder for temporary files.
        api_key: the key that the server requires."""
        self._command, self._name = command, command.program.name
        self._python, self._arguments, self._environment = python, arguments, environment
        self.api_key, self.can_sleep = api_key, can_sleep
        self._log, self._clock = log, clock
        self._grace_s = _GRACE_S[on_gpu]
        self._tmp = ""
        self._in_use: int | None = None  # the lock on this folder; the kernel drops it when this process ends
        self._running: _Running | None = None  # the last one that was started
        self._children: list[psutil.Process] = []

    @property
    def pid(self) -> int:
        """Pid of the running server, or of the last one."""
        if self._running is None:
            raise RuntimeError("no server has been started; call start first")
        return self._running.process.pid

    @property
    def _noted(self) -> Path:
        return Path(self._tmp) / _NOTED

    @property
    def children(self) -> list[psutil.Process]:
        """The program's own processes, such as SGLang's schedulers. Empty until the server is ready."""
        return list(self._children)

    async def start(self, is_ready: IsReady, limit_s: float) -> None:
        deadline = self._clock.monotonic() + limit_s
        self._log.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self._command.program.package)
        self._tmp = tempfile.mkdtemp(prefix=_TMP_PREFIX.format(self._command.program.package))
        self._in_use = _lock(Path(self._tmp))
        self._noted.mkdir()
        for tries_left in reversed(range(_START_TRIES)):
            began_at = self._log.stat().st_size if self._log.exists() else 0
            (port,) = (0,) if self._command.has_socket else free_ports(LOOPBACK, 1)
            self.url = f"http://{LOOPBACK}:{port}" if port else f"{UNIX}{Path(self._tmp) / SOCKET}"
            running = self._spawn(port, asyncio.get_running_loop())
            if await self._until_ready(running, is_ready, deadline):
                children = psutil.Process(running.process.pid).children(recursive=True)
                self._children = [child for child in children if _is_named(child, self._command.own_processes)]
                await asyncio.to_thread(self._blot_key, began_at)
                return
            await asyncio.to_thread(self._blot_key, began_at)
            said = tail_of(self._log, began_at, line_chars=_LINE_CHARS)
            whole = tail_of(self._log, began_at, lines=_ALL_LINES, line_chars=_LINE_CHARS)
            if running.ended.is_set() and "address already in use" in whole.lower() and tries_left:
                await asyncio.to_thread(running.exited.wait, _KILL_LIMIT_S)
                continue
            ended = self.how_it_ended()
            await self.close()
            steps = longest_steps(whole, self._clock.time()) or "unknown"
            limits = f"{limit_s:g} s (generation.load_timeout_s; longest steps: {steps})"
            late = f"the {self._name} server did not answer within {limits}"
            raise ConfigError(self._did_not_start(ended or late, said))

    def _blot_key(self, began_at: int) -> None:
        """Overwrite the API key in the log with asterisks: the program logs its arguments at its start."""
        key = self.api_key.encode()
        if not key:
            return
        with contextlib.suppress(OSError), self._log.open("r+b") as log:
            log.seek(began_at)
            text, place = log.read(), -1
            while (place := text.find(key, place + 1)) >= 0:
                log.seek(began_at + place)
                log.write(b"*" * len(key))

    def _did_not_start(self, what: str, said: str) -> str:
        program = self._command.program
        if re.search(rf"No module named '?{program.package}'?", said):
            return f"generation.python={self._python!r}: {program.name} is not installed there; {program.setup_hint}"
        return f"{what} while it was starting ({self._python}); its log, {self._log}, ends with\n{said}"

    def progress(self) -> str:
        """The text of the last timestamped line of the log."""
        last = tail_of(self._log, line_chars=_LINE_CHARS).splitlines()
        said = [line for line in last if line.startswith("[")]  # `[time] text`
        return f" ({said[-1].partition('] ')[2][:_SHOWN_CHARS]})" if said else ""

    def how_it_ended(self) -> str | None:
        """How the server or one of its children ended. If the server has ended, that is reported, because its children end with
        it. None: all run."""
        if self._running is not None and self._running.code is not None:
            return f"the {self._name} server {_how(self._running.code)}"
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"a process of the {self._name} server (pid {child.pid}) has ended"
        return None

    async def wait_ended(self, limit_s: float) -> None:
        if self._running is None:
            await super().wait_ended(limit_s)
        else:
            await self._running.wait_ended(limit_s)

    def log_text(self) -> str:
        """The path and the last lines of its log, for an error message."""
        return f"its log, {self._log}, ends with\n{tail_of(self._log, line_chars=_LINE_CHARS)}"

    async def close(self) -> None:
        """Send SIGTERM, then SIGKILL after a grace period.

        The thread that owns the process then kills the rest of its group and removes its shared memory.
        """
        running = self._running
        if running is not None and not running.exited.is_set():
            await asyncio.to_thread(_note_shared_memory, running.process.pid, self._noted, self._command.shared_memory)
            running.signal(signal.SIGTERM)
            running.signal(signal.SIGCONT)  # a stopped process cannot handle SIGTERM
            await running.wait_ended(self._grace_s)
            if not running.ended.is_set():
                running.signal(signal.SIGKILL)
            await asyncio.to_thread(running.exited.wait, _KILL_LIMIT_S)
        if self._tmp:
            shutil.rmtree(self._tmp, ignore_errors=True)
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None

    def _spawn(self, port: int, loop: asyncio.AbstractEventLoop) -> _Running:
        command = [self._python, "-m", self._command.module, *self._arguments(port)]
        if self.api_key:  # pass it in a file: every user can read command lines
            file = Path(self._tmp) / "key.yaml"
            file.unlink(missing_ok=True)
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(f'api-key: "{self.api_key}"\n')
            command += ["--config", str(file)]
        wrapper = dying_with_parent(command)
        environment, noted = self._environment(self._tmp), self._noted
        self._running, self._children = None, []
        started: Future[_Running] = Future()

        def own() -> None:
            """Start and reap the process. This thread must outlive the process: the kernel sends the parent-death signal to the
            process when this thread ends."""
            try:
                opened = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600 if self.api_key else 0o666)
                with open(opened, "ab") as log:
                    began = time.strftime(f"[{_TIME_FORMAT}]", time.localtime(self._clock.time()))
                    log.write(f"{began} {' '.join(command)}\n".encode())
                    log.flush()
                    process = subprocess.Popen(
                        wrapper,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=self._tmp,  # `python -m` looks for modules in the current folder first
                        env=environment,
                        start_new_session=True,  # its own process group, which can be killed as a whole
                    )
            except OSError as error:
                started.set_exception(error)
                return
            self._running = running = _Running(process)
            started.set_result(running)
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(process.pid), str(noted), str(_SHARED_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            running.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the event
                loop.call_soon_threadsafe(running.ended.set)
            _end_group(process.pid, self._clock)  # before the process is reaped: afterwards its pid may be reused
            _remove_shared_memory(noted)
            guard.kill()
            guard.communicate()
            process.wait()
            running.exited.set()

        threading.Thread(target=own, name=f"{self._name} server", daemon=True).start()
        try:
            return started.result(_SPAWN_LIMIT_S)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no process within {_SPAWN_LIMIT_S:g} s"
            raise ConfigError(
                f"generation.python={self._python!r}: the {self._name} process could not be created: {why}"
            ) from error

    async def _until_ready(self, running: _Running, is_ready: IsReady, deadline: float) -> bool:
        """Wait until the server is ready. Returns False if it exits or the deadline passes.

        Records its shared memory meanwhile, and once more when it is ready.
        """
        note_at, ready = 0.0, False
        while not ready and self._clock.monotonic() < deadline and not running.ended.is_set():
            if not (ready := await is_ready(self.url)):
                await running.wait_ended(POLL_S)
            if ready or self._clock.monotonic() > note_at:
                await asyncio.to_thread(
                    _note_shared_memory, running.process.pid, self._noted, self._command.shared_memory
                )
                note_at = self._clock.monotonic() + _NOTE_S
        return ready


def _end_group(leader: int, clock: Clock) -> None:
    """Kill the remaining process group of a process that has ended. Python's resource trackers get a moment to end by themselves,
    because they remove the shared memory of the other processes."""
    deadline = clock.monotonic() + _TRACKER_LIMIT_S
    while clock.monotonic() < deadline and (members := _members(leader)):
        for process, is_tracker in members:
            if not is_tracker:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        clock.sleep(_SWEEP_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _members(group: int) -> list[tuple[psutil.Process, bool]]:
    """The live processes of a group, each with whether it is a resource tracker."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, any("resource_tracker" in argument for argument in process.cmdline())))
    return found


def _note_shared_memory(server: int, noted: Path, prefixes: tuple[str, ...]) -> None:
    """Record the program's files in shared memory that a server and its children have open. Those files belong to this server."""
    with contextlib.suppress(psutil.Error):
        main = psutil.Process(server)
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                for file in (Path(opened.path) for opened in process.open_files()):
                    if file.parent == _SHARED_MEMORY and file.name.startswith(prefixes):
                        (noted / file.name).touch()


def _remove_shared_memory(noted: Path) -> None:
    """Remove the recorded shared memory of a server that has ended."""
    with contextlib.suppress(FileNotFoundError):
        for note in list(noted.iterdir()):
            with contextlib.suppress(OSError):
                (_SHARED_MEMORY / note.name).unlink(missing_ok=True)


def _remove_leftovers(package: str) -> None:
    """Remove the folders of a program's servers whose owner has ended, and their shared memory, in case the guard was killed. An
    owner holds a lock, also in another container, where this process does not see it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TMP_PREFIX.format(package)}*"):
        with contextlib.suppress(OSError):
            # Another user's folder must not decide which files to remove. A folder without a lock is being made
            if folder.lstat().st_uid != os.getuid() or not (folder / _IN_USE).is_file():
                continue
            lock = _lock(folder)
            try:
                _remove_shared_memory(folder / _NOTED)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a server's folder. Raises BlockingIOError if another process holds the lock."""
    lock = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _is_named(process: psutil.Process, start: str) -> bool:
    """Whether this is one of the program's own processes (sglang::...), without which it fails. It does not fail without Python's
    resource trackers."""
    with contextlib.suppress(psutil.Error):
        return any(argument.startswith(start) for argument in process.cmdline()[:1])
    return False


def _how(code: int) -> str:
    if code >= 0:
        return f"has ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def longest_steps(log: str, now: float) -> str:
    """Return the _NUM_STEPS steps of a start that took the longest, in their order, by the times in a log; "" without times.
    now: seconds since the epoch, for the last step."""
    begins = []
    for line in log.splitlines():
        if match := _TIMED.match(line):
            begins.append((time.mktime(time.strptime(match[1], _TIME_FORMAT)), match[2].strip()[:_SHOWN_CHARS]))
    ends = [*(began for began, _ in begins[1:]), now]
    steps = [(end - began, at, said) for at, ((began, said), end) in enumerate(zip(begins, ends, strict=False))]
    longest = sorted(sorted(steps, reverse=True)[:_NUM_STEPS], key=lambda step: step[1])
    return ", ".join(f"{seconds:.0f} s after {said!r}" for seconds, _, said in longest if seconds >= 1)


# ------------------------------------------------------------------------------------------------------ how it is started


def options(arguments: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """A command line. given: generation.server_args, which override the arguments: "" or "true" gives a flag, "false" omits it."""
    command: list[str] = []
    for name, value in {**arguments, **{name.removeprefix("--"): value for name, value in given.items()}}.items():
        if value.lower() in {"", "true"}:
            command.append(f"--{name}")
        elif value.lower() != "false":
            command += [f"--{name}", value]
    return command


def program_environment(base: Mapping[str, str], *, python: str, tmp: str) -> dict[str, str]:
    """This process's environment without the variables of this interpreter (PYTHONPATH, ...), for a program of another one."""
    foreign = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", *_OF_TORCHRUN}
    environment = {name: value for name, value in base.items() if name not in foreign}
    environment |= {
        "PATH": f"{Path(python).parent}{os.pathsep}{base.get('PATH', os.defpath)}",  # tools installed beside it, such as ninja
        "TMPDIR": tmp,  # folder for the program's sockets; it is removed after the program has ended
    }
    # The programs' libraries warn about missing hardware; the warnings would flood the log
    environment.setdefault("PYTHONWARNINGS", "ignore")
    return environment
