"""Untrusted programs in a sandbox: what they may do, and attempts to escape. Every attempt is refused, and the result says so."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.data.prompts import Prompt
from asyncrl.rewards.judges import Judges
from asyncrl.rewards.reward import Completion, Reward
from asyncrl.rewards.sandbox.pool import IsolationMissing, Limits, Program, Result, SandboxError, SandboxPool
from asyncrl.rewards.sandbox.syscalls import build_filter, call_name
from tests.support.services import make_services

GONE_LIMIT_S = 60.0  # for processes that are to end
LIMITS = Limits(
    cpu_s=0.7, wall_s=100.0, memory_bytes=96 << 20, processes=12, scratch_bytes=4 << 20, output_bytes=10_000
)
SLEEPER = "import time; time.sleep(1000)"

LATE_WORDS = """
import atexit, threading
atexit.register(print, "last")
threading.Thread(target=print, args=("a thread",)).start()
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    pool = SandboxPool(limits=LIMITS, size=2)
    yield pool
    pool.close()


def run(pool: SandboxPool, code: str, given: str = "") -> Result:
    return pool.run(Program({"main.py": code}), given)


def said(pool: SandboxPool, code: str) -> object:
    """The JSON that a program prints. The program must succeed."""
    result = run(pool, "import json, os\n" + code)
    assert result.ok, (result.report, result.stderr)
    return json.loads(result.stdout)


# ---------------------------------------------------------------------------------------------------------- honest programs


def test_a_program_gets_its_input_and_is_heard(pool: SandboxPool) -> None:
    result = run(pool, "import sys\nprint(int(input()) * 2)\nprint('wärm', file=sys.stderr)", "21\n")
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("ended", 0, "42\n", "wärm\n")
    assert result.ok
    assert result.report == "ended with code 0"
    assert result.cpu_s > 0


def test_many_inputs_of_one_program_begin_anew_each_time(pool: SandboxPool) -> None:
    leave = "open('left', 'w').write('x'); os.mkdir('d'); os.symlink('/usr', 'd/u')"
    code = f"import os\nprint(input(), os.path.exists('left'))\n{leave}"
    with pool.open(Program({"main.py": code})) as sandbox:
        assert [sandbox.run(f"{number}\n").stdout for number in range(3)] == ["0 False\n", "1 False\n", "2 False\n"]


@pytest.mark.parametrize(
    ("code", "exit_code", "stdout", "stderr"),
    [
        ("exit()", 0, "", ""),
        ("import sys; sys.exit(7)", 7, "", ""),
        ("exit('no')", 1, "", "no\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        (LATE_WORDS, 0, "a thread\nlast\n", ""),
    ],
)
def test_programs_end_as_anywhere(pool: SandboxPool, code: str, exit_code: int, stdout: str, stderr: str) -> None:
    result = run(pool, code)
    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("ended", exit_code, stdout, stderr)


def test_a_traceback_is_the_programs_own(pool: SandboxPool) -> None:
    result = run(pool, "def f():\n    return 1 / 0\nf()")
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    assert "sandbox" not in result.stderr


def test_other_programs_and_more_files(pool: SandboxPool) -> None:
    program = Program(
        {"run.sh": "cat data/a.txt; read line; echo $line", "data/a.txt": b"from a file\n"}, ["sh", "run.sh"]
    )
    assert pool.run(program, "given\n").stdout == "from a file\ngiven\n"
    missing = pool.run(Program({}, ["no-such-program"]))
    assert missing.exit_code == 127
    assert "no-such-program" in missing.stderr


def test_a_program_uses_modules_processes_and_threads(pool: SandboxPool) -> None:
    code = (
        "import asyncio, subprocess, tempfile, random, collections\n"
        "async def main():\n    await asyncio.sleep(0)\n    return 3\n"
        "with tempfile.TemporaryFile() as f: f.write(b'x')\n"
        "print(json.dumps([asyncio.run(main()), subprocess.check_output(['echo', 'hi'], text=True)]))"
    )
    assert said(pool, code) == [3, "hi\n"]


def test_names_of_files_stay_below() -> None:
    for name in ("/etc/x", "../x", "a/../../x", "", "x\0y"):
        with pytest.raises(ValueError, match="not below its folder"):
            Program({name: "", "main.py": ""})
    with pytest.raises(ValueError, match=r"main\.py"):
        Program({"other.py": ""})
    with pytest.raises(ValueError, match="cpu_s"):
        Limits(cpu_s=0)


# ------------------------------------------------------------------------------------------------------------------ escapes


def test_no_network(pool: SandboxPool) -> None:
    """Neither the internet, nor ports of this machine, nor the abstract sockets of its processes are reachable."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"asyncrl-test-{os.getpid()}"
        abstract.bind("\0" + name)
        abstract.listen()
        port = server.getsockname()[1]
        code = f"""
import socket
def attempt(family, address, kind=socket.SOCK_STREAM):
    try:
        socket.socket(family, kind).connect(address)
        return "connected"
    except OSError as error:
        return type(error).__name__
print(json.dumps([
    attempt(socket.AF_INET, ("127.0.0.1", {port})), attempt(socket.AF_INET, ("1.1.1.1", 53), socket.SOCK_DGRAM),
    attempt(socket.AF_INET6, ("::1", {port})), attempt(socket.AF_NETLINK, (0, 0), socket.SOCK_RAW),
    attempt(socket.AF_UNIX, "\\0{name}"),
]))"""
        result = run(pool, "import json\n" + code)
    assert json.loads(result.stdout) == ["PermissionError"] * 4 + ["ConnectionRefusedError"]
    assert result.refused == {"socket (family 2)": 2, "socket (family 10)": 1, "socket (family 16)": 1}
    assert "refused: socket (family 10) (1)" in result.report


def test_a_fork_bomb_is_ended(pool: SandboxPool) -> None:
    result = run(pool, "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass")
    assert result.outcome in ("processes", "cpu_time")
    assert result.left_running <= LIMITS.processes
    sleepers = "for _ in range(50): threading.Thread(target=time.sleep, args=(600,)).start()"
    threads = run(pool, f"import threading, time\nthreading.stack_size(1 << 18)\n{sleepers}")
    assert threads.outcome == "processes"
    assert said(pool, "print(1)") == 1  # and the machine is unharmed


def test_memory_bombs_are_ended(pool: SandboxPool) -> None:
    once = run(pool, "x = bytearray(10**10)")
    assert once.exit_code == 1
    assert once.report == "ended with code 1, out of memory"
    slowly = run(pool, "x = []\nwhile True: x.append(bytearray(10**6))")
    assert slowly.outcome == "memory" or "out of memory" in slowly.report
    together = run(
        pool,
        f"import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\nx = bytearray({40 << 20})\ntime.sleep(60)",
    )
    assert together.outcome == "memory"  # no single process exceeded the limit


HOLD = f"""
import ctypes, errno, fcntl, itertools, mmap, os, select, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
PAGE, HUGE, ANYWHERE = ctypes.c_size_t(4096), 2 << 20, None

def mapped(size, kind, fd=-1):
    where = libc.mmap(ANYWHERE, ctypes.c_size_t(size), 3, kind, fd, ctypes.c_size_t(0))
    if where == 2**64 - 1:
        raise OSError(ctypes.get_errno(), "mmap")
    return where

def until_refused(make):
    made = []
    try:
        while True:
            made.append(make())
    except OSError:
        return made

def in_each_process(work):
    read, write = os.pipe()
    for _ in range({LIMITS.processes - 2}):
        if os.fork() == 0:
            kept, count = work()
            os.write(write, b"%d\\n" % count)
            time.sleep(1000)
    told = b""
    while told.count(b"\\n") < {LIMITS.processes - 2}:
        told += os.read(read, 4096)
    return sum(map(int, told.split()))

def fill(end):
    end.setblocking(False)
    try:
        while True:
            end.send(bytes(4096))
    except BlockingIOError:
        pass
"""


@dataclass(frozen=True)
class Kind:
    """A program that tries to hold one kind of memory that belongs to no process, or that the kernel needs for it."""

    code: str  # prints how much it holds
    outcomes: tuple[str, ...] = ("ended",)
    refused: tuple[str, ...] = ()  # system calls
    most: int | None = None  # of what it prints; None: it prints nothing, because it is ended or refused


DESCRIPTORS = LIMITS.processes * LIMITS.open_files
KINDS = {
    "queues of sockets": Kind(
        "print(in_each_process(lambda: ([fill(end) or end for _ in range(25) for end in socket.socketpair()], 0)))",
        ("memory",),
    ),
    "connections that wait": Kind(
        "s = socket.socket(socket.AF_UNIX)\ns.bind('s')\ns.listen(4096)\n"
        "while True:\n    c = socket.socket(socket.AF_UNIX)\n    c.connect('s')\n    fill(c)\n    c.close()",
        ("memory",),
    ),
    "descriptors in flight": Kind(
        "a, b = socket.socketpair()\n"
        "def send():\n    c, d = socket.socketpair()\n    socket.send_fds(a, [b'x'], [d.fileno()])\n"
        "    socket.send_fds(d, [b'x'], [c.fileno()])\n    c.close(), d.close()\n"
        "print(2 * len(until_refused(send)))",
        most=LIMITS.open_files + 2,
    ),
    "filters of sockets": Kind(
        "code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 65535) * 4000)\n"
        "def sockets():\n    pair = socket.socketpair()\n    for end in pair:\n"
        "        end.setsockopt(socket.SOL_SOCKET, 26, struct.pack('HL', 4000, ctypes.addressof(code)))\n    return pair\n"
        "def work():\n    made = until_refused(sockets)\n    return made, len(made)\n"
        "print(in_each_process(work))",
        ("memory",),
    ),
    "larger queues of sockets": Kind(
        "a, _ = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)",
        refused=("setsockopt",),
    ),
    "pipes": Kind(
        "def pipe():\n    read, write = os.pipe()\n    os.set_blocking(write, False)\n    count = os.write(write, bytes(1 << 20))\n"
        "    os.close(write)\n    return count\n"
        "def work():\n    made = until_refused(pipe)\n    return made, sum(made)\n"
        "print(in_each_process(work))",
        most=DESCRIPTORS << 16,
    ),
    "larger pipes": Kind("_, write = os.pipe()\nfcntl.fcntl(write, 1031, 1 << 20)", refused=("fcntl",)),
    "huge pages in pipes": Kind(
        "where = mapped(2 * HUGE, 0x22)\n_, write = os.pipe()\npiece = struct.pack('PL', where, 1)\n"
        "print(max(0, libc.vmsplice(write, piece, ctypes.c_size_t(1), 0)))",
        most=0,
    ),
    "pages of files in pipes": Kind(
        "file = os.open('f', os.O_RDWR | os.O_CREAT)\nos.write(file, bytes(4096))\n_, write = os.pipe()\n"
        "print(len(until_refused(lambda: os.splice(file, write, 1, 0))))",
        most=0,
    ),
    "pages of files in sockets": Kind(
        "file = os.open('f', os.O_RDWR | os.O_CREAT)\na, b = socket.socketpair()\na.setblocking(False)\n"
        "def page():\n    os.ftruncate(file, 0)\n    os.pwrite(file, b'x', 0)\n    os.sendfile(a.fileno(), file, 0, 1)\n"
        "print(len(until_refused(page)))",
        most=0,
    ),
    "terminals": Kind(
        "def terminal():\n    fd = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)\n"
        "    fcntl.ioctl(fd, 0x40045431, struct.pack('i', 0))\n    count = 0\n    try:\n        while True:\n"
        "            count += os.write(fd, bytes(4096))\n    except BlockingIOError:\n        return count\n"
        "def work():\n    made = until_refused(terminal)\n    return made, sum(made)\n"
        "print(in_each_process(work))",
        most=DESCRIPTORS << 16,
    ),
    "event descriptors": Kind(
        "def work():\n    made = until_refused(lambda: os.eventfd(0))\n    return made, len(made)\nprint(in_each_process(work))",
        most=DESCRIPTORS,
    ),
    "opened files of /proc": Kind(
        "def file():\n    fd = os.open('/proc/self/smaps', os.O_RDONLY)\n    os.read(fd, 1 << 16)\n"
        "def work():\n    made = until_refused(file)\n    return made, len(made)\nprint(in_each_process(work))",
        most=DESCRIPTORS,
    ),
    "watches of epoll": Kind(
        "polls, count = [select.epoll() for _ in range(20)], 0\n"
        "for _ in range(10):\n"
        "    files = [os.eventfd(0) for _ in range(20)]\n"
        "    for file in files:\n"
        "        for number in range(44, 300):\n"
        "            try:\n                os.dup2(file, number)\n            except OSError:\n                break\n"
        "            for poll in polls:\n                poll.register(number, select.EPOLLIN)\n                count += 1\n"
        "            os.close(number)\n"
        "    if os.fork() == 0:\n        time.sleep(1000)\n"  # the files stay open, and the watches with them
        "    for file in files:\n        os.close(file)\n"
        "print(count)",
        ("ended", "cpu_time"),
        most=LIMITS.processes * 20**3,
    ),
    "events of inotify": Kind("assert libc.inotify_init() < 0", refused=("inotify_init",)),
    "watches of inotify": Kind("assert libc.inotify_init1(0) < 0", refused=("inotify_init1",)),
    "contexts of asynchronous I/O": Kind(
        "context = ctypes.c_ulong()\nassert libc.syscall(206, 4000, ctypes.byref(context)) < 0", refused=("io_setup",)
    ),
    "rings of io_uring": Kind("print(max(0, libc.syscall(425, 8, ctypes.create_string_buffer(200))))", most=0),
    "userfaultfd": Kind("libc.syscall(323, 0)", refused=("userfaultfd",)),
    "anonymous files": Kind("os.memfd_create('x')", refused=("memfd_create",)),
    "secret memory": Kind("print(max(0, libc.syscall(447, 0)))", most=0),
    "shared memory of System V": Kind("libc.shmget(0, PAGE, 0o1600)", refused=("shmget",)),
    "messages of System V": Kind("libc.msgget(0, 0o1600)", refused=("msgget",)),
    "semaphores of System V": Kind("libc.semget(0, 1000, 0o1600)", refused=("semget",)),
    "message queues": Kind("libc.syscall(240, b'q', 0o102, 0o600, None)", refused=("mq_open",)),
    "keys": Kind("libc.syscall(248, b'user', b'a', bytes(1000), 1000, -3)", refused=("add_key",)),
    "shared memory that no process maps": Kind("mmap.mmap(-1, 1 << 20)", refused=("mmap",)),
    "shared memory of a device": Kind(
        "print(len(until_refused(lambda: mapped(1 << 20, 1, os.open('/dev/zero', os.O_RDWR)))))", most=0
    ),
    "huge pages": Kind(
        "where = mapped(20 * HUGE, 0x22)\nlibc.madvise(ctypes.c_void_p(where), ctypes.c_size_t(20 * HUGE), 14)\n"
        "for at in range(0, 20 * HUGE, 4096):\n    ctypes.memset(where + at, 1, 1)\n"
        "print(sum(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')))",
        most=0,
    ),
    "huge pages that the program switches on": Kind("assert libc.prctl(41, 0, 0, 0, 0) < 0", refused=("prctl",)),
    "locked memory": Kind("print(0 if libc.mlock(ctypes.c_void_p(mapped(1 << 20, 0x22)), PAGE) else 4096)", most=0),
    "mappings": Kind(
        "size = 110 << 20\nwhere = mapped(size, 0x22)\n"
        "def work():\n    for at in range(0, size, 8192):\n        libc.mprotect(ctypes.c_void_p(where + at), PAGE, 1)\n"
        "    return 0, 0\n"
        "print(in_each_process(work))\ntime.sleep(1000)",
        ("memory",),
    ),
    "page tables": Kind(
        "where = mapped(90 << 20, 0x4022)\n"
        "def work():\n    for at in range(0, 90 << 20, HUGE):\n        ctypes.string_at(where + at, 1)\n"
        "    return 0, next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmPTE'))\n"
        "print(in_each_process(work))",
        most=LIMITS.processes * 1000,
    ),
    "signals that wait": Kind(
        "signal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
        "print(next(n for n in itertools.count() if libc.sigqueue(os.getpid(), 40, None)))",
        most=1024,
    ),
    "timers": Kind(
        "about, timer = struct.pack('Pii48x', 0, 40, 1), ctypes.c_void_p()\n"
        "print(next(n for n in itertools.count() if libc.timer_create(1, about, ctypes.byref(timer))))",
        most=1024,
    ),
    "locks of files": Kind(
        "files = [os.open(str(n), os.O_RDWR | os.O_CREAT) for n in range(50)]\n"
        "for at in itertools.count(0, 2):\n    for file in files:\n        fcntl.lockf(file, fcntl.LOCK_EX, 1, at)",
        ("cpu_time",),
    ),
    "filters of system calls": Kind(
        "code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7FFF0000) * 4000)\n"
        "filter = struct.pack('HL', 4000, ctypes.addressof(code))\n"
        "print(next(n for n in itertools.count() if libc.prctl(22, 2, filter, 0, 0)))",
        most=8,
    ),
    "empty files": Kind(
        "for number in itertools.count():\n    os.close(os.open('%0250d' % number, os.O_CREAT))", ("memory", "cpu_time")
    ),
    "links": Kind(
        "open('f', 'w')\nfor number in itertools.count():\n    os.link('f', '%0250d' % number)", ("memory", "cpu_time")
    ),
    "files in memory": Kind(
        "count = 0\nfor folder in ('/tmp', '/dev/shm'):\n    file = open(f'{folder}/f', 'wb', 0)\n"
        "    count += 65536 * len(until_refused(lambda: file.write(bytes(65536))))\nprint(count)",
        most=LIMITS.scratch_bytes + (8 << 20) + 65536,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_belongs_to_no_process_is_bounded(pool: SandboxPool, kind: str) -> None:
    """Each kind is refused, counted as memory, or bounded by other limits."""
    given = KINDS[kind]
    result = run(pool, HOLD + given.code)
    assert result.outcome in given.outcomes, (result.report, result.stderr)
    assert tuple(result.refused) == given.refused, result.stderr
    if given.most is not None and result.outcome == "ended":
        assert result.ok, result.stderr
        held = int(result.stdout)
        assert min(1, given.most) <= held <= given.most  # 0 would mean that the program did not try


def test_few_sockets_are_not_too_much(pool: SandboxPool) -> None:
    few = "import asyncio, socket\nasyncio.run(asyncio.sleep(0))\npairs = [socket.socketpair() for _ in range(10)]"
    assert run(pool, few).ok
    code = "import socket\na, _ = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)\n"
    assert run(pool, code).ok


def test_files_are_copied_and_zeros_are_read_as_anywhere(pool: SandboxPool) -> None:
    """Although calls that copy inside the kernel are missing, and /dev/zero is another device."""
    code = (
        "import shutil, socket, threading\nopen('a', 'wb').write(os.urandom(100_000))\nshutil.copy('a', 'b')\n"
        "a, b = socket.socketpair()\nthreading.Thread(target=lambda: a.sendfile(open('a', 'rb')) and a.close()).start()\n"
        "got = b''\nwhile some := b.recv(65536): got += some\n"
        "print(json.dumps([open('b', 'rb').read() == open('a', 'rb').read() == got, open('/dev/zero', 'rb').read(3) == bytes(3)]))"
    )
    assert said(pool, code) == [True, True]


HARM = {
    "deep": "for _ in range(1500):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\n",
    "many": "for number in range(5_000):\n    open(str(number), 'w').close()\n",
    "names": "for name in ('a\\nb', '-rf', ' ', '\\udc80', '\\x01', '*', 'x' * 255):\n    os.mkdir(name)\n"
    "    open(os.path.join(name, name), 'w').close()\n",
    "unreadable": "os.makedirs('a/b/c')\nfor name in ('a/b/c', 'a/b', 'a'):\n    os.chmod(name, 0)\n",
    "links": "open('f', 'w').close()\nos.link('f', 'g')\nos.symlink('/', 'root')\nos.symlink('/usr', 'usr')\n"
    "os.symlink('loop', 'loop')\n",
    "fifo": "os.mkfifo('fifo')\nimport socket\nsocket.socket(socket.AF_UNIX).bind('socket')\n",
    "sparse": "open('sparse', 'wb').truncate(50_000_000)\n",
    "running": "if os.fork() == 0:\n    number = 0\n    while True:\n        number += 1\n"
    "        os.makedirs(f'{number % 50}/x', exist_ok=True)\n",
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("isolation", ["full", "limits"])
def test_what_a_program_leaves_in_its_folder_is_removed(
    harm: str, isolation: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next input, and with the sandbox."""
    code = f"import os, sys\nprint(sorted(os.listdir('.')))\nif sys.stdin.read():\n    sys.exit()\n{HARM[harm]}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = None if isolation == "full" else SandboxPool(isolation="limits", spare=1)
    try:
        with (own or request.getfixturevalue("pool")).open(Program({"main.py": code})) as sandbox:
            assert sandbox.run().stdout == "['main.py']\n"
            again = sandbox.run("look")
            assert (again.outcome, again.stdout) == ("ended", "['main.py']\n")
    finally:
        if own is not None:
            own.close()
    assert list(tmp_path.iterdir()) == []


def test_one_input_leaves_nothing_to_the_next(pool: SandboxPool) -> None:
    code = "import os\nfor folder in ('.', '/dev/shm'):\n    print(sorted(os.listdir(folder)))\n    open(f'{folder}/left', 'w')"
    with pool.open(Program({"main.py": code})) as sandbox:
        first, second = sandbox.run(), sandbox.run()
    assert first.stdout == second.stdout == "['main.py']\n[]\n"


def test_nothing_can_be_written_outside(pool: SandboxPool, tmp_path: Path) -> None:
    places = ["/x", "/usr/x", "/usr/lib/x", "/etc/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"]
    places += [
        f"{sys.base_prefix}/x",
        f"{tmp_path}/x",
        "/var/x",
        "/root/x",
        "/sys/x",
        "/run/x",
        "/proc/1/oom_score_adj",
    ]
    code = f"""
told = []
for place in {places!r}:
    try:
        open(place, "w").write("x")
        told.append(place)
    except OSError as error:
        assert error.errno in (1, 2, 13, 20, 30), error
print(json.dumps(told))"""
    assert said(pool, code) == []
    assert list(tmp_path.iterdir()) == []


def test_no_secret_can_be_read(pool: SandboxPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secrets" / "token"
    secret.parent.mkdir(mode=0o700)
    secret.write_text("T0PSECRET")
    monkeypatch.setenv("TOKEN", "T0PSECRET")
    code = f"""
places = [{str(secret)!r}, "/root/.ssh", "/etc/shadow", "/etc/passwd", "/home", "/var", "/run", {os.getcwd()!r}]
found = [place for place in places if os.path.exists(place)]
for folder, _, names in os.walk("/proc"):
    if folder.count("/") > 3: continue
    for name in ("environ", "cmdline", "mem", "maps"):
        if name in names:
            try:
                if b"T0PSECRET" in open(os.path.join(folder, name), "rb").read(): found.append(folder)
            except (OSError, OverflowError, ValueError): pass
numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
descriptors = [os.readlink(f"/proc/self/fd/{{fd}}").split(":")[0] for fd in range(3)]
print(json.dumps([found, numbers == [1, os.getpid()], os.getuid() != 0, int(status["CapEff"], 16) + int(status["CapPrm"], 16),
                  status["NoNewPrivs"].strip(), "T0PSECRET" in str(os.environ), descriptors]))"""
    assert said(pool, code) == [[], True, True, 0, "1", False, ["pipe"] * 3]


def test_daemons_do_not_outlive_their_program(pool: SandboxPool) -> None:
    code = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
print("done")"""
    result = run(pool, code)
    assert (result.outcome, result.stdout, result.left_running) == ("ended", "done\n", 1)
    assert "left 1 processes running, which were killed" in result.report


def test_signals_reach_nobody_else(pool: SandboxPool) -> None:
    outside = [os.getpid(), *(pid for pid in [os.getppid()] if pid != 1)]  # 1 has another meaning inside
    with subprocess.Popen([sys.executable, "-c", SLEEPER]) as victim:
        code = f"""
import signal
reached = []
for pid in (1, os.getppid()):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
        os.kill(pid, number)  # the sandbox's own first process: it does not hear them
for pid in {[victim.pid, *outside]}:
    try:
        os.kill(pid, 9)
        reached.append(pid)
    except ProcessLookupError: pass
try: os.kill(-1, 9)
except OSError: pass
print(json.dumps(reached))"""
        try:
            assert said(pool, code) == []
            assert victim.poll() is None
        finally:
            victim.kill()


def test_the_watching_process_can_be_neither_read_nor_bent(pool: SandboxPool) -> None:
    code = """
import resource, ctypes
refused = []
def attempt(name, function, *arguments):
    try:
        function(*arguments)
    except OSError:
        refused.append(name)
attempt("memory", open, "/proc/1/mem", "r+b")
attempt("descriptors", os.listdir, "/proc/1/fd")
attempt("limits", resource.prlimit, 1, resource.RLIMIT_CPU, (0, 0))
attempt("priority", os.setpriority, os.PRIO_PROCESS, 1, 19)
attempt("all priorities", os.setpriority, os.PRIO_USER, 0, 19)
attempt("cores", os.sched_setaffinity, 1, [0])
os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(1)
print(json.dumps(refused))"""
    assert said(pool, code) == ["memory", "descriptors", "limits", "priority", "all priorities", "cores"]


def test_what_isolation_rests_on_is_refused_and_told(pool: SandboxPool) -> None:
    names = [
        "ptrace",
        "mount",
        "unshare",
        "setns",
        "bpf",
        "keyctl",
        "pivot_root",
        "process_vm_readv",
        "kexec_load",
        "userfaultfd",
    ]
    numbers = _numbers(names)
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps([[libc.syscall(n, 0, 0, 0, 0, 0), ctypes.get_errno()] for n in {numbers!r}]))
print(json.dumps([libc.syscall(425, 0), ctypes.get_errno()]))  # io_uring_setup: as if the kernel had none"""
    result = run(pool, "import json\n" + code)
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert told == [[[-1, 1]] * len(names), [-1, 38]]
    assert result.refused == dict.fromkeys(names, 1)


def _numbers(names: list[str]) -> list[int]:
    return [next(n for n in range(424) if call_name(n, 0) == name) for name in names]


def test_who_goes_on_trying_is_ended(pool: SandboxPool) -> None:
    result = run(
        pool, "import socket\nwhile True:\n    try:\n        socket.socket()\n    except OSError:\n        pass"
    )
    assert result.outcome == "forbidden"
    assert result.refused == {"socket (family 2)": 100}


def test_time_is_limited(pool: SandboxPool) -> None:
    busy = run(pool, "while True: pass")
    assert busy.outcome == "cpu_time"
    each = 0.4  # CPU seconds of each of eight processes: below the limit of one process, in total above the program's
    burn = f"while time.process_time() < {each}: pass"
    spread = run(pool, f"import os, time\nfor _ in range(3): os.fork()\n{burn}\ntime.sleep(1000)")
    assert spread.outcome == "cpu_time"  # their total
    assert LIMITS.cpu_s < spread.cpu_s
    with contextlib.closing(SandboxPool(limits=Limits(wall_s=0.01))) as impatient:  # the pool's trial gets 30 s
        assert run(impatient, SLEEPER).outcome == "wall_time"


def test_output_is_limited(pool: SandboxPool) -> None:
    result = run(pool, "while True: print('x' * 1000)")
    assert result.outcome == "output"
    assert len(result.stdout) == LIMITS.output_bytes


def test_a_program_that_reads_nothing_or_closes_all_is_no_problem(pool: SandboxPool) -> None:
    assert run(pool, "print(1)", "x" * 3_000_000).stdout == "1\n"
    assert run(pool, "import os\nos.closerange(0, 100)").ok
    assert run(pool, "import os\nos.chmod('/tmp', 0) if os.stat('/tmp').st_uid == os.getuid() else 0").ok


# ------------------------------------------------------------------------------------------------------------ the machinery


def processes_below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_LIMIT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_nothing_outlives_its_maker(tmp_path: Path) -> None:
    """The maker is killed with SIGKILL, in the middle of a program, after it has prepared another sandbox."""
    code = f"from asyncrl.rewards.sandbox.pool import *\nSandboxPool().run(Program({{'main.py': {SLEEPER!r}}}))"
    with subprocess.Popen([sys.executable, "-c", code]) as maker:
        deadline = time.monotonic() + GONE_LIMIT_S
        while len(found := processes_below(maker.pid)) < 5:  # two bwrap processes, a process inside each, the program
            assert time.monotonic() < deadline, found
            assert maker.poll() is None
            time.sleep(0.05)
        maker.send_signal(signal.SIGKILL)
    assert_gone(found)


def test_without_isolation_the_next_pool_removes_what_a_killed_maker_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes nothing else: no folder in use, no copy, none with such a name only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    harm = f"import os, time\nos.makedirs('a/b')\nos.chmod('a', 0)\nos.symlink({str(tmp_path)!r}, 'link')\n{SLEEPER}"
    code = f"from asyncrl.rewards.sandbox.pool import *\nSandboxPool(isolation='limits').run(Program({{'main.py': {harm!r}}}))"
    with subprocess.Popen([sys.executable, "-c", code]) as maker:
        deadline = time.monotonic() + GONE_LIMIT_S
        while len(list(tmp_path.glob("*/files/link"))) < 1 or len(list(tmp_path.iterdir())) < 2:  # one is prepared
            assert time.monotonic() < deadline
            assert maker.poll() is None
            time.sleep(0.05)
        (folder,) = (link.parents[1] for link in tmp_path.glob("*/files/link"))
        SandboxPool(isolation="limits").close()
        assert folder.is_dir()  # its maker lives
        found = processes_below(maker.pid)
        maker.send_signal(signal.SIGKILL)
    assert_gone(found)
    own = tmp_path / "asyncrl-sandbox-results"
    own.mkdir()
    (own / "owner").write_text("me")
    copy = tmp_path / "asyncrl-sandbox-copy"
    shutil.copytree(folder, copy, symlinks=True)
    SandboxPool(isolation="limits").close()
    assert sorted(tmp_path.iterdir()) == [copy, own]


def test_a_closed_pool_leaves_nothing() -> None:
    before = {process.pid for process in processes_below(os.getpid())}
    pool = SandboxPool(spare=2)
    assert run(pool, "print(1)").ok
    made = [process for process in processes_below(os.getpid()) if process.pid not in before]
    pool.close()
    assert_gone(made)


def test_a_sandbox_that_was_killed_ahead_is_replaced(pool: SandboxPool) -> None:
    assert run(pool, "print(1)").ok  # one is prepared now
    killed = 0
    for process in processes_below(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):  # some belong to programs that have ended
            if "--as-pid-1" in process.cmdline():
                process.kill()
                killed += 1
                for inner in processes_below(process.pid):
                    inner.kill()
    assert killed
    assert run(pool, "print(2)").stdout == "2\n"


def test_forks_of_a_process_with_a_pool_use_it(pool: SandboxPool) -> None:
    """Judges do this: they are forks of the process that has imported the reward function."""
    assert run(pool, "print(1)").ok
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if run(pool, "print(1)").ok and run(pool, "print(1)").ok else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run(pool, "print(2)").stdout == "2\n"


def test_a_kernel_that_does_not_report_refused_calls_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The filter that reports refused calls is invalid here, so the kernel rejects it, as a kernel without this feature would."""
    monkeypatch.setattr(
        "asyncrl.rewards.sandbox.pool.build_filter", lambda *, told: bytes(8) if told else build_filter(told=False)
    )
    with caplog.at_level(logging.WARNING, logger="asyncrl.sandbox"):
        pool = SandboxPool(limits=LIMITS)
    assert "refused system calls are not reported on this machine" in caplog.text
    result = run(pool, "import socket; socket.socket()")
    pool.close()
    assert (result.ok, result.refused) == (False, {})


def test_without_bubblewrap_nothing_is_run_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationMissing, match=r"apt-get install bubblewrap.*isolation='limits'"):
        SandboxPool()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(IsolationMissing, match=r"No permissions to create new namespace.*unprivileged_userns_clone"):
        SandboxPool()

    with caplog.at_level(logging.WARNING, logger="asyncrl.sandbox"):
        pool = SandboxPool(isolation="limits", limits=LIMITS)
    assert "run as this user" in caplog.text
    assert run(pool, "print(int(input()) + 1)", "41").stdout == "42\n"
    assert run(pool, "import socket; socket.socket()").refused == {"socket (family 2)": 1}
    assert run(pool, "while True: pass").outcome == "cpu_time"
    daemon = run(pool, f"import os\nif os.fork() == 0:\n    os.setsid()\n    {SLEEPER}")
    assert (daemon.outcome, daemon.left_running) == ("ended", 1)
    pool.close()


def test_a_busy_pool_says_so(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.rewards.sandbox.pool.BUSY_LIMIT_S", 0.05)
    program = Program({"main.py": "print(1)"})
    with pool.open(program), pool.open(program), pytest.raises(SandboxError, match="all 2 sandboxes have been busy"):
        pool.run(program)


async def test_the_examples_reward_runs_what_the_model_wrote_in_its_judges(tmp_path: Path) -> None:
    """Judge a group with right answers, wrong ones, and some that would harm a machine without a sandbox."""
    path = Path(__file__).parents[2] / "examples" / "code" / "reward.py"
    logger = logging.getLogger("test")
    judges = Judges(f"{path}:reward", memory_bytes=0, most=16, most_async=16, logger=logger)
    reward = Reward(f"{path}:reward", timeout_s=100.0, services=make_services(logger=logger), judges=judges)
    given, wanted = "1 2\n5 3\n", "3\n8\n"
    answer = [[given, wanted]]
    prompt = Prompt(prompt_id="p", text="1 2:3=", input_ids=[1], answer=answer, task="code", row={}, too_long=False)
    program = "```python\nimport sys\nfor l in sys.stdin: print(sum(map(int, l.split())))\n```"
    touched = tmp_path / "touched"
    said = {
        "a+b": 1.0,
        "a-b": 0.0,
        f"I think:\n{program}\nDone.": 1.0,
        "a+": 0.0,
        f"open({str(touched)!r}, 'w').write('x')": 0.0,
        "__import__('os').kill(-1, 9)": 0.0,
        "__import__('os')._exit(0)": 0.0,
        "open('/proc/self/cwd/../proc/1/environ').read()": 0.0,
    }
    try:
        scores = await reward.score(prompt, [Completion(text, True) for text in said])
        assert await reward.score(prompt, [Completion("a+b", False)]) == [0.0]
    finally:
        reward.close()
    assert scores == list(said.values())
    assert not touched.exists()


def worker_info(kind: str, folder: Path) -> WorkerInfo:
    return WorkerInfo(
        kind=kind,
        index=0,
        count=1,
        experiment="e",
        trial="t",
        attempt=1,
        run_dir=str(folder),
        seed=1,
        name_resolve=NameResolveConfig(endpoints=["memory://"]),
        runtime=RuntimeConfig(),
    )


def test_the_benchmark() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "sandbox.py"
    command = [sys.executable, str(script), "--rounds", "1", "--programs", "3", "--inputs", "2", "--json-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["name"], result["unit"]) == ("sandbox", "programs/min")
    assert result["value"] > 0
    assert result["ratio"]["bare_process"].keys() == {"programs", "inputs"}


def test_a_filter_is_whole() -> None:
    code = build_filter(told=True)
    assert len(code) % 8 == 0
    assert len(code) // 8 < 4096  # the kernel's limit
    assert call_name(100_000, 0) == "system call 100000"
