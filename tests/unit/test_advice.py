"""A run that does not learn is told why; a healthy run gets no advice."""

import json

import pytest
from rich.console import Console

from asyncrl.cli.advice import LEAST_STEPS, Advice, AdviceNews
from asyncrl.cli.commands.plot import _notes
from asyncrl.cli.commands.run import JsonView
from asyncrl.cli.curves import picture
from asyncrl.cli.progress import RunView, step_line
from asyncrl.cli.run_files import read_runs
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


def test_a_task_that_is_nearly_solved_has_equal_groups():
    """As at the end of the quickstart, and after a resume there."""
    solved = records([0.93] * 30, reward__equal_group_share=0.8, actor__entropy=0.01)
    assert names(solved) == []
    assert "too easy" in Advice(records([0.97] * 30, reward__equal_group_share=0.95)).symptoms()[0].text


def test_rejected_prompts_are_told_with_the_remedy_of_the_main_reason():
    found = records(FLAT)
    for at, record in enumerate(found):
        record |= {"rejected/prompt_too_long": 60.0 * at, "rejected/reward_error": 1.0}
    (symptom,) = Advice(found).symptoms()
    assert symptom.text.startswith("48% of the prompts were rejected, most of them as prompt_too_long. Leave long")


def test_advice_is_repeated_when_the_steps_have_doubled():
    news = AdviceNews()
    said = [record["step"] for record in records(FLAT * 2, **EQUAL) if news.new(record)]
    assert said == [LEAST_STEPS, 2 * LEAST_STEPS, 4 * LEAST_STEPS]


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
