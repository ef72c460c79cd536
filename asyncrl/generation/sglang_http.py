"""Client of SGLang's own HTTP protocol (0.5.23): message types, and one call for each endpoint that we use.

This module makes no decisions. Every call has a time limit. Errors contain the server's message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

import aiohttp
import msgspec
from msgspec import Struct

from asyncrl.generation.engine import EngineFailed
from asyncrl.protocol.errors import DECODE_ERRORS, ErrorClass, class_of_status
from asyncrl.protocol.generation import FinishReason, LoadsReply, SamplingParams, VersionSpan
from asyncrl.runtime.http_client import MAX_ANSWER_BYTES, BoundedResponse

STREAM_INTERVAL = 16  # tokens per piece: fine enough for the journal, and a small share of SGLang's work
_CONNECT_LIMIT_S = 5.0
# SGLang closes a connection that was idle for 5 s (SGLANG_TIMEOUT_KEEP_ALIVE). A request that meets the close fails, so the client
# closes it earlier
_KEEP_ALIVE_S = 2.0
_JSON = {"Content-Type": "application/json"}
_NO_LOGPROB = -1  # logprob_start_len: no logprobs of the prompt's tokens


class SGLangError(EngineFailed):
    """SGLang refused or failed a request. status: the HTTP status, 0 if there was no answer."""

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


class Piece(Struct, frozen=True):
    """A piece of a response. output_ids and logprobs are the new ones (incremental streaming), or all so far."""

    output_ids: list[int] = []
    meta_info: PieceMeta = PieceMeta()
    error: Any = None


class SGLangInfo(Struct, frozen=True, kw_only=True):
    """GET /model_info."""

    model_path: str
    weight_version: str


class SGLangSettings(Struct, frozen=True, kw_only=True):
    """The fields of GET /server_info that we use. The defaults apply to fields that the server omits."""

    version: str = ""
    max_req_input_len: int  # exclusive limit of a prompt's length
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    tp_size: int = 1
    dp_size: int = 1


class _Outcome(Struct, frozen=True):
    success: bool = True
    message: str = ""


class _Generate(Struct, frozen=True, kw_only=True):
    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool = True
    logprob_start_len: int = _NO_LOGPROB
    stream: bool = False


_MEMORY = ["kv_cache", "weights"]
_encode = msgspec.json.Encoder().encode
_decode_piece = msgspec.json.Decoder(Piece).decode


def sglang_params(params: SamplingParams, stop_token_ids: list[int]) -> dict[str, Any]:
    """Our sampling parameters in SGLang's format. In SGLang, too, temperature 0 is greedy, with logprobs at temperature 1."""
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p if params.temperature > 0 else 1.0,
        "top_k": params.top_k if params.temperature > 0 else -1,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "stream_interval": STREAM_INTERVAL,
    }


class SGLangClient:
    """Client of one server. Each call raises SGLangError if it fails, or if no answer arrives within its limit.

    The first call opens a session on the running event loop; `close` ends it.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:  # aiohttp would raise RuntimeError, which callers do not expect
            raise SGLangError(f"the connection to {self.url} is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                response_class=BoundedResponse,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding"),
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else None,
            )
        return self._session

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    # ---------------------------------------------------------------------------------------------------------- generate

    async def generate(
        self, rid: str, input_ids: list[int], params: dict[str, Any], *, idle_limit_s: float
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of a response; the last one has the finish reason. idle_limit_s: limit until the next piece.

        A short response is not streamed and is one piece. Closing the iterator before its end does not abort the request.
        """
        stream = params["max_new_tokens"] > STREAM_INTERVAL
        body = _encode(_Generate(rid=rid, input_ids=input_ids, sampling_params=params, stream=stream))
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_LIMIT_S, sock_read=idle_limit_s)
        try:
            async with self._opened().post(f"{self.url}/generate", data=body, headers=_JSON, timeout=timeout) as answer:
                if answer.status != 200:
                    raise SGLangError(_said(await answer.read()), answer.status)
                if not stream:
                    yield _piece(await answer.read())
                    return
                async for event in _events(answer.content):
                    if event == b"[DONE]":
                        return
                    yield _piece(event)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise SGLangError(f"{self.url}/generate: {error!r}") from error

    async def score(self, rid: str, input_ids: list[int], *, limit_s: float) -> list[float]:
        """Logprob of each token of a prompt given those before it, at temperature 1; 0 for the first."""
        request = _Generate(
            rid=rid, input_ids=input_ids, sampling_params={"max_new_tokens": 1, "temperature": 0.0}, logprob_start_len=0
        )
        piece = _piece(await self._request("POST", "/generate", _encode(request), limit_s))
        rows = piece.meta_info.input_token_logprobs
        if [row[1] for row in rows] != input_ids:
            raise SGLangError(
                f"{self.url}/generate returned {len(rows)} scores, not those of the {len(input_ids)} tokens that were sent"
            )
        return [0.0, *(float("nan") if row[0] is None else row[0] for row in rows[1:])]

    async def abort(self, rid: str = "", *, limit_s: float) -> None:
        """End the request with this rid; "": all requests. SGLang ends every request with an id that starts with rid."""
        await self._request("POST", "/abort_request", _encode({"rid": rid} if rid else {"abort_all": True}), limit_s)

    # ------------------------------------------------------------------------------------------------- weights and cache

    async def pause(self, mode: str, *, limit_s: float) -> None:
        await self._request("POST", "/pause_generation", _encode({"mode": mode}), limit_s)

    async def resume(self, *, limit_s: float) -> None:
        await self._request("POST", "/continue_generation", b"{}", limit_s)

    async def update_weights_from_disk(self, path: str, version: str, *, flush_cache: bool, limit_s: float) -> None:
        """Load a folder in place. load_format must be sent; otherwise the server uses the one that it was started with."""
        body = {
            "model_path": path,
            "load_format": "auto",
            "weight_version": version,
            "flush_cache": flush_cache,
        }
        await self.call("/update_weights_from_disk", body, limit_s=limit_s)

    async def flush_cache(self, *, limit_s: float) -> bool:
        """Flush the prefix cache. Returns False if SGLang runs requests."""
        try:
            await self._request("POST", "/flush_cache", b"{}", limit_s)
        except SGLangError as error:
            if error.status == 400:
                return False
            raise
        return True

    async def release_memory(self, *, limit_s: float) -> None:
        """Free the weights and the KV cache. SGLang must be idle: it dies of a release while a request ends."""
        await self._request("POST", "/release_memory_occupation", _encode({"tags": _MEMORY}), limit_s)

    async def resume_memory(self, *, limit_s: float) -> None:
        """Undo release_memory, except for the contents of the weights. SGLang dies if nothing was released."""
        await self._request("POST", "/resume_memory_occupation", _encode({"tags": _MEMORY}), limit_s)

    async def call(self, path: str, body: dict[str, Any], *, limit_s: float) -> str:
        """POST to an endpoint that answers {success, message}; returns the message. Raises SGLangError if success is false."""
        answer = await self._request("POST", path, _encode(body), limit_s)
        outcome: _Outcome = _decode(answer, _Outcome, path)
        if not outcome.success:
            raise SGLangError(f"{path}: {outcome.message}", 400)
        return outcome.message

    # ------------------------------------------------------------------------------------------------------------- state

    async def info(self, *, limit_s: float) -> SGLangInfo:
        info: SGLangInfo = _decode(await self._request("GET", "/model_info", None, limit_s), SGLangInfo, "/model_info")
        return info

    async def settings(self, *, limit_s: float) -> SGLangSettings:
        answer = await self._request("GET", "/server_info", None, limit_s)
        settings: SGLangSettings = _decode(answer, SGLangSettings, "/server_info")
        return settings

    async def used_tokens(self, *, limit_s: float) -> int:
        """KV cache tokens used by requests, summed over all schedulers."""
        answer = await self._request("GET", "/v1/loads?include=core", None, limit_s)
        return sum(load.num_used_tokens for load in _decode(answer, LoadsReply, "/v1/loads").loads)

    async def _request(self, method: str, path: str, body: bytes | None, limit_s: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(_CONNECT_LIMIT_S, limit_s))
        try:
            async with self._opened().request(
                method, f"{self.url}{path}", data=body, headers=_JSON, timeout=timeout
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise SGLangError(f"{path} answered {answer.status}: {_said(content)}", answer.status)
                return content
        except TimeoutError as error:
            raise SGLangError(f"{self.url}{path}: no answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SGLangError(f"{self.url}{path}: {error!r}") from error


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, also when it is split over several chunks.

    Raises SGLangError if more than MAX_ANSWER_BYTES arrive without the end of an event.
    """
    rest = b""
    async for data in content.iter_any():
        *whole, rest = (rest + data).split(b"\n\n")
        if len(rest) > MAX_ANSWER_BYTES:
            raise SGLangError(f"/generate streams an event of more than {MAX_ANSWER_BYTES} bytes: {rest[:200]!r}")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[6:]


def _piece(data: bytes) -> Piece:
    try:
        piece = _decode_piece(data)
    except DECODE_ERRORS as error:
        raise SGLangError(f"/generate sent an answer that cannot be decoded ({error}): {data[:200]!r}") from error
    if piece.error is not None:
        body = piece.error if isinstance(piece.error, dict) else {"message": str(piece.error)}
        code = body.get("code", 500)
        raise SGLangError(str(body.get("message", body)), code if isinstance(code, int) else 500)
    finish = piece.meta_info.finish_reason
    if finish is not None and finish.type == "abort" and finish.status_code is not None:
        raise SGLangError(finish.message or "aborted", finish.status_code)
    return piece


def _decode(data: bytes, kind: Any, path: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise SGLangError(f"{path} sent an answer that cannot be decoded ({error}): {data[:200]!r}") from error


def _said(content: bytes) -> str:
    """The message in an error's body, which has one of SGLang's three formats; otherwise the start of the body."""
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
