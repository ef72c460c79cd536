"""A run that does not learn is told why; a healthy run gets no advice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.cli.advice import LEAST_STEPS, Advice, AdviceNews, advise
from asyncrl.cli.commands.plot import _notes
from asyncrl.cli.commands.run import JsonView
from asyncrl.cli.curves import picture
from asyncrl.cli.progress import RunView, step_line
from asyncrl.cli.run_files import Run, Tenths, read_runs
from asyncrl.runtime.metrics import METRICS_FILE, JsonLinesWriter

HEALTHY = {
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/equal_group_share": 0.4,
    "length/truncated_share": 0.0,
    "actor/entropy": 0.4,
    "batch/num_prompts": 64.0,
}


def records(rewards, **changes):
    """The records of train steps with these mean rewards."""
    shown = {key.replace("__", "/"): value for key, value in changes.items()}
    return [{"step": step, "reward/mean": reward, **HEALTHY, **shown} for step, reward in enumerate(rewards, 1)]


def names(found):
    return [symptom.name for symptom in Advice(found).symptoms()]


FLAT = [0.1, 0.12, 0.09] * 10
RISING = [0.1 + 0.02 * step for step in range(30)]
EQUAL = {"reward__equal_group_share": 0.9}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        (EQUAL, ["equal_groups"]),
        ({"reward__equal_group_share": 0.72}, ["equal_groups"]),
        ({"reward__equal_group_share": 0.65}, []),
        ({"length__truncated_share": 0.6}, ["truncated"]),
        ({"actor__entropy": 0.01}, ["entropy"]),
        ({"reward__max": 0.0}, ["same_reward"]),
        ({"reward__max": float("nan"), "reward__min": float("nan")}, []),
        ({"actor__entropy": None, "length__truncated_share": None, "reward__equal_group_share": None}, []),
        ({**EQUAL, "length__truncated_share": 0.9}, ["equal_groups", "truncated"]),
    ],
)
def test_a_flat_reward_has_a_reason(changes, found):
    assert names(records(FLAT, **changes)) == found


def test_nothing_is_said_of_a_run_that_learns_or_has_just_begun():
    signs = {**EQUAL, "length__truncated_share": 0.9, "actor__entropy": 0.0}
    assert names(records(RISING, **signs)) == []
    assert names(records(FLAT[: LEAST_STEPS - 1], **signs)) == []
    assert names(records(FLAT[:LEAST_STEPS], **signs)) != []
    assert names(records([0.1] * 6 + [0.2] * 6, **signs)) == []  # the second half is compared with the first


def test_a_task_that_is_nearly_solved_has_equal_groups():
    """As at the end of the quickstart, and after a resume there."""
    solved = records([0.93] * 30, reward__equal_group_share=0.8, actor__entropy=0.01)
    assert names(solved) == []
    below_zero = records([0.7] * 30, reward__min=-1.0, reward__equal_group_share=0.8, actor__entropy=0.01)
    assert names(below_zero) == []
    assert "too easy" in Advice(records([0.97] * 30, reward__equal_group_share=0.95)).symptoms()[0].remedy


def test_rejected_prompts_are_told_with_the_remedy_of_the_main_reason():
    found = records(FLAT)
    for at, record in enumerate(found):
        record |= {"rejected/prompt_too_long": 60.0 * at, "rejected/reward_error": 1.0}
    (symptom,) = Advice(found).symptoms()
    assert symptom.line.startswith(
        "the reward does not rise: 48% of the prompts were rejected, most of them as prompt_too_long. Leave long"
    )
    found[-1]["rejected/odd"] = 6000.0  # a reason that is new, and has no remedy of its own
    (symptom,) = Advice(found).symptoms()
    assert "most of them as odd. See the log" in symptom.line


def test_advice_is_repeated_when_the_steps_have_doubled():
    news = AdviceNews()
    said = [record["step"] for record in records(FLAT * 2, **EQUAL) if news.new(record)]
    assert said == [LEAST_STEPS, 2 * LEAST_STEPS, 4 * LEAST_STEPS]


def test_another_symptom_is_told_when_it_appears():
    news, said = AdviceNews(), []
    for record in records(FLAT, **EQUAL):
        if record["step"] >= 10:
            record["length/truncated_share"] = 1.0
        said += [(record["step"], "cut off" in line) for line in news.new(record)]
    assert said == [(12, False), (14, True), (24, False), (28, True)]


def test_a_step_line_has_the_symptoms_also_on_a_narrow_terminal():
    record = {**records([0.1])[0], "version": 1, "time/train_s": 1.0}
    assert "equal groups 90%" in step_line(record, 60, 60, briefs=["equal groups 90%"])
    assert "version" not in step_line(record, 60, 60, briefs=["equal groups 90%"])


def test_run_and_plot_tell_the_advice(tmp_path, capsys):
    views = (RunView(tmp_path, 30, Console(width=300)), JsonView(tmp_path))
    with JsonLinesWriter(tmp_path / METRICS_FILE) as writer:
        for record in records(FLAT, **EQUAL):
            writer.write({"attempt": 1, "time": float(record["step"]), **record})
    for view in views:
        view.turn(())
    out = capsys.readouterr().out
    text, notices = out.partition('{"event"')[0], [json.loads(line) for line in out.splitlines() if line[0] == "{"]
    assert "warning: step 12: the reward does not rise: in 90% of the groups all rewards are equal" in text
    assert "reward 0.090  equal groups 90%" in text
    assert any("in 90% of the groups" in entry["text"] for entry in notices if entry["event"] == "notice")
    shown = picture(read_runs([tmp_path], lambda _: False))
    assert any("the reward does not rise: in 90%" in note for note in _notes(shown, [tmp_path]))
    assert "without_signal" in [panel.name for panel in shown.panels]


# ------------------------------------------------------------------------------------------- the data, and the idle side


@pytest.mark.parametrize(
    ("changes", "title", "figure"),
    [
        (
            {"actor__cap_share": 0.06},
            "sampler and trainer differ",
            "6% of the trained tokens have a behaviour weight out of",
        ),
        (
            {"mismatch__share": 0.07},
            "sampler and trainer differ",
            "7% of the tokens of a first step have another logprob",
        ),
        ({"actor__cap_share": 0.04, "mismatch__share": 0.04}, "", ""),
    ],
)
def test_sampler_and_trainer_that_differ_are_told_also_if_the_reward_rises(changes, title, figure):
    found = Advice(records(RISING, **changes)).symptoms()
    assert [one.title for one in found] == [title] * bool(title)
    assert all(one.figure.startswith(figure) and one.remedy for one in found)


def test_the_largest_mismatch_of_the_attempts_is_told():
    found = records(RISING)
    found[0]["mismatch/share"], found[20]["mismatch/share"] = 0.07, 0.01
    assert [one.brief for one in Advice(found).symptoms()] == ["mismatch 7%"]


def test_rewards_that_time_out_are_slow():
    found = records(RISING)
    for at, record in enumerate(found):
        record["rejected/reward_timeout"] = float(at)
    (symptom,) = Advice(found).symptoms()
    assert symptom.line.startswith("slow rewards: 1.5% of the prompts were rejected because a reward exceeded")


def timed_run(data_s, train_s, weights_s, generates, *, devices=(2, 2), servers=True):
    """Steps of which the trainer waits for data, trains, and waits for weights. generates(tenths since the step began): whether
    a server generates then. devices: of training, and of generation."""
    step_s, steps, generating = data_s + train_s + weights_s, records(RISING), Tenths()
    for at, record in enumerate(steps):
        record |= {"time": step_s * (at + 1), "time/step_s": step_s, "time/train_s": train_s}
        record |= {"time/wait_data_s": data_s, "time/wait_weights_s": weights_s}
        for kind, number in zip(("train", "generated"), devices, strict=True):
            record |= {
                f"throughput/{kind}_tokens_per_s": 10.0 * number,
                f"throughput/{kind}_tokens_per_s_per_device": 10.0,
            }
        for tenth in range(round(10 * step_s)) if servers else ():
            if generates(tenth):
                generating.add(round(10 * step_s * at) + tenth)
    return Run("r", Path(), 1, steps, [], generating)


def always(_):
    return True


@pytest.mark.parametrize(
    ("run", "title", "figure", "remedy"),
    [
        # The trainer works half of the time: 4 devices do the work of 2. With 5 of 8 devices generation takes 4/5 of the time,
        # and training on 3 takes 2/3
        (
            timed_run(5.0, 5.0, 0.0, always, devices=(4, 4)),
            "the trainer is idle",
            "waits for data 50% of the time; no server generates in 0%",
            "about 5 should generate and 3 train; now 4 and 4 do. A step then takes about 80% of its time",
        ),
        # With 3 of 4 devices training on one would take as long as a step takes now
        (timed_run(5.0, 5.0, 0.0, always), "the trainer is idle", "50%", "Give generation more devices"),
        # The servers work 40 % of the time: 6 devices do the work of 2.4, so of 8 devices about 4 should generate
        (
            timed_run(0.0, 10.0, 0.0, lambda tenth: tenth < 40, devices=(2, 6)),
            "the servers are idle",
            "no server generates in 60% of the time; the trainer waits for data 0%",
            "Of these 8 devices, about 4 should generate and 4 train; now 6 and 2 do",
        ),
        (
            timed_run(5.0, 5.0, 0.0, always, devices=(1, 1)),
            "the trainer is idle",
            "50%",
            "Give generation more devices",
        ),
        (
            timed_run(0.0, 7.0, 3.0, always),
            "the trainer is idle",
            "waits 30% of the time until the previous",
            "faster disk",
        ),
        (timed_run(6.0, 4.0, 0.0, lambda tenth: tenth < 60), "the sides alternate", "60%", "max_head_offpolicyness=1"),
        # Servers generate in a fifth of the training time: the sides do not only alternate
        (
            timed_run(5.0, 5.0, 0.0, lambda tenth: tenth < 50 or tenth % 5 == 0),
            "the trainer is idle",
            "50% of the time; no server generates in 40%",
            "",
        ),
        (
            timed_run(3.0, 7.0, 0.0, lambda tenth: tenth < 30 or tenth % 5 == 0),
            "the servers are idle",
            "in 56% of the time; the trainer waits for data 30%",
            "",
        ),
        # It generates for 2 s, and then the rewards take 4 s
        (
            timed_run(6.0, 4.0, 0.0, lambda tenth: tenth < 20),
            "slow rewards",
            "in 40% of the time",
            "Rewards, agents or tools",
        ),
        (timed_run(1.0, 8.5, 0.5, lambda tenth: tenth % 10), None, "", ""),
        (timed_run(1.5, 8.5, 0.0, lambda tenth: tenth >= 15), None, "", ""),
        (timed_run(9.0, 1.0, 0.0, always, servers=False), None, "", ""),  # mode=sync
        (timed_run(0.45, 0.45, 0.0, always), None, "", ""),  # too short to tell
    ],
)
def test_the_idle_side_is_named_with_its_share_and_what_would_help(run, title, figure, remedy):
    found = advise(run)
    assert [one.title for one in found] == [title] * (title is not None)
    for one in found:
        assert figure in one.figure
        assert remedy in one.remedy


def test_steps_after_the_newest_entry_of_the_journals_are_unknown():
    run = timed_run(1.0, 8.5, 0.5, always)
    later = [{**record, "time": record["time"] + 50.0} for record in run.steps[-5:]]
    assert advise(replace(run, steps=[*run.steps, *later])) == []


def test_the_split_counts_the_devices_of_the_newest_step():
    run = timed_run(5.0, 5.0, 0.0, always, devices=(4, 4))
    for record in run.steps[:-1]:
        record["throughput/train_tokens_per_s"] = 10.0
    assert "now 4 and 4 do" in advise(run)[0].remedy


def test_advice_survives_records_with_missing_values():
    run = timed_run(5.0, 5.0, 0.0, always)
    for key in sorted(run.steps[-1]):
        steps = [*run.steps[:-1], {name: value for name, value in run.steps[-1].items() if name != key}]
        advise(Run("r", Path(), 1, steps, [], run.generating))
