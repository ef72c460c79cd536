"""Configs of the examples: a copy of an example's folder runs without the repository. tests/processes imports the copies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl.launch.experiment import load_experiment

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(folder.parent for folder in (ROOT / "examples").glob("*/README.md"))
CONFIGS = {  # example -> config that runs it from the repository's root
    "sloppy_sorter": "quickstart_cpu",
    "long_tail": "long_tail_cpu",
    "math": "async_ppo_math",
}


@pytest.fixture(params=EXAMPLES, ids=lambda folder: folder.name)
def copied(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of an example's files, without siblings, as the current folder."""
    folder = tmp_path / "my_copy"
    folder.mkdir()
    for file in request.param.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    monkeypatch.chdir(folder)
    return folder


def test_configs_of_a_copy_refer_only_to_files_of_the_copy(copied: Path) -> None:
    for file in copied.glob("*.yaml"):
        config = load_experiment(file)
        assert "examples/" not in file.read_text(encoding="utf-8")
        assert "launcher/" not in file.read_text(encoding="utf-8")
        for task in config.rollout.tasks.values():
            for spec in (task.reward, task.env, task.agent):
                location = spec.rpartition(":")[0]
                assert not location.endswith(".py") or (copied / location).is_file()


@pytest.mark.parametrize(("example", "name"), CONFIGS.items(), ids=CONFIGS)
def test_configs_of_examples_equal_those_of_the_repositorys_root(example: str, name: str, tmp_path: Path) -> None:
    """All fields are equal except for the folder in which paths begin and the location of SGLang."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    text = text.replace(f"--out examples/{example}", "--out .").replace(f"examples/{example}/", "")
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    sglang = [] if "sglang" not in text else ["generation.python=python"]
    own = load_experiment(ROOT / "examples" / example / "config.yaml", sglang)
    assert own == load_experiment(tmp_path / "config.yaml", sglang)
