"""The kernel's OOM killer really kills a process, in a control group of its own with a memory limit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_BYTES = 400_000_000
GONE_LIMIT_S = 60.0
PARENT = """
import subprocess, sys
from pathlib import Path
from asyncrl.launch.supervisor.children import how_it_ended
log = Path(sys.argv[1])
with log.open("w") as file:
    child = subprocess.Popen([sys.executable, "-c", "print('takes it all', flush=True); b'x' * (1 << 30)"], stdout=file)
print(how_it_ended(child.wait(60), log))
"""


@pytest.fixture
def group():
    """A control group with a limit of LIMIT_BYTES for all of its processes. It is of version 1 or 2, as on the machine."""
    of, name = {}, f"asyncrl-test-{os.getpid()}"  # a unique name: another process's tests may run at the same time
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        of[controllers] = path.lstrip("/")
    if "memory" in of:
        made, limit = Path("/sys/fs/cgroup/memory") / of["memory"] / name, "memory.limit_in_bytes"
    else:
        made, limit = Path("/sys/fs/cgroup") / name, "memory.max"
    try:
        made.mkdir()
        (made / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group can be made here, which takes root: {error}")
    yield made
    deadline = time.monotonic() + GONE_LIMIT_S
    while (made / "cgroup.procs").read_text():
        assert time.monotonic() < deadline, "its processes have not ended"
        time.sleep(0.05)
    made.rmdir()


def test_whom_the_kernel_kills_for_want_of_memory_is_told_as_that(group, tmp_path):
    join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", join, "sh", sys.executable, "-c", PARENT, str(tmp_path / "log")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "was killed by signal SIGKILL (by the kernel, because memory ran out: " in told
    assert f"the limit is {LIMIT_BYTES // 1_000_000}" in told
    assert "takes it all" in told
