"""Curves of runs: reading metrics.jsonl and the servers' journals, and the panels that result."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from asyncrl.cli.curves import as_json, of_learning, picture, smoothed, thinned, timeline
from asyncrl.cli.run_files import RunFiles, distinct_names, read_records, read_runs


def step(number, **fields):
    return {
        "step": number,
        "attempt": 1,
        "time": 100.0 + number,
        "reward/mean": number / 10,
        "offpolicy/head_mean": 0.5,
        "offpolicy/head_max": 2.0,
        "batch/num_sequences": 8.0,
        "batch/num_sequences_of_two_versions": 2.0,
        "length/response_mean": 7.0,
        "length/response_max": 9.0,
        "time/step_s": 1.0,
        "time/train_s": 0.5,
        "time/wait_data_s": 0.4,
        "time/wait_weights_s": 0.1,
        "time/actor_train_s": 0.3,
        "time/publish_s": 0.2,
        "throughput/tokens_per_s": 1000.0,
        "throughput/train_tokens_per_s_per_device": 600.0,
        "throughput/generated_tokens_per_s_per_device": 400.0,
        "mfu/actor_train": 0.25,
        "memory/model_worker_0_bytes": 2.0**30,
        "memory/model_worker_1_bytes": 2.0**31,
        "actor/entropy": 1.25,
        "actor/approx_kl": 0.01,
        "actor/behav_approx_kl": 0.02,
        "actor/grad_norm": 0.75,
        "actor/clip_share": 0.125,
        "actor/cap_share": 0.0,
        **fields,
    }


def evaluation(number, **fields):
    return {"step": number, "attempt": 1, "eval/sampled_reward": 0.3, "eval/greedy_reward": 0.6, **fields}


def encoded(record) -> str:
    """Encode a record as MetricsWriter does: null for numbers that are not finite."""
    return msgspec.json.encode(record).decode()


def write_run(run_dir: Path, records, generating=None) -> Path:
    """Write a run's folder. generating: the times in the journal of each generation server."""
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(encoded(record) + "\n" for record in records))
    for index, times in enumerate(generating or []):
        journal = run_dir / "journal" / f"generation_server_{index}.jsonl"
        journal.parent.mkdir(exist_ok=True)
        journal.write_text("".join(json.dumps({"time": at, "tokens": 5, "version": "v"}) + "\n" for at in times))
    return run_dir


def curves_of(shown, panel_name):
    """Map (run, name) of each curve to its points."""
    panel = next(panel for panel in shown.panels if panel.name == panel_name)
    return {(curve.run, curve.name): list(zip(curve.x, curve.y, strict=True)) for curve in panel.curves}


def test_the_panels_of_a_run(tmp_path):
    records = [step(1), evaluation(0), step(2), evaluation(2)]
    shown = picture(read_runs([write_run(tmp_path / "e" / "t0", records, generating=[[101.0]])]))
    assert [panel.name for panel in shown.panels] == [
        "reward",
        "response_length",
        "entropy",
        "kl",
        "grad_norm",
        "clip_share",
        "off_policyness",
        "mixed_versions",
        "time_shares",
        "time_parts",
        "tokens",
        "device_tokens",
        "mfu",
        "memory",
        "steps",
    ]
    assert shown.missing == ()
    assert curves_of(shown, "reward") == {
        ("t0", "train batch, sampled"): [(1, 0.1), (2, 0.2)],
        # ordered by the step of an evaluation, not by the time of writing
        ("t0", "evaluation, sampled"): [(0, 0.3), (2, 0.3)],
        ("t0", "evaluation, greedy"): [(0, 0.6), (2, 0.6)],
    }
    assert curves_of(shown, "off_policyness") == {
        ("t0", "mean"): [(1, 0.5), (2, 0.5)],
        ("t0", "oldest of the batch"): [(1, 2.0), (2, 2.0)],
    }
    assert curves_of(shown, "mixed_versions") == {("t0", ""): [(1, 25.0), (2, 25.0)]}
    assert curves_of(shown, "time_shares") == {
        ("t0", "training"): [(1, 50.0), (2, 50.0)],
        ("t0", "waits for data"): [(1, 40.0), (2, 40.0)],
        ("t0", "waits for weights"): [(1, 10.0), (2, 10.0)],
        ("t0", "no generation"): [(1, 100.0), (2, pytest.approx(90.0))],
    }
    assert curves_of(shown, "entropy") == {("t0", ""): [(1, 1.25), (2, 1.25)]}
    assert curves_of(shown, "kl") == {
        ("t0", "anchor to current"): [(1, 0.01), (2, 0.01)],
        ("t0", "behaviour to proximal"): [(1, 0.02), (2, 0.02)],
    }
    assert curves_of(shown, "grad_norm") == {("t0", ""): [(1, 0.75), (2, 0.75)]}
    assert curves_of(shown, "clip_share") == {
        ("t0", "clipped"): [(1, 12.5), (2, 12.5)],
        ("t0", "behaviour weight out of bounds"): [(1, 0.0), (2, 0.0)],
    }
    assert curves_of(shown, "time_parts") == {
        ("t0", "actor_train"): [(1, 30.0), (2, 30.0)],
        ("t0", "publish"): [(1, 20.0), (2, 20.0)],
    }
    assert curves_of(shown, "tokens") == {("t0", ""): [(1, 1000.0), (2, 1000.0)]}
    assert curves_of(shown, "device_tokens") == {
        ("t0", "training"): [(1, 600.0), (2, 600.0)],
        ("t0", "generation"): [(1, 400.0), (2, 400.0)],
    }
    assert curves_of(shown, "mfu") == {("t0", "actor_train"): [(1, 25.0), (2, 25.0)]}
    assert curves_of(shown, "memory") == {("t0", "largest"): [(1, 2.0), (2, 2.0)]}
    assert curves_of(shown, "steps") == {("t0", ""): [(1, 1.0), (2, 1.0)]}


def test_rewards_lengths_and_ages_have_distributions(tmp_path):
    spread = {f"{name}p{share}": share / 10 for name in ("reward/", "length/response_") for share in (10, 50, 90)}
    ages = [{"offpolicy/head_count/0": 3.0, "offpolicy/head_count/2": 1.0}, {"offpolicy/head_count/10": 4.0}]
    run = write_run(tmp_path / "t0", [step(1, **spread, **ages[0]), step(2, **spread, **ages[1])])
    shown = picture(read_runs([run]))
    assert curves_of(shown, "rewards")["t0", "90 % are below"] == [(1, 9.0), (2, 9.0)]
    assert curves_of(shown, "response_length")["t0", "median"] == [(1, 5.0), (2, 5.0)]
    assert curves_of(shown, "group_ages") == {
        ("t0", "0 behind"): [(1, 75.0), (2, 0.0)],
        ("t0", "2 behind"): [(1, 25.0), (2, 0.0)],
        ("t0", "10 behind"): [(1, 0.0), (2, 100.0)],
    }
    assert next(panel for panel in shown.panels if panel.name == "group_ages").stacked
    other = write_run(tmp_path / "t1", [step(1, **ages[0])])
    assert "group_ages" not in [panel.name for panel in picture(read_runs([run, other])).panels]


def test_the_learning_leads_and_the_time_can_be_left_out(tmp_path):
    names = [panel.name for panel in of_learning(picture(read_runs([write_run(tmp_path / "t0", [step(1)])]))).panels]
    assert names[0] == "reward"
    assert not {"time_shares", "tokens", "steps", "memory"} & set(names)


def test_chosen_metrics_have_a_panel_each(tmp_path):
    run = write_run(tmp_path / "t0", [step(1, **{"game/best": 0.5}), step(2, **{"game/best": 1.0})])
    shown = picture(read_runs([run]), ["game/best", "no/such", "reward/mean"])
    assert [panel.name for panel in shown.panels] == ["game/best", "reward/mean"]
    assert curves_of(shown, "game/best") == {("t0", ""): [(1, 0.5), (2, 1.0)]}
    assert shown.missing == ("no/such: no step or evaluation has it",)


def test_generation_is_idle_when_no_server_generates(tmp_path):
    """Step 1 lasts from 100 to 101. One server generates in 3 of its tenths, the other in 2; they share one tenth."""
    first, second = [100.0, 100.1, 100.2, 101.0], [100.2, 100.9]
    write_run(tmp_path / "t0", [step(1)], generating=[first, second])
    shown = picture(read_runs([tmp_path / "t0"]))
    assert curves_of(shown, "time_shares")["t0", "no generation"] == [(1, pytest.approx(60.0))]


def test_idle_generation_of_the_newest_step_is_unknown_during_a_run(tmp_path):
    write_run(tmp_path / "t0", [step(1), step(2)], generating=[[100.5, 101.3]])
    idle = {}
    for going_on in (False, True):
        runs = read_runs([tmp_path / "t0"], is_running=lambda path, going_on=going_on: going_on)
        assert runs[0].going_on == going_on
        idle[going_on] = [y for _, y in curves_of(picture(runs), "time_shares")["t0", "no generation"]]
    assert idle[False] == pytest.approx([90.0, 90.0])
    assert idle[True] == pytest.approx([90.0, math.nan], nan_ok=True)


def test_several_runs_have_distinct_names(tmp_path):
    dirs = [
        write_run(tmp_path / "e" / "a", [step(1)]),
        write_run(tmp_path / "f" / "a", [step(1)]),
        write_run(tmp_path / "f" / "b", [step(1), step(1, attempt=2), step(2, attempt=2)]),
    ]
    runs = read_runs([*dirs, dirs[0]])
    assert [(run.name, run.attempt, len(run.steps)) for run in runs] == [
        ("e/a", 1, 1),
        ("f/a", 1, 1),
        ("b, attempt 1", 1, 1),
        ("b, attempt 2", 2, 2),
    ]
    shown = picture(runs)
    assert curves_of(shown, "time_shares")["b, attempt 2", "trainer waits"] == [(1, 50.0), (2, 50.0)]
    assert not any(panel.stacked for panel in shown.panels)


def test_a_run_continued_from_a_checkpoint_is_one_curve(tmp_path):
    """Discarded steps are left out, and a repeated evaluation counts once."""
    evaluation = {"step": 2, "eval/greedy_reward": 0.5}
    records = [
        *(step(number) for number in (1, 2, 3)),
        {**evaluation, "attempt": 1},
        {**evaluation, "step": 3, "attempt": 1},
        step(3, attempt=2),  # continues from step 2 and dies before its first checkpoint
        {**evaluation, "attempt": 3, "eval/greedy_reward": 0.75},
        *(step(number, attempt=3) for number in (3, 4)),
        step(1, attempt=4),
    ]
    run_dir = write_run(tmp_path / "t0", records)
    (run_dir / "journal").mkdir(exist_ok=True)
    parents = {1: None, 2: (1, 2), 3: (1, 2), 4: None}
    lines = [{"event": "begun", "attempt": attempt, "from": parent} for attempt, parent in parents.items()]
    (run_dir / "journal" / "master.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = read_runs([run_dir], is_running=lambda _: True)
    assert [(run.name, run.attempt, run.going_on) for run in runs] == [
        ("t0, attempt 3", 3, False),
        ("t0, attempt 4", 4, True),
    ]
    assert [(record["step"], record["attempt"]) for record in runs[0].steps] == [(1, 1), (2, 1), (3, 3), (4, 3)]
    assert [(record["step"], record["eval/greedy_reward"]) for record in runs[0].evaluations] == [(2, 0.75)]


def test_names_are_as_long_as_needed():
    paths = [Path("/r/e/a"), Path("/r/f/a"), Path("/r/f/b"), Path("/s/f/a")]
    assert distinct_names(paths) == ["e/a", "r/f/a", "b", "s/f/a"]
    assert distinct_names([Path("/a"), Path("/r/a")]) == ["//a", "r/a"]


def test_broken_lines_are_skipped_and_invalid_numbers_become_nan(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [
        encoded(step(1, **{"reward/mean": math.nan})),
        "{broken",
        "[1]",
        '{"no": "step"}',
        encoded(step(2, **{"reward/mean": None})),
        encoded(step(3, **{"reward/mean": "text", "offpolicy/head_mean": math.inf})),
        encoded(step(4)),
        encoded(step(5))[:40],
    ]
    file.write_text("\n".join(lines))
    records, num_broken = read_records(file)
    assert ([record["step"] for record in records], num_broken) == ([1, 2, 3, 4], 3)
    shown = picture(read_runs([tmp_path]))
    reward, head = curves_of(shown, "reward"), curves_of(shown, "off_policyness")
    name = tmp_path.name
    assert [y for _, y in reward[name, "train batch, sampled"]] == pytest.approx([math.nan] * 3 + [0.4], nan_ok=True)
    assert [y for _, y in head[name, "mean"]] == pytest.approx([0.5, 0.5, math.nan, 0.5], nan_ok=True)


def test_a_missing_metric_leaves_its_panel_out_and_is_reported(tmp_path):
    missing = ("length/", "time/", "actor/", "offpolicy/head_max", "batch/", "mfu/", "memory/", "throughput/train")
    record = {key: value for key, value in step(1).items() if not key.startswith(missing)}
    shown = picture(read_runs([write_run(tmp_path / "t0", [record])]))
    assert [panel.name for panel in shown.panels] == ["reward", "off_policyness", "tokens", "device_tokens"]
    assert list(shown.missing) == [
        "Response length: no step or evaluation has it",
        "Entropy: no step or evaluation has it",
        "KL divergence (estimates): no step or evaluation has it",
        "Gradient norm: no step or evaluation has it",
        "Clip share: no step or evaluation has it",
        "Off-policyness of first tokens, oldest of the batch: no step has it",
        "Responses of several versions: no step or evaluation has it",
        "Time of a step: no step or evaluation has it",
        "Train steps: no step or evaluation has it",
    ]


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1, "rewa'])
def test_a_run_without_records_is_not_listed(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    assert read_runs([tmp_path]) == []
    assert picture([]).panels == ()


def test_an_evaluation_alone_is_shown(tmp_path):
    shown = picture(read_runs([write_run(tmp_path / "t0", [evaluation(0)])]))
    assert set(curves_of(shown, "reward")) == {("t0", "evaluation, sampled"), ("t0", "evaluation, greedy")}


def test_the_evaluations_of_a_step_are_shown_together(tmp_path):
    """The final weights and their moving average are evaluated at the same step, each with a record of its own."""
    records = [
        evaluation(3),
        {"step": 3, "attempt": 1, "eval/ema_greedy_reward": 0.7},
        {"step": 3, "attempt": 1, "eval/greedy_reward": 0.8},  # repeated: the newest value counts
    ]
    (run,) = read_runs([write_run(tmp_path / "t0", records)])
    (shown,) = run.evaluations
    assert (shown["eval/sampled_reward"], shown["eval/greedy_reward"], shown["eval/ema_greedy_reward"]) == (
        0.3,
        0.8,
        0.7,
    )


def test_sets_and_their_estimates_at_the_largest_k_have_curves(tmp_path):
    records = [
        step(1),
        {
            "step": 1,
            "attempt": 1,
            "eval/aime/sampled_reward": 0.1,
            "eval/aime/sampled_reward.algebra": 0.9,
            "eval/aime/sampled_pass@2": 0.2,
            "eval/aime/sampled_pass@16": 0.4,
            "eval/aime/sampled_pass@16_ci95": 0.1,
            "eval/aime/sampled_majority@16": 0.3,
        },
    ]
    shown = picture(read_runs([write_run(tmp_path / "t0", records)]))
    assert curves_of(shown, "reward")["t0", "aime, sampled"] == [(1.0, 0.1)]
    assert curves_of(shown, "at_k") == {
        ("t0", "aime, sampled, pass@16"): [(1.0, 0.4)],
        ("t0", "aime, sampled, majority@16"): [(1.0, 0.3)],
    }


def test_panels_with_negative_rewards_do_not_begin_at_zero(tmp_path):
    shown = picture(read_runs([write_run(tmp_path / "t0", [step(1, **{"reward/mean": -0.5})])]))
    assert [panel.bottom for panel in shown.panels] == [None] + [0.0] * 14


AGES = {
    "head": {"0": 30, "2": 10},
    "tail": {"0": 40},
    "by_length": [
        {"tokens_min": 1, "tokens_max": 1, "responses": 10, "head_mean": 0.0, "head_max": 0},
        {"tokens_min": 4, "tokens_max": 7, "responses": 30, "head_mean": 0.5, "head_max": 2},
    ],
}


def test_the_ages_of_a_run_that_has_ended_come_from_its_summary(tmp_path):
    write_run(tmp_path / "t0", [step(1)])
    (tmp_path / "t0" / "summary.json").write_text(json.dumps({"attempt": 1, "offpolicyness": AGES}))
    shown = picture(read_runs([tmp_path / "t0"]))
    assert [(panel.name, panel.x) for panel in shown.panels if "age" in panel.name] == [
        ("ages", "versions behind"),
        ("age_by_length", "response length from (tokens)"),
    ]
    assert curves_of(shown, "ages") == {
        ("t0", "first token"): [(0.0, 75.0), (2.0, 25.0)],
        ("t0", "last token"): [(0.0, 100.0)],
    }
    assert curves_of(shown, "age_by_length") == {
        ("t0", "mean"): [(1.0, 0.0), (4.0, 0.5)],
        ("t0", "oldest"): [(1.0, 0.0), (4.0, 2.0)],
    }


@pytest.mark.parametrize(
    "summary", ["", "{", "{}", json.dumps({"attempt": 2, "offpolicyness": AGES}), '{"attempt": 1, "steps": 1}']
)
def test_a_summary_of_another_attempt_or_without_ages_is_not_drawn(tmp_path, summary):
    write_run(tmp_path / "t0", [step(1)])
    (tmp_path / "t0" / "summary.json").write_text(summary)
    assert "ages" not in {panel.name for panel in picture(read_runs([tmp_path / "t0"])).panels}


def test_json_has_null_for_missing_values(tmp_path):
    write_run(tmp_path / "t0", [step(1, **{"reward/mean": math.nan}), step(2)])
    answer = json.loads(json.dumps(as_json(picture(read_runs([tmp_path / "t0"]))), allow_nan=False))
    assert answer["runs"] == [
        {
            "name": "t0",
            "run_dir": str(tmp_path / "t0"),
            "attempt": 1,
            "steps": 2,
            "evaluations": 0,
            "going_on": False,
            "broken_lines": 0,
        }
    ]
    assert answer["panels"][0]["series"] == [
        {"run": "t0", "name": "train batch, sampled", "x": [1, 2], "y": [None, 0.2]}
    ]


def test_running_mean():
    assert smoothed([1.0, 2.0, 6.0], 3) == [1.5, 3.0, 4.0]
    assert smoothed([1.0, math.nan, 3.0], 3) == pytest.approx([1.0, math.nan, 3.0], nan_ok=True)
    assert smoothed([1.0, 2.0], 1) == [1.0, 2.0]


def test_thinned_curves_keep_their_extremes(tmp_path):
    rewards = [math.sin(at) for at in range(5000)]
    rewards[1234], rewards[4321], rewards[77] = 9.0, -9.0, math.nan
    records = [step(at + 1, **{"reward/mean": reward}) for at, reward in enumerate(rewards)]
    (panel, *_) = picture(read_runs([write_run(tmp_path / "t0", records)])).panels
    (curve,) = thinned(panel, 500).curves
    assert len(curve.x) <= 500
    assert list(curve.x) == sorted(curve.x)
    assert dict(zip(curve.x, curve.y, strict=True))[1235] == 9.0
    assert min(curve.y) == -9.0
    assert thinned(panel, 5000) == panel


def test_the_timeline_counts_seconds_from_the_first_event(tmp_path):
    steps = [step(1, time=110.0), step(2, time=112.0)]
    run_dir = write_run(tmp_path / "t0", steps, generating=[[102.0 + at for at in range(2500)]])
    events = [
        {"event": "begun", "attempt": 1, "from": None, "time": 100.0},
        *({"event": "published", "version": version, "time": at} for version, at in ((0, 101.0), (1, 111.0))),
        *({"event": "rejected", "reason": "too_easy", "time": at} for at in (103.0, 103.5, 107.0)),
    ]
    (run_dir / "journal" / "master.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for name, record in (
        ("faults", {"event": "kill", "name": "master/0", "time": 105.0}),
        ("generation_server_1", {"time": 104.0, "tokens": 7, "version": "a0001-v00000003"}),
    ):
        (run_dir / "journal" / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    (run,) = read_runs([run_dir])
    shown = {panel.name: panel for panel in timeline(RunFiles(run_dir).read(), run)}

    def points(panel):
        return {curve.name: list(zip(curve.x, curve.y, strict=True)) for curve in shown[panel].curves}

    assert {curve.role: curve.name for curve in shown["versions"].curves} == {0: "published", 2: "generation_server/1"}
    rates = points("generated")
    assert rates["generation_server/0"][0] == (2.0, 5.0)
    # A second, although each point is the sum of two
    assert {rate for _, rate in rates["generation_server/0"]} == {5.0}
    assert rates["generation_server/1"] == [(4.0, 7.0)]
    assert points("versions") == {"published": [(1.0, 0), (11.0, 1)], "generation_server/1": [(4.0, 3)]}
    assert points("rejected") == {
        "too_easy": [(3.0, 2), (7.0, 3)],  # so far
        "attempts, restarts, faults": [(0.0, 0.0), (5.0, 0.0)],
    }
    assert [at for at, _ in points("tokens")[""]] == [10.0, 12.0]


def test_a_timeline_without_events_begins_at_the_first_step(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "t0", [step(1, time=110.0), step(2, time=112.0)])])
    shown = {panel.name: panel for panel in timeline(RunFiles(run.run_dir).read(), run)}
    assert {name: list(panel.curves[0].x) for name, panel in shown.items()} == {
        "tokens": [0.0, 2.0],
        "time_shares": [0.0, 2.0],
    }
    assert timeline(RunFiles(tmp_path).read(), None) == []


def test_tasks_have_a_panel_with_their_evaluations(tmp_path):
    records = [
        step(1, **{"count/sort": 4.0, "reward/sort": 0.5}),
        evaluation(1, **{"eval/hard/greedy_reward.sort": 0.25}),
    ]
    shown = picture(read_runs([write_run(tmp_path / "t0", records, generating=[[101.0]])]))
    assert curves_of(shown, "reward_by_task") == {("t0", "sort"): [(1, 0.5)], ("t0", "hard, greedy, sort"): [(1, 0.25)]}
    assert shown.missing == ()
