"""Tasks: for each kind of problem its reward, its agents (one a mode) and its environments, loaded from config once."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from asyncrl.config.schema import ConfigError, RolloutConfig, SamplingConfig, TaskConfig
from asyncrl.data.prompts import Prompt
from asyncrl.rewards.import_object import import_object
from asyncrl.rewards.outcome import RolloutRejected
from asyncrl.rewards.reward import Reward
from asyncrl.rollout.agent import Agent, SingleStepAgent
from asyncrl.rollout.chat_agent import ChatAgent
from asyncrl.rollout.env import Env, RewardEnv, UnjudgedEnv
from asyncrl.runtime.board import StatusBoard

TRAIN = "train"
_AGENTS = (Agent, ChatAgent)
_AGENT_ARGUMENTS, _ENV_ARGUMENTS = (
    ("tokenizer", "sampling", "group_size"),
    ("prompt", "reward"),
)  # the worker sets these


class Task:
    """One kind of problem."""

    def __init__(
        self,
        name: str,
        task_id: int,
        config: TaskConfig,
        rollout: RolloutConfig,
        *,
        tokenizer: Any,
        board: StatusBoard,
        logger: logging.Logger,
    ) -> None:
        self.name = name
        self.task_id = task_id
        self._config = config
        self._reward = Reward.of(config.reward, rollout, board=board, logger=logger) if config.reward else None
        agent_class = _import_class(config.agent, SingleStepAgent, _AGENTS, f"rollout.tasks.{name}.agent")
        judges_itself = issubclass(agent_class, ChatAgent) and not config.reward
        if not (config.reward or config.env or judges_itself):
            raise ConfigError(f"rollout.tasks.{name} has neither reward nor env; set one of them")
        default_env = UnjudgedEnv if judges_itself else RewardEnv
        self._env_class = _import_class(config.env, default_env, (Env,), f"rollout.tasks.{name}.env")
        modes: dict[str, tuple[SamplingConfig, int]] = {
            TRAIN: (rollout.sampling, rollout.group_size),
            "sampled": (replace(rollout.sampling, greedy=False), 1),
            "greedy": (replace(rollout.sampling, greedy=True), 1),
        }
        self.agents: Mapping[str, Agent | ChatAgent] = {
            mode: _make(
                agent_class,
                f"rollout.tasks.{name}.agent_args",
                config.agent_args,
                tokenizer=tokenizer,
                sampling=sampling,
                group_size=group_size,
            )
            for mode, (sampling, group_size) in modes.items()
        }

    def close(self) -> None:
        """End the processes of its reward."""
        if self._reward is not None:
            self._reward.close()

    def make_env(self, prompt: Prompt) -> Env:
        """A fresh environment for one prompt."""
        env: Env = _make(
            self._env_class,
            f"rollout.tasks.{self.name}.env_args",
            self._config.env_args,
            prompt=prompt,
            reward=self._reward,
        )
        return env


class TaskTable:
    """All tasks of a run. Ids number them in the order of their names."""

    def __init__(self, rollout: RolloutConfig, *, tokenizer: Any, board: StatusBoard, logger: logging.Logger) -> None:
        if not rollout.tasks:
            raise ConfigError(
                "rollout.tasks is empty; name a task, e.g. rollout.tasks.default.reward=my_package.rewards:exact"
            )
        self._tasks = {
            name: Task(name, task_id, rollout.tasks[name], rollout, tokenizer=tokenizer, board=board, logger=logger)
            for task_id, name in enumerate(sorted(rollout.tasks))
        }

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()

    @property
    def chat(self) -> bool:
        """Is there an agent that asks through the OpenAI API?"""
        return any(isinstance(agent, ChatAgent) for task in self._tasks.values() for agent in task.agents.values())

    def of(self, prompt: Prompt) -> Task:
        """The prompt's task. Raises RolloutRejected (`unknown_task`) where the config has none of that name."""
        try:
            return self._tasks[prompt.task]
        except KeyError:
            raise RolloutRejected(
                "unknown_task",
                f"prompt {prompt.prompt_id} is of task {prompt.task!r}; rollout.tasks has {sorted(self._tasks)}",
            ) from None


def check_class(spec: str, kind: str, arguments: Mapping[str, Any]) -> float:
    """Import an agent or an env, and see that it takes these arguments (`asyncrl-launch check` calls it in a judge).

    Raises ConfigError, or the error of the user's module.
    """
    bases, own = (_AGENTS, _AGENT_ARGUMENTS) if kind == "agent" else ((Env,), _ENV_ARGUMENTS)
    found = _import_class(spec, object, bases, kind)
    _check_arguments(found, f"{kind}_args", arguments, own)
    return 1.0


def _import_class(spec: str, default: type, bases: tuple[type, ...], what: str) -> type:
    if not spec:
        return default
    loaded = import_object(spec, what)
    if not (inspect.isclass(loaded) and issubclass(loaded, bases)):
        wanted = " or ".join(f"{base.__module__}.{base.__name__}" for base in bases)
        raise ConfigError(f"{what} {spec!r} is {loaded!r}; it must be a subclass of {wanted}")
    return loaded


def _make(made_class: Callable[..., Any], what: str, arguments: Mapping[str, Any], **own: Any) -> Any:
    """An object with the worker's arguments and the config's, which must fit the class."""
    _check_arguments(made_class, what, arguments, own)
    return made_class(**own, **arguments)


def _check_arguments(
    made_class: Callable[..., Any], what: str, arguments: Mapping[str, Any], own: Collection[str]
) -> None:
    """own: names of the worker's arguments."""
    overlap = sorted(arguments.keys() & set(own))
    if overlap:
        raise ConfigError(f"{what} must not set {overlap}: the worker does")
    try:
        inspect.signature(made_class).bind(**dict.fromkeys(own), **arguments)
    except TypeError as error:
        raise ConfigError(f"{what} {dict(arguments)} does not fit {made_class.__qualname__}: {error}") from None
