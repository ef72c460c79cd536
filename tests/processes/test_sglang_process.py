"""A process is started as SGLang would be, with children that do not ask to die with their parent. No process and no shared memory
of theirs remains."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.generation import server_process

LIMIT_S = 60.0  # for one wait, on a busy machine
PROGRAM = """
import multiprocessing, os, time

def hold(opened):
    with open(os.environ["HELD"], "w"):
        opened.send(True)
        time.sleep(1000)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    lock = context.Semaphore(1)
    reader, writer = context.Pipe()
    context.Process(target=hold, args=(writer,)).start()
    reader.recv()
    print("[now] ready", flush=True)
    time.sleep(1000)
"""
OWNER = """
import asyncio, os, sys
from pathlib import Path
from asyncrl.generation.server_process import ServerProcess, _members
from asyncrl.generation.sglang_process import SGLANG
from asyncrl.runtime.process import tail_of

async def main(folder):
    process = ServerProcess(
        SGLANG,
        python=sys.executable,
        arguments=lambda port: [],
        environment=lambda tmp: {**os.environ, "PYTHONPATH": str(folder), "TMPDIR": tmp},
        log=folder / "sglang.log",
        on_gpu=False,
    )

    async def is_ready(url):
        return "[now] ready" in tail_of(folder / "sglang.log")

    await process.start(is_ready, 60.0)
    print(*[member.pid for member, _ in _members(process.pid)], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await process.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{LIMIT_S:g} s went by before {what}"
        time.sleep(0.05)


@pytest.fixture
def in_shared_memory() -> Iterator[Callable[[], Path]]:
    """Make files with names in SGLang's style."""
    made = []

    def make() -> Path:
        handle, path = tempfile.mkstemp(prefix="sglang_loads_", suffix=".shm", dir="/dev/shm")
        os.close(handle)
        made.append(Path(path))
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("how", ["closed", "killed", "SGLang killed"])
def test_nothing_is_left_of_it(tmp_path: Path, in_shared_memory: Callable[[], Path], how: str) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(PROGRAM)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    held, of_another = in_shared_memory(), in_shared_memory()
    with (
        of_another.open(),
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary), "HELD": str(held)},
        ) as owner,
    ):
        assert owner.stdin is not None
        assert owner.stdout is not None
        members = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(members) == 3  # the process, its child, and Python's resource tracker
        assert held.exists()
        if how == "killed":
            owner.kill()
        elif how == "SGLang killed":
            next(member for member in members if member.ppid() == owner.pid).kill()
            wait_for(lambda: not held.exists(), "the owner had removed what SGLang had in shared memory")
        if how != "killed":
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert owner.wait(LIMIT_S) == 0
            assert not held.exists()
            assert list(temporary.iterdir()) == []
    _, alive = psutil.wait_procs(members, timeout=LIMIT_S)
    assert alive == []
    wait_for(lambda: not held.exists(), "its guard had removed what SGLang had in shared memory")
    assert of_another.exists()


def test_the_next_one_removes_what_an_owner_left_that_was_killed_with_its_guard(
    tmp_path: Path, in_shared_memory: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = {}
    for name in ("killed", "alive", "begins"):
        noted = tmp_path / f"asyncrl-sglang-{name}" / "shared_memory"
        noted.mkdir(parents=True)
        files[name] = in_shared_memory()
        (noted / files[name].name).touch()
    os.close(server_process._lock(tmp_path / "asyncrl-sglang-killed"))
    held = server_process._lock(tmp_path / "asyncrl-sglang-alive")  # by a process that need not be visible here
    server_process._remove_leftovers("sglang")
    os.close(held)
    assert {name: file.exists() for name, file in files.items()} == {"killed": False, "alive": True, "begins": True}
    assert not (tmp_path / "asyncrl-sglang-killed").exists()
