"""A process that is started as SGLang would be, with children that ask for no death of their own: none is left of it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import multiprocessing, time

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    lock = context.Semaphore(1)
    context.Process(target=time.sleep, args=(1000,)).start()
    print("[now] ready", flush=True)
    time.sleep(1000)
"""
OWNER = """
import asyncio, os, sys
from pathlib import Path
from asyncrl.generation.sglang_process import SGLangProcess, _members, tail_of

async def main(folder):
    process = SGLangProcess(
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


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_nothing_is_left_of_it(tmp_path: Path, how: str) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(PROGRAM)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        members = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(members) == 3  # it, its child, and Python's resource tracker
        if how == "closed":
            owner.stdin.write("\n")
            owner.stdin.flush()
            assert owner.wait(30) == 0
            assert list(temporary.iterdir()) == []
        else:
            owner.kill()
    _, alive = psutil.wait_procs(members, timeout=10)
    assert alive == []
