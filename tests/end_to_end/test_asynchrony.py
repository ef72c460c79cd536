"""Generation and training overlap on a task with a long tail of response lengths. The journals are the evidence."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from whole_runs import (
    ROOT,
    assert_each_prompt_trained_once,
    assert_nobody_left_behind,
    busy_buckets,
    busy_share,
    trained_events,
)

from asyncrl.testing.runs import RunHandle, assert_nothing_left, launch, train_steps

STEPS, BATCH, ETA = 36, 16, 2  # of 12 steps the mean share varies by 0.08 from run to run, of 36 by 0.03

pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]


@pytest.fixture(scope="module")
def run(long_tail: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    with launch(
        ROOT / "configs" / "long_tail_cpu.yaml",
        f"fileroot={tmp_path_factory.mktemp('asynchrony')}",
        f"model_path={long_tail / 'model'}",
        f"prompts.path={long_tail / 'data' / 'train.jsonl'}",
        f"rollout.tasks.default.reward={ROOT / 'examples' / 'long_tail' / 'reward.py'}:reward",
        f"train.max_steps={STEPS}",
        "trace=true",
    ) as run:
        assert run.wait(600) == 0, run.output()
        assert_nothing_left(run.run_dir)
        yield run


def test_tokens_are_generated_during_train_steps(run: RunHandle) -> None:
    spans = [(event["start"], event["end"]) for event in trained_events(run.run_dir)]
    assert len(spans) == STEPS
    busy = busy_buckets(run.run_dir)
    # The mean is over steps, not over time. If something delays the trainer for long, generation finishes all admitted work and
    # then waits, as it should. Such a delay affects one step only.
    assert mean(busy_share(busy, [span]) for span in spans) >= 0.80


def test_the_timeline_shows_all_processes_on_one_clock(run: RunHandle) -> None:
    """The timeline shows generation, push, waits, MFCs, weight writes and updates. Generation continues inside train steps."""
    events = json.loads((run.run_dir / "trace" / "attempt_1.json").read_text())["traceEvents"]
    process = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(process.values()) == [
        *("generation_server/0", "generation_server/1", "gserver_manager/0", "master/0"),
        *("model_worker/0", "model_worker/1", "rollout_worker/0", "rollout_worker/1"),
    ]

    def spans(name: str, kind: str) -> list[tuple[int, int]]:
        """Return (start, end) in microseconds of each event called `name` in processes of this kind."""
        mine = [event for event in events if event["name"].startswith(name) and process[event["pid"]].startswith(kind)]
        complete = [(event["ts"], event["ts"] + event["dur"]) for event in mine if event["ph"] == "X"]
        begun = {(event["pid"], event["id2"]["local"]): event["ts"] for event in mine if event["ph"] == "b"}
        ended = {(event["pid"], event["id2"]["local"]): event["ts"] for event in mine if event["ph"] == "e"}
        assert begun.keys() == ended.keys()
        return complete + [(start, ended[key]) for key, start in begun.items()]

    steps = sorted(spans("train step", "master"))
    assert len(steps) == STEPS
    assert len(spans("actor_train", "model_worker")) == 2 * STEPS
    for start, end in spans("actor_train", "model_worker"):  # each lies within a train step of the master
        assert any(step_start <= start and end <= step_end for step_start, step_end in steps)
    assert len(spans("write weights", "model_worker")) >= STEPS + 1
    assert len(spans("update generation_server/0", "gserver_manager")) >= 2
    assert len(spans("load weights", "generation_server")) >= 4
    num_trained = STEPS * BATCH
    for name in ("rollout", "generate", "push"):
        assert len(spans(name, "rollout_worker")) >= num_trained
    assert any(event.get("cat") == "wait" and event["args"]["on"] for event in events if event["ph"] == "b")
    passes = sorted(spans("forward", "generation_server"))
    shares = [
        sum(max(0, min(end, stop) - max(begin, start)) for begin, end in passes) / (stop - start)
        for start, stop in steps
    ]
    assert mean(shares) > 0.3  # the passes of both servers, added; they share two cores with training


def test_trains_on_older_versions_within_the_bound(run: RunHandle) -> None:
    steps = train_steps(run.run_dir)
    prompts = sum(record["batch/num_prompts"] for record in steps)
    assert sum(record["offpolicy/head_mean"] * record["batch/num_prompts"] for record in steps) / prompts > 0
    oldest = [
        (event["step"] - 1) - min(first for group in event["groups"] for first, _ in group["versions"])
        for event in trained_events(run.run_dir)
    ]
    assert oldest == [record["offpolicy/head_max"] for record in steps]
    assert max(oldest) <= ETA


def test_responses_go_on_across_updates(run: RunHandle) -> None:
    """A response that an update interrupts keeps its tokens, and each token keeps its version."""
    spans = [
        tuple(span) for event in trained_events(run.run_dir) for group in event["groups"] for span in group["versions"]
    ]
    assert all(first <= last for first, last in spans)
    assert any(first < last for first, last in spans)


def test_nothing_is_dropped_and_long_responses_are_trained_like_short_ones(run: RunHandle) -> None:
    assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
    assert_nobody_left_behind(run.run_dir, ETA)
    assert json.loads((run.run_dir / "summary.json").read_text())["rejected"] == {}
    assert max(record["length/response_max"] for record in train_steps(run.run_dir)) > 3 * 24  # 24 is the mean length
