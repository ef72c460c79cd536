"""HTTP of a generation server (SGLang's): requests that generate, and the server's load."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class SamplingParams(Struct, frozen=True, kw_only=True):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    stop_token_ids: list[int] = []
    ignore_eos: bool = False  # the model's own end token does not stop generation (stop_token_ids still do)


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """POST /generate."""

    input_ids: list[int]
    sampling_params: SamplingParams
    rid: str
    return_logprob: bool = True
    priority: int = 0  # above 0: the request goes to the front of the queue
    # Not in SGLang: number of input tokens whose routes the caller has from an earlier piece; the answer leaves them out
    routes_from: int = 0


class FinishReason(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: Literal["stop", "length", "abort"]
    matched: int | None = None
    length: int | None = None
    message: str | None = None


class VersionSpan(Struct, frozen=True, kw_only=True):
    """output_ids[start:end] were sampled by this weight version."""

    version: str
    start: int
    end: int


class GenerateMeta(Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    weight_version: str
    weight_versions: list[VersionSpan]
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []  # None: the logprob was not a number
    # Routes (data/routes.py) of the tokens from `routes_from` on, without that of the last token; empty without train.routes, and
    # in an answer without a token
    routed_experts: bytes = b""


class GenerateReply(Struct, frozen=True, kw_only=True):
    """The stop token stays in output_ids. An aborted request is answered with status 200 and its output so far."""

    text: str = ""
    output_ids: list[int]
    meta_info: GenerateMeta


class ModelInfo(Struct, frozen=True, kw_only=True):
    """GET /get_model_info (= /model_info)."""

    model_path: str
    weight_version: str
    paused: bool = False  # not in SGLang: generation is paused


class Load(Struct, frozen=True, kw_only=True):
    """The load of one scheduler (SGLang has one for each data-parallel rank); only those of SGLang's fields that asyncrl uses."""

    dp_rank: int = 0
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int  # of the KV cache
    num_total_tokens: int  # num_used_tokens plus the need of waiting requests, which our server estimates


class LoadsReply(Struct, frozen=True, kw_only=True):
    """GET /v1/loads."""

    timestamp: str
    version: str  # of the program that answers
    loads: list[Load]
