"""Which of the user's files a run reads, and which of their changes it notices."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.schema import ExperimentConfig, PromptSourceConfig, RolloutConfig, TaskConfig
from asyncrl.config.sources import sources_of
from asyncrl.launch import inputs
from asyncrl.launch.inputs import changes, read_inputs, save_inputs, saved_inputs


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "reward.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("WORTH = 1\n")
    return ExperimentConfig(
        model_path=str(tmp_path / "model"),
        prompts=PromptSourceConfig(path=str(tmp_path / "prompts.jsonl")),
        rollout=RolloutConfig(tasks={"default": TaskConfig(reward=f"{tmp_path}/reward.py:reward")}),
    )


def test_equal_content_is_no_change(config: ExperimentConfig, tmp_path: Path) -> None:
    before = read_inputs(config)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    (tmp_path / "model").symlink_to("elsewhere")
    os.utime(tmp_path / "prompts.jsonl", (1.0, 1.0))
    (tmp_path / "model" / "README.md").write_text("other")
    save_inputs(before, tmp_path)
    assert saved_inputs(tmp_path) == before
    assert changes(before, read_inputs(config)) == []


def test_each_kind_of_change_is_named(config: ExperimentConfig, tmp_path: Path) -> None:
    before = read_inputs(config)
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    (tmp_path / "model" / "chat_template.jinja").write_text("x")
    (tmp_path / "prompts.jsonl").unlink()
    (tmp_path / "beside.py").write_text("WORTH = 2\n")
    template, config_json, prompts, beside = changes(before, read_inputs(config))
    assert template.startswith(f"model_path: {tmp_path}/model/chat_template.jinja was added (modified 2")
    assert config_json.startswith(f"model_path: {tmp_path}/model/config.json was changed (2 bytes before, 8 now; modif")
    assert prompts == f"prompts.path: {tmp_path}/prompts.jsonl was removed, or cannot be read"
    assert beside.startswith(f"rollout.tasks.default.reward: {tmp_path}/beside.py was changed (10 bytes; modified 2")


def test_a_large_file_is_compared_by_size_and_time(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 1)
    before = read_inputs(config)
    assert changes(before, read_inputs(config)) == []
    os.utime(tmp_path / "model" / "model.safetensors", (1.0, 1.0))
    (told,) = changes(before, read_inputs(config))
    assert told.startswith(
        f"model_path: {tmp_path}/model/model.safetensors may have changed: it has another modification"
    )


def test_another_file_of_a_field_is_not_compared(config: ExperimentConfig, tmp_path: Path) -> None:
    """`resume` names the field itself."""
    (tmp_path / "others.jsonl").write_text('{"prompt": "b"}\n')
    other = replace(config, prompts=replace(config.prompts, path=str(tmp_path / "others.jsonl")))
    assert changes(read_inputs(config), read_inputs(other)) == []


def test_code_counts_with_all_that_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages, relative imports and imports in functions; not Python's own modules and installed packages."""
    package = tmp_path / "my_package"
    (package / "inner").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "rewards.py": "import json, numpy, asyncrl\nfrom . import near\nfrom .inner.deep import worth\n",
        "near.py": "def late():\n    import my_package.later as later\n",
        "later.py": "",
        "unused.py": "",
        "inner/__init__.py": "from ..upper import name\n",
        "inner/deep.py": "import broken\n",
        "upper.py": "name = 1\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    (tmp_path / "broken.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    found = {str(file.relative_to(tmp_path)) for file in sources_of("my_package.rewards:reward")}
    assert found == {f"my_package/{name}" for name in files if name != "unused.py"} | {"broken.py"}
    assert sources_of("asyncrl.rollout.agent:RewardEnv") == sources_of("json:loads") == []
    assert sources_of(f"{tmp_path}/gone.py:reward") == [tmp_path / "gone.py"]
