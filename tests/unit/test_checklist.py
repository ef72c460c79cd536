"""All problems of a config are reported at once; a check that cannot be made is named."""

import json

import pytest

from asyncrl.cli import main as cli
from asyncrl.config.fields import Wrong, overlap
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.launch.checks.checklist import FIELDS, MODEL, Case, Check, Finding, make_checks

CONFIG = """\
model_path: {folder}/nowhere
fileroot: {folder}/runs
prompts: {{path: {folder}/missing.jsonl}}
rollout: {{tasks: {{default: {{reward: "{folder}/reward.py:rewrd"}}, other: {{env: "{folder}/env.py:Env"}}}}}}
train: {{batch_size: 0}}
wandb: {{mode: ofline}}
"""
TOLD = (
    "train.batch_size=0: must be at least 1",
    "wandb.mode='ofline': did you mean 'offline'?",
    "there is no config.json",
    "rollout.tasks.default.reward=",
    "rollout.tasks.other.env=",
    "missing.jsonl",
    "not checked before these are fixed: weights, tokenizer, ",
)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "reward.py").write_text("def reward(*_):\n    return 1.0\n")
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file


@pytest.mark.parametrize("command", [["check"], ["run"], ["run", "--dry-run"]])
def test_all_problems_are_reported_at_once(config, capsys, command):
    assert cli.main([command[0], str(config), *command[1:]]) == 2
    out = capsys.readouterr().out
    assert [text for text in TOLD if text not in out] == []
    if command == ["check"]:
        assert "6 problems of the config" in out.splitlines()[-1]


def test_check_reports_all_problems_as_json(config, capsys):
    assert cli.main(["check", str(config), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["error"]["kind"], len(answer["problems"])) == (False, "config", 6)
    assert [text for text in TOLD if text not in answer["error"]["message"]] == []
    assert answer["machine"]


def test_a_reward_function_is_called_although_the_model_is_missing(config, capsys):
    """The tasks and the prompts are usable, so a reward that raises is found with the other problems."""
    folder = config.parent
    (folder / "p.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    (folder / "reward.py").write_text("def reward(*_):\n    raise KeyError('digits')\n")
    tasks = f"rollout.tasks={{default: {{reward: '{folder}/reward.py:reward'}}}}"
    config.write_text(
        f"model_path: {folder}/nowhere\nprompts: {{path: {folder}/p.jsonl}}\n"
        f"rollout: {{tasks: {{default: {{reward: '{folder}/reward.py:reward'}}}}}}\n"
    )
    assert cli.main(["check", str(config), tasks]) == 2
    out = capsys.readouterr().out
    assert "KeyError: 'digits'" in out
    assert "there is no config.json" in out
    assert "has only 1 prompts" in out


def test_a_check_is_made_although_another_fails():
    def fails(case):
        yield ConfigError("first")
        raise ConfigError("second")

    checks = (
        Check("a", fails, gives=MODEL),
        Check("b", lambda case: [ConfigError("third"), Finding("x", "warn", "odd")]),
        Check("c", fails, needs=(MODEL,)),
        Check("d", fails, reads=("train.ppo",)),
        Check("e", fails, needs=(FIELDS,)),
        Check("f", fails, when=lambda config: False),
        Check("g", lambda case: None, gives="g"),
    )
    report = make_checks(checks, Case(ExperimentConfig()), [Wrong("train.ppo.epochs", "train.ppo.epochs=0: no")])
    assert report.problems == ["train.ppo.epochs=0: no", "first", "second", "third"]
    assert [warning.name for warning in report.of("files")] == ["x"]
    assert report.not_made == ["c", "e"]
    assert report.facts == {"g"}
    with pytest.raises(ConfigError, match="first\nsecond\nthird\nnot checked before these are fixed: c, e"):
        report.refuse()


@pytest.mark.parametrize(
    ("fields", "wrong", "reads"),
    [
        (["train"], ["train.ppo"], True),
        (["train.ppo.epochs"], ["train"], True),
        (["train"], ["trainer"], False),
        (["train.p"], ["train.ppo"], False),
        ([], ["train"], False),
    ],
)
def test_a_check_reads_a_field_of_its_section_or_around_it(fields, wrong, reads):
    assert overlap(fields, wrong) is reads
