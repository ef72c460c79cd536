"""Episodes of the environments of verifiers (the package's v1 API). It runs in the processes of EpisodeAgent, in any Python that
has this package, and imports nothing else of asyncrl.

    rollout.tasks.default.agent=verifiers:NAME

The prompts are the environment's tasks, by their number. This module writes them:

    python -m asyncrl.rollout.verifiers_episode NAME --limit 1000 >data/train.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.mcp import launch
from verifiers.v1.runtimes import subprocess as runtime_of_subprocesses
from verifiers.v1.utils.compile import validate_pairing
from verifiers.v1.utils.loaders import default_harness_id, load_environment, load_harness, resolve_env_config

from asyncrl.rollout import verifiers_harness

_KEY = "ASYNCRL_SESSION_KEY"  # where verifiers' client looks for the session's key
_HARNESS = "asyncrl_in_process"
sys.modules[_HARNESS] = verifiers_harness  # verifiers finds harnesses by the names of modules, without dots
_read_port = launch._read_back_port


async def _take_port(runtime: Any, path: str) -> int:
    """Read the file in which a tool's server names its port, and remove it, which verifiers does not."""
    port: int = await _read_port(runtime, path)
    if runtime.type == "subprocess":
        os.unlink(path)
    return port


launch._read_back_port = _take_port

Seats = list[tuple[str, float, str]]  # seat, reward, speaker


class _Servers:
    """What the episodes of an environment share in this process: the servers of its taskset's tools, and verifiers' proxy."""

    def __init__(self, environment: Any) -> None:
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ending = asyncio.Event()
        # One task begins and ends them, as an environment expects
        self._task = asyncio.create_task(self._serve(environment))

    async def _serve(self, environment: Any) -> None:
        async with environment.serving():
            self._started.set_result(None)
            await self._ending.wait()

    async def start(self) -> None:
        """Wait until they are started. Raises the error of the start."""
        await asyncio.wait((self._task, self._started), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task

    async def end(self) -> None:
        self._ending.set()
        await asyncio.wait((self._task,))


_servers: dict[str, _Servers] = {}  # by settings


async def play(settings: Mapping[str, Any], item: Mapping[str, Any], address: Mapping[str, Any]) -> Seats | float:
    """Play the task of a row of the prompts. settings: `environment`, its name; optionally `config`, verifiers' own, as a mapping,
    and `folder`, for the files of episodes, which those that are killed leave.

    Returns the reward of each seat that is trained. A seat is an agent of verifiers', and each of its runs a speaker, which
    verifiers' client names in the header X-Session-ID. Raises RuntimeError with the cause if the episode failed: its reward would
    be 0. The servers that episodes share are then started anew, because one of them may be the cause.
    Without an address it plays nothing, and only makes the environment. Raises verifiers' error if no episode could be played.
    """
    key = json.dumps(settings, sort_keys=True)
    environment = _loaded(key)
    if not address:
        _check(environment)
        return 0.0
    os.environ[_KEY] = address["api_key"]
    if key not in _servers:
        _servers[key] = _Servers(environment)
    servers = _servers[key]
    try:
        await servers.start()
        kept = asyncio.all_tasks()
        try:
            return await _play(environment, int(item["index"]), address)
        finally:  # what the episode leaves does not go on in the next one
            if left := asyncio.all_tasks() - kept:
                for task in left:
                    task.cancel()
                await asyncio.wait(left)
    except Exception:
        await _servers.pop(key).end()
        raise


async def _play(environment: Any, index: int, address: Mapping[str, Any]) -> Seats:
    client = vf.EvalClientConfig(base_url=address["base_url"], api_key_var=_KEY)
    episode = await environment.run_episode(_task(environment, index), vf.ModelContext("policy", client, vf.Sampling()))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or errors:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
    roles = agent_config_fields(environment.config)
    trained = [
        trace
        for trace in episode.traces
        if trace.agent.trainable and roles[trace.agent.name].client is None and trace.assistant_messages
    ]
    if not trained:
        raise RuntimeError("the policy played no seat that is trained")
    return [(trace.agent.name, float(trace.reward), trace.id) for trace in trained]


@functools.cache
def _loaded(settings: str) -> Any:
    given = json.loads(settings)
    if given.get("folder"):
        runtime_of_subprocesses.CACHE_DIR = Path(given["folder"])
    return load_environment(_config(given["environment"], given.get("config", {})))


def _check(environment: Any) -> None:
    """Check what verifiers checks in each episode: whether the harness of each role fits the tasks and the runtime."""
    roles, task = agent_config_fields(environment.config), type(environment.taskset).task_type()
    for role, harness in environment.config.agent_harnesses().items():
        validate_pairing(load_harness(harness), task, roles[role].runtime)


def _task(environment: Any, index: int) -> Any:
    """A process keeps the tasks of a bounded set, and makes those of another one anew up to this task."""
    if environment.taskset.bounded:
        return _tasks(environment)[index]
    return next(itertools.islice(environment.taskset, index, None))


@functools.cache
def _tasks(environment: Any) -> list[Any]:
    return list(environment.taskset)


def _config(name: str, given: Mapping[str, Any]) -> Any:
    """verifiers' config. A role runs in this process, unless the environment or the config has a runtime or a harness for it:
    verifiers' defaults are a remote runtime and a program that it installs for each episode."""
    raw = {**given, "taskset": {**given.get("taskset", {}), "id": name}}
    config = resolve_env_config(raw)
    has_harness = default_harness_id(name) == name
    for role in agent_config_fields(config):
        agent = type(config).model_fields[role].default  # as the environment declares it
        raw[role] = {}
        if "runtime" not in agent.model_fields_set:
            raw[role]["runtime"] = {"type": "subprocess"}
        if agent.harness is None and not has_harness:
            raw[role]["harness"] = {"id": _HARNESS}
        elif agent.harness is not None and agent.harness.id == "null":  # the same program
            raw[role]["harness"] = {**agent.harness.model_dump(exclude_unset=True), "id": _HARNESS}
        raw[role] |= given.get(role, {})
    return resolve_env_config(raw)


def _rows(name: str, limit: int) -> None:
    taskset = load_environment(_config(name, {})).taskset
    for index, task in enumerate(itertools.islice(taskset, limit)):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else " ".join(_text(message.content) for message in prompt or ())
        print(json.dumps({"index": index, "text": text or name, "answer": ""}))


def _text(content: Any) -> str:
    """Of a message. Parts of other kinds, such as images, are left out."""
    return content if isinstance(content, str) else " ".join(part.text for part in content or () if part.type == "text")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write the tasks of a verifiers environment as prompts, one JSON object a line."
    )
    parser.add_argument("name", help="the environment, as verifiers names it")
    parser.add_argument("--limit", type=int, default=10_000, help="the most tasks (default: %(default)s)")
    asked = parser.parse_args()
    _rows(asked.name, asked.limit)
