"""Agents that use the chat endpoint: groups, rewards, threads, and every way to end early."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web
from test_openai_api import EOS, LIMIT_S, LOGGER, SERVICES, TOKENIZER, VERSION
from test_rollout_worker import Stage

from asyncrl.config.schema import ConfigError, EvalSetConfig, RolloutConfig, SamplingConfig, TaskConfig
from asyncrl.data.chat import ChatTemplate
from asyncrl.data.prompts import Prompt
from asyncrl.data.sequence import SequenceSample
from asyncrl.rewards.outcome import RolloutEnded, RolloutRejected, RolloutReleased
from asyncrl.rewards.score import Score
from asyncrl.rewards.trajectory import (
    OnPiece,
    Response,
    complete_sample,
    rewards_by_seat,
    sample_answers,
    session_summary,
    summary_of,
)
from asyncrl.rollout import chat_agent
from asyncrl.rollout.agent import Env, StepResult, UnjudgedEnv
from asyncrl.rollout.chat_agent import ChatAgent, ChatSession, SeatReward
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.rollout.rollouts import TRAIN, TaskTable
from asyncrl.runtime.loop_watch import watch_loop
from asyncrl.testing.tiny import make_chat_tokenizer

SAMPLING = SamplingConfig(max_new_tokens=32)
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = Prompt("e0-p0", "", [], "HI", "default", {"messages": MESSAGES}, False)


async def echo(input_ids: list[int], sampling: SamplingConfig, on_piece: OnPiece) -> Response:
    """Repeat the user's text in capitals. `lose` ends the rollout, and `wait` never returns."""
    text = TOKENIZER.decode(input_ids).rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if text == "lose":
        raise RolloutReleased("server_lost", "gone")
    if text == "wait":
        await asyncio.Event().wait()
    response = Response(list(input_ids))
    output = [*TOKENIZER.encode(text.upper()), EOS]
    response.add_piece(output, [-1.0] * len(output), [(VERSION, len(output))])
    on_piece(response)
    response.finished = True
    return response


async def ask(session: ChatSession, text: str = "hi", speaker: str = "") -> str:
    message: Any = {"role": "user", "content": text}
    headers = {"X-Session-ID": speaker}
    reply = await session.client().chat.completions.create(model="m", messages=[message], extra_headers=headers)
    return reply.choices[0].message.content or ""


class Judge(Env):
    """Gives reward 1 for the prompt's answer. Counts open instances."""

    open = 0

    async def reset(self) -> tuple[Any, dict[str, Any]]:
        Judge.open += 1
        return None, {}

    async def step(self, action: Any) -> StepResult:
        return None, float(action.text == self.prompt.answer and action.finished), True, False, {}

    async def close(self) -> None:
        Judge.open -= 1


@contextlib.asynccontextmanager
async def open_endpoint() -> AsyncIterator[ChatEndpoint]:
    """All environments and sessions of the test must be closed at its end."""
    made = ChatEndpoint(SERVICES)
    await made.start("127.0.0.1")
    Judge.open = 0
    yield made
    await made.close()
    assert Judge.open == 0
    assert SERVICES.board.snapshot().queues["chat sessions"] == 0


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with open_endpoint() as made:
        yield made


async def collect(
    agent: type[ChatAgent], endpoint: ChatEndpoint, *, group_size: int = 3, env: Env | None = None, **args: Any
) -> SequenceSample:
    made = agent(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=group_size, **args)
    env = env or Judge(prompt=PROMPT, reward=None)
    (sample,) = await asyncio.wait_for(made.collect_sessions(PROMPT, env, endpoint, echo), LIMIT_S)
    return sample


class Asks(ChatAgent):
    async def chat(self, session: ChatSession, prompt: Prompt) -> float:
        await ask(session, "hi")
        return 1.0


@pytest.mark.parametrize(
    ("own", "told"), [({}, "Be brief. glad"), ({"chat_template_args": {"mood": "sad"}}, "Be brief. sad")]
)
async def test_requests_have_system_message_and_template_arguments_of_the_prompt(
    endpoint: ChatEndpoint, own: dict[str, Any], told: str
) -> None:
    """The agent's own arguments win."""
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ mood }}"
    tokenizer = make_chat_tokenizer(None, template)
    prompt = replace(PROMPT, template=ChatTemplate(tokenizer, {"mood": "glad"}, "Be brief."))
    agent = Asks(tokenizer=tokenizer, sampling=SAMPLING, group_size=1, **own)
    collecting = agent.collect_sessions(prompt, Judge(prompt=prompt, reward=None), endpoint, echo)
    (sample,) = await asyncio.wait_for(collecting, LIMIT_S)
    read = sample.data["packed_input_ids"][sample.data["prompt_mask"]].tolist()
    assert tokenizer.decode(read) == told.replace(". ", ". hi ")


class Meeting(ChatAgent):
    """All members chat at the same time, each in a session of its own, and each returns its own reward."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.met = 0
        self.all_met = asyncio.Event()

    async def chat(self, session: ChatSession, prompt: Prompt) -> float:
        self.met += 1
        if self.met == self.group_size:
            self.all_met.set()
        await self.all_met.wait()
        assert await ask(session, f"member {session.member}") == f"MEMBER {session.member}"
        return session.member / 2


async def test_members_have_sessions_and_rewards_of_their_own(endpoint: ChatEndpoint) -> None:
    sample = await collect(Meeting, endpoint)
    assert sample.data["rewards"].tolist() == [0.0, 0.5, 1.0]
    assert [
        TOKENIZER.decode(ids[mask]) for ids, mask in zip(*map(lambda key: sample.slices(key)[0], KEYS), strict=True)
    ] == [f"MEMBER {member}<|im_end|>" for member in range(3)]
    assert summary_of(sample).version_start == [VERSION] * 3


class TwoAnswers(ChatAgent):
    """Asks twice. Returns a reward for each answer."""

    rewards: Any = ()

    async def chat(self, session: ChatSession, prompt: Prompt) -> Any:
        client = session.client()
        messages: list[Any] = [{"role": "user", "content": "one"}]
        for text in ("one", "two"):
            messages = [*messages, {"role": "user", "content": text}] if text == "two" else messages
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages = [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]
        return self.rewards


async def test_each_answer_has_a_reward_of_its_own(endpoint: ChatEndpoint) -> None:
    class Graded(TwoAnswers):
        rewards = (0.5, [0.0, 1.0, 0.0, 0.25])  # the first answer at its last token, the second token by token

    sample = await collect(Graded, endpoint, group_size=1)
    dense, sampled = sample.data["dense_rewards"], sample.data["loss_mask"]
    assert dense[sampled].tolist() == [0, 0, 0, 0.5, 0, 1, 0, 0.25]  # "ONE" and "TWO", each with its end token
    assert not dense[~sampled].any()
    assert sample.data["rewards"].tolist() == [0]


class TokenByToken(Judge):
    async def step(self, action: Any) -> StepResult:
        return None, [float(at) for at, _ in enumerate(action.token_ids)], True, False, {}


async def test_the_environment_may_judge_the_last_answer_token_by_token(endpoint: ChatEndpoint) -> None:
    class Judged(TwoAnswers):
        rewards = None

    sample = await collect(Judged, endpoint, group_size=1, env=TokenByToken(prompt=PROMPT, reward=None))
    dense, sampled = sample.data["dense_rewards"], sample.data["loss_mask"]
    assert dense[sampled].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]  # "ONE" and "TWO", each with its end token


async def test_a_session_has_one_reward_for_each_answer(endpoint: ChatEndpoint) -> None:
    class Missing(TwoAnswers):
        rewards = (1.0,)

    with pytest.raises(ValueError, match="chat returned 1 rewards for a trained sequence of 2 answers"):
        await collect(Missing, endpoint, group_size=1)


@pytest.mark.full
async def test_200_sessions_start_in_turns_of_their_own(endpoint: ChatEndpoint) -> None:
    """Each session makes an openai client, which takes 22 ms of CPU. The loop's other work runs in between."""
    turns = 0
    starts: list[int] = []

    class Starting(ChatAgent):
        async def chat(self, session: ChatSession, prompt: Prompt) -> float:
            starts.append(turns)
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
            await ask(session)
            return 1.0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    try:
        await collect(Starting, endpoint, group_size=200)
    finally:
        turning.cancel()
    assert len(set(starts)) == len(starts) == 200


KEYS = ("packed_input_ids", "loss_mask")


async def test_without_a_reward_of_its_own_the_last_answer_is_judged(endpoint: ChatEndpoint) -> None:
    class Unpaid(ChatAgent):
        async def chat(self, session: ChatSession, prompt: Prompt) -> None:
            await ask(session, "hi" if session.member else "ho")

    assert (await collect(Unpaid, endpoint)).data["rewards"].tolist() == [0.0, 1.0, 1.0]


async def test_a_plain_function_runs_in_a_thread_with_a_blocking_client(endpoint: ChatEndpoint) -> None:
    class Blocking(ChatAgent):
        def chat(self, session: ChatSession, prompt: Prompt) -> float:
            with openai.OpenAI(base_url=session.base_url, api_key="any") as client:
                reply = client.chat.completions.create(model="m", messages=prompt.row["messages"])
            return float(reply.choices[0].message.content == prompt.answer)

    assert (await collect(Blocking, endpoint, group_size=2)).data["rewards"].tolist() == [1.0, 1.0]


async def test_the_sequence_that_is_trained_is_chosen_and_the_rest_counted(
    endpoint: ChatEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    class Wanderer(ChatAgent):
        async def chat(self, session: ChatSession, prompt: Prompt) -> float:
            await ask(session, "the longer one")
            await ask(session, "short")
            return 1.0

    with caplog.at_level(logging.WARNING):
        last = await collect(Wanderer, endpoint, group_size=1)
        longest = await collect(Wanderer, endpoint, group_size=1, trained="longest")
    assert (last.data["loss_mask"].sum(), longest.data["loss_mask"].sum()) == (6, 15)
    assert (endpoint.counts.trained_tokens, endpoint.counts.left_out_tokens) == (21, 21)
    assert "a session has 2 sequences and only the one answered last is trained; 15 sampled tokens" in caplog.text


class Failing(ChatAgent):
    """Member 0 fails in some way. The others wait for an answer that never comes."""

    async def chat(self, session: ChatSession, prompt: Prompt) -> Any:
        if session.member:
            return await ask(session, "wait")
        return await self.fail(session)

    async def fail(self, session: ChatSession) -> Any:
        raise NotImplementedError


class SwallowsErrors(Failing):
    async def fail(self, session: ChatSession) -> float:
        try:
            await ask(session, "lose")
        except openai.APIError:
            await asyncio.Event().wait()  # ignores the error, and waits
        return 1.0


class ReturnsInSpite(Failing):
    async def fail(self, session: ChatSession) -> float:
        try:
            await ask(session, "lose")
        except openai.APIError:
            return 1.0
        return 0.0


class Silent(Failing):
    async def fail(self, session: ChatSession) -> float:
        return 1.0


class NotANumber(Failing):
    async def fail(self, session: ChatSession) -> float:
        await ask(session)
        return float("nan")


class OneIsNotANumber(Failing):
    async def fail(self, session: ChatSession) -> Any:
        reply = await session.client().chat.completions.create(model="m", messages=MESSAGES)
        return {reply.id: float("inf")}


class SeatWithoutANumber(Failing):
    async def fail(self, session: ChatSession) -> Any:
        await ask(session, speaker="white")
        return [SeatReward("white", float("-inf"))]


class Exits(Failing):
    async def fail(self, session: ChatSession) -> float:
        raise SystemExit(3)


class CancelsItself(Failing):
    async def fail(self, session: ChatSession) -> float:
        raise asyncio.CancelledError


class Refused(Failing):
    async def fail(self, session: ChatSession) -> float:
        await session.client().chat.completions.create(model="m", messages=MESSAGES, seed=1)
        return 1.0


@pytest.mark.parametrize(
    ("agent", "error", "told"),
    [
        (SwallowsErrors, RolloutReleased, "server_lost: gone"),
        (ReturnsInSpite, RolloutReleased, "server_lost: gone"),
        (Silent, RolloutRejected, "no_response: "),
        (NotANumber, RolloutRejected, "reward_not_finite: chat returned nan"),
        (OneIsNotANumber, RolloutRejected, "reward_not_finite: chat returned inf"),
        (SeatWithoutANumber, RolloutRejected, "reward_not_finite: chat returned -inf"),
        (Exits, RuntimeError, "SystemExit: 3"),
        (CancelsItself, RuntimeError, "chat has cancelled itself"),
        (Refused, openai.BadRequestError, "agent_args.ignore"),
    ],
)
async def test_one_member_that_fails_ends_the_group(
    endpoint: ChatEndpoint, agent: type[ChatAgent], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        await collect(agent, endpoint)


async def test_a_rollout_that_is_taken_back_leaves_nothing(endpoint: ChatEndpoint) -> None:
    class Waiting(ChatAgent):
        async def chat(self, session: ChatSession, prompt: Prompt) -> float:
            asking.set()
            await ask(session, "wait")
            return 1.0

    asking = asyncio.Event()
    collecting = asyncio.ensure_future(collect(Waiting, endpoint))
    await asyncio.wait_for(asking.wait(), LIMIT_S)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting


async def test_a_thread_that_is_left_behind_finds_its_session_closed(endpoint: ChatEndpoint) -> None:
    class Late(ChatAgent):
        def chat(self, session: ChatSession, prompt: Prompt) -> float:
            with openai.OpenAI(base_url=session.base_url, api_key="any") as client:
                with contextlib.suppress(openai.APIError):
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "lose"}])
                try:
                    released.wait(LIMIT_S)
                    client.chat.completions.create(model="m", messages=MESSAGES)
                except openai.APIError as error:
                    found.append(error)
            ended.set()
            return 1.0

    released, ended, found = threading.Event(), threading.Event(), []
    with pytest.raises(RolloutEnded, match="server_lost"):
        await collect(Late, endpoint, group_size=1)
    released.set()
    assert await asyncio.to_thread(ended.wait, LIMIT_S)
    assert [type(error) for error in found] == [openai.NotFoundError]


async def test_threads_that_do_not_end_have_a_bound(endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversation at a time has a thread here, and one more thread may outlive its rollout."""
    monkeypatch.setattr(chat_agent, "_MAX_THREADS", 1)
    monkeypatch.setattr(chat_agent, "_MAX_ABANDONED", 1)

    class Hangs(ChatAgent):
        def chat(self, session: ChatSession, prompt: Prompt) -> float:
            begun.put(session.member)
            ended.wait(LIMIT_S)
            return 1.0

    begun, ended = queue.Queue[int](), threading.Event()
    hangs = Hangs(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=2)

    def collecting() -> Awaitable[Any]:
        env = Judge(prompt=PROMPT, reward=None)
        return asyncio.wait_for(hangs.collect_sessions(PROMPT, env, endpoint, echo), LIMIT_S)

    try:
        for _ in range(2):
            playing = asyncio.ensure_future(collecting())
            assert await asyncio.to_thread(begun.get, timeout=LIMIT_S) == 0  # member 1 waits, and begins in neither
            playing.cancel()
            await asyncio.wait({playing})
        with pytest.raises(RolloutRejected, match=r"agent_hangs: 2 threads of `chat` have not ended"):
            await collecting()
    finally:
        ended.set()


async def test_a_blocking_client_on_the_event_loop_is_told_of() -> None:
    told, text = threading.Event(), ""

    class Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            nonlocal text
            text = record.getMessage()
            told.set()

    def stand_still() -> None:
        watch_loop(asyncio.get_running_loop(), LOGGER, limit_s=0.05)
        assert told.wait(LIMIT_S)

    handler = Teller()
    LOGGER.addHandler(handler)
    try:
        stand_still()
    finally:
        LOGGER.removeHandler(handler)
    assert "has been blocked for 0.05 s by a coroutine. Put a blocking client into a plain `def chat`" in text
    assert "in stand_still" in text


class Plain(ChatAgent):
    def chat(self, session: ChatSession, prompt: Prompt) -> Awaitable[float | None] | float | None:
        return 1.0


def table(task: TaskConfig) -> TaskTable:
    rollout = RolloutConfig(group_size=2, sampling=SAMPLING, tasks={"default": task})
    sets = {"s": EvalSetConfig(num_responses=3, modes=["sampled"])}
    return TaskTable(rollout, sets, SERVICES, tokenizer=TOKENIZER)


async def test_a_task_with_a_chat_agent_needs_no_reward() -> None:
    tasks = table(TaskConfig(agent=f"{__name__}:Plain", agent_args={"ignore": ["seed"], "max_requests": 2}))
    assert tasks.chat
    task = tasks.of(PROMPT)
    assert {mode: agent.group_size for mode, agent in task.agents.items()} == {("", TRAIN): 2, ("s", "sampled"): 3}
    env = task.make_env(PROMPT)
    assert isinstance(env, UnjudgedEnv)
    with pytest.raises(ValueError, match="has neither reward nor env"):
        await env.step(None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"trained": "first"}, "it must be last, longest or all"),
        ({"ignore": ["heat"]}, r"ignore contains \['heat'\]; known are background, best_of, chat_template_kwargs"),
        ({"max_requests": 0}, "must be at least 1"),
        ({"max_session_tokens": -1}, "max_session_tokens=-1 not negative"),
    ],
)
def test_arguments_that_will_not_do(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        table(TaskConfig(agent=f"{__name__}:Plain", agent_args=arguments))
    with pytest.raises(ConfigError, match="Plain does not take this argument"):
        table(TaskConfig(agent=f"{__name__}:Plain", agent_args={"max_turns": 3}))


class AsksTwice(ChatAgent):
    async def chat(self, session: ChatSession, prompt: Prompt) -> float:
        for text in ("one", "two"):
            await ask(session, text)
        return 1.0


@pytest.mark.parametrize("limit", ["max_requests", "max_sequences", "max_tokens", "max_session_tokens"])
async def test_an_agents_limits_are_those_of_its_sessions(endpoint: ChatEndpoint, limit: str) -> None:
    with pytest.raises(openai.BadRequestError, match=rf"agent_args\.{limit}\b"):
        await collect(AsksTwice, endpoint, **{limit: 1})


class Swallows(ChatAgent):
    """Accepts any answer."""

    async def chat(self, session: ChatSession, prompt: Prompt) -> float:
        with contextlib.suppress(openai.APIError):
            await ask(session, prompt.text)
        return 0.25


async def test_a_rollout_worker_serves_its_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation server's refusal is the rollout's reason, whatever the agent does with the error."""
    monkeypatch.setattr("test_rollout_worker.make_char_tokenizer", make_chat_tokenizer)
    stage = Stage(tmp_path)
    stage.rollout = replace(stage.rollout, group_size=2, tasks={"default": TaskConfig(agent=f"{__name__}:Swallows")})
    try:
        await stage.start()
        await stage.grant(stage.ticket(0))
        assert await stage.results(1) == {"ticket-0": ("stored", "")}
        stage.server.script.extend(web.Response(status=400, text="too long") for _ in range(2))
        await stage.grant(stage.ticket(1))
        assert (await stage.results(2))["ticket-1"] == ("rejected", "generation_refused")
        await stage.end()
    finally:
        await stage.close()
    (pulled,) = stage.pulled
    assert pulled.meta.rewards == [0.25, 0.25]
    for ids, mask in zip(pulled.sample.slices()[0], pulled.sample.slices("loss_mask")[0], strict=True):
        assert TOKENIZER.decode(ids[~mask]) == "<|im_start|>user\n012<|im_end|>\n<|im_start|>assistant\n"
        assert ids[mask].tolist() == [0]  # the server's policy samples only EOS, the end of the turn


class Branches(ChatAgent):
    """Member m has m + 1 conversations. Returns a reward for each, or their number."""

    each = False

    async def chat(self, session: ChatSession, prompt: Prompt) -> Any:
        replies = [
            await session.client().chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"{session.member} {index}"}]
            )
            for index in range(session.member + 1)
        ]
        return {reply.id: index for index, reply in enumerate(replies)} if self.each else len(replies)


class BranchesWithRewards(Branches):
    each = True


class OneRewardMissing(Branches):
    async def chat(self, session: ChatSession, prompt: Prompt) -> Any:
        await super().chat(session, prompt)
        return {"chatcmpl-other": 1.0}


@pytest.mark.parametrize(
    ("agent", "rewards", "of_sessions"),
    [(Branches, [1, 2, 2, 3, 3, 3], [1, 2, 3]), (BranchesWithRewards, [0, 0, 1, 0, 1, 2], [0, 0.5, 1])],
)
async def test_all_sequences_of_the_sessions_are_trained(
    endpoint: ChatEndpoint, agent: type[ChatAgent], rewards: list[float], of_sessions: list[float]
) -> None:
    """Filters and evaluations read one reward for each session. Without train.branches the sample is refused."""
    sample = await collect(agent, endpoint, trained="all")
    made = complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, branches=True)
    assert made.data["sessions"].tolist() == [0, 1, 1, 2, 2, 2]
    assert made.data["rewards"].tolist() == rewards
    assert session_summary(made, summary_of(made)).rewards == of_sessions
    masked = zip(*map(lambda key: made.slices(key)[0], KEYS), strict=True)
    assert [TOKENIZER.decode(ids[mask])[:3] for ids, mask in masked] == ["0 0", "1 0", "1 1", "2 0", "2 1", "2 2"]
    with pytest.raises(ValueError, match=r"set train\.branches=true"):
        complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0)


async def test_rewards_must_name_the_last_answer_of_each_sequence(endpoint: ChatEndpoint) -> None:
    with pytest.raises(ValueError, match="return one reward for each"):
        await collect(OneRewardMissing, endpoint, trained="all")


class Plays(ChatAgent):
    """Two seats, of which each wins in every second member, and a judge. `black` speaks twice in one member."""

    async def chat(self, session: ChatSession, prompt: Prompt) -> list[SeatReward]:
        speakers = ("white", "black", "judge", "second")
        await asyncio.gather(*(ask(session, f"{name} {session.member}", name) for name in speakers))
        won = float(session.member % 2)
        played = [SeatReward("white", Score(won, f"white {session.member}")), SeatReward("black", -won)]
        return played + [SeatReward("black", -won, "second")] * (session.member == 2)


class PlaysTwice(ChatAgent):
    async def chat(self, session: ChatSession, prompt: Prompt) -> list[SeatReward]:
        await ask(session, speaker="one")
        return [SeatReward("white", 1.0, "one"), SeatReward("black", 1.0, "one")]


class OneSeatIsSilent(Plays):
    async def chat(self, session: ChatSession, prompt: Prompt) -> list[SeatReward]:
        played = await super().chat(session, prompt)
        return [*played, SeatReward("red", 1.0)] if session.member == 1 else played


async def test_each_seat_has_a_group_of_its_own(endpoint: ChatEndpoint) -> None:
    sample = await collect(Plays, endpoint)
    made = complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, branches=True)
    assert made.data["seats"].tolist() == [0, 0, 0, 0, 1, 1, 1]  # black before white
    assert made.data["sessions"].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert made.data["rewards"].tolist() == [0, -1, 0, 0, 0, 1, 0]
    assert sample_answers(sample) == [None] * 4 + ["white 0", "white 1", "white 2"]
    judged = session_summary(made, summary_of(made))
    assert judged.rewards == made.data["rewards"].tolist()
    assert rewards_by_seat(made, judged) == [[0, -1, 0, 0], [0, 1, 0]]
    assert judged.num_seats == 2
    masked = zip(*map(lambda key: made.slices(key)[0], KEYS), strict=True)
    said = ["BLACK 0", "BLACK 1", "BLACK 2", "SECOND 2", "WHITE 0", "WHITE 1", "WHITE 2"]
    assert [TOKENIZER.decode(ids[mask]).removesuffix("<|im_end|>") for ids, mask in masked] == said
    with pytest.raises(ValueError, match=r"or several seats .*set train\.branches=true"):
        complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0)


async def test_seats_that_cannot_be_trained(endpoint: ChatEndpoint) -> None:
    """A speaker's tokens are trained once, and a seat without an answer ends the whole group."""
    with pytest.raises(ValueError, match="several rewards for a speaker"):
        await collect(PlaysTwice, endpoint)
    with pytest.raises(RolloutRejected, match="the speaker 'red' ended without an answer"):
        await collect(OneSeatIsSilent, endpoint)


@pytest.mark.parametrize(
    ("seats", "sessions", "told"),
    [([1, 0], [0, 0], "put the sequences of a seat side by side"), ([0, 1], [0, 1], "number those of a seat from 0")],
)
async def test_seats_of_an_agents_own(endpoint: ChatEndpoint, seats: list[int], sessions: list[int], told: str) -> None:
    sample = await collect(Asks, endpoint, group_size=2)
    sample = sample.update(sample.derive({"seats": np.array(seats), "sessions": np.array(sessions)}, like="rewards"))
    with pytest.raises(ValueError, match=told):
        complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, branches=True)


class Draws(Plays):
    async def chat(self, session: ChatSession, prompt: Prompt) -> list[SeatReward]:
        for speaker in ("white", "black"):
            await ask(session, prompt.text, speaker)
        unlike = session.member if prompt.prompt_id.endswith("1") else 0
        return [SeatReward("white", 1.0), SeatReward("black", -1.0 - unlike)]


async def test_a_filter_reads_each_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rewards within each seat teach nothing, although the seats' rewards differ."""
    monkeypatch.setattr("test_rollout_worker.make_char_tokenizer", make_chat_tokenizer)
    stage = Stage(tmp_path)
    tasks = {"default": TaskConfig(agent=f"{__name__}:Draws")}
    stage.rollout = replace(stage.rollout, group_size=2, tasks=tasks, reject_equal_rewards=True)
    stage.branches = True
    try:
        await stage.start()
        await stage.grant(stage.ticket(0))
        assert await stage.results(1) == {"ticket-0": ("rejected", "equal_rewards")}
        await stage.grant(stage.ticket(1))
        assert (await stage.results(2))["ticket-1"] == ("stored", "")
        await stage.end()
    finally:
        await stage.close()
    (pulled,) = stage.pulled
    assert pulled.meta.rewards == [-1.0, -2.0, 1.0, 1.0]
