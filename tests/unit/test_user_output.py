"""What users' code prints into logs: the first bytes stay, the rest is dropped and counted."""

import logging
import subprocess
import sys

import pytest

from asyncrl.rewards.judges import Judges
from asyncrl.runtime.user_output import Budget

LIMIT_S = 60.0

REWARD = """
import os, subprocess, sys
def reward(prompt, completion, answer):
    print("first line of", completion, flush=True)
    for _ in range(100):
        print("x" * 10_000)
        os.write(2, b"y" * 10_000)
    subprocess.run(["sh", "-c", "yes | head -c 1000000"], check=True)
    return 1.0
"""


def test_a_budget_tells_each_time_that_the_dropped_bytes_have_doubled():
    budget = Budget(10_000_000, "master/0")
    assert [budget.take(6_000_000), budget.notice()] == [6_000_000, ""]
    assert budget.take(6_000_000) == 4_000_000
    assert "master/0 has printed more than 10 MB: 2000000 further bytes" in budget.notice()
    told = [bool(budget.notice()) for _ in range(1000) if budget.take(1_000_000) == 0]
    assert 5 < sum(told) < 12
    assert budget.dropped == 1_002_000_000


async def test_a_reward_that_prints_without_end_does_not_fill_the_disk(tmp_path):
    (tmp_path / "loud.py").write_text(REWARD)
    log = tmp_path / "log"
    with log.open("wb") as file:
        judges = Judges(
            f"{tmp_path}/loud.py:reward",
            memory_bytes=0,
            most=2,
            most_async=2,
            logger=logging.getLogger("test"),
            output=file.fileno(),
            max_output_bytes=1_000_000,
        )
        try:
            for number in range(3):
                assert (await judges.ask([(("", f"call {number}", ""), {})], LIMIT_S))["values"] == [1.0]
        finally:
            judges.close()
    text = log.read_text()
    assert text.startswith("first line of call 0\n")
    assert 1_000_000 < len(text) < 1_010_000
    assert f"the reward {tmp_path}/loud.py:reward has printed more than 1 MB" in text


WORKER = """
import logging, sys
from asyncrl.runtime.user_output import limit_streams
logging.basicConfig(stream=sys.stderr, format="log: %(message)s", force=True)
limit_streams("rollout_worker/0", 1_000_000)
print("first line")
for _ in range(100):
    print("x" * 100_000)
    print("y" * 100_000, file=sys.stderr)
logging.getLogger("a").warning("the worker's own line")
sys.stdout.flush()
"""


def test_users_code_in_a_worker_is_bounded_and_the_workers_log_is_not():
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("first line\n")
    assert "rollout_worker/0 has printed more than 1 MB" in done.stdout
    assert 1_000_000 < len(done.stdout) < 1_010_000
    assert 1_000_000 < len(done.stderr) < 1_010_000
    assert done.stderr.endswith("log: the worker's own line\n")


BELOW = """
import ctypes, logging, os, subprocess, sys, time
from asyncrl.runtime.user_output import limit_streams
logging.basicConfig(stream=sys.stderr, format="log: %(message)s", force=True)
limit_streams("rollout_worker/0", 1_000_000)
for _ in range(50):
    logging.getLogger("a").warning("the worker's own line " + "o" * 100_000)  # 5 MB, which do not count
print("printed")
os.write(1, b"first line\\n")
libc = ctypes.CDLL(None)
ways = {
    "os.write": lambda: os.write(1, bytes(100_000)),
    "C": lambda: libc.write(2, bytes(100_000), 100_000),
    "process": lambda: subprocess.run(["head", "-c", "100000", "/dev/zero"], check=True),
}
null, written = os.stat(os.devnull), 0
while not os.path.samestat(os.fstat(1), null):
    ways[sys.argv[1]]()
    written += 100_000
    time.sleep(0.001)
assert written >= 1_000_000, written
for _ in range(100):
    ways[sys.argv[1]]()
logging.getLogger("a").warning("the last line")
print("printed, too")
"""


@pytest.mark.parametrize("way", ["os.write", "C", "process"])
def test_what_is_written_below_python_does_not_fill_the_disk(tmp_path, way):
    log = tmp_path / "log"
    with log.open("ab") as file:
        subprocess.run(
            [sys.executable, "-c", BELOW, way], stdout=file, stderr=subprocess.STDOUT, check=True, timeout=LIMIT_S
        )
    text = log.read_text()
    lines = [line for line in text.replace("\0", "").splitlines() if line]
    assert "first line" in lines
    assert len([line for line in lines if line.startswith("log: the worker's own line")]) == 50
    assert "rollout_worker/0 has written more than 1 MB to its output below Python's streams" in text
    assert lines[-2:] == ["log: the last line", "printed, too"]


LATE = """
import os, threading
from asyncrl.runtime.user_output import limit_streams
start = threading.Thread.start
def late(thread):
    os.write(1, bytes(900_000))  # before the thread has the CPU for the first time
    start(thread)
threading.Thread.start = late
limit_streams("rollout_worker/0", 1_000_000)
os.write(1, bytes(200_000))
null = os.stat(os.devnull)
while not os.path.samestat(os.fstat(1), null):
    pass
"""


def test_what_is_written_before_the_watch_of_the_log_runs_counts(tmp_path):
    with (tmp_path / "log").open("ab") as file:
        subprocess.run([sys.executable, "-c", LATE], stdout=file, stderr=subprocess.STDOUT, check=True, timeout=LIMIT_S)
