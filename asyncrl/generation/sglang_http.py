"""Client of SGLang's own HTTP protocol (0.5.23): message types, and one call for each endpoint that we use."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from asyncrl.generation.server_client import Piece, ServerClient, ServerError, decode
from asyncrl.protocol.errors import DECODE_ERRORS, ErrorClass
from asyncrl.protocol.generation import LoadsReply, SamplingParams

STREAM_INTERVAL = 16  # tokens per piece: fine enough for the journal, and a small share of SGLang's work
_NO_LOGPROB = -1  # logprob_start_len: no logprobs of the prompt's tokens


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
    return_routed_experts: bool = False


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


class SGLangClient(ServerClient):
    """Client of one SGLang server. returns_routes: responses have the experts of their tokens (sglang_routes.py)."""

    not_changed: ClassVar = {
        "Failed to get weights iterator": ErrorClass.PASSING,  # it could not read the files
        "Failed to get model loader": ErrorClass.PERMANENT,
    }

    def __init__(self, url: str, api_key: str = "", *, returns_routes: bool = False) -> None:
        super().__init__(url, api_key)
        self._returns_routes = returns_routes

    def wanted(self, params: SamplingParams, stop_token_ids: list[int], version: str) -> dict[str, Any]:
        return sglang_params(params, stop_token_ids)

    async def generate(
        self, rid: str, input_ids: list[int], wanted: dict[str, Any], *, idle_limit_s: float
    ) -> AsyncGenerator[Piece, None]:
        """A short response is not streamed and is one piece."""
        stream = wanted["max_new_tokens"] > STREAM_INTERVAL
        body = _encode(
            _Generate(
                rid=rid,
                input_ids=input_ids,
                sampling_params=wanted,
                stream=stream,
                return_routed_experts=self._returns_routes,
            )
        )
        async with contextlib.aclosing(
            self._events("/generate", body, streamed=stream, idle_limit_s=idle_limit_s)
        ) as events:
            async for event in events:
                yield _piece(event)

    async def score(self, rid: str, input_ids: list[int], version: str, *, limit_s: float) -> list[float]:
        request = _Generate(
            rid=rid, input_ids=input_ids, sampling_params={"max_new_tokens": 1, "temperature": 0.0}, logprob_start_len=0
        )
        piece = _piece(await self._request("POST", "/generate", _encode(request), limit_s))
        rows = piece.meta_info.input_token_logprobs
        if [row[1] for row in rows] != input_ids:
            raise ServerError(
                f"{self.url}/generate returned {len(rows)} scores, not those of the {len(input_ids)} tokens that were sent"
            )
        return [0.0, *(float("nan") if row[0] is None else row[0] for row in rows[1:])]

    async def abort(self, rid: str = "", *, limit_s: float) -> None:
        """SGLang ends every request with an id that starts with rid."""
        await self._request("POST", "/abort_request", _encode({"rid": rid} if rid else {"abort_all": True}), limit_s)

    async def pause(self, mode: str, *, limit_s: float) -> None:
        await self._request("POST", "/pause_generation", _encode({"mode": mode}), limit_s)

    async def hold(self, *, limit_s: float) -> None:
        await self.pause("in_place", limit_s=limit_s)

    async def resume(self, *, limit_s: float) -> None:
        await self._request("POST", "/continue_generation", b"{}", limit_s)

    async def load(self, path: str, version: str, *, limit_s: float) -> None:
        await self.update_weights_from_disk(path, version, flush_cache=False, limit_s=limit_s)

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
        try:
            await self._request("POST", "/flush_cache", b"{}", limit_s)
        except ServerError as error:
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
        """POST to an endpoint that answers {success, message}; returns the message. Raises ServerError if success is false."""
        answer = await self._request("POST", path, _encode(body), limit_s)
        outcome = decode(answer, _Outcome, path)
        if not outcome.success:
            raise ServerError(f"{path}: {outcome.message}", 400)
        return outcome.message

    async def served_version(self, *, limit_s: float) -> str:
        return (await self.info(limit_s=limit_s)).weight_version

    async def info(self, *, limit_s: float) -> SGLangInfo:
        return decode(await self._request("GET", "/model_info", None, limit_s), SGLangInfo, "/model_info")

    async def settings(self, *, limit_s: float) -> SGLangSettings:
        answer = await self._request("GET", "/server_info", None, limit_s)
        return decode(answer, SGLangSettings, "/server_info")

    async def used_tokens(self, *, limit_s: float) -> int:
        """KV cache tokens used by requests, summed over all schedulers."""
        answer = await self._request("GET", "/v1/loads?include=core", None, limit_s)
        return sum(load.num_used_tokens for load in decode(answer, LoadsReply, "/v1/loads").loads)


def _piece(data: bytes) -> Piece:
    try:
        piece = _decode_piece(data)
    except DECODE_ERRORS as error:
        raise ServerError(f"/generate sent an answer that cannot be decoded ({error}): {data[:200]!r}") from error
    if piece.error is not None:
        body = piece.error if isinstance(piece.error, dict) else {"message": str(piece.error)}
        code = body.get("code", 500)
        raise ServerError(str(body.get("message", body)), code if isinstance(code, int) else 500)
    finish = piece.meta_info.finish_reason
    if finish is not None and finish.type == "abort" and finish.status_code is not None:
        raise ServerError(finish.message or "aborted", finish.status_code)
    return piece
