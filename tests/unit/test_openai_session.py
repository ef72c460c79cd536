"""Sessions of an OpenAI client: which tokens a request continues, which are trained, and the limits. The test plays the policy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.chat import ChatTemplate
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.outcome import RolloutRejected, RolloutReleased
from asyncrl.rewards.trajectory import OnPiece, Response, build_sample
from asyncrl.rollout.openai_request import ChatRequest, RequestError, RequestRules, chat_request, fields_of
from asyncrl.rollout.openai_session import Answer, Session, SessionCounts, SessionLimits, message_of
from asyncrl.rollout.openai_turns import episodes_of
from asyncrl.rollout.tool_calls import TAG, parse_tool_calls
from asyncrl.testing.tiny import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer(None)
EOS = TOKENIZER.eos_token_id
SAMPLING = SamplingConfig(max_new_tokens=64)
V0, V1 = WeightVersion(1, 0).pack(), WeightVersion(1, 1).pack()
USER = {"role": "user", "content": "What is 3 + 4?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def request(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
    return chat_request(fields_of(body, RequestRules(SAMPLING)), RequestRules(SAMPLING))


class Player:
    """A policy that samples the test's lines, in pieces of `chunk` tokens.

    In a line, `^` marks an update of the weights, `$` is the end token, and `!` alone releases the rollout.
    """

    def __init__(self, *lines: str, chunk: int = 3) -> None:
        self.lines = list(lines)
        self.chunk = chunk
        self.asked: list[str] = []
        self.limits: list[int] = []
        self.version = V0
        self.hold = asyncio.Event()
        self.hold.set()
        self.waiting = asyncio.Event()

    async def __call__(self, input_ids: list[int], sampling: SamplingConfig, on_piece: OnPiece) -> Response:
        self.asked.append(TOKENIZER.decode(input_ids))
        self.limits.append(sampling.max_new_tokens)
        line = self.lines.pop(0)
        self.waiting.set()
        await self.hold.wait()
        if line == "!":
            raise RolloutReleased("server_lost", "gone")
        before, _, after = line.partition("^")
        response = Response(list(input_ids))
        for text, version in ((before, self.version), (after, V1)):
            ids = TOKENIZER.encode(text.replace("$", "<|im_end|>"), add_special_tokens=False)
            for start in range(0, len(ids), self.chunk):
                piece = ids[start : start + self.chunk]
                response.add_piece(piece, [-float(token) for token in piece], [(version, len(piece))])
                if on_piece(response):
                    return response
        response.finished = response.output_ids[-1] == EOS
        return response


def make(player: Player, *, template: str = "", counts: SessionCounts | None = None, **limits: int) -> Session:
    tokenizer = make_chat_tokenizer(None, template) if template else TOKENIZER
    return Session(
        player,
        ChatTemplate(tokenizer, {}),
        sampling=SAMPLING,
        ignore=frozenset(),
        limits=SessionLimits(
            **{"max_requests": 8, "max_sequences": 4, "max_tokens": 0, "max_session_tokens": 0, **limits}
        ),
        counts=counts or SessionCounts(),
        tokenizer=tokenizer,
        parse=parse_tool_calls,
        tool_call_tag=TAG,
    )


def said(answer: Answer) -> dict[str, Any]:
    """Return the message that a client appends to its messages."""
    return dict(message_of(answer.said))


def trained(session: Session, which: Any = "last") -> tuple[str, list[str]]:
    """Return the trained sequence as text, and its parts inside the loss mask."""
    sample = build_sample("s", [session.trained_turn(which).episode()])
    ids, mask = sample.data["packed_input_ids"], sample.data["loss_mask"]
    parts, current = [], []
    for token, learnt in zip(ids.tolist(), mask.tolist(), strict=True):
        if learnt:
            current.append(token)
        elif current:
            parts.append(TOKENIZER.decode(current))
            current = []
    return TOKENIZER.decode(ids.tolist()), [*parts, TOKENIZER.decode(current)]


async def test_a_conversation_continues_with_the_sampled_tokens() -> None:
    """Encoding the text would give other tokens: the special token in the middle is not shown, but stays in the sequence."""
    player = Player("Se<|im_start|>ven^ it is.$", "Yes.$")
    session = make(player)
    first = await session.answer(request([USER]))
    assert (first.said.content, first.finish_reason) == ("Seven it is.", "stop")
    messages = [USER, said(first), user("Sure?")]
    second = await session.answer(request(messages))
    expected = (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\nSe<|im_start|>ven it is.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert player.asked[1] == expected
    assert (second.num_prompt_tokens, len(second.response.output_ids)) == (len(second.response.input_ids), 5)
    assert trained(session) == (
        expected + "Yes.<|im_end|>",
        ["Se<|im_start|>ven it is.<|im_end|>", "Yes.<|im_end|>"],
    )
    sample = build_sample("s", [session.trained_turn("last").episode()])
    learnt = sample.data["loss_mask"]
    assert set(sample.data["versions"][~learnt].tolist()) == {-1}
    assert sample.data["versions"][learnt].tolist() == [V0] * 6 + [V1] * 8 + [V0] * 5
    assert sample.data["packed_logprobs"][learnt].tolist() == [
        -float(token) for token in sample.data["packed_input_ids"][learnt]
    ]
    assert sample.data["prompt_mask"].sum() == first.num_prompt_tokens
    assert session.num_sequences == 1


async def test_a_tool_call_and_its_result_continue_the_sequence() -> None:
    player = Player('I add. <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>$', "7$")
    session = make(player)
    first = await session.answer(request([USER], tools=TOOLS))
    assert (first.said.content, first.finish_reason) == ("I add.", "tool_calls")
    (call,) = first.said.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    await session.answer(request([USER, said(first), result], tools=TOOLS))
    assert player.asked[1].startswith(player.asked[0] + "I add. <tool_call>")
    assert player.asked[1].endswith("</tool_call><|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
    assert session.num_sequences == 1
    assert trained(session)[1] == [player.asked[1][len(player.asked[0]) :].split("\n<|im_start|>")[0], "7<|im_end|>"]


async def test_tool_calls_are_text_if_not_requested_or_incomplete() -> None:
    line = '<tool_call>{"name": "add"}</tool_call>'
    session = make(Player(line + "$", line + "$", line))
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS}):
        answer = await session.answer(request([USER], **fields))
        assert (answer.said.content, answer.said.tool_calls) == (line, ())
    assert answer.finish_reason == "length"


async def test_a_truncated_answer_is_closed_in_the_next_prompt() -> None:
    player = Player("Sev", "en$")
    session = make(player)
    first = await session.answer(request([USER], max_tokens=3))
    assert first.finish_reason == "length"
    await session.answer(request([USER, said(first), user("Go on")], max_completion_tokens=8))
    assert "assistant\nSev<|im_end|>\n<|im_start|>user\nGo on" in player.asked[1]
    assert player.limits == [3, 8]
    assert trained(session)[1] == ["Sev", "en<|im_end|>"]


@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_a_stop_string_ends_the_answer_once_it_is_complete(chunk: int) -> None:
    player = Player("One. Two. Three.$", "Four$", chunk=chunk)
    session = make(player)
    first = await session.answer(request([USER], stop=["wo.", "never"]))
    assert (first.said.content, first.finish_reason) == ("One. T", "stop")
    assert TOKENIZER.decode(first.response.output_ids) == "One. Two."
    assert len(first.response.logprobs) == sum(count for _, count in first.response.versions) == 9
    await session.answer(request([USER, said(first), user("And?")]))
    assert "assistant\nOne. Two.<|im_end|>\n<|im_start|>user\nAnd?" in player.asked[1]


async def test_branches_share_their_prefix_and_one_is_trained() -> None:
    """One question gets two answers, and the second is continued. Then the first is continued, too."""
    counts = SessionCounts()
    player = Player("a$", "b$", "c is long$", "d$")
    session = make(player, counts=counts)
    first = await session.answer(request([USER]))
    second = await session.answer(request([USER]))
    assert player.asked[0] == player.asked[1]
    await session.answer(request([USER, said(second), user("x")]))
    assert session.num_sequences == 2
    await session.answer(request([USER, said(first), user("y")]))
    assert "assistant\nb<|im_end|>" in player.asked[2]
    assert "assistant\na<|im_end|>" in player.asked[3]
    assert trained(session, "last")[1] == ["a<|im_end|>", "d<|im_end|>"]
    assert trained(session, "longest")[1] == ["b<|im_end|>", "c is long<|im_end|>"]
    assert session.count_trained(session.leaves("last")) == 2 + 10
    assert (counts.trained_tokens, counts.left_out_tokens) == (4, 12)


async def test_of_equal_answers_and_of_equal_sequences_the_last_one_counts() -> None:
    """The two answers have the same text, and only the second is of the new weights."""
    session = make(Player("a$", "^a$", "b$"))
    await session.answer(request([USER]))
    twin = await session.answer(request([USER]))
    assert session.trained_turn("longest").response is twin.response
    await session.answer(request([USER, said(twin), user("x")]))
    assert session.trained_turn("last").path()[0].response is twin.response


def trained_parts(session: Session) -> list[tuple[str, str]]:
    """Each trained sequence with trained=all: its text, and the tokens inside its loss mask as text."""
    leaves = session.leaves("all")
    sample = build_sample("s", episodes_of(leaves), sessions=[0] * len(leaves))
    assert sample.data["versions"][sample.data["loss_mask"]].min() == V0
    assert sample.data["versions"][~sample.data["loss_mask"]].max() == -1
    versions = zip(sample.slices("versions")[0], sample.slices("loss_mask")[0], strict=True)
    bounds = [(of[mask].min(), of[mask].max()) for of, mask in versions]
    assert bounds == list(zip(sample.data["version_start"], sample.data["version_end"], strict=True))
    rows = zip(sample.slices("packed_input_ids")[0], sample.slices("loss_mask")[0], strict=True)
    return [(TOKENIZER.decode(ids.tolist()), TOKENIZER.decode(ids[mask].tolist())) for ids, mask in rows]


async def test_all_leaves_are_trained_and_each_answer_once() -> None:
    """A prefix is merged, both branches of an answer and a conversation that begins anew are trained."""
    counts = SessionCounts()
    session = make(Player("a$", "b$", "^c$", "d$"), counts=counts)
    first = await session.answer(request([USER]))
    assert [mask for _, mask in trained_parts(session)] == ["a<|im_end|>"]
    await session.answer(request([USER, said(first), user("x")]))
    assert [mask for _, mask in trained_parts(session)] == ["a<|im_end|>b<|im_end|>"]  # the first answer is a prefix
    await session.answer(request([USER, said(first), user("y")]))
    await session.answer(request([user("new")]))
    parts = trained_parts(session)
    assert [mask for _, mask in parts] == ["a<|im_end|>b<|im_end|>", "c<|im_end|>", "d<|im_end|>"]
    assert ["assistant\na<|im_end|>" in text for text, _ in parts] == [True, True, False]
    assert session.count_trained(session.leaves("all")) == 0
    assert (counts.trained_tokens, counts.left_out_tokens) == (8, 0)


async def test_sub_agents_in_parallel_are_trained() -> None:
    session = make(Player("a$", "b$", "c$"))
    await asyncio.gather(*(session.answer(request([user(text)])) for text in "xyz"))
    assert sorted(mask for _, mask in trained_parts(session)) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


async def test_concurrent_requests_branch() -> None:
    player = Player("a$", "b$", "c$")
    session = make(player)
    first = await session.answer(request([USER]))
    follow = [[USER, said(first), user(text)] for text in "xy"]
    await asyncio.gather(*(session.answer(request(messages)) for messages in follow))
    assert session.num_sequences == 2
    assert {asked.count("assistant\na<|im_end|>") for asked in player.asked[1:]} == {1}


async def test_an_edited_history_continues_its_unchanged_prefix() -> None:
    player = Player("a$", "b$", "c$")
    session = make(player)
    first = await session.answer(request([USER]))
    second = await session.answer(request([USER, said(first), user("x")]))
    edited = {**said(second), "content": "B"}
    await session.answer(request([USER, said(first), user("x"), edited, user("y")]))
    assert session.num_sequences == 2
    assert trained(session)[1] == ["a<|im_end|>", "c<|im_end|>"]  # the policy did not sample B
    assert "assistant\nB<|im_end|>" in player.asked[2]


@pytest.mark.parametrize("other", [{"tools": TOOLS}, {"chat_template_kwargs": {"mood": "glad"}}])
async def test_other_tools_or_template_arguments_begin_another_sequence(other: dict[str, Any]) -> None:
    player = Player("a$", "b$")
    session = make(player)
    first = await session.answer(request([USER]))
    await session.answer(request([USER, said(first), user("x")], **other))
    assert session.num_sequences == 2
    assert trained(session)[1] == ["b<|im_end|>"]


async def test_a_template_that_omits_answers_begins_another_sequence() -> None:
    counts = SessionCounts()
    forgetful = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}:"
    player = Player("a$", "b$")
    session = make(player, template=forgetful, counts=counts)
    first = await session.answer(request([USER]))
    await session.answer(request([USER, said(first), user("x")]))
    assert player.asked[1] == "What is 3 + 4?x:"
    assert (session.num_sequences, counts.rerendered) == (2, 1)


async def test_a_request_beyond_a_limit_is_refused_and_the_session_continues() -> None:
    player = Player(*"abc$")
    session = make(player, max_requests=3, max_sequences=2, max_tokens=60)
    for _ in range(2):
        await session.answer(request([USER]))
    with pytest.raises(RequestError, match=r"has 2 sequences, the limit of agent_args.max_sequences"):
        await session.answer(request([USER]))
    longer = [USER, session.trained_turn("last").answer, user("much too long, and what is more, not short")]
    with pytest.raises(RequestError, match=r"agent_args.max_tokens=60") as refused:
        await session.answer(request(longer))
    assert refused.value.body["error"]["code"] == "context_length_exceeded"
    session = make(player, max_requests=1, max_tokens=58)
    await session.answer(request([USER]))
    assert player.limits[-1] == 58 - len(TOKENIZER.encode(player.asked[-1]))
    with pytest.raises(RequestError, match=r"has made 1 requests, the limit set by agent_args.max_requests"):
        await session.answer(request([USER]))
    assert not session.failed.done()


async def test_the_tokens_of_all_sequences_of_a_session_are_limited() -> None:
    """A shared prefix counts in each sequence, a continued sequence once, and a pending answer at its longest."""
    player = Player("a$", "b$", "c$", "d$")
    session = make(player, max_session_tokens=250)
    first = await session.answer(request([USER], max_tokens=8))
    prompt = first.num_prompt_tokens
    assert (player.limits[-1], session.num_tokens) == (8, prompt + 2)
    longer = [USER, said(first), user("x")]
    player.hold.clear()
    player.waiting.clear()
    pending = asyncio.ensure_future(session.answer(request(longer, max_tokens=9)))
    await player.waiting.wait()
    context = len(session.trained_turn("last").children[0].episode().input_ids)
    assert session.num_tokens == context + 9  # the first turn is the same sequence
    player.hold.set()
    await pending
    await session.answer(request(longer, max_tokens=10))  # a branch with the same messages
    assert session.num_tokens == 2 * (context + 2)
    used = session.num_tokens

    session = make(player := Player("a$", "b$", "c$", "d"), max_session_tokens=used + prompt + 1)
    first = await session.answer(request([USER]))
    for _ in range(2):
        await session.answer(request(longer, max_tokens=10))
    with pytest.raises(
        RequestError, match=rf"have {used + context} tokens.*agent_args.max_session_tokens={used + prompt + 1}"
    ):
        await session.answer(request(longer))  # the branch's prefix does not fit, although the messages that it adds do
    await session.answer(request([USER]))
    assert player.limits[-1] == 1  # what is left
    assert session.num_tokens == used + prompt + 1
    with pytest.raises(RequestError, match=r"end the session, or raise the limit"):
        await session.answer(request([USER]))
    assert not session.failed.done()


@pytest.mark.parametrize("limit", ["max_tokens", "max_session_tokens"])
async def test_a_request_that_leaves_no_room_for_an_answer_is_refused(limit: str) -> None:
    """A request for an answer of 0 tokens would end the rollout."""
    prompt = (await make(Player("a$")).answer(request([USER]))).num_prompt_tokens
    with pytest.raises(RequestError, match=rf"agent_args.{limit}={prompt}"):
        await make(Player("a$"), **{limit: prompt}).answer(request([USER]))
    await make(player := Player("a"), **{limit: prompt + 1}).answer(request([USER]))
    assert player.limits == [1]


async def test_the_error_that_ends_the_rollout_is_kept() -> None:
    session = make(Player("!"))
    with pytest.raises(RolloutReleased):
        await session.answer(request([USER]))
    with pytest.raises(RolloutReleased, match="server_lost: gone"):
        await session.failed
    assert session.num_sequences == 0


async def test_a_request_whose_client_disconnects_is_not_recorded() -> None:
    player = Player("a$", "b$")
    player.hold.clear()
    session = make(player)
    gone = asyncio.ensure_future(session.answer(request([USER])))
    await player.waiting.wait()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert session.num_sequences == 0
    player.hold.set()
    await session.answer(request([USER]))
    assert trained(session)[1] == ["b<|im_end|>"]


async def test_closing_a_session_refuses_running_and_later_requests() -> None:
    player = Player("a$", "b$")
    session = make(player)
    await session.answer(request([USER]))
    player.hold.clear()
    player.waiting.clear()
    late = asyncio.ensure_future(session.answer(request([USER])))
    await player.waiting.wait()
    await session.close()
    for asking in (late, session.answer(request([USER]))):
        with pytest.raises(RequestError, match="this session does not exist or has ended") as error:
            await asking
        assert error.value.status == 404
    assert trained(session)[1] == ["a<|im_end|>"]


async def test_an_answer_that_comes_when_the_session_is_closed_is_not_recorded() -> None:
    """It ends in the same turn of the event loop, so that there is nothing left to cancel."""
    player = Player("a$", "b$")
    session = make(player)
    await session.answer(request([USER]))
    player.hold.clear()
    player.waiting.clear()
    late = asyncio.ensure_future(session.answer(request([USER])))
    await player.waiting.wait()
    player.hold.set()
    await asyncio.sleep(0)  # the policy has answered, and the session has not taken it
    await session.close()
    with pytest.raises(RequestError, match="this session does not exist or has ended"):
        await late
    assert trained(session)[1] == ["a<|im_end|>"]


async def test_a_rollout_without_a_response_is_rejected_with_the_last_refusal() -> None:
    session = make(Player())
    session.refused(RequestError("n=2: one answer per request is recorded"))
    with pytest.raises(RolloutRejected, match=r"no_response: .* its last request was refused: n=2"):
        session.trained_turn("last")


async def test_speakers_do_not_continue_each_other() -> None:
    """Both say the same and hear the same, and each has its own tokens. A third one is not trained."""
    counts = SessionCounts()
    session = make(Player("a$", "a$", "b$", "c$", "d$"), counts=counts)
    told = {name: await session.answer(replace(request([USER]), speaker=name)) for name in ("white", "black")}
    for name in told:
        await session.answer(replace(request([USER, said(told[name]), user(name)]), speaker=name))
    await session.answer(replace(request([USER, said(told["white"]), user("judge")]), speaker="judge"))
    assert session.num_sequences == 3
    leaves = [leaf for name in told for leaf in session.leaves("last", name)]
    sample = build_sample("s", episodes_of(leaves), sessions=[0, 0], seats=[0, 1])
    rows = zip(sample.slices("packed_input_ids")[0], sample.slices("loss_mask")[0], strict=True)
    assert [TOKENIZER.decode(ids[mask]) for ids, mask in rows] == ["a<|im_end|>b<|im_end|>", "a<|im_end|>c<|im_end|>"]
    assert session.count_trained(leaves) == 2
    with pytest.raises(RolloutRejected, match="the speaker 'referee' ended without an answer"):
        session.leaves("last", "referee")
