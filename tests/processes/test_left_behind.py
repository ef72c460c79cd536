"""Processes that a reward function leaves behind, with their own sessions and empty environments, end with its judge."""

import asyncio
import logging
import os
import signal
import sys

import psutil
import pytest

from asyncrl.rewards.judges import Judges

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
