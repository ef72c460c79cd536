"""mode=eval_only and the config of `asyncrl-launch eval`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.cli.evaluation_table import evaluation_table, failed_parts
from asyncrl.cli.main import main
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.launch.evaluation import to_evaluate
from asyncrl.launch.experiment import draft_experiment, load_experiment
from asyncrl.launch.program import plan

BASE = """
model_path: m
allocation: transformers.d2+d1
prompts: {path: p.jsonl}
rollout: {num_workers: 1, tasks: {default: {reward: r.py:r}}}
eval: {sets: {aime: {prompts: {path: a.jsonl, chat_template: true}, at_end: false, every_steps: 3}}}
"""


def load(tmp_path: Path, *overrides: str) -> ExperimentConfig:
    (tmp_path / "run.yaml").write_text(BASE)
    return draft_experiment(tmp_path / "run.yaml", overrides, change=to_evaluate).checked()


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.streaming=true", "train.critic={minibatches: 1}", "train.ppo.advantage_norm=none"],
        ["train.ppo.kl_coef=0.1", "allocation=transformers.d2+d1+ref_inf:d1", "train.ref.on_missing=continue"],
        ["allocation=transformers.d2@0-1+d2@0-1", "manager.max_head_offpolicyness=0"],
        ["allocation=transformers.d2+d1 until 4 then transformers.d1+d2"],
        ["train.ema={decay: 0.9}", "train.target_reward=0.5", "weights.verify_logprobs=true", "recover=required"],
        ["mode=train_only", "replay.path=x", "eval.sets.aime.every_steps=0"],
    ],
)
def test_a_config_evaluates_whatever_it_trains(tmp_path: Path, overrides: list[str]) -> None:
    config = load(tmp_path, *overrides)
    assert config.prompts == config.eval.sets["aime"].prompts
    specs = plan(config, attempt=1, num_prompts=5)
    assert [spec.name for spec in specs] == [
        "generation_server/0",
        "generation_server/1",
        "recorder/0",
        "master/0",
        "gserver_manager/0",
        "rollout_worker/0",
    ]
    master = next(spec.config for spec in specs if spec.kind == "master")
    chosen = master.eval.sets["aime"]  # type: ignore[union-attr]
    assert (chosen.at_start, chosen.at_end, chosen.every_steps) == (False, True, 0)


def test_what_rollouts_depend_on_is_kept(tmp_path: Path) -> None:
    config = load(tmp_path, "train.words=[words_x]", "train.dense_rewards=true", "train.batch_size=3")
    assert (config.train.words, config.train.dense_rewards, config.train.batch_size) == (["words_x"], True, 3)
    assert (config.tensorboard, config.wandb.mode, config.manager.eval_share) == (False, "disabled", 1.0)


def test_an_evaluation_without_sets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE.partition("eval:")[0])
    with pytest.raises(ConfigError, match=r"eval\.prompts\.path='': is required with mode=eval_only"):
        load_experiment(tmp_path / "run.yaml", ["mode=eval_only"])


def test_a_folder_without_a_run_or_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert f"asyncrl-launch eval CONFIG model_path={tmp_path}" in capsys.readouterr().out
    kept = tmp_path / "e" / "t0" / "configs" / "attempt_1"
    kept.mkdir(parents=True)
    (kept / "experiment.yaml").write_text(BASE)
    assert main(["eval", str(tmp_path / "e" / "t0")]) == 2
    assert "checkpoints/final has no config.json" in capsys.readouterr().out


def test_the_table_has_a_row_for_each_part() -> None:
    evaluation = {"step": 0}
    for name, reward, failed in (("aime/sampled", 0.25, 1.0), ("greedy", 0.0, 4.0)):
        values = {"reward": reward, "num_prompts": 4.0, "num_failed": failed, "length": 7.0}
        evaluation |= {f"eval/{name}_{value}": number for value, number in values.items()}
    evaluation |= {"eval/aime/sampled_pass@4": 0.5, "eval/aime/sampled_pass@4_ci95": 0.125}
    console = Console(width=160)
    with console.capture() as captured:
        console.print(evaluation_table("Evaluation", evaluation))
    shown = captured.get()
    assert "pass@4 0.500 ±0.125" in shown
    assert "4 (1 failed)" in shown
    assert failed_parts(evaluation) == ["eval.prompts, greedy"]
