"""The cost of faults, part by part, from made-up records of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.testing.faults.costs import Cost, Costs, Stage, cost_lines, costs_of, read_costs, stages_of


def fault(number: int, what: str, at: float, **end: float) -> list[dict[str, Any]]:
    """Return records of the injector. end: for instance recovered=12.0, continued=15.0."""
    kind, target = what.split()
    common = {"number": number, "kind": kind, "target": target, "name": f"{target}/0"}
    return [
        {"event": "fault", "time": at, **common},
        *({"event": event, "time": when, **common} for event, when in end.items()),
    ]


def parts(stages: list[Stage]) -> dict[str, tuple[float, float]]:
    return {stage.part: (stage.begin, stage.end) for stage in stages}


EVERY_SECOND = [float(second) for second in range(1, 101)]


def test_a_killed_process_is_detected_restarted_and_refilled():
    stages = stages_of(
        fault(0, "kill rollout_worker", 10.0, recovered=11.0),
        runs=[(1.0, "rollout_worker/0"), (12.0, "rollout_worker/1"), (13.5, "rollout_worker/0")],
        issued_again=[],
        steps=EVERY_SECOND,
    )
    assert parts(stages) == {"detection": (10.0, 11.0), "restart": (11.0, 13.5), "refill": (13.5, 23.0)}


def test_a_trainer_group_is_ready_when_all_its_processes_run():
    stages = stages_of(
        fault(0, "kill master", 10.0, recovered=11.0),
        runs=[(1.0, "master/0"), (1.0, "model_worker/0"), (12.0, "master/0"), (14.0, "model_worker/0")],
        issued_again=[],
        steps=EVERY_SECOND,
    )
    assert parts(stages)["restart"] == (11.0, 14.0)


@pytest.mark.parametrize(
    ("target", "issued_again", "expected"),
    [
        ("gserver_manager", [12.0], {"frozen": (10.0, 20.0)}),
        ("rollout_worker", [9.0, 14.0, 15.0], {"detection": (10.0, 14.0), "frozen": (14.0, 20.0)}),
        ("rollout_worker", [9.0, 21.0], {"detection": (10.0, 20.0)}),  # it was not detected
    ],
)
def test_a_frozen_rollout_worker_is_detected_when_its_prompts_are_issued_again(target, issued_again, expected):
    records = fault(0, f"stop {target}", 10.0, continued=20.0)
    stages = stages_of(records, runs=[], issued_again=issued_again, steps=EVERY_SECOND)
    assert parts(stages) == {**expected, "refill": (20.0, 30.0)}


def test_a_frozen_process_killed_meanwhile_is_detected_with_its_next_process():
    records = fault(0, "stop model_worker", 10.0, killed_meanwhile=40.0, recovered=41.0)
    stages = stages_of(records, runs=[(43.0, "model_worker/0")], issued_again=[], steps=EVERY_SECOND)
    assert parts(stages) == {"detection": (10.0, 41.0), "restart": (41.0, 43.0), "refill": (43.0, 53.0)}


def test_the_cost_of_a_part_is_its_length_minus_its_steps():
    """Normally one step per second: none for five seconds, half as many for ten, and five steps trained again."""
    steps = [float(at) for at in range(1, 101) if not 20 < at <= 25 and not (25 < at <= 35 and at % 2)]
    stages = [
        Stage(number=0, part="detection", begin=20.0, end=25.0),
        Stage(number=0, part="refill", begin=25.0, end=35.0),
    ]
    costs = costs_of(fault(0, "kill master", 20.0), stages, steps=steps, voided_steps=5)
    assert costs is not None
    lost_s = {"frozen": 0.0, "detection": 5.0, "restart": 0.0, "refill": 5.0}
    assert costs.of_faults == [Cost(what="kill master", num_faults=1, lost_s=lost_s)]
    assert costs.step_s == pytest.approx(1.0)
    assert (costs.time_s, costs.again_s, costs.lost_s) == (15.0, 5.0, 15.0)


def test_time_of_two_faults_counts_once():
    """The newer fault's detection counts instead of the older freeze. Its refill counts only after that freeze is over."""
    stages = [
        Stage(number=0, part="frozen", begin=20.0, end=40.0),
        Stage(number=1, part="detection", begin=25.0, end=30.0),
        Stage(number=1, part="refill", begin=30.0, end=45.0),
    ]
    steps = [at for at in EVERY_SECOND if not 20 < at <= 45]
    records = [*fault(0, "stop master", 20.0), *fault(1, "kill rollout_worker", 25.0)]
    costs = costs_of(records, stages, steps=steps, voided_steps=0)
    assert costs is not None
    by_what = {cost.what: cost.lost_s for cost in costs.of_faults}
    assert by_what["stop master"]["frozen"] == 15.0
    assert (by_what["kill rollout_worker"]["detection"], by_what["kill rollout_worker"]["refill"]) == (5.0, 5.0)


def test_without_undisturbed_steps_there_are_no_costs():
    stages = [Stage(number=0, part="frozen", begin=5.0, end=100.0)]
    assert costs_of(fault(0, "stop master", 5.0), stages, steps=EVERY_SECOND, voided_steps=0) is None
    assert costs_of([], [], steps=EVERY_SECOND, voided_steps=0) is None


def test_costs_are_read_from_the_files_of_a_run(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    began = 1_700_000_000.0
    ends = [began + at for at in EVERY_SECOND if not 20 < at <= 26]
    trained = [
        {"event": "trained", "attempt": 1, "step": step, "end": end, "groups": []} for step, end in enumerate(ends, 1)
    ]
    write(tmp_path, "master", {"event": "begun", "attempt": 1, "from": None}, *trained)
    write(tmp_path, "faults", *fault(0, "kill rollout_worker", began + 20.0, recovered=began + 22.0))
    write(tmp_path, "gserver_manager", {"event": "admitted", "ticket": "a1-e0-p1-i2-v0-h0-x", "time": began + 23.0})
    ran = time.strftime("%Y-%m-%d %H:%M:%S.000", time.localtime(began + 25.0))
    log = tmp_path / "logs" / "attempt_1" / "rollout_worker_0.log"
    log.write_text(f"{ran} INFO    rollout_worker/0: running\n")
    costs = read_costs(tmp_path)
    assert costs is not None
    assert costs.of_faults[0].lost_s == {"frozen": 0.0, "detection": 2.0, "restart": 3.0, "refill": 1.0}
    assert read_costs(tmp_path, since=began + 30.0) is None


def write(run_dir: Path, worker: str, *records: dict[str, Any]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "journal" / f"{worker}.jsonl").write_text(text)


def test_the_table_has_one_line_per_kind_and_the_sum():
    cost = Cost(
        what="kill master", num_faults=2, lost_s={"frozen": 0.0, "detection": 1.5, "restart": 2.0, "refill": -0.5}
    )
    lines = cost_lines(Costs(step_s=0.5, time_s=20.0, of_faults=[cost], again_s=4.0))
    assert [line.split() for line in lines[1:3]] == [
        ["kill", "master", "2", "0.0", "1.5", "2.0", "-0.5"],
        ["all", "0.0", "1.5", "2.0", "-0.5"],
    ]
    assert lines[3].startswith("7.0 s lost of 20.0 s")
    assert len({len(line) for line in lines[:3]}) == 1
