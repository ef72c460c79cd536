"""Sandboxes in which a reward function runs untrusted programs, such as generated code, isolated and within limits.

    sandboxes = SandboxPool()                                   # once, in the module of the reward function

    def reward(prompt, completion, answer):
        with sandboxes.open(Program({"main.py": completion})) as sandbox:
            return float(all(sandbox.run(given).stdout == wanted for given, wanted in answer))

bubblewrap (`bwrap`) gives each program its own namespaces. The program has no network and sees no other processes. Its only files
are the system's programs and this Python's, all read-only, and a scratch folder in memory that is removed with the sandbox. A
seccomp filter (syscalls.py) refuses the system calls that could weaken the isolation, and reports them. Time, memory, processes,
files and output are limited for all processes of the program together. Processes that the program leaves running are killed and
counted. Its environment holds only a few fixed variables. Each program has its own sandbox, started in advance (a pool keeps
`spare` of them ready) and used for one program only, with any number of inputs.

    reward function --socket: program, inputs-->  main.py, first process in the sandbox  --fork, pipes-->  program

If the machine cannot isolate programs (no bwrap, user namespaces forbidden), creating the pool raises IsolationMissing with the
reason, and the run does not start. isolation="limits" runs programs anyway, with the filter and the limits, but as this user and
with access to this user's files.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import marshal
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Literal

from asyncrl.rewards.sandbox import main
from asyncrl.rewards.sandbox.syscalls import SECCOMP_NUMBERS, NoFilter, build_filter, call_name

Outcome = Literal["ended", "cpu_time", "wall_time", "memory", "processes", "output", "forbidden", "killed"]

START_LIMIT_S = 30.0  # limit for the start of a sandbox; on an idle machine the start takes hundredths of a second
# Limit of the wait for a free sandbox. It is below the default of rollout.reward_timeout_s, so that the error names the reason
BUSY_LIMIT_S = 50.0
ANSWER_SLACK_S = 15.0  # the sandbox itself enforces Limits.wall_s; the pool waits this much longer for its answer
MAX_REFUSED = 100  # after this many refused system calls on one input the program is killed

_OUTCOMES: tuple[Outcome, ...] = ("ended", "cpu_time", "wall_time", "memory", "processes", "output")
_SCRATCH = "/tmp"  # in the sandbox
_OUTSIDE_PREFIX = "asyncrl-sandbox-"  # of scratch folders without isolation, in the folder for temporary files
_OWNER = "owner"
_SHM_BYTES = 8 << 20
_MAX_SIGNALS = 1024  # signals that wait, and timers: the kernel counts both together
_AS_SLACK = 64 << 20  # for the interpreter itself
_MAX_PROGRAM = 64_000_000
_PROC_COUNTED_APART = (5, 14)  # the first Linux version in which RLIMIT_NPROC counts each user namespace separately
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_NOTIF_BYTES, _RESPONSE_BYTES = 80, 24
_EPERM = 1
_REPORT_NUMBERS = 7
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_REMEDY = (
    "bubblewrap needs namespaces: in a container allow user namespaces or CAP_SYS_ADMIN; on Debian and Ubuntu see sysctl "
    "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns. To run untrusted programs without "
    "isolation, as this user and with this user's files, set isolation='limits'"
)
_BOOTSTRAP = """
import marshal, os
def take(fd, count):
    data = b""
    while len(data) < count:
        some = os.read(fd, count - len(data))
        if not some:
            os._exit(0)
        data += some
    return data
fd = {fd}
names = {{"__name__": "stage"}}
exec(marshal.loads(take(fd, int.from_bytes(take(fd, 8), "little"))), names)
names["main"](fd)
"""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program, so there is no result: reject the prompt instead of scoring it."""


class IsolationMissing(SandboxError):
    """This machine cannot isolate untrusted programs. The message says what is missing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one input. Unless noted otherwise, a limit covers all processes of the program together."""

    cpu_s: float = 5.0
    wall_s: float = 30.0  # larger than cpu_s, because other work may keep the machine busy
    memory_bytes: int = 512 << 20
    address_bytes: int = 0  # per process; 0: memory_bytes. Node and Java reserve far more than they use
    processes: int = 16  # processes and threads; a program that reaches this number is killed
    scratch_bytes: int = 64 << 20  # also the size limit of any single file
    open_files: int = 64  # per process
    output_bytes: int = 64_000  # for stdout and stderr each

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 0 or (getattr(self, name) == 0 and name != "address_bytes"):
                raise ValueError(f"Limits.{name} is {getattr(self, name)}; it must be above 0")
        if self.processes < 2:
            raise ValueError(
                f"Limits.processes is {self.processes}; the program itself counts as one, so set 2 or more"
            )


@dataclass(frozen=True, slots=True)
class Program:
    """Files (path below the scratch folder -> content) and the command to run. No command: run `main.py` in this Python."""

    files: Mapping[str, str | bytes]
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in self.files:
            parts = Path(name).parts
            if not parts or name.startswith("/") or ".." in parts or "\0" in name:
                raise ValueError(
                    f"file {name!r} of a program is not below its folder; use a relative path without `..`"
                )
        if not self.command and "main.py" not in self.files:
            raise ValueError(f"a program without a command needs main.py among its files; it has {sorted(self.files)}")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of running a program on one input."""

    # ended: the program exited. cpu_time ... output: it exceeded that limit and was killed.
    # forbidden: too many refused system calls. killed: the sandbox died with the program, or gave no valid answer in time.
    outcome: Outcome
    exit_code: int | None  # negative: killed by that signal; None unless outcome is "ended"
    stdout: str
    stderr: str
    refused: Mapping[str, int]  # name of a refused system call -> number of attempts
    left_running: int  # processes that the program left running; they were killed
    cpu_s: float
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.outcome == "ended" and self.exit_code == 0

    @property
    def report(self) -> str:
        """One line for people: how the program ended, refused system calls, and processes left running."""
        told = {"ended": f"ended with code {self.exit_code}"}.get(self.outcome, self.outcome.replace("_", " "))
        if self.outcome == "ended" and self.exit_code and _out_of_memory(self.stderr):
            told += ", out of memory"
        if self.refused:
            told += "; refused: " + ", ".join(f"{name} ({count})" for name, count in sorted(self.refused.items()))
        if self.left_running:
            told += f"; left {self.left_running} processes running, which were killed"
        return told


def _out_of_memory(stderr: str) -> bool:
    last = stderr.rstrip().rpartition("\n")[2]
    return last.startswith("MemoryError") or "std::bad_alloc" in stderr


class SandboxPool:
    """At most `size` sandboxes at once, `spare` of them started in advance. Usable from any thread and in any fork of this process.

    waits for: a free sandbox, at most BUSY_LIMIT_S.  unblocked by: the end of another one.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        size: int | None = None,
        spare: int = 1,
        isolation: Literal["required", "limits"] = "required",
        read_only: Sequence[str | Path] = (),
        packages: Sequence[str | Path] = (),
        logger: logging.Logger | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """read_only: additional folders that programs can read. packages: the same, and also on Python's module search path.
        now: monotonic seconds.

        Runs a trial program. Raises IsolationMissing if programs cannot be isolated. With isolation="limits" it raises that only if
        there is no filter for this machine, or if the trial program fails without isolation, too.
        """
        if isolation not in ("required", "limits"):
            raise ValueError(f"isolation is {isolation!r}; it must be 'required' or 'limits'")
        self.limits = limits or Limits()
        self._size = size or max(2, len(os.sched_getaffinity(0)))
        self._spare = min(spare, self._size)
        self._packages = [str(Path(folder).resolve()) for folder in packages]
        self._logger, self._now = logger or logging.getLogger("asyncrl.sandbox"), now
        folders = [str(Path(folder).resolve()) for folder in read_only] + self._packages
        self._recipe = _Recipe.make(isolation == "required", self.limits, folders)
        self._renew()
        if isolation == "limits":
            _remove_leftovers()
        reports_refusals = self._try()
        if isolation == "limits":
            self._logger.warning(
                "isolation=limits: untrusted programs run as this user and can read and write all files of this user"
            )
        elif not reports_refusals:
            self._logger.warning("refused system calls are not reported on this machine (they are still refused)")

    @contextlib.contextmanager
    def open(self, program: Program) -> Iterator[Sandbox]:
        """A sandbox that holds this program, for any number of inputs. Closed at the end of the `with` block."""
        if os.getpid() != self._pid:  # this is a fork, and the spare sandboxes belong to its parent
            for theirs in self._ready:
                theirs.forget()
            self._renew()
        if not self._places.acquire(timeout=BUSY_LIMIT_S):
            raise SandboxError(f"all {self._size} sandboxes have been busy for {BUSY_LIMIT_S:g} s")
        try:
            sandbox = self._take(program)
            try:
                self._make_spare()  # starts while the program runs
                yield sandbox
            finally:
                sandbox.close()
        finally:
            self._places.release()

    def run(self, program: Program, given: str | bytes = b"") -> Result:
        """Run a program on one input, in a sandbox of its own."""
        with self.open(program) as sandbox:
            return sandbox.run(given)

    def close(self) -> None:
        """End the spare sandboxes."""
        with self._lock:
            while self._ready:
                self._ready.popleft().close()

    def _try(self) -> bool:
        """Run a trial program. Return whether sandboxes of this machine report refused system calls."""
        recipe, limits = self._recipe, self._recipe.limits
        # Use a generous time limit here: a busy machine can be slow and still isolate programs
        self._recipe = replace(recipe, limits=replace(limits, wall_s=max(limits.wall_s, START_LIMIT_S)))
        try:
            with self.open(Program({"main.py": "print(6 * 7)"})) as sandbox:
                result, reports_refusals = sandbox.run(), sandbox.reports_refusals
        except IsolationMissing:
            raise
        except SandboxError as error:
            if not self._recipe.alone:
                raise
            raise IsolationMissing(f"{error}. {_REMEDY}") from error
        finally:
            self._recipe = recipe
            self.close()  # forks of this process cannot use its spare sandboxes
        if not result.ok or result.stdout != "42\n":
            raise IsolationMissing(
                f"a sandbox started, but the trial program in it {result.report} {result.stderr[-500:]}. {_REMEDY}"
            )
        return reports_refusals

    def _renew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(self._size)
        self._ready: deque[Sandbox] = deque()

    def _take(self, program: Program) -> Sandbox:
        """Load the program into a spare sandbox, or into a new one."""
        while True:
            with self._lock:
                spare = self._ready.popleft() if self._ready else None
            sandbox = spare or Sandbox(self._recipe, self._now)
            try:
                sandbox.wait_until_ready()
                sandbox.load(program, self._packages)
                return sandbox
            except SandboxError:
                sandbox.close()
                if spare is None:  # a spare one may have been killed meanwhile, for memory: try again
                    raise

    def _make_spare(self) -> None:
        with self._lock:
            if len(self._ready) >= self._spare:
                return
        sandbox = Sandbox(self._recipe, self._now)
        with self._lock:
            self._ready.append(sandbox)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a pool starts its sandboxes."""

    command: tuple[str, ...]  # everything before the interpreter
    alone: bool  # isolated
    limits: Limits
    setup: bytes

    @classmethod
    def make(cls, isolated: bool, limits: Limits, folders: Sequence[str]) -> _Recipe:
        try:
            told, untold = build_filter(told=True), build_filter(told=False)
        except NoFilter as error:
            raise IsolationMissing(str(error)) from None
        if sys.platform != "linux":
            raise IsolationMissing(f"isolating untrusted programs requires Linux; this is {sys.platform}")
        setup = {
            "alone": isolated,
            "told": told,
            "untold": untold,
            "seccomp": SECCOMP_NUMBERS[platform.machine()],
        }
        command = _bwrap(limits, folders) if isolated else ()
        return cls(tuple(command), isolated, limits, _framed(marshal.dumps(setup)))


class Sandbox:
    """One sandbox. Not thread-safe."""

    def __init__(self, recipe: _Recipe, now: Callable[[], float]) -> None:
        self._recipe, self._now = recipe, now
        self._listener = -1
        self._closed = False
        self._used = False
        self._scratch = None if recipe.alone else _OutsideScratch()
        self._control, theirs = socket.socketpair()
        info, info_theirs = os.pipe()
        errors, errors_theirs = os.pipe()
        self._errors = open(errors, "rb")  # noqa: SIM115 - closed by `forget`
        more = ("--info-fd", str(info_theirs), "--") if recipe.alone else ()
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        bootstrap = _BOOTSTRAP.format(fd=theirs.fileno())
        with theirs, open(info, "rb") as told:
            try:
                self._process = subprocess.Popen(
                    [*recipe.command, *more, python, "-I", "-S", "-c", bootstrap],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors_theirs,
                    pass_fds=(theirs.fileno(), info_theirs),
                    env={},
                )
            finally:
                os.close(info_theirs)
                os.close(errors_theirs)
            self._info = os.dup(told.fileno())
        self._inner = -1  # pidfd of the first process in the sandbox
        code = marshal.dumps(_stage_code())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # wait_until_ready reports the cause
            self._control.settimeout(START_LIMIT_S)
            self._control.sendall(_framed(code) + self._recipe.setup)

    @property
    def reports_refusals(self) -> bool:
        """Whether the kernel notifies the sandbox of refused system calls. Valid after `wait_until_ready`."""
        return self._listener >= 0

    def wait_until_ready(self) -> None:
        """Wait until the sandbox has started. Raises SandboxError if that fails or takes more than START_LIMIT_S."""
        deadline = self._now() + START_LIMIT_S
        try:
            self._control.settimeout(max(0.1, deadline - self._now()))
            word = self._control.recv(1)
            if word == b"T":
                _, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                (self._listener,) = fds
        except (OSError, ValueError) as error:
            raise self._not_started(repr(error)) from error
        if word not in (b"T", b"U"):
            raise self._not_started("it ended")
        self._find_inner()

    def load(self, program: Program, packages: Sequence[str]) -> None:
        """Send the program to the sandbox. Raises SandboxError if it is too large or the sandbox has ended. Neither counts as a
        result of the program."""
        files = {
            n: c.encode("utf-8", "surrogatepass") if isinstance(c, str) else bytes(c) for n, c in program.files.items()
        }
        if sum(map(len, files.values())) > min(_MAX_PROGRAM, self._recipe.limits.scratch_bytes):
            raise SandboxError("the program's files are larger than Limits.scratch_bytes")
        limits, scratch = self._recipe.limits, self._scratch.path if self._scratch is not None else _SCRATCH
        rlimits = {
            "RLIMIT_AS": (limits.address_bytes or limits.memory_bytes) + _AS_SLACK,
            "RLIMIT_CPU": int(limits.cpu_s) + 1,
            "RLIMIT_FSIZE": limits.scratch_bytes,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_SIGPENDING": _MAX_SIGNALS,
        }
        if self._recipe.alone and (os.getuid() == 0 or _kernel() >= _PROC_COUNTED_APART):
            # The sandbox's first process counts, too. main.py notices a program that reaches the limit, and kills it.
            rlimits["RLIMIT_NPROC"] = limits.processes + 1
        job = {
            "files": files,
            "command": list(program.command),
            "scratch": scratch,
            "packages": list(packages),
            "rlimits": rlimits,
            "environment": {
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": scratch,
                "TMPDIR": scratch,
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_bytes,
            "processes": limits.processes,
            "output_bytes": limits.output_bytes,
        }
        try:
            self._control.settimeout(START_LIMIT_S)
            self._control.sendall(_framed(marshal.dumps(job)))
            word = self._control.recv(1)
        except OSError as error:
            raise self._not_started(repr(error)) from error
        if word != b"L":
            raise self._not_started("it ended")

    def run(self, given: str | bytes = b"") -> Result:
        """Run the program on this input. Raises SandboxError if it cannot be run: input too large, or sandbox closed."""
        data = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
        if len(data) > _MAX_PROGRAM:
            raise SandboxError(f"an input of {len(data)} bytes is too large; at most {_MAX_PROGRAM} are allowed")
        if self._closed:
            raise SandboxError("this sandbox has ended: the program killed it, or its `with` block is over")
        refused: dict[str, int] = {}
        start = self._now()
        deadline = start + self._recipe.limits.wall_s + ANSWER_SLACK_S
        try:
            self._control.settimeout(ANSWER_SLACK_S)
            self._control.sendall(_framed(data))
            answer = self._answer(deadline, refused)
        except _Forbidden:
            self.close()
            return Result("forbidden", None, "", "", refused, 0, 0.0, self._now() - start)
        except (OSError, EOFError):
            self.close()
            return Result("killed", None, "", "", refused, 0, 0.0, self._now() - start)
        (why, code, left, cpu_us, wall_us), out, err = answer
        outcome = _OUTCOMES[why]
        return Result(
            outcome,
            code if outcome == "ended" else None,
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
            refused,
            left,
            cpu_us / 1e6,
            wall_us / 1e6,
        )

    def close(self) -> None:
        """End the sandbox and all its processes."""
        if self._closed:
            return
        self._control.close()  # the first process ends when it reads the end of file; kill it in case it cannot
        if self._inner >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        if self._scratch is not None:
            self._scratch.remove()
        self.forget()

    def forget(self) -> None:
        """Release this process's descriptors: the sandbox has ended, or belongs to the process this one was forked from."""
        self._closed = True
        self._control.close()
        for fd in (self._inner, self._listener, self._info):
            if fd >= 0:
                os.close(fd)
        if self._scratch is not None:
            self._scratch.forget()
        self._errors.close()
        self._process.returncode = self._process.returncode or 0

    # ---------------------------------------------------------------------------------------------------------- the answer

    def _answer(self, deadline: float, refused: dict[str, int]) -> tuple[tuple[int, ...], bytes, bytes]:
        """Read the sandbox's answer. Meanwhile refuse the system calls that the filter has suspended. The answer is untrusted: its
        length and ranges are checked."""
        data = bytearray()
        most = 2 * self._recipe.limits.output_bytes + 8 * _REPORT_NUMBERS
        wanted = 8 * _REPORT_NUMBERS
        numbers: tuple[int, ...] = ()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if self._listener >= 0:
            poll.register(self._listener, select.POLLIN)
        while len(data) < wanted:
            left_s = deadline - self._now()
            if left_s <= 0:
                raise TimeoutError("no answer")
            for fd, event in poll.poll(left_s * 1000):
                if fd == self._listener:
                    if event & select.POLLIN:
                        self._refuse(refused)
                    else:
                        poll.unregister(fd)
                    continue
                some = self._control.recv(1 << 16)
                if not some:
                    raise EOFError
                data += some
                if len(data) > most:
                    raise EOFError
            if not numbers and len(data) >= 8 * _REPORT_NUMBERS:
                numbers = tuple(
                    int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, 8 * _REPORT_NUMBERS, 8)
                )
                if not 0 <= numbers[0] < len(_OUTCOMES) or min(numbers[2:]) < 0:
                    raise EOFError
                wanted += numbers[5] + numbers[6]
                if wanted > most:
                    raise EOFError
        at = 8 * _REPORT_NUMBERS
        return numbers[:5], bytes(data[at : at + numbers[5]]), bytes(data[at + numbers[5] : wanted])

    def _refuse(self, refused: dict[str, int]) -> None:
        """Count one system call that the filter has suspended, and make it fail."""
        held = bytearray(_NOTIF_BYTES)
        try:
            fcntl.ioctl(self._listener, _NOTIF_RECV, held)
        except OSError:  # the caller is gone
            return
        call = call_name(int.from_bytes(held[16:20], "little"), int.from_bytes(held[32:40], "little"))
        refused[call] = refused.get(call, 0) + 1
        response = bytearray(_RESPONSE_BYTES)
        response[0:8] = held[0:8]
        response[16:20] = (-_EPERM).to_bytes(4, "little", signed=True)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _NOTIF_SEND, response)
        if sum(refused.values()) >= MAX_REFUSED:
            raise _Forbidden

    # ----------------------------------------------------------------------------------------------------------- start, end

    def _find_inner(self) -> None:
        """Read the id of the first process in the sandbox from bwrap, and open a pidfd for signals."""
        if not self._recipe.alone:
            self._inner = os.pidfd_open(self._process.pid)
            return
        told = b""
        while b"}" not in told:
            some = os.read(self._info, 4096)
            if not some:
                raise self._not_started("bwrap did not report the process that it started")
            told += some
        number = int(told.partition(b'"child-pid":')[2].lstrip().partition(b",")[0].partition(b"\n")[0])
        try:
            self._inner = os.pidfd_open(number)
        except ProcessLookupError as error:
            raise self._not_started("it ended at once") from error

    def _not_started(self, why: str) -> SandboxError:
        said = b""
        self._process.kill()
        os.set_blocking(self._errors.fileno(), False)
        with contextlib.suppress(OSError):
            said = (self._errors.read() or b"")[-1000:]
        self.close()
        text = said.decode("utf-8", "replace").strip()
        return SandboxError(f"a sandbox did not start within {START_LIMIT_S:g} s: {text or why}")


class _OutsideScratch:
    """The scratch folder of a program without isolation. Its maker holds a lock on its owner file. So a later pool recognises the
    folders of makers that were killed."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix=_OUTSIDE_PREFIX)
        self._lock = os.open(f"{self._folder}/{_OWNER}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # a pool that looks for leftovers holds it for a moment
        os.write(self._lock, _proof(self._folder))
        self.path = f"{self._folder}/files"
        os.mkdir(self.path, 0o700)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            main.empty(self._folder)
            os.rmdir(self._folder)

    def forget(self) -> None:
        """Close this process's descriptor. The lock ends when the last process has closed its own."""
        os.close(self._lock)


def _remove_leftovers() -> None:
    """Remove the scratch folders of processes that were killed. The owner file proves that a folder is one: a copy or another
    folder with such a name has another number or no such file."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_OUTSIDE_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                proof = _proof(str(folder))
                if os.read(lock, len(proof) + 1) == proof:
                    main.empty(str(folder))
                    os.rmdir(folder)
            finally:
                os.close(lock)


def _proof(folder: str) -> bytes:
    return f"scratch folder of a program: {os.path.realpath(folder)} {os.lstat(folder).st_ino}\n".encode()


class _Forbidden(Exception):
    """The program made MAX_REFUSED refused system calls and is killed."""


_code: CodeType | None = None


def _stage_code() -> CodeType:
    global _code
    if _code is None:
        path = Path(main.__file__)
        _code = compile(path.read_bytes(), "<sandbox>", "exec", optimize=2)
    return _code


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def _kernel() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(part) for part in numbers if part.isdigit())


def _bwrap(limits: Limits, folders: Sequence[str]) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise IsolationMissing(
            "untrusted programs need bubblewrap, and there is no `bwrap` in PATH: apt-get install bubblewrap (dnf, apk: the same "
            "name). To run them without isolation, as this user and with this user's files, set isolation='limits'"
        )
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:
        # RLIMIT_NPROC does not limit root, so the first process may only change its user, and then is not root any more
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    command += ["--as-pid-1", "--hostname", "sandbox", "--clearenv", "--ro-bind", "/usr", "/usr"]
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        else:
            command += ["--ro-bind-try", folder, folder]
    command += ["--perms", "0755", "--dir", "/etc"]
    for file in _SYSTEM_FILES:
        command += ["--ro-bind-try", file, file]
    for folder in dict.fromkeys([os.path.realpath(sys.base_prefix), *folders]):
        if folder == "/":
            raise IsolationMissing("programs would be able to read /, which contains everything; name smaller folders")
        if not folder.startswith("/usr/") and folder != "/usr":
            for above in reversed(Path(folder).parents[:-1]):  # bwrap would create them readable by their owner only
                command += ["--perms", "0755", "--dir", str(above)]
            command += ["--ro-bind", folder, folder]
    command += ["--proc", "/proc", "--dev", "/dev"]
    # Memory that processes share through /dev/zero is counted by no limit. /dev/full reads as zeros, too, but cannot be mapped
    command += ["--dev-bind", "/dev/full", "/dev/zero"]
    command += ["--perms", "1777", "--size", str(_SHM_BYTES), "--tmpfs", "/dev/shm"]
    command += ["--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", _SCRATCH, "--chdir", _SCRATCH]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/"]
