"""`asyncrl-launch check` calls each reward once, in a separate process, and shows its value or the error with file and line."""

import json
import re
from dataclasses import replace

import pytest

from asyncrl.cli.task_trial import try_tasks, user_error
from asyncrl.config.schema import ConfigError, ExperimentConfig, PromptSourceConfig, RolloutConfig, TaskConfig
from asyncrl.rollout.rollouts import check_class
from asyncrl.testing.tiny import make_chat_tokenizer

REWARDS = """\
import os, time

def exact(prompt, completion, answer, *, finished, task, row):
    print("printed by the reward")
    return 0.5 * float(completion == answer) + 0.25 * finished + 0.125 * (task == "default") + (row["extra"] == 1)

async def waits(prompt, completion, answer):
    return len(prompt)

def raises(prompt, completion, answer):
    import json
    return json.loads("no json")

def hangs(prompt, completion, answer):
    while True:
        time.sleep(1)

def leaves(prompt, completion, answer):
    os._exit(7)

def hoards(prompt, completion, answer):
    return len(bytearray(10**9))

def text(prompt, completion, answer):
    return "good"
"""
CLASSES = """\
from asyncrl.rollout.agent import Env

class Mine(Env):
    def __init__(self, prompt, reward, **given):
        if "turns" not in given:
            raise ValueError("never made")

class Stranger:
    pass
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "classes.py").write_text(CLASSES)
    (tmp_path / "broken.py").write_text("import math\nimport no_such_module_of_mine\n")
    (tmp_path / "wrong.py").write_text("def reward(:\n")
    rows = [{"prompt": "sort 21", "answer": "12", "extra": 1, "kind": "default"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_of(folder, timeout_s=60.0, mode="async", **task):
    specs = {kind: f"{folder}/{spec}" if ".py" in str(spec) else spec for kind, spec in task.items()}
    return ExperimentConfig(
        mode=mode,
        prompts=PromptSourceConfig(path=str(folder / "prompts.jsonl"), shuffle=False),
        rollout=RolloutConfig(
            tasks={"default": TaskConfig(**specs)}, reward_timeout_s=timeout_s, reward_memory_bytes=500_000_000
        ),
    )


@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_gets_the_prompt_without_special_tokens(folder, chat):
    make_chat_tokenizer(folder / "model", "<|im_start|>{{ messages[0].content }}<|im_end|>")
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "<|im_end|>1234", "answer": ""}))
    config = config_of(folder, reward="rewards.py:waits")
    prompts = replace(config.prompts, chat_template=chat)
    (finding,) = try_tasks(replace(config, model_path=str(folder / "model"), prompts=prompts))
    assert finding.value.endswith("rewards.py:waits gives 4 if the response to '1234' is nothing")


def test_a_task_whose_prompts_the_template_refuses_is_reported_with_a_line(folder):
    make_chat_tokenizer(
        folder / "model", "{% if messages[0].content != 'ok' %}{{ raise_exception('no') }}{% endif %}ok"
    )
    config = config_of(folder, reward="rewards.py:waits")
    config = replace(config, model_path=str(folder / "model"), prompts=replace(config.prompts, chat_template=True))
    rows = [{"prompt": "bad", "answer": ""}] * 2
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = try_tasks(config)
    assert finding.state == "fail"
    assert re.search(
        r"none of its first prompts can be used: .*prompts.jsonl:2: the chat template refuses .*: no", finding.value
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "ok", "answer": ""}])
    )
    (finding,) = try_tasks(config)
    assert finding.state == "ok"


def test_the_value_of_a_reward_is_shown(folder, capfd):
    (finding,) = try_tasks(config_of(folder, reward="rewards.py:exact"))
    assert (finding.name, finding.state) == ("task default", "ok")
    assert finding.value.endswith("rewards.py:exact gives 1.875 if the response to 'sort 21' is its answer '12'")
    captured = capfd.readouterr()
    assert captured.out == ""  # nothing else is printed to stdout, which may be JSON
    assert "printed by the reward" in captured.err
    (finding,) = try_tasks(config_of(folder, reward="rewards.py:waits"))
    assert "waits gives 7 if" in finding.value


@pytest.mark.parametrize(
    ("reward", "timeout_s", "told"),
    [
        ("rewards.py:raises", 60.0, r"raised json.decoder.JSONDecodeError: Expecting value: .* \(.*rewards.py:12\)"),
        ("rewards.py:hangs", 0.2, r"took more than 0.2 s \(rollout.reward_timeout_s=0.2\)"),
        ("rewards.py:leaves", 60.0, r"ended its process: it ended with exit code 7"),
        ("rewards.py:hoards", 60.0, r"raised MemoryError \(.*rewards.py:22\)"),
        ("rewards.py:text", 60.0, r"returned 'good'; it must be a finite number"),
        ("rewards.py:none", 60.0, r"cannot be imported: .* has no 'none'"),
        (
            "broken.py:reward",
            60.0,
            r"cannot be imported: ModuleNotFoundError: .*'no_such_module_of_mine' \(.*broken.py:2\)",
        ),
        ("wrong.py:reward", 60.0, r"cannot be imported: SyntaxError: .* \(.*wrong.py:1\)"),
    ],
)
def test_failing_rewards_are_reported(folder, reward, timeout_s, told):
    (finding,) = try_tasks(config_of(folder, reward=reward, timeout_s=timeout_s))
    assert (finding.name, finding.state) == ("rollout.tasks.default.reward", "fail")
    assert finding.remedy
    assert re.search(told, finding.value), finding.value


def test_the_failure_of_a_reward_in_a_thread_is_only_a_warning(folder):
    """It may depend on memory that it shares with an agent, which the separate process lacks."""
    config = config_of(folder, reward="rewards.py:raises")
    (finding,) = try_tasks(replace(config, rollout=replace(config.rollout, reward_isolation="thread")))
    assert (finding.name, finding.state) == ("rollout.tasks.default.reward", "warn")
    assert "rollout.reward_isolation=thread" in finding.remedy


@pytest.mark.parametrize(
    ("task", "field", "told"),
    [
        ({"env": "classes.py:Mine", "env_args": {"turns": 1}}, None, "Mine can be imported"),
        (
            {"env": "classes.py:Mine", "env_args": {"prompt": 1}},
            "env",
            "default.env_args.prompt=1: the rollout worker sets it; leave it out",
        ),
        ({"env": "classes.py:Stranger"}, "env", "it must be a subclass of asyncrl.rollout.agent.Env"),
        (
            {"reward": "rewards.py:exact", "env_args": {"x": 1}},
            "env",
            "RewardEnv does not take this argument; it takes none",
        ),
        ({"agent": "classes.py:Mine"}, "agent", "must be a subclass of asyncrl.rollout.agent.Agent or "),
        ({"agent": "broken.py:Agent"}, "agent", "broken.py:2)"),
        ({"agent": "verifiers:no_such"}, "agent", "taskset 'no_such' not found"),
    ],
)
def test_agents_and_environments_are_imported(folder, task, field, told):
    (finding,) = try_tasks(config_of(folder, **task))
    assert told in finding.value
    assert finding.state == ("fail" if field else "ok")
    assert finding.name == (f"rollout.tasks.default.{field}" if field else "task default")


FEEDBACK = "asyncrl.rollout.agent:FeedbackEnv"
MULTI_STEP = "asyncrl.rollout.agent:MultiStepAgent"
CHAT = "asyncrl.rollout.chat_agent:ChatAgent"


def load(**task):
    for kind in ("agent", "env"):
        check_class("rollout.tasks.t", task, kind)


def test_valid_arguments_are_accepted():
    load(reward="m:r")
    load(env=FEEDBACK, env_args={"feedback": "again", "max_turns": 2}, agent=MULTI_STEP, agent_args={"max_turns": 2})
    load(agent=CHAT, agent_args={"ignore": ["temperature"], "max_requests": 4})  # computes its rewards itself


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (
            {"env": FEEDBACK, "env_args": {"feedback": "x", "max_turn": 2}},
            r"rollout\.tasks\.t\.env_args\.max_turn=2: FeedbackEnv does not take this argument; did you mean 'max_turns'\?",
        ),
        ({"env": FEEDBACK}, "FeedbackEnv also needs feedback; it takes feedback, success, max_turns"),
        ({"reward": "m:r", "env_args": {"x": 1}}, "RewardEnv does not take this argument; it takes none"),
        ({"reward": "m:r", "agent_args": {"n": 1}}, "SingleStepAgent does not take this argument"),
        (
            {"reward": "m:r", "agent": MULTI_STEP, "agent_args": {"group_size": 2}},
            "the rollout worker sets it; leave it out",
        ),
        ({"agent": MULTI_STEP}, r"MultiStepAgent needs rollout\.tasks\.t\.reward or rollout\.tasks\.t\.env"),
        (
            {"agent": CHAT, "agent_args": {"ignored": []}},
            "ChatAgent does not take this argument; did you mean 'ignore'",
        ),
    ],
)
def test_invalid_arguments_are_refused(task, told):
    with pytest.raises(ConfigError, match=told):
        load(**task)


def test_the_arguments_of_inherited_classes(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from asyncrl.rollout.agent import Env, FeedbackEnv\n"
        "class C(FeedbackEnv):\n    async def reset(self): ...\n"
        "class D(Env):\n    def __init__(self, colour, **others): ...\n"
        "class E(Env):\n    def __init__(self, a, b=2, *, prompt): ...\n"
    )
    load(env=f"{file}:C", env_args={"feedback": "again"})
    load(env=f"{file}:D", env_args={"colour": 1, "anything": 2})
    with pytest.raises(ConfigError, match="D also needs colour"):
        load(env=f"{file}:D")
    with pytest.raises(ConfigError, match=r"__init__ of E must take prompt, reward by name .* does not take reward"):
        load(env=f"{file}:E", env_args={"a": 1})


def test_no_reward_is_called_in_a_mode_without_rewards(folder):
    assert try_tasks(config_of(folder, mode="train_only", reward="rewards.py:leaves")) == []


def test_a_reward_without_a_prompt_is_not_called(folder):
    config = config_of(folder, reward="rewards.py:leaves")
    task = config.rollout.tasks["default"]
    (finding,) = try_tasks(replace(config, rollout=replace(config.rollout, tasks={"other": task})))
    assert finding.state == "ok"
    assert finding.value.endswith("was not called: no training prompt belongs to this task")


def test_user_error_without_a_traceback():
    assert user_error("reward 'x': there is no file x") == "reward 'x': there is no file x"
