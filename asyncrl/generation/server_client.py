"""Client of a program that serves a model by HTTP: the session, the pieces of a response, and the calls that an engine makes.

`ServerClient` has a subclass for each program, which knows its protocol. A client makes no decisions. Every call has a time limit.
Errors contain the server's message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from asyncrl.generation.engine import EngineFailed
from asyncrl.protocol.errors import DECODE_ERRORS, ErrorClass, class_of_status
from asyncrl.protocol.generation import FinishReason, SamplingParams, VersionSpan
from asyncrl.runtime.http_client import MAX_ANSWER_BYTES, BoundedResponse

UNIX = "unix:"  # begins the address of a Unix socket
_CONNECT_LIMIT_S = 5.0
# SGLang (SGLANG_TIMEOUT_KEEP_ALIVE) closes a connection that was idle for 5 s. A request that meets the close fails, so the client
# closes it earlier
_KEEP_ALIVE_S = 2.0
_JSON = {"Content-Type": "application/json"}

T = TypeVar("T")


class ServerError(EngineFailed):
    """The server refused or failed a request. status: the HTTP status, 0 if there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.error_class = class_of_status(status) if status else ErrorClass.PASSING


class Finish(Struct, frozen=True):
    """Why a response ended. status_code is set if an `abort` is an error."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None

    def as_ours(self) -> FinishReason:
        """The finish reason in our servers' format."""
        matched = self.matched if isinstance(self.matched, int) else None
        return FinishReason(type=self.type, matched=matched, length=self.length, message=self.message)


class PieceMeta(Struct, frozen=True):
    finish_reason: Finish | None = None
    completion_tokens: int = 0
    weight_versions: list[VersionSpan] = []
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    routed_experts: str = ""  # of SGLang, in the last piece (sglang_routes.py)


class Piece(Struct, frozen=True):
    """A piece of a response. output_ids and logprobs are the new ones (incremental streaming), or all so far."""

    output_ids: list[int] = []
    meta_info: PieceMeta = PieceMeta()
    error: Any = None


class ServerClient(ABC):
    """Client of one server. Each call raises ServerError if it fails, or if no answer arrives within its limit.

    The first call opens a session on the running event loop; `close` ends it.
    """

    # Parts of the program's messages when a load has changed nothing
    not_changed: ClassVar[Mapping[str, ErrorClass]] = {}

    def __init__(self, url: str, api_key: str = "") -> None:
        """url: http://host:port, or unix:/path of a socket."""
        self.url = url
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def connect(self, url: str) -> None:
        """Use this address from now on: a server that starts again may have another socket, to which no open session leads."""
        if url != self.url and self._session is not None:
            await self._session.close()
            self._session = None
        self.url = url

    # ---------------------------------------------------------------------------------------------------------- generate

    @abstractmethod
    def wanted(self, params: SamplingParams, stop_token_ids: list[int], version: str) -> dict[str, Any]:
        """Our sampling parameters in the program's format. version: the one that is served when the request is sent."""

    @abstractmethod
    def generate(
        self, rid: str, input_ids: list[int], wanted: dict[str, Any], *, idle_limit_s: float
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of a response; the last one has the finish reason. idle_limit_s: limit until the next piece.

        Closing the iterator before its end need not abort the request.
        """

    @abstractmethod
    async def score(self, rid: str, input_ids: list[int], version: str, *, limit_s: float) -> list[float]:
        """Logprob of each token of a prompt given those before it, at temperature 1; 0 for the first. version: the one that is
        served; "": none is."""

    @abstractmethod
    async def abort(self, rid: str = "", *, limit_s: float) -> None:
        """End the request with this id, which then ends with the finish reason `abort`; "": all requests."""

    # ------------------------------------------------------------------------------------------------- weights and cache

    @abstractmethod
    async def hold(self, *, limit_s: float) -> None:
        """Stop running requests where they are."""

    @abstractmethod
    async def resume(self, *, limit_s: float) -> None:
        """Let them run again."""

    @abstractmethod
    async def load(self, path: str, version: str, *, limit_s: float) -> None:
        """Load a folder in place, and label later tokens with this version."""

    @abstractmethod
    async def flush_cache(self, *, limit_s: float) -> bool:
        """Flush the prefix cache. Returns False if the server runs requests."""

    # ------------------------------------------------------------------------------------------------------------- state

    @abstractmethod
    async def served_version(self, *, limit_s: float) -> str:
        """The label of the loaded weights. The server is ready when it answers this."""

    @abstractmethod
    async def used_tokens(self, *, limit_s: float) -> int | None:
        """Tokens of the KV cache that requests use; None: the program does not tell."""

    # -------------------------------------------------------------------------------------------------------------- HTTP

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:  # aiohttp would raise RuntimeError, which callers do not expect
            raise ServerError(f"the connection to {self.url} is closed")
        if self._session is None:
            connector: aiohttp.BaseConnector = (
                aiohttp.UnixConnector(self.url.removeprefix(UNIX), limit=0, keepalive_timeout=_KEEP_ALIVE_S)
                if self.url.startswith(UNIX)
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                response_class=BoundedResponse,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else None,
            )
        return self._session

    @property
    def _base(self) -> str:
        return "http://localhost" if self.url.startswith(UNIX) else self.url

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _events(
        self, path: str, body: bytes, *, streamed: bool, idle_limit_s: float
    ) -> AsyncGenerator[bytes, None]:
        """POST; yield the data of each server-sent event, or the body of an answer that is not streamed."""
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_LIMIT_S, sock_read=idle_limit_s)
        try:
            async with self._opened().post(f"{self._base}{path}", data=body, headers=_JSON, timeout=timeout) as answer:
                if answer.status != 200:
                    raise ServerError(_said(await answer.read()), answer.status)
                if not streamed:
                    yield await answer.read()
                    return
                async for event in _events(answer.content, path):
                    if event == b"[DONE]":
                        return
                    yield event
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{self.url}{path}: {error!r}") from error

    async def _request(self, method: str, path: str, body: bytes | None, limit_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(_CONNECT_LIMIT_S, limit_s))
        try:
            async with self._opened().request(
                method, f"{self._base}{path}", data=body, headers=_JSON, timeout=timeout
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise ServerError(f"{path} answered {answer.status}: {_said(content)}", answer.status)
                return content
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path}: no answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{self.url}{path}: {error!r}") from error


async def _events(content: aiohttp.StreamReader, path: str) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, also when it is split over several chunks.

    Raises ServerError if more than MAX_ANSWER_BYTES arrive without the end of an event.
    """
    rest = b""
    async for data in content.iter_any():
        *whole, rest = (rest + data).split(b"\n\n")
        if len(rest) > MAX_ANSWER_BYTES:
            raise ServerError(f"{path} streams an event of more than {MAX_ANSWER_BYTES} bytes: {rest[:200]!r}")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[6:]


def decode(data: bytes, kind: type[T], path: str) -> T:
    """Decode an answer. Raises ServerError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise ServerError(f"{path} sent an answer that cannot be decoded ({error}): {data[:200]!r}") from error


def _said(content: bytes) -> str:
    """The message in an error's body, which has one of three formats; otherwise the start of the body."""
    try:
        body = msgspec.json.decode(content)
    except DECODE_ERRORS:
        return content[:500].decode(errors="replace")
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            return str(inner.get("message", inner))[:2000]
        return str(inner)[:2000]
    return str(body)[:500]
