"""`asyncrl-launch scale` on a whole run: servers join and leave, one is killed as it leaves, and no sample is lost."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_runs import Gate

from asyncrl.cli import main as cli
from asyncrl.testing.runs import (
    RunHandle,
    assert_nothing_left,
    journal,
    launch,
    make_tiny_run,
    processes_of,
    read_json_lines,
)

NUM_PROMPTS, BATCH = 60, 2
LIMIT_S = 200.0

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_tiny_run(tmp_path, num_prompts=NUM_PROMPTS)


@pytest.fixture
def gate(config: Path) -> Gate:
    """Holds the run until the test has acted on it."""
    return Gate(config, BATCH, "float(len(set(completion)))")


@pytest.fixture
def run(config: Path, gate: Gate) -> Iterator[RunHandle]:
    overrides = (
        Gate.OVERRIDE,
        "train.max_steps=0",
        f"train.batch_size={BATCH}",
        "manager.heartbeat_s=0.5",
        "manager.drain_timeout_s=1",
    )
    gate.let(5)
    with launch(config, *overrides) as handle:
        yield handle


def sampled_by(run: RunHandle, index: int) -> int:
    """Tokens in the server's journal."""
    path = run.run_dir / "journal" / f"generation_server_{index}.jsonl"
    return sum(record["tokens"] for record in read_json_lines(path)) if path.exists() else 0


def serving(run: RunHandle) -> list[str]:
    """Servers that run and have loaded weights, by the name of their config."""
    lines = [" ".join(process.cmdline()) for process in processes_of(run.run_dir)]
    names = [found[0] for line in lines if (found := re.search(r"generation_server_\d+\.yaml", line))]
    log = (run.run_dir / "logs" / "attempt_1" / "gserver_manager_0.log").read_text()
    return sorted(name for name in names if f"{name.removesuffix('.yaml').replace('r_', 'r/')} serves a0001" in log)


def scale(run: RunHandle, count: int, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert cli.main(["scale", str(run.run_dir), f"generation={count}", "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)["generation"]
    return answer


def shown(run: RunHandle, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Servers in the output of `status`. A launcher thread removes a departed server shortly after it learns of the departure."""
    assert cli.main(["status", str(run.run_dir), "--json"]) == 0
    workers = [worker["worker"] for worker in json.loads(capsys.readouterr().out)["workers"]]
    return [name for name in workers if name.startswith("generation_server")]


def test_servers_join_and_leave_a_run_and_no_sample_is_lost(
    run: RunHandle, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    run.wait_for_step(1, LIMIT_S)
    assert scale(run, 3, capsys) == {"before": 1, "wanted": 3, "there": 1}
    assert cli.main(["status", str(run.run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generation_wanted"] == 3
    run.wait_until(lambda: len(serving(run)) == 3, "the new servers serve", LIMIT_S)
    gate.let(25)
    run.wait_until(lambda: sampled_by(run, 1) and sampled_by(run, 2), "the new servers have sampled", LIMIT_S)
    gate.let(0)

    run.worker("generation_server/2").suspend()  # otherwise the server might leave before it is killed
    assert scale(run, 1, capsys) == {"before": 3, "wanted": 1, "there": 3}
    run.wait_for_output("generation servers: 3 -> 1", LIMIT_S)
    run.worker("generation_server/2").send_signal(signal.SIGKILL)  # a killed server leaves at once
    run.wait_for_output("generation_server/2 has left the run", LIMIT_S)
    run.wait_for_output("generation_server/1 has left the run", LIMIT_S)  # the other server continues its groups
    assert serving(run) == ["generation_server_0.yaml"]
    run.wait_until(lambda: shown(run, capsys) == ["generation_server/0"], "`status` showed who is left", LIMIT_S)

    gate.open()
    assert run.wait(LIMIT_S) == 0, run.output()
    assert_nothing_left(run.run_dir)
    events = journal(run.run_dir)
    groups = [group for event in events if event["event"] == "trained" for group in event["groups"]]
    assert sorted(tuple(group["prompt"]) for group in groups) == [(0, position) for position in range(NUM_PROMPTS)]
    assert not [event for event in events if event["event"] == "rejected"]
    assert json.loads((run.run_dir / "summary.json").read_text())
