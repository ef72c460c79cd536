"""Results of evaluations by prompt: written by the master, pruned, and shown by `inspect`."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from asyncrl.config.schema import EvalConfig, EvalSetConfig, PromptSourceConfig
from asyncrl.data.evaluation_files import PromptResult, list_results, read_results, write_results
from tests.support.master import LIMIT_S, MasterParts, PlayedManager, PlayedWorkers, master_config


def result(**fields: object) -> PromptResult:
    about = {"eval_set": "aime", "mode": "sampled", "position": 0, "line": 7, "task": "default"}
    return PromptResult(**{**about, **fields})  # type: ignore[arg-type]


def test_results_are_json_lines_and_read_back(tmp_path: Path) -> None:
    good = result(rewards=[1.0, 0.0], response_lengths=[3, 4], answers=["[7]", None], versions=[(2, 2), (2, 3)])
    failed = result(position=1, line=2, reason="reward_error")
    write_results(tmp_path, "a1-s4", [good, failed], keep=2)
    (file,) = list_results(tmp_path)
    assert file == tmp_path / "evaluations" / "a1-s4.jsonl"
    assert json.loads(file.read_text().splitlines()[1]) == {
        "set": "aime",
        "mode": "sampled",
        "position": 1,
        "line": 2,
        "task": "default",
        "rewards": [],
        "response_lengths": [],
        "answers": [],
        "versions": [],
        "reason": "reward_error",
    }
    assert read_results(file) == [good, failed]


def test_only_the_newest_files_are_kept(tmp_path: Path) -> None:
    for number in range(5):
        write_results(tmp_path, f"a1-s{number}", [result()], keep=2)
        os.utime(tmp_path / "evaluations" / f"a1-s{number}.jsonl", (number, number))
    assert [file.stem for file in list_results(tmp_path)] == ["a1-s3", "a1-s4"]
    write_results(tmp_path, "a1-s5", [result()], keep=0)
    assert list_results(tmp_path) == []


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1 is no result of a prompt: .*set"):
        read_results(tmp_path / "x.jsonl")


async def test_the_master_writes_the_results_of_each_prompt(tmp_path: Path) -> None:
    manager = PlayedManager()
    manager.may_end.set()
    source = PromptSourceConfig(path=str(tmp_path / "p.jsonl"))
    sets = {"one": EvalSetConfig(prompts=source, num_prompts=2, modes=["greedy"])}
    async with AsyncExitStack() as opened:
        config = master_config(tmp_path, eval=EvalConfig(sets=sets, keep=1))
        master = MasterParts(config, opened, manager=manager, caller=PlayedWorkers())
        for name in ("", "end"):
            master.evaluations.begin(["one"], name, prefix="ema_")
            await asyncio.wait_for(master.evaluations.all_over(), LIMIT_S)
    (file,) = list_results(tmp_path)
    assert file.stem == "a1-end"
    found = read_results(file)
    assert [(one.eval_set, one.mode, one.position, one.line, one.rewards, one.versions) for one in found] == [
        ("one", "ema_greedy", at, at + 1, [0.5], [(0, 2)]) for at in range(2)
    ]


def test_inspect_shows_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("")
    write_results(
        tmp_path, "a1-s4", [result(rewards=[1.0, 0.0], response_lengths=[3, 4], answers=["[7]", None])], keep=2
    )
    write_results(tmp_path, "a1-s8", [result(reason="reward_error")], keep=2)
    os.utime(tmp_path / "evaluations" / "a1-s4.jsonl", (1, 1))
    assert main(["inspect", str(tmp_path), "--evaluation"]) == 0
    assert "reward_error" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--evaluation", "a1-s4"]) == 0
    shown = capsys.readouterr().out
    assert "0.500" in shown
    assert "[7], none" in shown
    assert main(["inspect", str(tmp_path), "--evaluation", "a1-s4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["answers"] == ["[7]", None]
    assert main(["inspect", str(tmp_path), "--evaluation", "a1-s9"]) == 1
    assert "no results of evaluation 'a1-s9'; it has a1-s4, a1-s8" in capsys.readouterr().out
