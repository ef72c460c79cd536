"""Servers join and leave a whole run, by `asyncrl-launch scale` and by HTTP. One is killed as it leaves. No sample is lost."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
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
from asyncrl.weights.versions import list_versions, read_manifest, role_dir
from tests.support.live_runs import ask, entry

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
        # Servers that join late load a full version and deltas. At this learning rate few bfloat16 elements change in a step
        "train.dtype=bfloat16",
        "train.optimizer.lr=3e-6",
        "weights.full_every=8",
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
    lines = []
    for process in processes_of(run.run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    names = [found[0] for line in lines if (found := re.search(r"generation_server_\d+\.yaml", line))]
    log = (run.run_dir / "logs" / "attempt_1" / "gserver_manager_0.log").read_text()
    return sorted(name for name in names if f"{name.removesuffix('.yaml').replace('r_', 'r/')} serves a0001" in log)


def scale(run: RunHandle, count: int, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert cli.main(["scale", str(run.run_dir), f"generation={count}", "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)["generation"]
    return answer


def states(run: RunHandle) -> dict[str, str]:
    """State of each server by name, from GET /servers."""
    status, text = ask(run, "GET", manager_of(run) + "/servers")
    assert status == 200, text
    return {server["server"]: server["state"] for server in json.loads(text)["servers"]}


def manager_of(run: RunHandle) -> str:
    return entry(run, lambda names: names.gserver_manager())


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
    assert_all_trained_once(run)


def assert_all_trained_once(run: RunHandle) -> None:
    """The run completes, and each prompt is trained exactly once."""
    assert run.wait(LIMIT_S) == 0, run.output()
    assert_nothing_left(run.run_dir)
    actor = role_dir(run.run_dir, "actor")
    assert [read_manifest(actor / str(version)).kind for version in list_versions(actor)[-3:]] == ["delta"] * 3
    events = journal(run.run_dir)
    groups = [group for event in events if event["event"] == "trained" for group in event["groups"]]
    assert sorted(tuple(group["prompt"]) for group in groups) == [(0, position) for position in range(NUM_PROMPTS)]
    assert not [event for event in events if event["event"] == "rejected"]
    assert_ages_are_those_of_the_journal(run, events)


def assert_ages_are_those_of_the_journal(run: RunHandle, events: Sequence[dict[str, Any]]) -> None:
    """The summary and the output give the ages of all trained responses."""
    summary = json.loads((run.run_dir / "summary.json").read_text())
    responses = [
        (event["step"] - 1, first, last)
        for event in events
        if event["event"] == "trained"
        for group in event["groups"]
        for first, last in group["versions"]
    ]
    ages = summary["offpolicyness"]
    heads = Counter(str(version - first) for version, first, _ in responses)
    assert ages["head"] == heads
    assert ages["tail"] == Counter(str(version - last) for version, _, last in responses)
    assert set(heads) == {"0", "1"}  # eta is 1
    assert sum(entry["responses"] for entry in ages["by_length"]) == len(responses) == summary["sequences"]
    assert summary["sequences_of_two_versions"] == sum(first != last for _, first, last in responses)
    assert f"0: {heads['0'] / len(responses):.1%}, 1: {heads['1'] / len(responses):.1%}" in run.output()


def test_servers_join_and_leave_by_http_and_no_sample_is_lost(run: RunHandle, gate: Gate) -> None:
    """1 -> 2 -> 1. A client with a forged token changes nothing."""
    run.wait_for_step(1, LIMIT_S)
    scale_at = manager_of(run) + "/scale"
    assert ask(run, "POST", scale_at, '{"generation": 2}', token="forged")[0] == 401
    assert ask(run, "GET", manager_of(run) + "/servers", token="forged")[0] == 401
    status, text = ask(run, "POST", scale_at, '{"generation": 0}')
    assert (status, "use a number from 1 to 256" in text) == (400, True)
    assert list(states(run)) == ["generation_server/0"]

    status, text = ask(run, "POST", scale_at, '{"generation": 2}')
    answer = json.loads(text)
    assert (status, answer["target"], answer["missing"]) == (200, 2, ["generation_server/1"])
    run.wait_until(lambda: states(run).get("generation_server/1") == "healthy", "the new server serves", LIMIT_S)
    assert len(serving(run)) == 2
    gate.let(25)
    run.wait_until(lambda: sampled_by(run, 1), "the new server has sampled", LIMIT_S)
    gate.let(0)

    for _ in range(2):  # the second request has no effect
        status, text = ask(run, "POST", scale_at, '{"generation": 1}')
        assert (status, json.loads(text)["target"]) == (200, 1)
    run.wait_for_output("generation_server/1 has left the run", LIMIT_S)
    # Its state may be `suspect`: on a busy machine it may have been slower than the other one
    run.wait_until(lambda: list(states(run)) == ["generation_server/0"], "one server is left", LIMIT_S)
    assert serving(run) == ["generation_server_0.yaml"]

    gate.open()
    assert_all_trained_once(run)
