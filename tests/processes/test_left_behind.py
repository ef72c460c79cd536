"""Processes that a reward function leaves behind, with their own sessions and empty environments, end with its judge."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.launch.rundir import LAUNCH_ENV
from asyncrl.launch.supervisor.process_pool import ProcessPool
from asyncrl.launch.supervisor.reaper import Reaper, remove
from asyncrl.rewards.judges import Judges
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.clock import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to subreapers")

LIMIT_S = 60.0
REWARD = """
import os

def leave():
    \"\"\"A process that is no child of this one, in a session of its own, with an empty environment. Returns its pid.\"\"\"
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            os.execve("/bin/sleep", ["sleep", "1004"], {})
        os._exit(0)
    os.waitpid(child, 0)
    return float(os.read(read, 100))

def reward(prompt, completion, answer):
    if completion == "guard":
        return float(os.getppid())
    return leave()
"""


@pytest.fixture
def judges(tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text(REWARD)
    made = Judges(f"{file}:reward", memory_bytes=0, most=2, most_async=2, logger=logging.getLogger("test"))
    yield made
    made.close()


async def ask(judges, completion):
    answer = await judges.ask([(("", completion, ""), {})], LIMIT_S)
    return psutil.Process(int(answer["values"][0]))


async def wait_until_gone(*processes):
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, LIMIT_S)
    assert not alive


@pytest.fixture
def cleared():
    """A list for processes of the test. Those that still run at its end are killed."""
    left = []
    yield left
    for process in left:
        if process.is_running():
            process.kill()


async def test_it_lives_as_long_as_its_judge_and_no_longer(judges, cleared):
    daemon, guard = await ask(judges, ""), await ask(judges, "guard")
    cleared.append(daemon)
    assert daemon.is_running()
    assert daemon.ppid() == guard.pid
    guard.children()[0].kill()
    await wait_until_gone(daemon)


async def test_it_ends_where_its_judge_is_killed_with_its_guard(judges, cleared):
    daemon, guard = await ask(judges, ""), await ask(judges, "guard")
    cleared.append(daemon)
    os.killpg(guard.pid, signal.SIGKILL)
    await wait_until_gone(daemon)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("which", ["nursery", "warden"])
async def test_it_ends_with_the_nursery_or_the_warden(judges, cleared, which, number):
    daemon, guard = await ask(judges, ""), await ask(judges, "guard")
    cleared.append(daemon)
    nursery = guard.parent()
    (nursery if which == "nursery" else nursery.parent()).send_signal(number)
    await wait_until_gone(daemon, guard, nursery)


async def test_it_ends_when_the_worker_closes_its_judges(judges, cleared):
    daemon = await ask(judges, "")
    cleared.append(daemon)
    judges.close()
    assert not daemon.is_running()


# ------------------------------------------------------------------------------------------------------------ a late reaper


def sleeping(marker):
    """A process in a group of its own, with the marker in its environment."""
    name, _, value = marker.partition("=")
    return subprocess.Popen(["sleep", "1005"], env={**os.environ, name: value}, start_new_session=True)


def test_a_late_reaper_kills_only_what_belongs_to_its_launch(tmp_path):
    """The launcher was killed while its reaper was frozen, and a new launch of the same run has begun."""
    folder = unix_sockets.make_folder(tmp_path)
    reaper = Reaper("ASYNCRL_LAUNCH=old", folder)
    old, reused, new = sleeping("ASYNCRL_LAUNCH=old"), sleeping("ASYNCRL_LAUNCH=new"), sleeping("ASYNCRL_LAUNCH=new")
    try:
        reaper.add(old.pid)
        reaper._send(f"add {reused.pid} 1")  # the number of a group of the old launch: its leader started earlier
        shutil.rmtree(folder)
        Path(folder).mkdir()  # another run's folder with the same name
        Path(folder, unix_sockets.OWNER).write_text("another run\nnumber\n")
        reaper.close(LIMIT_S)
        assert old.wait(LIMIT_S) == -signal.SIGKILL
        assert (reused.poll(), new.poll()) == (None, None)
        assert Path(folder).exists()
    finally:
        for process in (old, reused, new):
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_the_folder_of_sockets_goes_although_a_killed_process_still_finishes_a_system_call(tmp_path, monkeypatch):
    folder, rmtree = tmp_path / "sockets", shutil.rmtree

    def remove_while_another_writes(path, **options):
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        for entry in folder.iterdir():
            entry.unlink()
        (folder / "late").touch()  # the folder is now not empty, so this try fails

    folder.mkdir()
    (folder / "owner").touch()
    monkeypatch.setattr(shutil, "rmtree", remove_while_another_writes)
    remove(str(folder))
    assert not folder.exists()


def test_the_processes_of_two_launches_of_a_run_have_different_markers(tmp_path):
    def marker():
        pool = ProcessPool([], tmp_path, fork=False, start_limit_s=LIMIT_S, notice=print)
        found = []

        def has_reaper():  # not in the first moment: the command line of a process that has just started is empty
            found.clear()
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.ZombieProcess):  # a launcher of an earlier test
                    found.extend([child] if "reaper.py" in " ".join(child.cmdline()) else [])
            return found

        assert wait_until(has_reaper, limit_s=LIMIT_S, every_s=0.01)
        (reaper,) = found
        arguments = reaper.cmdline()
        pool.close()
        return arguments[-3]

    first, second = marker(), marker()
    assert first.startswith(f"{LAUNCH_ENV}=")
    assert first != second
