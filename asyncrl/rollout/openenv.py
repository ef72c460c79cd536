"""OpenEnvAgent: an environment behind OpenEnv's protocol, in a server process of its own.

    rollout.tasks.default.agent=openenv:http://host:8000      a server that runs
    rollout.tasks.default.agent=openenv:my_game.server.app:app   servers that the rollout worker starts, as `uvicorn` names the app

The protocol is JSON over a WebSocket: reset, step, state. Only servers need the package openenv-core, and they may run in a Python
of their own. A server that the worker has started plays one episode at a time, and ends when an episode fails in it. So a fault of
an environment costs one rollout, which is released and played again up to manager.max_issues times. It never becomes a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from asyncrl.data.prompts import Prompt
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.rewards.outcome import RolloutReleased
from asyncrl.rollout.chat_agent import ChatAgent, ChatReward, ChatSession
from asyncrl.runtime.process import python_module
from asyncrl.runtime.user_output import Pump

_URLS = ("http://", "https://", "ws://", "wss://")
_MAX_MESSAGE_BYTES = 64 << 20
_PAUSE_S = 0.2  # between two attempts to reach a server that starts, or one that has no place for a further session
_FULL = "CAPACITY_REACHED"
_CLOSING = aiohttp.ClientWSTimeout(ws_close=1.0)


class OpenEnvAgent(ChatAgent):
    """Plays one episode for each member of a group: the policy reads an observation and answers with an action, in turn.

    waits for: a place among the episodes; the server. unblocked by: the ends of other episodes, the server's answers, limits.
    """

    def __init__(
        self,
        *,
        server: str,  # its URL, or `module:app`
        python: str = "",  # the interpreter of servers that are started; "": this one
        action: str = "message",  # the field of an action that has the policy's answer
        observation: str = "",  # the field of an observation that the policy reads; "": all of it, as JSON
        max_turns: int = 16,
        turn_rewards: bool = False,  # each answer has the reward of its step; needs train.dense_rewards
        limit_s: float = 600.0,  # of one episode
        step_limit_s: float = 60.0,  # of the server's answer to one message
        start_limit_s: float = 120.0,  # of a server's start
        memory_bytes: int = 8_000_000_000,  # of a server that is started
        processes: int = 16,  # episodes that are played at the same time, per worker
        **chat: Any,  # arguments of ChatAgent
    ) -> None:
        super().__init__(**chat)
        if max_turns < 1 or processes < 1 or min(limit_s, step_limit_s, start_limit_s, memory_bytes) <= 0:
            raise ValueError(
                f"max_turns={max_turns}, processes={processes}, limit_s={limit_s}, step_limit_s={step_limit_s}, "
                f"start_limit_s={start_limit_s} and memory_bytes={memory_bytes} must be positive"
            )
        if not server.startswith(_URLS) and shutil.which(python or sys.executable) is None:
            raise ValueError(f"python={python!r}: there is no such program")
        self._action, self._observation = action, observation
        self._max_turns, self._turn_rewards, self._limit_s = max_turns, turn_rewards, limit_s
        self._servers = _servers(server, python, step_limit_s, start_limit_s, memory_bytes, processes)

    async def chat(self, session: ChatSession, prompt: Prompt) -> ChatReward:
        async with self._servers.game(dict(prompt.row.get("reset") or {})) as game:
            try:
                async with asyncio.timeout(self._limit_s):
                    return await self._talk(game, session)
            except TimeoutError:
                why = f"the episode took more than {self._limit_s:g} s"
                raise RolloutReleased("episode_timeout", why) from None

    async def _talk(self, game: _Game, session: ChatSession) -> ChatReward:
        messages: list[Any] = []
        rewards: list[float] = []
        while not game.done and len(rewards) < self._max_turns:
            messages.append({"role": "user", "content": self._text(game.observation)})
            reply = await session.client().chat.completions.create(model="policy", messages=messages)
            (choice,) = reply.choices
            said = choice.message.content or ""
            messages.append({"role": "assistant", "content": said})
            rewards.append(await game.ask("step", {self._action: said}))
            if choice.finish_reason == "length":
                break
        return list(rewards) if self._turn_rewards else sum(rewards)

    def _text(self, observation: dict[str, Any]) -> str:
        if not self._observation:
            return json.dumps(observation)
        if self._observation not in observation:
            raise ValueError(
                f"agent_args.observation={self._observation}: the environment's observations have {', '.join(observation)}"
            )
        return str(observation[self._observation])


class _Data(msgspec.Struct, frozen=True):
    """Of an observation or of an error."""

    observation: dict[str, Any] | None = None
    reward: float | bool | None = None
    done: bool = False
    code: str = ""
    message: str = ""


class _Answer(msgspec.Struct, frozen=True):
    type: str
    data: _Data


class _FullError(Exception):
    """The server has no place for a further session."""


class _Game:
    """A session of a server, and what its latest answer says."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, limit_s: float) -> None:
        self._socket, self._limit_s = socket, limit_s
        self.observation: dict[str, Any] = {}
        self.done = False
        self.sound = True  # the server has given a good answer to each message

    async def ask(self, what: str, data: dict[str, Any]) -> float:
        """Send a message, and return the reward in the answer. Raises RolloutReleased, and _FullError."""
        self.sound = False
        try:
            async with asyncio.timeout(self._limit_s):
                await self._socket.send_json({"type": what, "data": data})
                answer = await self._socket.receive_str()
        except TimeoutError:
            raise RolloutReleased("step_timeout", f"{what} took more than {self._limit_s:g} s") from None
        except (aiohttp.ClientError, OSError, TypeError) as error:  # TypeError: the socket is closed
            raise RolloutReleased("episode_died", f"the environment's server is gone at {what}: {error}") from None
        try:
            said = msgspec.json.decode(answer, type=_Answer)
        except DECODE_ERRORS as error:
            raise RolloutReleased(
                "episode_error", f"{what}: the answer is not of OpenEnv's protocol: {error}"
            ) from None
        if said.type == "error":
            if said.data.code == _FULL:
                raise _FullError
            raise RolloutReleased("episode_error", f"{what}: {said.data.code}: {said.data.message}")
        if said.data.observation is None:
            raise RolloutReleased("episode_error", f"{what}: the answer has no observation: {answer[:200]}")
        self.sound, self.done, self.observation = True, said.data.done, said.data.observation
        return float(said.data.reward or 0.0)


class _Server:
    """A server, at its URL or in a process that ends with this one."""

    def __init__(self, url: str, app: str, python: str, memory_bytes: int) -> None:
        """app: of a server that is started; "": url is that of one that runs."""
        self.url, self._path = url, ""
        self._process: subprocess.Popen[bytes] | None = None
        if not app:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-")
        self._path = os.path.join(self._folder.name, "socket")
        limited = [
            "/bin/sh",
            "-c",
            'ulimit -d "$0" && exec "$@"',
            str(memory_bytes >> 10),
            python or sys.executable,
            "-P",
        ]
        program = [*limited, *("-m", "uvicorn", app, "--uds", self._path, "--log-level", "warning")]
        with contextlib.closing(Pump(None, f"the server of {app}")) as pump:
            self._process = subprocess.Popen(
                python_module("asyncrl.rollout.command_main", *program),
                stdin=subprocess.DEVNULL,
                stdout=pump.writer,
                stderr=subprocess.STDOUT,
            )

    @property
    def is_own(self) -> bool:
        return self._process is not None

    @property
    def exit_code(self) -> int | None:
        """None: the server runs, or is not ours."""
        return None if self._process is None else self._process.poll()

    def connector(self) -> aiohttp.BaseConnector:
        return aiohttp.UnixConnector(self._path) if self.is_own else aiohttp.TCPConnector()

    async def end(self) -> None:
        """End the process and its descendants."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)  # its program kills them, within seconds
            self._folder.cleanup()


class _Servers:
    """The servers of a worker's agents, which those for training and evaluations share.

    waits for: a place; a server that starts or is full, at most start_limit_s. unblocked by: the ends of episodes, the server.
    """

    def __init__(
        self, server: str, python: str, step_limit_s: float, start_limit_s: float, memory_bytes: int, processes: int
    ) -> None:
        self._name, self._step_limit_s, self._start_limit_s = server, step_limit_s, start_limit_s
        url, app = (server.rstrip("/"), "") if server.startswith(_URLS) else ("http://localhost", server)
        self._make = functools.partial(_Server, url, app, python, memory_bytes)
        self._places = asyncio.Semaphore(processes)
        self.free: list[_Server] = []

    @contextlib.asynccontextmanager
    async def game(self, reset: dict[str, Any]) -> AsyncIterator[_Game]:
        """A session that has been reset. A server of ours plays the next one only if this one has ended well."""
        async with self._places:
            server = self.free.pop() if self.free else self._make()
            game: _Game | None = None
            async with contextlib.AsyncExitStack() as opened:
                try:
                    game = await self._begin(server, opened, reset)
                    yield game
                finally:
                    if game is not None and game.sound:
                        self.free.append(server)
                    else:
                        await server.end()

    async def _begin(self, server: _Server, opened: contextlib.AsyncExitStack, reset: dict[str, Any]) -> _Game:
        client = await opened.enter_async_context(aiohttp.ClientSession(connector=server.connector()))
        why: object = "it is full"
        try:
            async with asyncio.timeout(self._start_limit_s):
                while server.exit_code is None:
                    try:
                        socket = await client.ws_connect(
                            f"{server.url}/ws", max_msg_size=_MAX_MESSAGE_BYTES, timeout=_CLOSING
                        )
                        game = _Game(socket, self._step_limit_s)
                        await game.ask("reset", reset)
                        opened.push_async_callback(socket.close)
                        return game
                    except _FullError:
                        await socket.close()
                    except (aiohttp.ClientError, OSError) as error:
                        why = error
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            why = f"within {self._start_limit_s:g} s: {why}"
            raise RolloutReleased("episode_lost", f"{self._name} began no session {why}") from None
        raise RolloutReleased("episode_lost", f"{self._name} ended with exit code {server.exit_code}")


@functools.cache
def _servers(
    server: str, python: str, step_limit_s: float, start_limit_s: float, memory_bytes: int, processes: int
) -> _Servers:
    return _Servers(server, python, step_limit_s, start_limit_s, memory_bytes, processes)
