"""Checks of env_args and agent_args against their classes, without importing the classes or starting processes."""

import sys

import pytest

from asyncrl.config.schema import ConfigError, TaskConfig
from asyncrl.launch.checks.task_arguments import check_task_arguments, find_parameters

FEEDBACK = "asyncrl.rollout.agent:FeedbackEnv"
MULTI_STEP = "asyncrl.rollout.agent:MultiStepAgent"
CHAT = "asyncrl.rollout.chat_agent:ChatAgent"


def check(**task):
    check_task_arguments("rollout.tasks.t", TaskConfig(**task))


def test_valid_arguments_are_accepted():
    check(reward="m:r")
    check(env=FEEDBACK, env_args={"feedback": "again", "max_turns": 2}, agent=MULTI_STEP, agent_args={"max_turns": 2})
    check(env="nobody.knows:Env", env_args={"anything": 1})
    check(agent=CHAT, agent_args={"ignore": ["temperature"], "max_requests": 4})  # computes its rewards itself


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
        check(**task)


def test_users_files_are_parsed_and_not_executed(tmp_path):
    (tmp_path / "base.py").write_text("class Base:\n    def __init__(self, *, prompt, reward, size=1): ...\n")
    file = tmp_path / "own.py"
    file.write_text(
        "1 / 0\n"
        "from base import Base\n"
        "from asyncrl.rollout.agent import FeedbackEnv as Feedback\n"
        "class A(Base): ...\n"
        "class B(A): ...\n"
        "class C(Feedback):\n    async def reset(self): ...\n"
        "class D(Base):\n    def __init__(self, colour, **others): ...\n"
        "class E(Base):\n    def __init__(self, a, b=2, *, prompt): ...\n"
        "class F(somewhere.Else): ...\n"
        "class G(G): ...\n"
    )

    def names(name):
        parameters = find_parameters(f"{file}:{name}")
        return parameters and parameters.names

    assert names("A") == names("B") == ("prompt", "reward", "size")
    assert names("C") == ("prompt", "reward", "feedback", "success", "max_turns")
    assert names("F") is None
    assert names("G") is None
    assert names("missing") is None
    check(env=f"{file}:D", env_args={"colour": 1, "anything": 2})
    with pytest.raises(ConfigError, match="D also needs colour"):
        check(env=f"{file}:D")
    assert find_parameters(f"{file}:E").required == {"a", "prompt"}
    with pytest.raises(ConfigError, match=r"its __init__ must take prompt, reward by name .* does not take reward"):
        check(env=f"{file}:E", env_args={"a": 1})


def test_a_package_is_found_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "heavy_package_of_a_user"
    package.mkdir()
    (package / "__init__.py").write_text("1 / 0\n")
    (package / "base.py").write_text("class Base:\n    def __init__(self, *, prompt, reward, n): ...\n")
    (package / "env.py").write_text("from .base import Base\nclass Env(Base): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_parameters("heavy_package_of_a_user.env:Env").names == ("prompt", "reward", "n")
    assert "heavy_package_of_a_user" not in sys.modules
