"""openai's client, the real endpoint and a real engine: the trained tokens are exactly those that the engine sampled."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.prompts import Prompt
from asyncrl.protocol.generation import GenerateReply, SamplingParams
from asyncrl.rewards.trajectory import OnPiece, Response
from asyncrl.rollout.agent import UnjudgedEnv
from asyncrl.rollout.chat_agent import ChatAgent, ChatSession
from asyncrl.rollout.client import PartialRolloutManager, Route
from asyncrl.rollout.openai_api import ChatEndpoint
from asyncrl.testing.tiny import make_chat_tokenizer
from tests.processes.served_engine import V0, V1, NoOtherServer, Served, forward_logprobs, serve
from tests.support.services import make_services

GROUP, MAX_NEW_TOKENS = 3, 40
SAMPLING = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, temperature=1.3)
PROMPT = Prompt("e0-p0", "", [], "", "default", {}, False)


class RecordingClient(PartialRolloutManager):
    """Keeps each request's input tokens together with the reply to it."""

    def __init__(self) -> None:
        super().__init__(
            NoOtherServer(),
            make_services(),
            new_tokens_per_chunk=16,
            request_timeout_s=60.0,
            turn_limit_s=60.0,
            max_requests=32,
        )
        self.replies: list[tuple[list[int], GenerateReply]] = []

    async def _request(self, route: Route, input_ids: list[int], params: SamplingParams, *more: Any) -> GenerateReply:
        reply = await super()._request(route, input_ids, params, *more)
        self.replies.append((input_ids, reply))
        return reply


class TwoTurns(ChatAgent):
    """Asks, lets the weights be updated once all members have their first answer, and asks again."""

    served: Served

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.first_turns = 0
        self.updated = asyncio.Event()
        self.conversations: dict[int, list[Any]] = {}
        self.logprobs: dict[int, list[float]] = {}

    async def chat(self, session: ChatSession, prompt: Prompt) -> float:
        client = session.client()
        messages: list[Any] = [{"role": "user", "content": f"{session.member} + 4?"}]  # distinguishes the members
        first = await client.chat.completions.create(model="policy", messages=messages, logprobs=True)
        assert first.choices[0].logprobs is not None
        self.logprobs[session.member] = [token.logprob for token in first.choices[0].logprobs.content or ()]
        messages.append(first.choices[0].message)
        self.first_turns += 1
        if self.first_turns == self.group_size:
            await self.served.update_in_a_pause(V1)
            self.updated.set()
        await self.updated.wait()
        messages.append({"role": "user", "content": "Sure?"})
        stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        messages.append(text)
        self.conversations[session.member] = messages
        return float(session.member)


async def respond(
    client: PartialRolloutManager, route: Route, ids: list[int], sampling: SamplingConfig, on_piece: OnPiece
) -> Response:
    return await client.respond(route, ids, sampling, [EOS], on_piece)


TOKENIZER = make_chat_tokenizer(None)
EOS = TOKENIZER.eos_token_id


async def test_tokens_logprobs_and_versions_are_those_of_the_engine(tmp_path: Path) -> None:
    async with serve(tmp_path, TOKENIZER) as served:
        await sessions_are_exact(served)


async def sessions_are_exact(served: Served) -> None:
    """Hold the sessions of a group with this server, and compare each with the engine's answers and with a forward pass."""
    agent = TwoTurns(tokenizer=TOKENIZER, sampling=SAMPLING, group_size=GROUP)
    agent.served = served
    client, endpoint = RecordingClient(), ChatEndpoint(make_services())
    await endpoint.start("127.0.0.1")
    try:
        policy = partial(respond, client, Route(served.ticket()))
        (sample,) = await agent.collect_sessions(PROMPT, UnjudgedEnv(prompt=PROMPT, reward=None), endpoint, policy)
    finally:
        await endpoint.close()
        await client.close()

    assert sample.data["rewards"].tolist() == list(range(GROUP))
    assert sample.data["version_start"].tolist() == [V0.pack()] * GROUP
    assert sample.data["version_end"].tolist() == [V1.pack()] * GROUP
    for member, (ids, logprobs, versions, mask) in enumerate(
        zip(
            *(sample.slices(key)[0] for key in ("packed_input_ids", "packed_logprobs", "versions", "loss_mask")),
            strict=True,
        )
    ):
        (first, first_end), (second, second_end) = runs(mask)
        assert second_end == len(ids)
        for start, end, version in ((first, first_end, V0), (second, second_end, V1)):
            assert set(versions[start:end].tolist()) == {version.pack()}
            assert reported(client, ids[:start].tolist(), end - start) == (
                ids[start:end].tolist(),
                [np.float32(value) for value in logprobs[start:end]],
            )
            expected = forward_logprobs(served.models[version], ids, temperature=SAMPLING.temperature)
            np.testing.assert_allclose(logprobs[start:end], expected[start:end], atol=1e-4)
        # the logprobs that the client received are those of the trajectory
        np.testing.assert_array_equal(np.float32(agent.logprobs[member]), logprobs[first:first_end])
        *_, answer, _, text = agent.conversations[member]
        assert text_of(ids[second:second_end]) == text
        assert text_of(ids[first:first_end]) == answer.content
        # the text between the turns comes from the template, which also closes a truncated answer
        closed = "" if ids[first_end - 1] == EOS else "<|im_end|>"
        between = f"{closed}\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
        assert TOKENIZER.decode(ids[first_end:second]) == between


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each run of the mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def reported(client: RecordingClient, prompt: list[int], count: int) -> tuple[list[int], list[Any]]:
    """Tokens and logprobs of the pieces that the engine generated for this prompt, one after another."""
    tokens: list[int] = []
    logprobs: list[Any] = []
    while len(tokens) < count:
        (piece,) = (reply for asked, reply in client.replies if asked == prompt + tokens and reply.output_ids)
        tokens = tokens + piece.output_ids
        logprobs += [np.float32(entry[0]) for entry in piece.meta_info.output_token_logprobs]
    return tokens, logprobs


def text_of(ids: np.ndarray) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))
