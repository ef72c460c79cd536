"""ChatEndpoint: the APIs of a rollout worker, so that any agent written for a client of OpenAI or Anthropic can be trained.

    POST /v1/chat/completions   OpenAI's chat completions; GET /v1/models
    POST /v1/completions        OpenAI's completions
    POST /v1/responses          OpenAI's responses
    POST /v1/messages           Anthropic's messages

The API key (Authorization: Bearer <session id>, or x-api-key) or the URL (/session/<session id>/v1/...) selects the session. The id
cannot be guessed and is valid for one group member's rollout; openai_session.py stores the tokens sampled under it. The header
X-Session-ID tells the speakers of a session apart, which never continue each other's answers. The endpoint runs in the rollout
worker because ticket, route, partial rollouts and the trajectory are there, so no tokens or logprobs have to be sent back.

Errors have the format of the client's API and tell it not to retry, because retries happen behind this endpoint. When a client
disconnects, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import secrets
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from asyncrl.rewards.outcome import RolloutEnded, RolloutRejected
from asyncrl.rewards.trajectory import Response
from asyncrl.rollout import openai_request
from asyncrl.rollout.dialects.anthropic_messages import AnthropicMessages
from asyncrl.rollout.dialects.dialect import MODEL, Dialect, Events, Piece, Reply, event
from asyncrl.rollout.dialects.openai_chat import OpenAIChat
from asyncrl.rollout.dialects.openai_completions import OpenAICompletions
from asyncrl.rollout.dialects.openai_responses import OpenAIResponses
from asyncrl.rollout.openai_request import RequestError, chat_request, fields_of
from asyncrl.rollout.openai_session import Answer, Session, SessionCounts, closed_error
from asyncrl.rollout.tool_calls import held_back
from asyncrl.runtime import security
from asyncrl.runtime.background import gather_or_cancel
from asyncrl.runtime.http_server import no_stranger, serve
from asyncrl.runtime.services import Services

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_BODY_BYTES = 8 << 20
SPEAKER = "X-Session-ID"  # the header that verifiers sends, too
_NO_RETRY = {"x-should-retry": "false"}  # without it openai's client retries after 409, 429 and 5xx
DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAICompletions(), OpenAIResponses(), AnthropicMessages())
IGNORABLE = openai_request.IGNORABLE.union(
    *(dialect.ignorable for dialect in DIALECTS)
)  # what agent_args.ignore may list


class ChatEndpoint:
    """The HTTP server of these APIs, and its open sessions."""

    def __init__(self, services: Services) -> None:
        self._board, self._logger, self._clock = services.board, services.logger, services.clock
        self._sessions: dict[str, Session] = {}  # one per group member of each running rollout, so bounded
        self._runner: web.AppRunner | None = None
        self._client: AsyncOpenAI | None = None
        self._starting = asyncio.Lock()
        self.url = ""
        self.counts = SessionCounts()

    async def start(self, host: str, port: int = 0) -> None:
        """Bind and serve."""
        # Otherwise an agent's first request imports openai.resources.chat.completions on the event loop, which takes a second.
        if "openai" in sys.modules:
            await asyncio.to_thread(importlib.import_module, "openai.resources.chat.completions")
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors_to_replies])
        for prefix in ("", "/session/{session}"):
            for dialect in DIALECTS:
                app.router.add_post(prefix + dialect.path, functools.partial(self._answer, dialect))
            app.router.add_get(prefix + "/v1/models", self._models)
            app.router.add_get(prefix + "/v1/models/{model:.+}", self._model)
        # handler_cancellation: when a client disconnects, its handler is cancelled, and with it the generation.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        self.url = await serve(self._runner, host, port, for_others=True)
        quiet = logging.getLogger("httpx")  # used by openai's client; it would log one line per request
        if quiet.level == logging.NOTSET:
            quiet.setLevel(logging.WARNING)

    async def close(self) -> None:
        if self.counts.requests:
            self._logger.info("chat sessions: %s", self.counts)
        if self._client is not None:
            await self._client.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: Session) -> str:
        """Serve a session; returns its id."""
        session_id = secrets.token_urlsafe(24)
        self._sessions[session_id] = session
        self._board.set_queue("chat sessions", len(self._sessions))
        return session_id

    async def next_start(self) -> None:
        """Let one caller continue per turn of the event loop, so that several hundred starting agents do not block the worker:
        making an openai client takes 22 ms of CPU."""
        async with self._starting:
            await asyncio.sleep(0)

    async def end(self, session_id: str) -> None:
        """Forget the session and cancel its open requests."""
        session = self._sessions.pop(session_id)
        self._board.set_queue("chat sessions", len(self._sessions))
        await session.close()

    def base_url(self, session_id: str) -> str:
        """Base URL of one session, for a client that uses only this session."""
        return f"{self.url}/session/{session_id}/v1"

    def client(self, session_id: str) -> AsyncOpenAI:
        """openai's client for a session. All clients of this endpoint share their connections."""
        if self._client is None:
            self._client = _shared_client(f"{self.url}/v1")
        return self._client.with_options(api_key=session_id)

    # ------------------------------------------------------------------------------------------------------------- handlers

    async def _answer(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        try:
            session = self._session_of(http)
            try:
                reply = await self._parsed(dialect, http, session)
                if reply.request.stream:
                    return await _Stream(dialect, http, session, reply, self._refusal_of).serve()
                return _json(dialect.body(reply, await _answers(session, reply)))
            except (RequestError, ConnectionError):
                raise
            except Exception as error:
                raise self._refusal_of(error, session) from None
        except RequestError as error:
            return _json(dialect.error(error), status=error.status, headers=_NO_RETRY)

    async def _parsed(self, dialect: Dialect, http: web.Request, session: Session) -> Reply:
        try:
            fields = fields_of(await http.read(), session.rules)
            request = chat_request(dialect.chat_fields(fields, session.conversation), session.rules)
            request = replace(request, speaker=http.headers.get(SPEAKER, ""), is_text=dialect.is_text)
            if request.num_answers > 1 and not dialect.gives_several:
                raise RequestError(f"n={request.num_answers}: {dialect.path} gives one answer; remove it", param="n")
        except RequestError as error:
            raise session.refused(error) from None
        except web.HTTPRequestEntityTooLarge:
            raise session.refused(RequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)) from None
        answer_id = dialect.id_prefix + uuid.uuid4().hex
        return Reply(answer_id, int(self._clock.time()), request, fields, session.rules.sampling, session.decode_token)

    def _refusal_of(self, error: Exception, session: Session) -> RequestError:
        """Return the reply for an error. An error of asyncrl, or of a user's parse_tool_calls, ends the rollout, because the agent
        could hide it."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, RolloutEnded):
            return RequestError(f"the rollout is over: {error}", status=410, code=error.reason, kind="rollout_ended")
        self._logger.error("a chat completion failed", exc_info=error)
        session.fail(RolloutRejected("endpoint_error", f"a chat completion failed: {error!r}"))
        return RequestError(f"the endpoint failed: {error!r}", status=500)

    async def _models(self, http: web.Request) -> web.Response:
        self._check_known(http)
        return _json({"object": "list", "data": [_model(MODEL)]})

    async def _model(self, http: web.Request) -> web.Response:
        self._check_known(http)
        return _json(_model(http.match_info["model"]))

    def _check_known(self, http: web.Request) -> None:
        """With authentication, require a session's id: agents know it, but not the run's token."""
        if security.current() is not None:
            self._session_of(http)

    def _session_of(self, http: web.Request) -> Session:
        session_id = http.match_info.get("session", "")
        if not session_id:
            scheme, _, session_id = http.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                session_id = http.headers.get("x-api-key", "")
            if not session_id:
                raise RequestError(
                    "no session given; put its id in the URL or use it as API key", status=401, code="invalid_api_key"
                )
        session = self._sessions.get(session_id.strip())
        if session is None:
            raise closed_error()
        no_stranger(http)
        return session

    @web.middleware
    async def _errors_to_replies(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            reply: web.StreamResponse = await handler(request)
            return reply
        except RequestError as error:
            refusal = error
        except web.HTTPException as error:  # unknown path or wrong method
            paths = ", ".join(dialect.path for dialect in DIALECTS)
            refusal = RequestError(f"{error.status} {error.reason}; use {paths}", status=error.status)
        return _json(refusal.body, status=refusal.status, headers=_NO_RETRY)


async def _answers(session: Session, reply: Reply) -> list[Answer]:
    answer_ids = map(reply.answer_id, range(reply.request.num_answers))
    return await gather_or_cancel([session.answer(reply.request, completion_id=answer_id) for answer_id in answer_ids])


class _Stream:
    """The answers to a request as server-sent events: new text after each piece; tool calls and the rest at the end."""

    def __init__(
        self,
        dialect: Dialect,
        http: web.Request,
        session: Session,
        reply: Reply,
        refusal_of: Callable[[Exception, Session], RequestError],
    ) -> None:
        self._dialect, self._http, self._session, self._reply = dialect, http, session, reply
        self._refusal_of = refusal_of
        self._events = dialect.events(reply)
        self._out: web.StreamResponse | None = None

    async def serve(self) -> web.StreamResponse:
        choices = [
            _Choice(self._session, self._reply, index, self._events, self._send)
            for index in range(self._reply.request.num_answers)
        ]
        try:
            answers = await gather_or_cancel([choice.serve() for choice in choices])
            await self._send(self._events.end(answers))
        except Exception as error:
            if self._out is None or isinstance(error, ConnectionError):
                raise
            body = self._dialect.error(self._refusal_of(error, self._session))
            await self._send(event(body, str(body.get("type", ""))))
        assert self._out is not None
        await self._out.write_eof()
        return self._out

    async def _send(self, events: bytes) -> None:
        """The reply starts with the first event, so that an earlier error can still set the HTTP status."""
        if self._out is None:
            self._out = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            )
            await self._out.prepare(self._http)
        await self._out.write(events)


class _Choice:
    """One streamed answer."""

    def __init__(
        self, session: Session, reply: Reply, index: int, events: Events, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self._session, self._reply, self._index = session, reply, index
        self._events, self._send = events, send
        request = reply.request
        self._markers = request.stops + ((session.tool_call_tag,) if request.parse_tools else ())
        self._sent_text = self._sent_tokens = 0
        self._so_far: Response | None = None
        self._news = asyncio.Event()

    async def serve(self) -> Answer:
        """Waits for pieces and for the client to read. Pieces that arrive while the client reads are sent together."""
        answering = asyncio.ensure_future(
            self._session.answer(self._reply.request, self._on_piece, completion_id=self._reply.answer_id(self._index))
        )
        answering.add_done_callback(lambda _: self._news.set())
        try:
            while not answering.done():
                await self._news.wait()
                self._news.clear()
                if self._so_far is not None and not answering.done():
                    await self._send_piece(self._so_far)
            answer = await answering
            await self._send_text(answer.said.content, answer.response, len(answer.response.output_ids))
            await self._send(self._events.answered(self._index, answer))
            return answer
        finally:
            answering.cancel()
            await asyncio.wait({answering})
            if not answering.cancelled():
                answering.exception()  # mark it as retrieved; a relevant error has been raised already

    def _on_piece(self, response: Response) -> None:
        self._so_far = response
        self._news.set()

    async def _send_piece(self, response: Response) -> None:
        """Send the new text of a piece, without the last token, which may end the answer, and without an incomplete character."""
        token_ids = response.output_ids[:-1]
        text = self._session.decode(token_ids).rstrip("\ufffd")
        await self._send_text(text[: held_back(text, self._markers)], response, len(token_ids))

    async def _send_text(self, text: str, response: Response, num_tokens: int) -> None:
        new, start = text[self._sent_text :], self._sent_tokens
        piece = Piece(new)
        if self._reply.request.logprobs and num_tokens > start:
            piece = Piece(new, response.output_ids[start:num_tokens], response.logprobs[start:num_tokens])
        if new or piece.token_ids:
            await self._send(self._events.piece(self._index, piece))
            self._sent_text += len(new)
            self._sent_tokens = num_tokens


def _shared_client(base_url: str) -> AsyncOpenAI:
    try:
        import openai
    except ImportError as error:
        raise ImportError("session.client() needs openai's package: pip install 'asyncrl[openai]'") from error
    # Ignore proxies of the environment: client and server are in one process. No timeout: waits end with the rollout.
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=None)
    return openai.AsyncOpenAI(
        base_url=base_url, api_key="a session's id", max_retries=0, timeout=None, http_client=http_client
    )


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "asyncrl"}


def _json(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
