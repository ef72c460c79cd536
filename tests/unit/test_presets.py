"""train.algorithm and train.correction select presets. The user's own values take precedence."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.presets import ALGORITHMS, CORRECTIONS
from asyncrl.config.schema import ConfigError, ExperimentConfig, PPOConfig
from asyncrl.launch.experiment import load_experiment

REPOSITORY = Path(__file__).parents[2]
MINIMAL = """
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}, sampling: {max_new_tokens: 40}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def flat(overrides: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dotted names and values that a preset sets. A value {} means that the section is not null."""
    result = {}
    for key, value in overrides.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return result


def value_at(config: ExperimentConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("field", "name"), [*(("algorithm", name) for name in ALGORITHMS), *(("correction", name) for name in CORRECTIONS)]
)
def test_a_preset_sets_its_fields_and_no_others(file: Path, field: str, name: str) -> None:
    config, plain = load_experiment(file, [f"train.{field}={name}"]), load_experiment(file)
    preset = flat((ALGORITHMS | CORRECTIONS)[name])
    for key, value in preset.items():
        expected = 40 if value == "${rollout.sampling.max_new_tokens}" else value
        assert value_at(config, key) is not None if value == {} else value_at(config, key) == expected, key
    for entry in fields(PPOConfig):
        if f"train.ppo.{entry.name}" not in preset:
            assert getattr(config.train.ppo, entry.name) == getattr(plain.train.ppo, entry.name), entry.name
    assert (config.train.critic is not None) == (name == "ppo")
    assert config.rollout.reject_equal_rewards == (name == "dapo")
    assert getattr(config.train, field) == name


def test_without_a_preset_the_defaults_apply(file: Path) -> None:
    assert load_experiment(file).train.ppo == PPOConfig()
    assert load_experiment(REPOSITORY / "configs/quickstart_cpu.yaml").train.ppo == PPOConfig()


def test_values_of_the_user_take_precedence_in_any_order(file: Path) -> None:
    file.write_text(MINIMAL + "train: {algorithm: dapo, ppo: {eps_clip_higher: 0.25}}\n")
    config = load_experiment(file, ["train.ppo.overlong_buffer=0.5", "rollout.reject_equal_rewards=false"])
    ppo = config.train.ppo
    assert (ppo.eps_clip_higher, ppo.overlong_buffer, ppo.overlong_length) == (0.25, 0.5, 40)
    assert not config.rollout.reject_equal_rewards
    # An override of the preset's name, before or after other overrides, replaces the file's preset as a whole
    ppo = load_experiment(file, ["train.ppo.minibatches=2", "train.algorithm=gspo"]).train.ppo
    assert (ppo.importance_level, ppo.eps_clip, ppo.eps_clip_higher, ppo.minibatches) == ("sequence", 3e-4, 0.25, 2)
    assert ppo.overlong_penalty == 0.0
    assert load_experiment(file, ["train.algorithm=''"]).train.ppo == PPOConfig(eps_clip_higher=0.25)


def test_an_algorithm_and_a_correction_can_be_combined(file: Path) -> None:
    ppo = load_experiment(file, ["train.algorithm=cispo", "train.correction=tis"]).train.ppo
    assert (ppo.policy_loss, ppo.behav_imp_weight_mode, ppo.behav_imp_weight_cap) == ("cispo", "clamp", 2.0)
    ppo = load_experiment(file, ["train.correction=icepop", "train.ppo.behav_imp_weight_cap=3"]).train.ppo
    assert (ppo.behav_imp_weight_mode, ppo.behav_imp_weight_floor, ppo.behav_imp_weight_cap) == ("mask", 0.5, 3.0)


def test_the_name_of_a_preset_may_be_interpolated(file: Path) -> None:
    """Like any value of the config, it may come from another field or from the environment (OmegaConf)."""
    assert load_experiment(file, ["trial=gspo", "train.algorithm=${trial}"]).train.ppo.importance_level == "sequence"


def test_the_critic_of_ppo_can_be_configured_and_removed(file: Path) -> None:
    critic = load_experiment(file, ["train.algorithm=ppo", "train.critic.eps_clip=0.3"]).train.critic
    assert critic is not None
    assert critic.eps_clip == 0.3
    assert load_experiment(file, ["train.algorithm=ppo", "train.critic=null"]).train.critic is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.algorithm=dr-grpo"], "train.algorithm='dr-grpo': did you mean 'dr_grpo'"),
        (["train.correction=clip"], "train.correction='clip'"),
        (["train.algorithm=grpo", "rollout.group_size=1"], "train.ppo.advantage_norm='group': a group of one has no"),
        (["train.algorithm=rloo", "rollout.group_size=1"], "train.ppo.baseline='leave_one_out': a group of one"),
        (["train.algorithm=grpo", "train.critic={}"], "train.ppo.advantage_norm='group': does not use values"),
        (["train.algorithm=dr_grpo", "train.critic={}"], "train.ppo.baseline='group_mean': does not use values"),
        (
            ["train.algorithm=dapo", "train.reward_model.path=m"],
            "rollout.reject_equal_rewards=True: compares the rewards",
        ),
        (
            ["train.algorithm=dapo", "train.ppo.advantage_norm=batch", "rollout.group_size=1"],
            "rollout.reject_equal_rewards=True: would reject every group of one",
        ),
        (["train.ppo.policy_loss=cispo", "train.ppo.c_clip=3"], "train.ppo.c_clip=3.0: applies to policy_loss=clip"),
        (["train.share_prefix=on", "train.compile=on"], "train.share_prefix='on': is not shown to work in compiled"),
        (
            ["train.router_aux_loss_coef=0.1", "train.streaming=true"],
            "train.router_aux_loss_coef=0.1: with train.streaming",
        ),
        (["train.router_aux_loss_coef=0.1", "train.compile=on"], "train.router_aux_loss_coef=0.1: compiled layers"),
        (["train.router_aux_loss_coef=0.1", "train.lora={rank: 4}"], "train.router_aux_loss_coef=0.1: with train.lora"),
        (
            ["train.router_aux_loss_coef=0.1", "allocation=transformers.d1+p2"],
            "train.router_aux_loss_coef=0.1: allocation=transformers.d1+p2 has pipeline stages",
        ),
        (["train.share_prefix=on", "train.routes=replay"], "train.share_prefix='on': the copies of a shared"),
        (["train.ppo.eps_clip=2"], "train.ppo.eps_clip=2.0: must be above 0 and at most 1"),
        (["train.algorithm={a: 1}"], "train.algorithm"),
        (["train=5"], "train"),
    ],
)
def test_invalid_names_and_combinations_are_refused(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_experiment(file, overrides)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_reinforce_pp_needs_no_group(file: Path) -> None:
    assert load_experiment(file, ["train.algorithm=reinforce_pp", "rollout.group_size=1"]).rollout.group_size == 1


def test_the_documentation_names_every_preset_and_the_fields_that_it_sets() -> None:
    text = (REPOSITORY / "docs/algorithms.md").read_text()
    for name, preset in (ALGORITHMS | CORRECTIONS).items():
        assert f"`{name}`" in text, name
        for key in flat(preset):
            assert re.search(rf"\b{key.rpartition('.')[2]}\b", text), key
    for number in re.findall(r"arXiv:(\d{4}\.\d{5})", (REPOSITORY / "asyncrl/config/presets.py").read_text()):
        assert number in text, number
