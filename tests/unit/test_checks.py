"""The table of checks: the contract that each check keeps, and a check that is one file and one row."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_check import OWNER, ROW

from asyncrl.cli import checks as table
from asyncrl.cli import main as cli
from asyncrl.cli.checks import CHECKS, checks_of
from asyncrl.config.fields import Wrong
from asyncrl.config.schema import ExperimentConfig
from asyncrl.launch.checks.checklist import FIELDS, PROCESSES, Case, Check, make_checks
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import plan
from asyncrl.testing.runs import make_tiny_run

ROWS = [*CHECKS, ROW]
NAMES = [f"{number}-{check.about}" for number, check in enumerate(ROWS)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    return load_experiment(make_tiny_run(tmp_path_factory.mktemp("run"), num_prompts=64))


def files(folder: str) -> set[Path]:
    """All files but the bytecode of users' modules, which Python writes when it imports them."""
    return {file for file in Path(folder).parent.rglob("*") if "__pycache__" not in file.parts}


@pytest.mark.parametrize("check", [pytest.param(row, id=name) for row, name in zip(ROWS, NAMES, strict=True)])
def test_the_contract_of_a_check(check: Check, config: ExperimentConfig) -> None:
    before = files(config.fileroot)
    case = Case(config, plan(config, attempt=1, num_prompts=64), devices=[])
    earlier = [row for row in ROWS[: ROWS.index(check)] if row.gives]
    report = make_checks([*earlier, check], case)
    assert report.problems == []
    if check.when(config):
        assert check.about not in report.not_made
    for finding in report.findings:
        assert finding.name
        assert finding.value
        assert finding.remedy or finding.state == "ok"
        assert finding.place == check.place
        assert finding.cost == check.cost
    assert files(config.fileroot) == before  # it writes nothing
    for field in check.reads:
        path = field.split(".")
        value: object = config
        for name in path:
            value = getattr(value, name)  # the field exists
        assert make_checks([check], case, [Wrong(field, "known")]).problems == ["known"]  # it is skipped


def test_each_fact_is_given_before_it_is_needed() -> None:
    given = {FIELDS, PROCESSES}
    for check in ROWS:
        assert set(check.needs) <= given
        given.add(check.gives)


def test_a_check_without_its_fact_is_named_and_not_made(config: ExperimentConfig) -> None:
    report = make_checks([ROW], Case(config), [Wrong("train", "train=1: no")])
    assert (report.not_made, report.findings[1:]) == (["owner"], [])
    assert make_checks([ROW], Case(config)).facts == {FIELDS, OWNER}


def test_check_and_run_take_a_new_row(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "CHECKS", (*CHECKS, ROW))
    assert ROW in checks_of("files", cost="short")
    file = str(Path(config.fileroot).parent / "tiny.yaml")
    assert cli.main(["run", file, "--dry-run", "experiment=root-1"]) == 0
    assert "owner: root; set experiment=<your name>-..." in capsys.readouterr().out
    for command in (["check"], ["run", "--dry-run"]):
        assert cli.main([command[0], file, *command[1:], "experiment=nameless"]) == 2
        assert "experiment='nameless': names no owner" in capsys.readouterr().out.replace("\n", " ")
