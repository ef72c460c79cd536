"""Untrusted programs in a sandbox: what they may do, and attempts to escape. Every attempt is refused, and the result says so."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
from asyncrl.runtime.board import StatusBoard

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


SOCKETS = """
import os, socket, time
for _ in range(8):
    if os.fork() == 0:
        pairs = [socket.socketpair() for _ in range(25)]
        for pair in pairs:
            for end in pair:
                end.setblocking(False)
                try:
                    while True:
                        end.send(bytes(4096))
                except BlockingIOError:
                    pass
        time.sleep(1000)
time.sleep(1000)
"""
FILES = """
import itertools
for number in itertools.count():
    open(str(number), "w").close()
"""


def test_memory_that_the_kernel_holds_is_counted(pool: SandboxPool) -> None:
    """Memory in socket queues and of empty files belongs to no process."""
    assert run(pool, SOCKETS).outcome == "memory"
    assert run(pool, FILES).outcome in ("memory", "cpu_time")
    few = "import asyncio, socket\nasyncio.run(asyncio.sleep(0))\npairs = [socket.socketpair() for _ in range(10)]"
    assert run(pool, few).ok


def test_the_queue_of_a_socket_grows_no_longer(pool: SandboxPool) -> None:
    """The memory count assumes the system's default length of a queue. Servers often permit far longer queues."""
    code = "import socket\na, _ = socket.socketpair()\na.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)\n"
    assert run(pool, code).ok
    result = run(pool, f"{code}a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)")
    assert result.refused == {"setsockopt": 1}


def test_a_pipe_does_not_grow(pool: SandboxPool) -> None:
    """No limit counts what waits in pipes. A pipe of the usual size holds 64 kB, one that was enlarged 1 MB."""
    code = (
        "import fcntl, os\nread, write = os.pipe()\ntry:\n    print(fcntl.fcntl(write, 1031, 1 << 20))\n"
        "except PermissionError:\n    print('refused')\n"
    )
    with pool.open(Program({"main.py": code})) as sandbox:
        result = sandbox.run()
    assert result.stdout == "refused\n"
    assert result.refused == {"fcntl": 1}


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


def test_memory_that_no_process_has_is_refused_or_limited(pool: SandboxPool) -> None:
    result = run(pool, "import os\nos.memfd_create('x')")
    assert result.refused == {"memfd_create": 1}
    for folder in ("/tmp", "/dev/shm"):
        code = f"import os\nfor n in range(100):\n    with open(f'{folder}/x{{n}}', 'wb') as f: f.write(bytes(1 << 20))"
        assert "No space left" in run(pool, code).stderr


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
    board = StatusBoard(worker_info("rollout_worker", tmp_path), logger)
    judges = Judges(f"{path}:reward", memory_bytes=0, most=16, most_async=16, logger=logger)
    reward = Reward(f"{path}:reward", timeout_s=100.0, board=board, logger=logger, judges=judges)
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
