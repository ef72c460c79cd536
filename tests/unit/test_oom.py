"""The kernel's out-of-memory counters tell whether a killed process was killed because memory ran out."""

import subprocess

import pytest

from asyncrl.launch.supervisor import children
from asyncrl.launch.supervisor.oom import OomCounters


def write(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


V2 = {
    "proc/self/cgroup": "0::/pod/run\n",
    "sys/fs/cgroup/pod/run/memory.events": "low 0\noom 0\noom_kill 0\n",
    "sys/fs/cgroup/pod/run/memory.max": "max\n",
    "sys/fs/cgroup/pod/memory.events": "oom 3\noom_kill 2\n",
    "sys/fs/cgroup/pod/memory.max": "8000000000\n",
    "proc/vmstat": "oom_kill 7\n",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/pod\n0::/\n",
    "sys/fs/cgroup/memory/pod/memory.oom_control": "under_oom 0\noom_kill 0\n",
    "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "500000000\n",
}
MACHINE = {"proc/self/cgroup": "0::/\n", "proc/vmstat": "pgfault 12\noom_kill 1\n"}


@pytest.mark.parametrize(
    ("files", "changed", "to", "told"),
    [
        (V2, "sys/fs/cgroup/pod/memory.events", "oom_kill 3\n", "counts 1 more, the limit is 8.0 GB"),
        (V2, "sys/fs/cgroup/pod/run/memory.events", "oom_kill 2\n", "counts 2 more"),
        (V2, "proc/vmstat", "oom_kill 9\n", ""),  # a kill outside the run's cgroup, on the same machine
        (V1, "sys/fs/cgroup/memory/pod/memory.oom_control", "oom_kill 1\n", "counts 1 more, the limit is 500.0 MB"),
        (MACHINE, "proc/vmstat", "oom_kill 2\n", "counts 1 more"),
        (MACHINE, "proc/vmstat", "oom_kill 1\n", ""),
        ({}, "nothing", "oom_kill 1\n", ""),
    ],
)
def test_the_nearest_readable_counters_are_used(tmp_path, files, changed, to, told):
    write(tmp_path, files)
    counters = OomCounters(tmp_path)
    assert counters.kills_lately(100.0) == ""
    write(tmp_path, {changed: to})
    expected = f"{tmp_path / changed} {told}" if told else ""
    assert [counters.kills_lately(now) for now in (101.0, 105.0, 112.0)] == [expected, expected, ""]


def test_a_process_killed_because_memory_ran_out_is_reported_as_such(tmp_path):
    write(tmp_path, V1)
    counters = OomCounters(tmp_path)
    log = tmp_path / "log"
    log.write_text("last words\n")
    with subprocess.Popen(["sleep", "1000"]) as process:
        process.kill()
        code = process.wait()
    assert (
        "was killed by signal SIGKILL (by a person or another process, or because memory ran out"
        in children.how_it_ended(code, log, counters)
    )
    write(tmp_path, {"sys/fs/cgroup/memory/pod/memory.oom_control": "oom_kill 1\n"})
    told = children.how_it_ended(code, log, counters)
    assert "was killed by signal SIGKILL (by the kernel, because memory ran out: " in told
    assert "the limit is 500.0 MB. Use fewer or smaller processes" in told
    assert told.endswith("last words")
