"""Every command keeps its exit code, and prints no traceback, whatever its standard streams are.

One interpreter imports the commands. It forks a process for each case, which changes its streams and runs the command to the end of
the interpreter.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.main import _COMMANDS
from asyncrl.launch.rundir import RunRecord, begin_attempt, logs_dir, write_record
from asyncrl.runtime.metrics import METRICS_FILE, JsonLinesWriter
from asyncrl.runtime.process import python_module

LIMIT_S = 100.0
BROKEN_PIPE = 141
STREAMS = ("good", "stdout without reader", "no reader", "none", "full")
FEW = ("good", "no reader", "none")
NAMES = [command.__name__.rpartition(".")[2] for command in _COMMANDS]

DRIVER = """
import gc, json, os, sys
from asyncrl.cli.main import main
gc.freeze()

def change(streams, told):
    # stderr is read for tracebacks where it is not what the case is about
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
    gone, writer = os.pipe()
    os.close(gone)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for fd in {"stdout without reader": (1,), "no reader": (1, 2)}.get(streams, ()):
        os.dup2(writer, fd)
    for fd in (1, 2) if streams == "full" else ():
        os.dup2(full, fd)
    for fd in (0, 1, 2) if streams == "none" else ():
        os.close(fd)
        setattr(sys, ("stdin", "stdout", "stderr")[fd], None)  # as the interpreter does at its start
    os.closerange(3, 100)

result = os.dup(1)
for at, (words, streams) in enumerate(json.loads(sys.stdin.read())):
    child = os.fork()
    if not child:
        change(streams, f"told{at}")
        sys.argv = ["asyncrl-launch", *words]
        sys.exit(main())
    os.write(result, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n".encode())
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was stopped, with logs and metrics that fill more than a pipe's buffer."""
    run_dir = tmp_path / "runs" / "sort" / "a"
    begin_attempt(run_dir)
    write_record(
        run_dir,
        RunRecord(pid=1, attempt=1, experiment="sort", trial="a", endpoints=[], started=1e9, total_steps=60),
    )
    with JsonLinesWriter(run_dir / METRICS_FILE) as writer:
        for step in range(1, 8):
            writer.write({"step": step, "attempt": 1, "reward/mean": step / 10})
    logs_dir(run_dir, 1).mkdir(parents=True, exist_ok=True)
    line = "2026-01-01 10:00:00.000 INFO     master/0: " + "x" * 100 + "\n"
    (logs_dir(run_dir, 1) / "master_0.log").write_text(line * 2000)
    return run_dir


def cases(run_dir: Path) -> list[tuple[list[str], str]]:
    run, folder, missing = str(run_dir), str(run_dir.parents[1]), str(run_dir / "no.yaml")
    work = [
        ["ls", folder],
        ["logs", run],
        ["config"],
        ["config", "--schema"],
        ["config", "--markdown"],
        ["init", "new"],
        ["completion", "bash"],
    ]
    work += [["plot", run], ["ls", "nowhere"], ["lss"], ["--version"], ["--help"], ["config", "train.nosuch"]]
    work += [[name, run] for name in ("status", "audit", "inspect", "trace", "profile", "rejudge", "stop")]
    work += [["scale", run, "generation=2"], ["host", "127.0.0.1:1"]]
    work += [[name, missing] for name in ("run", "resume", "check", "eval", "plan", "prepare", "chaos", "debug", "ui")]
    assert {words[0] for words in work} >= set(NAMES)
    with_json = [
        [*words, "--json"] for words in work if words[0] in NAMES and words[-1][0] != "-" and words[0] != "init"
    ]
    table = [(words, streams) for words in work for streams in STREAMS]
    return table + [
        (words, streams) for words in [*with_json, *([name, "--help"] for name in NAMES)] for streams in FEW
    ]


@pytest.mark.timeout(LIMIT_S + 20)
def test_every_command_keeps_its_exit_code_whatever_its_streams_are(run_dir: Path, tmp_path: Path) -> None:
    table = cases(run_dir)
    given = [
        ([word if word != "new" else f"new{at}" for word in words], streams)
        for at, (words, streams) in enumerate(table)
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER],
        input=json.dumps(given),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    codes = list(map(int, done.stdout.split()))
    assert len(codes) == len(table)
    expected = {tuple(words): code for (words, streams), code in zip(table, codes, strict=True) if streams == "good"}
    wrong = []
    for at, ((words, streams), code) in enumerate(zip(table, codes, strict=True)):
        right = expected[tuple(words)]
        if words[0] == "logs" and "reader" in streams and right == 0 and "--help" not in words:
            right = BROKEN_PIPE  # its work is its output
        told = (tmp_path / f"told{at}").read_text()
        if code != right or "Traceback" in told or "Exception" in told:
            wrong.append((" ".join(words), streams, code, right, told[-300:]))
    assert wrong == []
    assert {expected[(name, "--help")] for name in NAMES} == {0}


@pytest.mark.parametrize("words", [["--help"], ["config", "--schema"]])
def test_a_reader_that_ends_at_once_changes_no_exit_code(words: list[str]) -> None:
    """`asyncrl-launch --help | true`, with an interpreter of its own."""
    with subprocess.Popen(
        python_module("asyncrl.cli.main", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 0
