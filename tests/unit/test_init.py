"""`asyncrl-launch init` writes complete and valid files. (tests/end_to_end/test_wheel.py runs them.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli.commands.init import shipped_examples
from asyncrl.cli.main import main
from asyncrl.config.reference import schema_text
from asyncrl.launch.experiment import load_experiment
from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model
from asyncrl.testing.warm_start import write_lines

ROOT = Path(__file__).parents[2]
TASK_FILES = {"README.md", "config.yaml", "make.py", "reward.py", "schema.json"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_the_new_task_passes_check_once_it_has_a_model_and_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", "my_task"]) == 0
    commands = "cd my_task && asyncrl-launch prepare config.yaml && asyncrl-launch run config.yaml"
    assert f"  {commands}\n" in capsys.readouterr().out
    folder = Path("my_task").absolute()
    assert names(folder) == TASK_FILES
    monkeypatch.chdir(folder)
    make_tiny_model(folder / "model", tokenizer=make_char_tokenizer(None), hidden_size=32, num_layers=1)
    for split in ("train", "eval"):
        write_lines(folder / "data" / f"{split}.jsonl", [{"prompt": "S21=", "answer": "12"}] * 512)
    assert main(["check", "config.yaml"]) == 0, capsys.readouterr().out


def test_all_examples_are_shipped_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    examples = {file.parent.name for file in (ROOT / "examples").glob("*/README.md")}
    assert shipped_examples().keys() == examples
    assert main(["init", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"].keys() == examples
    assert main(["init", "--list"]) == 0
    assert "word_problems   Word problems: your own model, data, rewards" in capsys.readouterr().out


@pytest.mark.parametrize("example", sorted(shipped_examples()))
def test_files_of_each_example_are_copied(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders are not copied, because they hold the results of runs."""
    assert main(["init", "deep/copy", "--example", example, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["example"] == example
    assert Path(answer["folder"]) == Path("deep/copy").absolute()
    expected = {file.name for file in (ROOT / "examples" / example).iterdir() if file.is_file()}
    expected |= {"schema.json"} if any(name.endswith(".yaml") for name in expected) else set()
    assert set(answer["files"]) == names(Path("deep/copy")) == expected
    assert answer["next"][0] == "cd deep/copy"
    assert len(answer["next"]) == (3 if "config.yaml" in expected else 1)


def test_each_config_names_the_schema_beside_it() -> None:
    assert main(["init", "copy", "--example", "word_problems"]) == 0
    for config in ("config.yaml", "gsm8k.yaml"):
        (first, *others) = Path("copy", config).read_text(encoding="utf-8").splitlines()
        assert first == "# yaml-language-server: $schema=schema.json"
        assert not any("$schema" in line for line in others)
    assert Path("copy/schema.json").read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("name", ["my_task", "007", "on", "a b"])
def test_the_experiment_is_named_after_the_folder(name: str) -> None:
    assert main(["init", name]) == 0
    assert load_experiment(Path(name) / "config.yaml").experiment == name


def test_an_empty_folder_is_used_and_any_other_path_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["init", "empty"]) == 0
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "full", "file"):
        capsys.readouterr()
        assert main(["init", name]) == 2
        assert f"NAME '{name}': it exists and is not an empty folder; choose another name" in capsys.readouterr().out
    assert names(tmp_path / "full") == {"precious"}
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_name_and_an_unknown_example_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 2
    assert "NAME is missing; name the folder to write" in capsys.readouterr().out
    assert main(["init", "x", "--example", "maths"]) == 2
    told = capsys.readouterr().out
    assert (
        "--example maths: no such example; did you mean 'math'? choose one of bad_batch, code, grpo, long_tail, math"
        in told
    )
    assert not Path("x").exists()


def test_a_folder_that_cannot_be_created_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert main(["init", "file/task"]) == 2
    assert "NAME 'file/task' cannot be created: Not a directory; choose another folder" in capsys.readouterr().out
