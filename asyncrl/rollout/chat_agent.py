"""ChatAgent: an agent written for an OpenAI client. It queries the policy over HTTP (openai_api.py) and returns a reward.

    class Solver(ChatAgent):
        async def chat(self, session, prompt):
            reply = await session.client().chat.completions.create(model="policy", messages=prompt.row["messages"])
            return float(reply.choices[0].message.content == prompt.answer)

Each member of a group has its own session; the sessions run concurrently. Of each session one sequence is trained: the one that
ends with the last answer, or the longest. With trained=all every sequence is trained that is no prefix of another. If `chat`
returns the rewards of several seats, this holds for each speaker. A sequence contains the policy's answers with exactly the sampled
tokens, and the agent's messages are masked out. Agents that use the queues instead are in agent.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.chat import ChatTemplate
from asyncrl.data.prompts import Prompt
from asyncrl.data.sequence import SequenceSample
from asyncrl.rewards.outcome import RolloutRejected, RolloutReleased
from asyncrl.rewards.reward import Completion, start_thread
from asyncrl.rewards.trajectory import Episode, build_sample
from asyncrl.rollout.agent import Env
from asyncrl.rollout.openai_api import IGNORABLE, ChatEndpoint
from asyncrl.rollout.openai_session import Policy, Session, SessionLimits, Trained
from asyncrl.rollout.openai_turns import Turn, episodes_of
from asyncrl.rollout.tool_calls import TAG, Said, parse_tool_calls
from asyncrl.runtime.background import gather_or_cancel

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_MAX_THREADS = 64  # plain `chat` functions that run at the same time, per task and worker
_MAX_ABANDONED = 32  # threads that outlived their rollout; beyond this no thread is started
_LOGGER = logging.getLogger(__name__)


class SeatReward(NamedTuple):
    """The reward of a seat that is trained. Each seat of a task has groups of its own.

    reward: a number, or a Score. Its answer counts in majority@k if the task has one seat.
    speaker: the header X-Session-ID of its requests; "": the seat's name. A seat may have several speakers.
    """

    seat: str
    reward: float
    speaker: str = ""


ChatReward = float | None | Sequence[float | Sequence[float]] | Sequence[SeatReward] | Mapping[str, float]


@dataclass(frozen=True)
class ChatSession:
    """The argument of `chat`: the policy's address, and the state of this group member."""

    base_url: str  # contains the session's id, so any API key works with it
    api_key: str  # the session's id; with it, any base URL of the worker works
    member: int  # index in the group
    env: Env  # its own fork, already reset; it may provide tools
    sampling: SamplingConfig  # sampling parameters of the answers
    endpoint: ChatEndpoint

    def client(self) -> AsyncOpenAI:
        """openai's client for this session, for an `async def chat`. All these clients share their connections.

        Making one takes 0.01 ms of CPU; making a separate `openai.AsyncOpenAI` takes 22 ms.
        """
        return self.endpoint.client(self.api_key)


class ChatAgent(ABC):
    """Subclasses implement `chat`. They take tokenizer, sampling, group_size and the task's agent_args by keyword."""

    judges_itself = True  # whether `chat` may return the reward; else the task needs a reward or an env
    tool_call_tag = TAG  # start of a tool call; streams withhold text from there on

    def __init__(
        self,
        *,
        tokenizer: Any,
        sampling: SamplingConfig,
        group_size: int,
        trained: Trained = "last",  # which of several sequences: that of the last answer, the longest, or all
        ignore: Sequence[str] = (),  # request fields that are ignored, e.g. [temperature, seed]
        chat_template_args: Mapping[str, Any] | None = None,  # variables of the template beside those of the prompts
        max_requests: int = 64,  # per session
        max_sequences: int = 16,  # per session: conversations that do not continue each other, and branches
        max_tokens: int = 0,  # for prompt and answer of a request together; 0: the generation server's limit
        max_session_tokens: int = 0,  # of all sequences of a session together; 0: unlimited
        step_limit_s: float = 0.0,  # from an answer to the next request, or to the end of `chat`; 0: unlimited
    ) -> None:
        if trained not in ("last", "longest", "all"):
            raise ValueError(f"trained is {trained!r}; it must be last, longest or all")
        if unknown := sorted(set(ignore) - IGNORABLE):
            raise ValueError(f"ignore contains {unknown}; known are {', '.join(sorted(IGNORABLE))}")
        if max_requests < 1 or max_sequences < 1 or min(max_tokens, max_session_tokens, step_limit_s) < 0:
            raise ValueError(
                f"max_requests={max_requests} and max_sequences={max_sequences} must be at least 1, max_tokens={max_tokens}, "
                f"step_limit_s={step_limit_s} and max_session_tokens={max_session_tokens} not negative"
            )
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.group_size = group_size  # sessions per prompt
        self.chat_template_args = dict(chat_template_args or {})
        self.template = ChatTemplate(tokenizer, self.chat_template_args)  # for prompts that have none
        self.trained = trained
        self._ignore = frozenset(ignore)
        self._limits = SessionLimits(max_requests, max_sequences, max_tokens, max_session_tokens)
        self._step_limit_s = step_limit_s
        self._threads = _Threads()
        self._told_left_out = False

    @abstractmethod
    def chat(self, session: ChatSession, prompt: Prompt) -> Awaitable[ChatReward] | ChatReward:
        """Hold one conversation or several, as `async def` or as `def`, which runs in a thread. Returns the reward.

        A number: of the whole session, and so of each of its trained sequences. A mapping: the reward of each trained sequence, by
        the id of its last answer (`reply.id`), for every sequence.
        A list of SeatRewards: the seats that are trained; answers to other speakers are sampled and not trained.
        None: the task's env judges the last answer of the trained sequence. With
        train.dense_rewards also a list with one entry for each answer of the trained sequence, in order: a number, placed at the
        answer's last token, or a list with one number for each token of the answer; not with trained=all.
        An exception rejects the prompt as
        `agent_error`. Use a blocking client only in a `def`: in an `async def` it would block the event loop that must answer its
        request.
        """

    def parse_tool_calls(self, text: str) -> Said:
        """Content and tool calls of an answer to a request with tools. Override it, with tool_call_tag, for another format."""
        return parse_tool_calls(text)

    async def collect_sessions(
        self, prompt: Prompt, env: Env, endpoint: ChatEndpoint, policy: Policy
    ) -> list[SequenceSample]:
        """The trajectory of one prompt. The first member that fails cancels the others.

        It holds the sequences of all seats, seat by seat, so that a ticket is one trajectory, whatever the number of seats.
        """
        members = [self._play(prompt, env.fork(), endpoint, policy, member) for member in range(self.group_size)]
        played = [speaker for of_member in await gather_or_cancel(members) for speaker in of_member]
        by_seat = [[of for of in played if of.seat == seat] for seat in sorted({of.seat for of in played})]
        episodes = [episode for speakers in by_seat for of in speakers for episode in of.episodes]
        if self.trained != "all" and len(by_seat) == 1 and len(played) == self.group_size:
            return [build_sample(prompt.prompt_id, episodes)]
        sessions = [at for speakers in by_seat for at, of in enumerate(speakers) for _ in of.episodes]
        seats = [at for at, speakers in enumerate(by_seat) for of in speakers for _ in of.episodes]
        return [build_sample(prompt.prompt_id, episodes, sessions=sessions, seats=seats)]

    async def _play(
        self, prompt: Prompt, env: Env, endpoint: ChatEndpoint, policy: Policy, member: int
    ) -> list[_Spoken]:
        """Play one member, from the start of its session to the end."""
        session = Session(
            policy,
            prompt.template.with_arguments(self.chat_template_args) if prompt.template else self.template,
            sampling=self.sampling,
            ignore=self._ignore,
            limits=self._limits,
            counts=endpoint.counts,
            tokenizer=self.tokenizer,
            parse=self.parse_tool_calls,
            tool_call_tag=self.tool_call_tag,
        )
        session_id = endpoint.open(session)
        try:
            await env.reset()
            seen = ChatSession(endpoint.base_url(session_id), session_id, member, env, self.sampling, endpoint)
            value = await self._converse(session, seen, prompt)
            if _are_seats(value):
                played = _spoken(session, self.trained, value)
                session.count_trained([leaf for of in played for leaf in of.leaves])
                return played
            leaves = session.leaves(self.trained)
            turn, episodes = leaves[-1], episodes_of(leaves)
            if value is None:
                assert turn.response is not None
                tokens = tuple(turn.response.output_ids)
                _, value, *_ = await env.step(Completion(turn.text, turn.response.finished, tokens))
                value = value if np.ndim(value) == 0 else [0.0] * (len(episodes[-1].responses) - 1) + [value]
        finally:
            await endpoint.end(session_id)
            await env.close()
        self._count(session, leaves)
        _add_rewards({leaf.completion_id: episode for leaf, episode in zip(leaves, episodes, strict=True)}, value)
        return [_Spoken("", leaves, episodes)]

    async def _converse(self, session: Session, seen: ChatSession, prompt: Prompt) -> Any:
        """Run `chat`. An error that ends the rollout inside a request is raised here, even if `chat` swallows it."""
        in_thread = not inspect.iscoroutinefunction(self.chat)
        async with self._threads.room if in_thread else contextlib.nullcontext():
            talking = self._start(seen, prompt, in_thread)
            try:
                await self._end_of(talking, session)
                if session.failed.done():
                    session.failed.result()
                if talking.cancelled():  # by itself; a revoked rollout cancels this task instead
                    raise RuntimeError("chat has cancelled itself")
                return talking.result()
            finally:
                if not talking.done():
                    talking.cancel()
                    await asyncio.wait({talking})
                elif not talking.cancelled():
                    talking.exception()  # mark it as retrieved; a relevant error has been raised already

    async def _end_of(self, talking: asyncio.Future[Any], session: Session) -> None:
        """Wait until `chat` ends or an error ends the rollout. Raises RolloutReleased if a step takes too long."""
        limit_s, left_s, done = self._step_limit_s, self._step_limit_s, set[asyncio.Future[Any]]()
        while not done:
            timeout = left_s if limit_s else None
            done, _ = await asyncio.wait(
                {talking, session.failed}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            left_s = limit_s - session.idle_s
            if not done and left_s <= 0:
                raise RolloutReleased("step_timeout", f"no request and no end came within {limit_s:g} s of an answer")

    def _start(self, seen: ChatSession, prompt: Prompt, in_thread: bool) -> asyncio.Future[Any]:
        if in_thread:
            return self._threads.start(lambda: self.chat(seen, prompt), f"chat {prompt.prompt_id}")

        async def guarded() -> Any:
            await seen.endpoint.next_start()
            try:
                return await cast("Awaitable[Any]", self.chat(seen, prompt))
            except SystemExit as error:  # would end the worker
                raise RuntimeError(f"SystemExit: {error}") from error

        return asyncio.ensure_future(guarded())

    def _count(self, session: Session, leaves: Sequence[Turn]) -> None:
        left_out = session.count_trained(leaves)
        if left_out and not self._told_left_out:
            self._told_left_out = True
            _LOGGER.warning(
                "a session has %d sequences and only the %s is trained; %d sampled tokens of the others are not (logged "
                "once; set agent_args.trained to choose)",
                session.num_sequences,
                "one answered last" if self.trained == "last" else "longest",
                left_out,
            )


@dataclass(frozen=True)
class _Spoken:
    """The trained sequences of a seat's speaker in a session."""

    seat: str
    leaves: list[Turn]
    episodes: list[Episode]


def _spoken(session: Session, trained: Trained, given: Sequence[SeatReward]) -> list[_Spoken]:
    leaves = {speaker: session.leaves(trained, speaker) for speaker in (of.speaker or of.seat for of in given)}
    if len(leaves) < len(given):  # its tokens would be trained twice
        raise ValueError(f"chat returned several rewards for a speaker: {given}; return one for each")
    spoken = [_Spoken(of.seat, ends, episodes_of(ends)) for of, ends in zip(given, leaves.values(), strict=True)]
    for of, reward in zip(spoken, given, strict=True):
        for episode in of.episodes:
            episode.reward = _finite(reward.reward)
            episode.note_answer(reward.reward)
    return spoken


def _are_seats(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(of, SeatReward) for of in value)


class _Threads:
    """Threads of plain `chat` functions. Limits the number of running and of abandoned threads."""

    def __init__(self) -> None:
        # A conversation holds a place while it runs. One that waits gets a place when another's rollout ends
        self.room = asyncio.Semaphore(_MAX_THREADS)
        self._started: list[Future[Any]] = []

    def start(self, run: Callable[[], Any], name: str) -> asyncio.Future[Any]:
        self._started = [thread for thread in self._started if not thread.done()]
        if len(self._started) >= _MAX_THREADS + _MAX_ABANDONED:
            raise RolloutRejected(
                "agent_hangs", f"{len(self._started)} threads of `chat` have not ended; no more are started"
            )
        thread = start_thread(run, name)
        self._started.append(thread)
        return asyncio.wrap_future(thread)


def _add_rewards(episodes: Mapping[str, Episode], value: Any) -> None:
    """Add the reward of `chat`: of the whole session, of each sequence, or a list with an entry for each answer of the only one.

    episodes: the trained sequences by the id of their last answer.
    """
    if isinstance(value, Mapping):
        if set(value) != set(episodes):
            raise ValueError(
                f"chat returned rewards for {sorted(value)}; the last answers of the trained sequences are {sorted(episodes)}; "
                "return one reward for each, or a number for all"
            )
        for answer, episode in episodes.items():
            episode.reward = _finite(value[answer])
            episode.note_answer(value[answer])
        return
    if not isinstance(value, (list, tuple)):
        for episode in episodes.values():
            episode.reward = _finite(value)
            episode.note_answer(value)
        return
    if len(episodes) > 1:
        raise ValueError("chat returned a list of rewards for several trained sequences; return a number, or a mapping")
    (episode,) = episodes.values()
    if len(value) != len(episode.responses):
        raise ValueError(
            f"chat returned {len(value)} rewards for a trained sequence of {len(episode.responses)} answers; return one for each"
        )
    for turn, reward in enumerate(value):
        episode.note_answer(reward)
        of_tokens = isinstance(reward, (list, tuple, np.ndarray))
        episode.add_turn_reward([_finite(one) for one in reward] if of_tokens else _finite(reward), turn)


def _finite(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RolloutRejected("reward_not_finite", f"chat returned {value!r}; it must be a finite number, or None")
    return number
