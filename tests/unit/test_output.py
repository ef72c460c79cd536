"""Output of commands that supervise processes: whether its reader reads, stops or ends, the command goes on."""

import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from asyncrl.cli.output import QueuedStream

LINE = "x" * 99 + "\n"
LIMIT_S = 60.0


@pytest.fixture
def pipe():
    """A pipe with room for 4096 bytes, as (reader, stream)."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with open(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def queued(stream, stalled_s=LIMIT_S):
    return QueuedStream(stream, lambda count: f"{count} lines are missing\n", stalled_s=stalled_s)


def read_until(reader, end):
    data = b""
    while not data.endswith(end):
        data += os.read(reader, 1 << 16)
    return data.decode()


def test_a_reader_that_comes_back_is_told_how_much_is_missing(pipe):
    reader, stream = pipe
    output = queued(stream)
    for number in range(15_000):
        print(f"{number:05d}" + "x" * 94, file=output)  # 3 MB: nothing waits for the reader
    print("the first cause", file=output)
    lines = read_until(reader, b"the first cause\n").splitlines()
    told = next(place for place, line in enumerate(lines) if line.endswith("missing"))
    before, after = int(lines[told - 1][:5]), int(lines[told + 1][:5])
    assert lines[told] == f"{after - before - 1} lines are missing"
    assert [int(line[:5]) for line in lines[told + 1 : -1]] == list(range(after, 15_000))
    assert len(lines) < 12_000


def test_of_the_changes_of_a_line_only_the_newest_waits(pipe):
    reader, stream = pipe
    output = queued(stream)
    print(LINE * 100, end="", file=output)  # the reader does not read
    for number in range(100_000):
        output.write(f"\r\x1b[2Kframe {number}")
    output.write("\nend\n")
    text = read_until(reader, b"end\n")
    assert "frame 99999" in text
    assert "missing" not in text
    assert text.count("frame") <= 2  # the newest, and perhaps the first one, which did not wait


def test_the_end_waits_for_a_reader_that_reads_and_for_no_other(pipe):
    reader, stream = pipe
    output = queued(stream, stalled_s=0.2)
    output.write(LINE * 500)
    got = []
    thread = threading.Thread(target=lambda: got.append(read_until(reader, LINE.encode() * 2)))
    thread.start()
    thread.join(LIMIT_S)
    output.write(LINE * 500)
    output.close()  # nothing reads now


@pytest.mark.parametrize("error", ["EPIPE", "ENOSPC"])
def test_an_output_that_cannot_be_written_ends_nothing(error):
    if error == "EPIPE":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    with open(writer, "w") as stream:
        output = queued(stream)
        for _ in range(15_000):
            output.write(LINE)
        output.close()


PROGRAM = """
import os, subprocess, sys
from asyncrl.cli.output import never_waiting
with never_waiting(as_json=False):
    for fd in (1, 2):
        os.write(fd, b"a library\\n" * 20_000)
    subprocess.run(["sh", "-c", "yes | head -c 200000; yes | head -c 200000 >&2"], check=True)
    print("x" * 2_000_000)
    os.write(int(sys.argv[1]), b"done")
raise RuntimeError("after it")
"""


def test_libraries_and_child_processes_do_not_wait_either():
    done, told = os.pipe()
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(told)], stdout=writer, stderr=writer, pass_fds=[told]
    ) as process:
        os.close(told)
        try:
            assert os.read(done, 10) == b"done"  # without a reader
            os.close(writer)
            with open(reader, errors="replace") as output:
                text = output.read()
            assert process.wait(LIMIT_S) == 1
        finally:
            process.kill()
            os.close(done)
    assert "a library\n" in text
    assert text.rstrip().endswith("RuntimeError: after it")


BACKGROUND = """
import os, signal, sys, termios
from asyncrl.cli.output import never_waiting
with never_waiting(as_json=False):
    print("from the background")
"""


def test_a_process_in_the_background_of_a_terminal_is_not_stopped_by_its_output():
    """`stty tostop`, as some users set it."""
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(
            "/bin/sh",
            ["sh", "-mc", 'stty tostop; "$1" -c "$2" & wait $!; echo "code $?"', "sh", sys.executable, BACKGROUND],
        )
    text = ""
    try:
        while "code " not in text:
            text += os.read(terminal, 4096).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert "from the background" in text
    assert "code 0" in text
