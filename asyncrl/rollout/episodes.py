"""EpisodeAgent: an environment's library plays whole episodes, in processes that may be of another Python.

Libraries of environments need packages that contradict each other and asyncrl's, and they hang, exit or leak. So each episode is a
call of one function in a process of its own, a judge (rewards/judges.py), with a limit of time and of memory. The function asks the
policy over HTTP. An episode that fails costs its rollout, which is released and played again up to manager.max_issues times. The
failure never becomes a reward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import ConfigError
from asyncrl.data.prompts import Prompt
from asyncrl.rewards.judges import JudgeDied, Judges, JudgesGone, JudgesLost
from asyncrl.rewards.outcome import RolloutRejected, RolloutReleased
from asyncrl.rewards.reward_function import Form
from asyncrl.rollout.chat_agent import ChatAgent, ChatSession, SeatReward
from asyncrl.runtime.unix_sockets import folder_of_run

_LOGGER = logging.getLogger(__name__)
_EPISODE = Form("function of episodes", ("settings", "item", "address"), seats=True)


class EpisodeAgent(ChatAgent):
    """Plays one episode for each member of a group.

    play: `package.module:function` or `path/to/file.py:function`, called as (settings, item, address) -> reward. It may also return
    a list of (seat, reward, speaker), as SeatReward has them. item: the prompt's row. address: `base_url` and `api_key` of the
    policy, and the group's `member`.
    """

    def __init__(
        self,
        *,
        play: str,
        settings: Mapping[str, Any] | None = None,  # passed to `play`
        python: str = "",  # the interpreter of the episodes' processes; "": this one
        limit_s: float = 600.0,  # of one episode
        memory_bytes: int = 8_000_000_000,  # of one episode's process; 0: no limit
        processes: int = 16,  # episodes that are played at the same time, per worker
        **chat: Any,  # arguments of ChatAgent
    ) -> None:
        super().__init__(**chat)
        if limit_s <= 0 or processes < 1:
            raise ValueError(f"limit_s={limit_s} must be positive, and processes={processes} at least 1")
        self._settings, self._limit_s = dict(settings or {}), limit_s
        self._spec, self._judges = play, _judges(play, python, memory_bytes, processes)

    async def start(self) -> None:
        """Wait until `play` is imported. Raises ConfigError if the import fails."""
        await self._judges.started()

    async def chat(self, session: ChatSession, prompt: Prompt) -> float | list[SeatReward]:
        address = {"base_url": session.base_url, "api_key": session.api_key, "member": session.member}
        try:
            answer = await self._judges.ask([((self._settings, dict(prompt.row), address), {})], self._limit_s)
        except TimeoutError:
            raise RolloutReleased("episode_timeout", f"{self._spec} took more than {self._limit_s:g} s") from None
        except JudgeDied as error:
            raise RolloutReleased("episode_died", f"{self._spec} ended its process: {error}") from None
        except JudgesLost as error:
            raise RolloutReleased("episode_lost", f"{self._spec} cannot be called: {error}") from error
        except JudgesGone as error:
            raise RolloutRejected("episode_gone", f"{self._spec} cannot be called any more: {error}") from None
        if "error" in answer:
            _LOGGER.warning("%s failed:\n%s", self._spec, answer["traceback"].rstrip())
            raise RolloutReleased("episode_error", f"{self._spec} raised {answer['error']}")
        if "no_number" in answer:
            raise RolloutRejected("reward_not_finite", f"{self._spec} returned {answer['no_number']}")
        (value,) = answer["values"]
        return [SeatReward(*seat) for seat in value] if isinstance(value, list) else float(value)


class VerifiersAgent(EpisodeAgent):
    """Plays the environments of the package verifiers (verifiers_episode.py)."""

    def __init__(
        self,
        *,
        environment: str,  # as verifiers names it
        config: Mapping[str, Any] | None = None,  # verifiers' own: `taskset`, `timeout`, a mapping for each seat, ...
        **episode: Any,  # arguments of EpisodeAgent
    ) -> None:
        settings = {"environment": environment, "config": dict(config or {}), "folder": folder_of_run()}
        super().__init__(play="asyncrl.rollout.verifiers_episode:play", settings=settings, **episode)

    async def start(self) -> None:
        """Wait until the environment is made. Raises ConfigError if no episode of it can be played."""
        await super().start()
        try:
            answer = await self._judges.ask([((self._settings, {}, {}), {})], self._limit_s)
        except TimeoutError:
            answer = {"error": f"it took more than {self._limit_s:g} s"}
        except JudgeDied as error:
            answer = {"error": f"it ended its process: {error}"}
        if "error" in answer:
            _LOGGER.error("%s", answer.get("traceback", ""))
            name = self._settings["environment"]
            raise ConfigError(f"the environment {name!r} of verifiers cannot be made: {answer['error']}")


@functools.cache
def _judges(play: str, python: str, memory_bytes: int, processes: int) -> Judges:
    """The processes of a worker's agents; those for training and evaluations share them. They end with the worker."""
    return Judges(
        play,
        form=_EPISODE,
        memory_bytes=memory_bytes,
        most=processes,
        most_async=processes,
        logger=_LOGGER,
        python=python,
        max_tries=1,
        waits=False,
    )
