"""Tables show what matters on terminals of any width."""

import argparse
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncrl.cli.commands.check import _print_findings
from asyncrl.cli.commands.common import process_table
from asyncrl.cli.commands.inspect import SequenceRow, TokenRow, _sequence_table, _token_table
from asyncrl.cli.commands.ls import _table
from asyncrl.cli.commands.plan import _print_layouts
from asyncrl.cli.commands.status import _view
from asyncrl.cli.live_state import Seen
from asyncrl.cli.main import _parser
from asyncrl.cli.progress import TrainingProgress, print_summary
from asyncrl.cli.run_files import RunEntry
from asyncrl.config.processes import RolloutWorkerConfig
from asyncrl.launch.checks.checklist import Finding
from asyncrl.launch.rundir import RunRecord
from asyncrl.plan.bounds import TimeBound
from asyncrl.plan.layouts import Layout
from asyncrl.protocol.status import Wait, WorkerStatus


def printed(table, width):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_only_the_response_is_cropped(width):
    rows = [
        SequenceRow(
            index=index,
            reward=-0.125,
            finish="length",
            prompt_tokens=512,
            response_tokens=1024,
            version_start="a0001-v00000017",
            version_end="a0001-v00000019",
            offpolicyness=2,
            text="a long response " * 50,
        )
        for index in range(2)
    ]
    text = printed(_sequence_table(SimpleNamespace(sequences=rows, sequence=0)), width)
    lines = [line for line in text.splitlines() if "-0.125" in line]
    assert len(lines) == 2
    for line in lines:
        assert len(line) <= width
        assert [word for word in ("length", "512 + 1024") if word in line] == ["length", "512 + 1024"]
        assert ("a0001-v00000017 to v19" in line) == (width >= 80)
    assert ("a long respo" in text) == (width >= 80)


def test_processes_that_differ_only_in_their_number_share_a_row():
    env = {"NAME": "a rather long value of an environment variable"}
    specs = [
        SimpleNamespace(name=f"{kind}/{index}", kind=kind, computes=False, env=env, config=RolloutWorkerConfig)
        for kind in ("rollout_worker", "gserver_manager")
        for index in range(5 if kind == "rollout_worker" else 1)
    ]
    text = printed(process_table("run", specs), 200)
    assert "rollout_worker/0 ... rollout_worker/4 (5)" in text
    assert text.count("a rather long value") == 1
    assert "the same" in text


# ------------------------------------------------------------------------------------------------- all tables, all widths


def ls(console, tmp_path):
    runs = [RunEntry("", f"sloppy-sorter/trial-{at}", "interrupted", 40 + at, 60, 0.125, 1e9) for at in range(3)]
    runs.append(RunEntry("", "sloppy-sorter/broken", "damaged", problem="run.json cannot be read"))
    console.print(_table(tmp_path, runs, 2e9))
    return "sloppy-sorter/trial-2 interrupted 42/60 0.125 damaged: run.json cannot be read 2001-09-09"


def status(console, tmp_path):
    waits = [Wait(what="a server that may serve", on="generation_server/1", since_s=3.0, limit_s=600.0)]
    one = WorkerStatus(worker="gserver_manager/0", pid=1, attempt=1, state="running", time=0.0, progress=1, waits=waits)
    two = WorkerStatus(
        worker="rollout_worker/12",
        pid=2,
        attempt=1,
        state="running",
        time=0.0,
        progress=1,
        restarts=3,
        version="a0001-v00000017",
        queues={"running": 128, "waiting_requests": 16},
    )
    record = RunRecord(pid=1, attempt=1, experiment="e", trial="t", endpoints=[], started=0.0)
    console.print(_view(tmp_path, record, Seen(TrainingProgress(60), [one, two], None, 5.0)))
    return (
        "gserver_manager/0 rollout_worker/12 a0001-v00000017 running, restart 3 5.0 s ago generation_server/1 "
        "running=128 waiting_requests=16 server that may serve"
    )


def check(console, tmp_path):
    remedy = "raise the limit with `ulimit -n 4096`, or use fewer processes"
    found = [
        Finding("shared memory", "fail", "64.0 MB free in /dev/shm, about 512.3 MB needed", "remount it larger"),
        Finding("GPUs asked for", "warn", "allocation=transformers.d2+d2: 2 for generation", remedy),
    ]
    _print_findings("this machine", found, console)
    return f"FAIL shared memory 64.0 512.3 MB needed remount it larger warn GPUs asked for {remedy}"


def processes(console, tmp_path):
    env = {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0,1"}
    specs = [
        SimpleNamespace(name=f"generation_server/{at}", kind="g", computes=True, env=env, config=RolloutWorkerConfig)
        for at in range(2)
    ]
    console.print(process_table("run", specs))
    return (
        "generation_server/0, generation_server/1 core or device TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=0,1"
    )


def tokens(console, tmp_path):
    row = TokenRow(
        position=1023,
        text="thousand",
        id=50256,
        prompt=False,
        loss_mask=True,
        version="a0001-v00000017",
        behaviour_logprob=-0.91954,
        proximal_logprob=-0.49354,
        ref_logprob=-1.23454,
        reward=0.5,
        advantage=2.64574,
    )
    console.print(_token_table([row], "token by token"))
    return "1023 'thousand' 50256 a0001-v00000017 -0.9195 -0.4935 -1.2345 yes 0.5 +2.6457"


def layouts(console, tmp_path):
    time = TimeBound(
        training_s=12.3,
        receiving_s=4.56,
        generation_s=78.9,
        step_s=91.2,
        mfu=0.5,
        expected_training_s=40.0,
        expected_generation_s=190.0,
        expected_step_s=234.0,
        response_tokens=1000,
        running=100,
    )
    _print_layouts([Layout("sglang.d4p1m2+d2p2m2", time, 60 << 30, True, True)], console, assumed="")
    return "sglang.d4p1m2+d2p2m2 yes 234 91.2 12.3 4.56 78.9 60.0 GiB"


def summary(console, tmp_path):
    told = {
        "steps": 60,
        "version": 60,
        "sequences": 3072,
        "generated_tokens": 21516,
        "wall_s": 33.1,
        "training_s": 16.2,
    }
    told |= {"first_reward": 0.080, "last_reward": 0.903, "evaluations": [], "rejected": {"reward_timeout": 7}}
    told |= {"trainer_idle_share": 0.53, "trainer_waits_data_share": 0.25, "trainer_waits_weights_share": 0.28}
    told |= {"generation_idle_share": 0.06, "head_offpolicyness_mean": 1.17, "head_offpolicyness_max": 2}
    told |= {"sequences_of_two_versions": 615}
    (tmp_path / "summary.json").write_text(json.dumps(told))
    print_summary(tmp_path, console)
    return "3072 responses, 21516 generated tokens 33.1 0.080 0.903 53% 25%, 28%) 1.17, 615 reward_timeout: 7"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("table", [ls, status, check, processes, tokens, layouts, summary])
def test_nothing_is_cropped_and_no_line_is_wider_than_the_terminal(tmp_path, monkeypatch, table, width):
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    needed = table(Console(file=out, width=width), Path())
    lines = out.getvalue().splitlines()
    words = set(re.sub("[\u2500-\u257f]", " ", out.getvalue()).split())
    assert set(needed.split()) - words == set()
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()
    wide = [line for line in lines if len(line) > width and not line.startswith(("Everything", "The trained model"))]
    assert wide == []


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_help_is_wrapped_at_words_except_examples(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", "1000")
    whole = helps()
    monkeypatch.setenv("COLUMNS", str(width))
    for name, text in helps().items():
        assert sorted(words(text)) == sorted(words(whole[name])), name
        for line in text.partition("\n\n")[2].splitlines():
            assert len(line) <= width or re.match(r"  +\S", line) or len(line.split()) == 1, line


def helps():
    """The help of each command."""
    parser = _parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {"": parser.format_help(), **{name: command.format_help() for name, command in commands.choices.items()}}


def words(text):
    """Without the usage, where argparse repeats nothing but breaks lines in its own way."""
    return text.partition("\n\n")[2].split()
