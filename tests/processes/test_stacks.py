"""Stacks on request from processes that hang in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from many_dumps import ask_again_and_again

from asyncrl.runtime.stacks import SUFFIX, Stacks, ask_all

LIMIT_S = 60.0  # for an answer that must come
VAIN_S = 15.0  # for an answer that cannot come: the test waits this long

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import asyncio, sys, threading, time
from pathlib import Path
from asyncrl.runtime.stacks import answer_requests, tell_tasks_of

async def inner(queue):
    await queue.get()

async def outer(queue):
    await inner(queue)

def compute(ready):
    ready.set()
    time.sleep(1000)

async def main(how):
    tell_tasks_of(asyncio.get_running_loop())
    waiting = [asyncio.create_task(outer(asyncio.Queue()), name=f"rollout {n}") for n in range(3)]
    ready = threading.Event()
    threading.Thread(target=compute, args=(ready,), daemon=True).start()
    ready.wait()
    await asyncio.sleep(0)
    print("ready", flush=True)
    if how in ("turns", "stopped"):
        await asyncio.sleep(1000)
    elif how == "blocks":
        time.sleep(1000)
    elif how == "spins":
        while True:
            pass
    elif how == "native":
        sum(range(10**13))
    elif how == "ends":
        return

answer_requests(Path(sys.argv[1]) / (sys.argv[2] + ".stacks"), sys.argv[2])
asyncio.run(main(sys.argv[2]))
"""
WAYS = ["turns", "blocks", "spins", "native", "stopped", "ends"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    return psutil.Process(process.pid).cpu_times().user


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def found(folder: Path) -> Iterator[dict[str, Stacks]]:
    """The answers of processes that hang in these ways. The process that cannot answer has its own folder and time limit."""
    silent = folder / "silent"
    silent.mkdir()

    def ask() -> dict[str, Stacks]:
        answers = [*ask_all([folder], LIMIT_S), *ask_all([silent], VAIN_S)]
        return {stacks.name: stacks for stacks in answers}

    with ExitStack() as stack:
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for how in WAYS:
            command = [sys.executable, "-c", PROGRAM, str(silent if how == "native" else folder), how]
            processes[how] = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(processes[how].kill)
        for process in processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        in_the_call = cpu_s(processes["native"]) + 0.1  # no other code can use this much CPU time from here on
        wait_until(lambda: cpu_s(processes["native"]) > in_the_call)
        processes["ends"].wait(LIMIT_S)
        os.kill(processes["stopped"].pid, signal.SIGSTOP)
        begun = time.monotonic()
        answers = ask()
        assert time.monotonic() - begun < LIMIT_S + VAIN_S
        assert {answers[how].pid for how in WAYS} == {process.pid for process in processes.values()}
        assert {name: stacks.state for name, stacks in ask().items()} == {
            name: stacks.state for name, stacks in answers.items()
        }
        for how in ("turns", "blocks", "spins", "native"):
            assert processes[how].poll() is None  # a request kills no process
        yield answers


@pytest.mark.parametrize("how", ["turns", "blocks", "spins"])
def test_threads_and_tasks_are_told_though_the_loop_hangs(found: dict[str, Stacks], how: str) -> None:
    stacks = found[how]
    assert (stacks.state, stacks.note) == ("answered", "")
    assert stacks.threads.count("(most recent call first)") == 2
    assert "in compute" in stacks.threads
    assert "Task rollout 0 and 2 others (outermost call first):" in stacks.tasks
    outer, inner, get = (stacks.tasks.index(f" in {name}\n") for name in ("outer", "inner", "get"))
    assert outer < inner < get
    assert "waits for Future" in stacks.tasks
    if how != "turns":
        assert " in main" in stacks.threads
        assert "(this task is running)" in stacks.tasks


def test_a_process_in_which_a_call_keeps_the_gil_does_not_answer(found: dict[str, Stacks]) -> None:
    stacks = found["native"]
    assert (stacks.state, stacks.threads, stacks.tasks) == ("busy", "", "")
    assert f"did not answer within {VAIN_S:g} s: one of its threads holds the GIL" in stacks.note
    assert f"`py-spy dump --pid {stacks.pid}`" in stacks.note


def test_of_one_that_is_stopped_or_gone_it_is_said(found: dict[str, Stacks]) -> None:
    assert found["stopped"].state == "stopped"
    assert "it is stopped (SIGSTOP, or a debugger) and cannot answer" in found["stopped"].note
    assert (found["ends"].state, found["ends"].note) == ("gone", "it has ended")


def test_nobody_else_is_sent_a_signal(tmp_path: Path) -> None:
    """No signal is sent if the pid in a stacks file now belongs to another process, or if the file is not a stacks file."""
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            file = tmp_path / f"master_0{SUFFIX}"
            file.write_text(f"asyncrl stacks of master/0, process {other.pid}, thread {other.pid}, started 1\n")
            (tmp_path / f"junk{SUFFIX}").write_bytes(b"\xff" * 100)
            (stacks,) = ask_all([tmp_path], 1.0)
            assert (stacks.name, stacks.state) == ("master/0", "gone")
            assert other.poll() is None
        finally:
            other.kill()


def test_of_several_that_have_ended_the_newest_is_named(tmp_path: Path) -> None:
    """All attempts' processes of one name have ended: that of the last folder is reported. A live one is reported in any case."""
    folders = [tmp_path / f"attempt_{number}" for number in (1, 2, 3)]
    for folder in folders:
        folder.mkdir()
        (folder / f"master_0{SUFFIX}").write_text("asyncrl stacks of master/0, process 1, thread 1, started -2\n")
    (stacks,) = ask_all(folders, 1.0)
    assert (stacks.state, stacks.file) == ("gone", str(folders[2] / f"master_0{SUFFIX}"))
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            started = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
            live = folders[0] / f"master_0{SUFFIX}"
            live.write_text(f"asyncrl stacks of master/0, process {other.pid}, thread 0, started {started}\n")
            (stacks,) = ask_all(folders, 0.0)
            assert (stacks.state, stacks.file) == ("busy", str(live))
        finally:
            other.kill()


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), "turns"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            file = tmp_path / f"turns{SUFFIX}"
            with file.open("ab") as long:
                long.write(b"x" * 2_000_000)
            (stacks,) = ask_all([tmp_path], LIMIT_S)
            assert stacks.state == "answered"
            assert "x" * 100 not in stacks.threads
            assert file.stat().st_size < 100_000
        finally:
            process.kill()


def test_many_requests_leave_a_process_with_busy_threads_unharmed(tmp_path: Path) -> None:
    """`python tests/processes/many_dumps.py` asks 10,000 times. faulthandler's handler crashed at the 6th to 252nd signal."""
    assert ask_again_and_again(tmp_path, 1000) == 1000


def test_a_signal_to_the_whole_process_is_answered_and_children_do_not_inherit_it(tmp_path: Path) -> None:
    program = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
from asyncrl.runtime.stacks import answer_requests
answer_requests(Path({str(tmp_path / "asked.stacks")!r}), "asked")
masks = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)"
print(subprocess.run([sys.executable, "-c", masks], capture_output=True, text=True, check=True).stdout, end="", flush=True)
while True:
    time.sleep(0.01)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().decode().strip() == "set() True"
            answers = tmp_path / "asked.stacks"
            wait_until(lambda: answers.stat().st_size > 0)
            os.kill(process.pid, signal.SIGUSR1)
            wait_until(lambda: "-- end --" in answers.read_text())
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_that_ends_at_once_is_known(tmp_path: Path) -> None:
    """answer_requests returns after the file has the process's name, whatever its thread does then."""
    program = """
import os, sys, threading
from pathlib import Path
from asyncrl.runtime.stacks import answer_requests

threading.Thread.run = lambda thread: None
answer_requests(Path(sys.argv[1]), "master/0")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / f"master_0{SUFFIX}")], check=True)
    (stacks,) = ask_all([tmp_path], 1.0)
    assert (stacks.name, stacks.state) == ("master/0", "gone")
