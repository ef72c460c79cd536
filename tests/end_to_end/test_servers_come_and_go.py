"""`asyncrl-launch scale` on a whole run: servers join and leave, one is killed as it leaves, and no sample is lost."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.launch import cli
from asyncrl.testing.runs import (
    RunHandle,
    assert_nothing_left,
    journal,
    launch,
    make_tiny_run,
    processes_of,
    read_json_lines,
)

NUM_PROMPTS = 60
LIMIT_S = 100.0

pytestmark = pytest.mark.timeout(300)

# No response is judged while there is a file `closed`: so the run waits for what the test does to it.
REWARD = """\
import asyncio
from pathlib import Path

CLOSED = Path(__file__).parent / "closed"


async def reward(prompt, completion, answer):
    while CLOSED.exists():
        await asyncio.sleep(0.05)
    return float(len(set(completion)))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunHandle]:
    config = make_tiny_run(tmp_path, num_prompts=NUM_PROMPTS)
    (tmp_path / "reward.py").write_text(REWARD)
    overrides = (
        "train.max_steps=0",
        "rollout.reward_timeout_s=300",
        "manager.heartbeat_s=0.5",
        "manager.drain_timeout_s=1",
    )
    with launch(config, *overrides) as handle:
        yield handle


def sampled_by(run: RunHandle, index: int) -> int:
    """Tokens that a server has written down."""
    path = run.run_dir / "journal" / f"generation_server_{index}.jsonl"
    return sum(record["tokens"] for record in read_json_lines(path)) if path.exists() else 0


def serving(run: RunHandle) -> list[str]:
    """Servers that run and have loaded weights, by their config's name."""
    lines = [" ".join(process.cmdline()) for process in processes_of(run.run_dir)]
    names = [found[0] for line in lines if (found := re.search(r"generation_server_\d+\.yaml", line))]
    log = (run.run_dir / "logs" / "attempt_1" / "gserver_manager_0.log").read_text()
    return sorted(name for name in names if f"{name.removesuffix('.yaml').replace('r_', 'r/')} serves a0001" in log)


def scale(run: RunHandle, count: int, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert cli.main(["scale", str(run.run_dir), f"generation={count}", "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)["generation"]
    return answer


def test_servers_join_and_leave_a_run_and_no_sample_is_lost(
    run: RunHandle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = tmp_path / "closed"
    run.wait_for_step(1, LIMIT_S)
    gate.touch()
    assert scale(run, 3, capsys) == {"before": 1, "wanted": 3, "there": 1}
    assert cli.main(["status", str(run.run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generation_wanted"] == 3
    run.wait_until(lambda: len(serving(run)) == 3, "the new servers serve", LIMIT_S)
    gate.unlink()
    run.wait_until(lambda: sampled_by(run, 1) and sampled_by(run, 2), "the new servers have sampled", LIMIT_S)
    gate.touch()

    assert scale(run, 1, capsys) == {"before": 3, "wanted": 1, "there": 3}
    run.wait_for_output("generation servers: 3 -> 1", LIMIT_S)
    run.worker("generation_server/2").send_signal(signal.SIGKILL)  # gone is gone
    run.wait_for_output("generation_server/2 has left the run", LIMIT_S)
    run.wait_for_output("generation_server/1 has left the run", LIMIT_S)  # its groups are the other server's now
    assert serving(run) == ["generation_server_0.yaml"]
    assert cli.main(["status", str(run.run_dir), "--json"]) == 0
    workers = [worker["worker"] for worker in json.loads(capsys.readouterr().out)["workers"]]
    assert [name for name in workers if name.startswith("generation_server")] == ["generation_server/0"]

    gate.unlink()
    assert run.wait(LIMIT_S) == 0, run.output()
    assert_nothing_left(run.run_dir)
    events = journal(run.run_dir)
    groups = [group for event in events if event["event"] == "trained" for group in event["groups"]]
    assert sorted(tuple(group["prompt"]) for group in groups) == [(0, position) for position in range(NUM_PROMPTS)]
    assert not [event for event in events if event["event"] == "rejected"]
    assert json.loads((run.run_dir / "summary.json").read_text())
