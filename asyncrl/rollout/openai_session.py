"""Session: the conversations of one group member with the policy through the OpenAI API, stored as trees of turns.

A turn is a request and its answer, in tokens and in messages. If the messages of a request start with all messages of a turn of its
speaker, answer included, the request continues that turn, with exactly the turn's tokens. A request that continues no turn starts a
new tree. A turn that two requests continue has two branches. Each leaf is therefore the end of a sequence. All of them are trained
(`leaves`), or one, selected by `trained_turn`; the sampled tokens of the others are then counted.

This module does not depend on HTTP (openai_api.py) or on servers (the policy: client.py). Requests of a session may run
concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from asyncrl.config.schema import SamplingConfig
from asyncrl.data.chat import ChatTemplate, Message, TemplateRefused, encode, encode_prompt, message_for_template
from asyncrl.rewards.outcome import RolloutEnded, RolloutRejected
from asyncrl.rewards.trajectory import OnPiece, Response
from asyncrl.rollout.openai_request import ChatRequest, RequestError, RequestRules
from asyncrl.rollout.openai_turns import TEXT, Turn, all_turns, find_text, find_turn, num_sampled, num_tokens
from asyncrl.rollout.tool_calls import Said

FinishReason = Literal["stop", "length", "tool_calls"]
Trained = Literal["last", "longest", "all"]  # selects the sequences of a session that are trained
Policy = Callable[[list[int], SamplingConfig, OnPiece], Coroutine[Any, Any, Response]]  # bound to a ticket's route


@dataclass(frozen=True)
class SessionLimits:
    max_requests: int  # per session
    max_sequences: int  # leaves of the session's trees
    max_tokens: int  # for prompt and answer of a request together; 0: the server's limit
    max_session_tokens: int  # of all sequences together, where a shared prefix counts in each; 0: unlimited


@dataclass
class SessionCounts:
    """Counters of all sessions of a worker."""

    requests: int = 0
    refused: int = 0  # invalid requests, answered with an error
    rerendered: int = 0  # continuations that the chat template does not allow; they started a new sequence
    trained_tokens: int = 0
    left_out_tokens: int = 0  # sampled tokens that no trained sequence contains


@dataclass(frozen=True)
class Answer:
    """The answer to a client's request."""

    said: Said
    finish_reason: FinishReason
    response: Response
    num_prompt_tokens: int
    stop: str | None = None  # the stop string that ended it


class Session:
    """One group member's turns. `answer` serves a request; the agent reads the results when its conversation is over."""

    def __init__(
        self,
        policy: Policy,
        template: ChatTemplate,
        *,
        sampling: SamplingConfig,
        ignore: frozenset[str],
        limits: SessionLimits,
        counts: SessionCounts,
        tokenizer: Any,
        parse: Callable[[str], Said],
        tool_call_tag: str,
    ) -> None:
        self.rules = RequestRules(sampling, ignore)
        self.tool_call_tag = tool_call_tag
        self._tokenizer, self._parse = tokenizer, parse
        self._policy, self._template = policy, template
        self._sampling, self._limits, self._counts = sampling, limits, counts
        self._roots: list[Turn] = []
        self._num_requests = self._num_ended = 0
        self._running: set[asyncio.Task[Response]] = set()
        self._closed = False
        self.last_refusal = ""
        self._num_pending = 0  # requests
        self._answered_at: float | None = None  # time of the last answer
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()

    # ------------------------------------------------------------------------------------------------------------- requests

    async def answer(
        self,
        request: ChatRequest,
        on_piece: Callable[[Response], None] = lambda response: None,
        *,
        completion_id: str = "",
    ) -> Answer:
        """Answer a request. Waits for the policy; unblocked by the end of the answer, `close`, or cancellation (the client left).

        Raises RequestError. An error that ends the rollout (RolloutEnded) is also stored in `failed`: the agent may swallow it.
        """
        turn = self._begin(request)
        turn.completion_id = completion_id
        self._num_pending += 1
        try:
            await self._respond(turn, request, on_piece)
        finally:
            self._num_pending -= 1
            self._answered_at = self._loop.time()
            if turn.response is None:
                (turn.parent.children if turn.parent else self._roots).remove(turn)
        return self._end(turn, request)

    def _begin(self, request: ChatRequest) -> Turn:
        """Place the request in the tree, without awaiting anything, so that two concurrent requests branch."""
        if self._closed:
            raise closed_error()
        if self._num_requests >= self._limits.max_requests:
            raise self._refusal(
                f"the session has made {self._num_requests} requests, the limit set by agent_args.max_requests; "
                "raise this limit to allow more"
            )
        try:
            turn = self._placed(request)
        except TemplateRefused as error:
            raise self._refusal(str(error), param="messages") from None
        siblings = turn.parent.children if turn.parent else self._roots
        if siblings and self.num_sequences >= self._limits.max_sequences:
            raise self._refusal(
                f"the messages start a new sequence, and the session has {self.num_sequences} sequences, the limit of "
                "agent_args.max_sequences; continue the last answer of a sequence, or raise the limit",
                param="messages",
            )
        length, most = len(turn.episode().input_ids), self._limits.max_tokens
        if most and length >= most:
            raise self._refusal(
                f"the messages have {length} tokens; agent_args.max_tokens={most} is the limit of messages and answer together",
                param="messages",
                code="context_length_exceeded",
            )
        replaced = turn.parent.path() if turn.parent and not siblings else []
        total, allowed = self.num_tokens - num_tokens(replaced) + length, self._limits.max_session_tokens
        if allowed and total >= allowed:
            raise self._refusal(
                f"with these messages the session's sequences have {total} tokens, answers that are being generated at their "
                f"longest; agent_args.max_session_tokens={allowed} is the limit of messages and answers of all sequences "
                "together; end the session, or raise the limit",
                param="messages",
            )
        rests = [end - begin for begin, end in ((length, most), (total, allowed)) if end]
        turn.most = min([request.max_new_tokens, *rests])
        siblings.append(turn)
        self._num_requests += 1
        self._counts.requests += 1
        return turn

    def _placed(self, request: ChatRequest) -> Turn:
        if request.is_text:
            return self._placed_text(request.messages[0]["content"], request.speaker)
        setting = (request.tools, request.template_arguments)
        own = [root for root in self._roots if root.speaker == request.speaker]
        parent, covered = find_turn(own, request.messages, setting)
        if parent is not None:
            after = request.messages[covered:]
            assert parent.answer is not None
            added = self._template.continuation_ids(
                request.messages[: covered - 1], parent.answer, after, *setting, stop_token=parent.stop_token
            )
            if added is not None:
                return Turn(parent, setting, after, added, request.speaker)
            self._counts.rerendered += 1
        prompt_ids = self._template.prompt_ids(request.messages, *setting)
        return Turn(None, setting, request.messages, prompt_ids, request.speaker)

    def _placed_text(self, text: str, speaker: str) -> Turn:
        """The turn of a prompt without a chat template."""
        parent, shown = find_text([root for root in self._roots if root.speaker == speaker], text)
        try:
            added = encode(self._tokenizer, text[shown:]) if parent else encode_prompt(self._tokenizer, text)
        except ValueError as error:
            raise self._refusal(str(error), param="prompt") from None
        return Turn(parent, TEXT, [{"role": "user", "content": text[shown:]}], added, speaker)

    async def _respond(self, turn: Turn, request: ChatRequest, on_piece: Callable[[Response], None]) -> None:
        input_ids = turn.episode().input_ids
        sampling = replace(self._sampling, max_new_tokens=turn.most)
        stopped_by_text = False

        def take(response: Response) -> bool:
            nonlocal stopped_by_text
            stopped_by_text = self._cut_at_stop(response, request.stops)
            on_piece(response)
            return stopped_by_text

        task = asyncio.ensure_future(self._policy(input_ids, sampling, take))
        self._running.add(task)
        try:
            response = await task
        except asyncio.CancelledError:
            if self._closed:
                raise closed_error() from None
            raise
        except RolloutEnded as error:
            self.fail(error)
            raise
        finally:
            self._running.discard(task)
        if self._closed:
            raise closed_error()
        turn.response = response
        if response.finished and not stopped_by_text:
            turn.stop_token = response.output_ids[-1]
        turn.number = self._num_ended
        self._num_ended += 1

    def _cut_at_stop(self, response: Response, stops: tuple[str, ...]) -> bool:
        """End the response with the first token that completes a stop string.

        The cut depends only on the tokens sampled so far, so the logprobs of the kept tokens stay correct.
        """
        if not stops or not _holds_any(self.decode(response.output_ids), stops):
            return False
        # The length of the shortest prefix with a stop string is in (few, enough]
        few, enough = 0, len(response.output_ids)
        while enough - few > 1:
            middle = (few + enough) // 2
            if _holds_any(self.decode(response.output_ids[:middle]), stops):
                enough = middle
            else:
                few = middle
        response.truncate(enough)
        response.finished = True
        return True

    def _end(self, turn: Turn, request: ChatRequest) -> Answer:
        response = turn.response
        assert response is not None
        turn.text = self.decode(spoken_ids(response, turn.stop_token))
        end = first_of(turn.text, request.stops)
        shown = turn.text[:end]
        stop = next((stop for stop in request.stops if turn.text.startswith(stop, end)), None)
        said = self._parse(shown) if request.parse_tools and response.finished else Said(shown)
        turn.answer = message_for_template(message_of(said))
        finish: FinishReason = "tool_calls" if said.tool_calls else "stop" if response.finished else "length"
        return Answer(said, finish, response, len(response.input_ids), stop)

    def conversation(self, answer_id: str) -> list[Message]:
        """The messages up to an answer, this one included. Raises RequestError."""
        for turn in all_turns(self._roots):
            if turn.completion_id == answer_id and turn.answer is not None:
                return [message for part in turn.path() for message in (*part.messages, part.answer or {})]
        raise RequestError(f"this session has no answer {answer_id!r}", status=404, param="previous_response_id")

    def _refusal(self, message: str, *, param: str | None = None, code: str | None = None) -> RequestError:
        return self.refused(RequestError(message, param=param, code=code))

    def refused(self, error: RequestError) -> RequestError:
        """Count an invalid request. It does not end the rollout; if the agent gets no answer at all, the error is reported."""
        self._counts.refused += 1
        self.last_refusal = str(error)
        return error

    def fail(self, error: RolloutEnded) -> None:
        """End the rollout, even if the agent swallows the error."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # mark it as retrieved; a waiter still gets the error

    async def close(self) -> None:
        """Refuse new requests and cancel running ones. The turns stay readable."""
        self._closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if not self.failed.done():
            self.failed.cancel()

    # ---------------------------------------------------------------------------------------------------------------- text

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def decode_token(self, token_id: int) -> str:
        """Text of one token, which may be a special token."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    # -------------------------------------------------------------------------------------------------------------- results

    @property
    def idle_s(self) -> float:
        """Seconds since the last answer. 0 before the first one, and while a request is pending."""
        return 0.0 if self._num_pending or self._answered_at is None else self._loop.time() - self._answered_at

    @property
    def num_sequences(self) -> int:
        """Number of leaves of the trees, including turns whose answer is pending."""
        return sum(1 for turn in all_turns(self._roots) if not turn.children)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences. A prefix that several share counts in each, because each is trained with it."""
        return sum(num_tokens(turn.path()) for turn in all_turns(self._roots) if not turn.children)

    def trained_turn(self, which: Trained, speaker: str | None = None) -> Turn:
        """The turn that ends the trained sequence: the one answered last, or the one whose path has most sampled tokens.

        speaker: of the turns; None: of any. Raises RolloutRejected (`no_response`) if no request was answered.
        """
        answered = self._answered(speaker)
        if not answered:
            why = f"; its last request was refused: {self.last_refusal}" if self.last_refusal else ""
            by = "the agent" if speaker is None else f"the speaker {speaker!r}"
            raise RolloutRejected("no_response", f"{by} ended without an answer from the policy{why}")
        if which != "longest":
            return max(answered, key=lambda turn: turn.number)
        return max(answered, key=lambda turn: (num_sampled(turn.path()), turn.number))

    def _answered(self, speaker: str | None) -> list[Turn]:
        return [
            turn for turn in all_turns(self._roots) if turn.response is not None and speaker in (None, turn.speaker)
        ]

    def leaves(self, which: Trained, speaker: str | None = None) -> list[Turn]:
        """The turns that end the trained sequences, in the order of their answers: one, or with `all` every turn that no answered
        request continues. A sequence that is a prefix of another has no leaf of its own. Raises as `trained_turn`.
        """
        last = self.trained_turn(which, speaker)
        if which != "all":
            return [last]
        answered = self._answered(speaker)
        continued = {turn.parent for turn in answered}
        return sorted((turn for turn in answered if turn not in continued), key=lambda turn: turn.number)

    def count_trained(self, trained: Sequence[Turn]) -> int:
        """Count the sampled tokens in the trained sequences, each once, and those outside them; returns the latter."""
        kept = num_sampled({turn for leaf in trained for turn in leaf.path()})
        left_out = num_sampled(list(all_turns(self._roots))) - kept
        self._counts.trained_tokens += kept
        self._counts.left_out_tokens += left_out
        return left_out


def closed_error() -> RequestError:
    return RequestError("this session does not exist or has ended", status=404, code="session_not_found")


def spoken_ids(response: Response, stop_token: int | None) -> list[int]:
    """The answer's tokens without the token that ended it."""
    return response.output_ids if stop_token is None else response.output_ids[:-1]


def first_of(text: str, markers: tuple[str, ...]) -> int:
    """Position of the first marker in text; len(text) if there is none."""
    return min((found for marker in markers if (found := text.find(marker)) >= 0), default=len(text))


def message_of(said: Said) -> Mapping[str, Any]:
    """An answer as an OpenAI message."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.tool_calls
    ]
    return {
        "role": "assistant",
        "content": said.content or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }


def _holds_any(text: str, markers: tuple[str, ...]) -> bool:
    return any(marker in text for marker in markers)
