"""configs/async_ppo_math.yaml and examples/math: missing parts are named, and three overrides make the config complete."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import constants

from asyncrl.cli import main as cli
from asyncrl.config.schema import ConfigError, ExperimentConfig, PromptSourceConfig
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.generation.server_environment import ProgramEnvironment
from asyncrl.launch.checks import preflight as preflight_module
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import load_process_config, plan
from asyncrl.protocol.trajectories import Locator
from tests.support.preflight import preflight

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "async_ppo_math.yaml"
FOLDER = ROOT / "examples" / "math"
EXCERPT = ROOT / "examples" / "word_problems" / "gsm8k_excerpt.jsonl"
MODULES = ("final_answer", "verifier", "reward", "make")


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """Import the example's modules as its make.py does, and remove them from sys.modules afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def made(example: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the data of the excerpt and the small model with random weights."""
    folder = tmp_path_factory.mktemp("math")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make.py", "--out", str(folder), "--gsm8k", str(EXCERPT), "--model"])
        example["make"].main()
    return folder


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in the repository's root, to which the config's paths are relative, with an empty cache of the Hub."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def overrides(made: Path) -> list[str]:
    """Return overrides of model, data and allocation, which suffice to run on a CPU."""
    return [
        f"model_path={made / 'model'}",
        f"prompts.path={made / 'data' / 'train.jsonl'}",
        f"eval.prompts.path={made / 'data' / 'eval.jsonl'}",
        "allocation=transformers.d1p1m1+d1p1m1",
    ]


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["check", str(CONFIG), "allocation=transformers.d1+d1"]
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().out
    for part in (
        "Qwen/Qwen2.5-1.5B-Instruct",
        str(tmp_path / "hub"),
        "asyncrl-launch prepare",
        "model_path=/path/to/model",
    ):
        assert part in printed


def test_missing_data_are_named(made: Path, tmp_path: Path) -> None:
    config = load_experiment(CONFIG, [*overrides(made), f"prompts.path={tmp_path / 'none.jsonl'}"])
    with pytest.raises(ConfigError, match=r"prompts.path.*there is no prompt file.*make it with `python examples/math"):
        preflight(config)


def test_the_config_passes_check_with_three_overrides(
    made: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["check", str(CONFIG), *overrides(made), f"fileroot={tmp_path}", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    assert answer["sizes"]["num_prompts"] == 48 + 128
    kinds = [process["kind"] for process in answer["processes"]]
    assert (kinds.count("generation_server"), kinds.count("model_worker")) == (1, 1)


def test_the_unchanged_allocation_needs_eight_gpus(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's folder and the data exist, and SGLang is installed."""
    monkeypatch.setattr(
        preflight_module, "find_program", lambda program, python: ProgramEnvironment("", version=program.tested)
    )
    config = load_experiment(CONFIG, overrides(made)[:3])
    assert config.allocation == "sglang.d4p1m1+d4p1m1"
    num_prompts = preflight(config)
    specs = plan(config, attempt=1, num_prompts=num_prompts, devices=[str(i) for i in range(8)])
    computing = [spec for spec in specs if spec.computes]
    assert sorted(spec.env["CUDA_VISIBLE_DEVICES"] for spec in computing) == [str(i) for i in range(8)]
    assert {spec.config.generation.dtype for spec in specs if spec.kind == "generation_server"} == {"bfloat16"}  # type: ignore[union-attr]
    assert {spec.config.train.dtype for spec in specs if spec.kind == "model_worker"} == {"bfloat16"}  # type: ignore[union-attr]
    on_cpu = plan(config, attempt=1, num_prompts=num_prompts)
    assert {spec.config.train.dtype for spec in on_cpu if spec.kind == "model_worker"} == {"float32"}  # type: ignore[union-attr]


def test_a_cached_model_is_found_by_its_name(made: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Workers receive the path of its folder. The small model stands in for Qwen's."""
    repo = tmp_path / "hub" / "models--Qwen--Qwen2.5-1.5B-Instruct"
    snapshot = repo / "snapshots" / ("ab" * 20)
    shutil.copytree(made / "model", snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("ab" * 20)
    words = [str(CONFIG), *overrides(made)[1:], f"fileroot={tmp_path}"]
    assert cli.main(["prepare", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"model_path": str(snapshot), "made": False, "exit_code": 0}
    assert cli.main(["check", *words]) == 0
    assert cli.main(["run", *words, "--dry-run", "--output", str(tmp_path / "dry")]) == 0
    for worker in ("generation_server_0", "model_worker_0", "rollout_worker_0"):
        config = load_process_config(tmp_path / "dry" / f"{worker}.yaml")
        assert config.tokenizer_path == str(snapshot)  # type: ignore[union-attr]


def test_prepare_makes_missing_data(made: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make = tmp_path / "make.py"
    make.write_text("import sys, pathlib\npathlib.Path(sys.argv[1]).write_text('')\n")
    missing = tmp_path / "train.jsonl"
    words = [str(CONFIG), *overrides(made), f"prompts.path={missing}", f"prepare=python {make} {missing}"]
    assert cli.main(["prepare", *words]) == 0
    assert missing.is_file()
    assert f"missing: {missing}; running" in capfd.readouterr().out.replace("\n", " ")
    assert cli.main(["prepare", *words]) == 0
    assert "running" not in capfd.readouterr().out


def source(config: ExperimentConfig, path: Path, model: Path) -> PromptSource:
    return PromptSource(PromptSourceConfig(**{**vars(config.prompts), "path": str(path)}), load_tokenizer(model))


def test_prompts_are_chats_that_request_a_boxed_answer(made: Path) -> None:
    config = load_experiment(CONFIG)
    prompts = source(config, made / "data" / "train.jsonl", made / "model")
    assert prompts.tasks == {"gsm8k", "fractions"}
    for position in range(len(prompts)):
        prompt = prompts.get(Locator(0, position))
        assert prompt.text.startswith(
            "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert not prompt.too_long
    assert (config.prompts.system_prompt, config.prompts.max_prompt_length) == (
        config.eval.prompts.system_prompt,  # type: ignore[union-attr]
        config.eval.prompts.max_prompt_length,  # type: ignore[union-attr]
    )


def test_the_original_files_of_gsm8k_are_valid_data(example: dict[str, ModuleType], made: Path) -> None:
    """Their lines name no task, and the answer is the whole solution."""
    prompts = source(load_experiment(CONFIG), EXCERPT, made / "model")
    assert (len(prompts), prompts.tasks) == (64, {"gsm8k"})
    for position in range(len(prompts)):
        prompt = prompts.get(Locator(0, position))
        assert prompt.task == "gsm8k"
        assert example["reward"].correct(prompt.text, prompt.answer, prompt.answer) == 1.0


def test_fraction_problems_are_distinct_and_reproducible(example: dict[str, ModuleType], made: Path) -> None:
    import numpy as np

    make, lowest_terms = example["make"], example["reward"].lowest_terms
    rows = make.fraction_problems(500, np.random.default_rng(3))
    assert len({row["question"] for row in rows}) == 500
    assert rows == make.fraction_problems(500, np.random.default_rng(3))
    for row in rows:
        assert lowest_terms(row["question"], f"\\boxed{{{row['answer']}}}", row["answer"]) == 1.0
        assert lowest_terms(row["question"], row["question"], row["answer"]) == 0.0
    assert sum("/" in row["answer"] for row in rows) > 300
    assert not any(row["answer"].startswith("-") for row in rows)


def test_the_small_model_has_the_end_tokens_of_qwen(made: Path) -> None:
    tokenizer = load_tokenizer(made / "model")
    generation = json.loads((made / "model" / "generation_config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>"
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert json.loads((made / "model" / "config.json").read_text())["model_type"] == "qwen2"


def test_a_line_that_is_not_of_gsm8k_is_refused(example: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit, match="is this GSM8K"):
        example["make"].gsm8k_row({"question": "?", "answer": "42"})
