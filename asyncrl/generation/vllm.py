"""The engine `vllm`: what is vLLM's own (0.32 and 0.33): command line, protocol, and the limits of requests.

vLLM's control endpoints can call any method of its workers. So it listens on a Unix socket in a folder that only this user can
enter, and on no port. The socket needs no key.

vLLM labels each token with the version that it was told last (/update_weight_version), which is told while nothing runs or
everything is paused. Each request has its version as the salt of its prefixes, so keys of an older version are never used for a
newer one, and its scores have salts of their own.

With train.lora vLLM keeps the base, and each version is an adapter under its own name, which every request names: that name is the
label of the request's tokens. The adapter before is unloaded, so a request that names it is refused; with interrupt=finish the
newest ones stay. vLLM is silent about tensors of an adapter that it does not use, so the logprob check stays on.

Logprobs are those of vLLM's processed logits: after temperature, and also after top-p and top-k, which would renormalise them.
Sampling with a filter is therefore refused. So are guessed tokens, whose logprobs vLLM 0.32 reports wrongly.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncrl.config.engines import ENGINES, VLLM_PROGRAM
from asyncrl.config.schema import ConfigError, GenerationConfig, LoraConfig
from asyncrl.data.model_limits import UNLIMITED, ModelLimits
from asyncrl.generation.engine import EngineArguments, EngineRequest, RequestRefused
from asyncrl.generation.server_client import Finish, Piece, PieceMeta, ServerClient, ServerError, decode
from asyncrl.generation.server_engine import ASK_LIMIT_S, ServerEngine
from asyncrl.generation.server_process import (
    LOOPBACK,
    SOCKET,
    ServerCommand,
    ServerLink,
    ServerProcess,
    options,
    program_environment,
)
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.generation import SamplingParams, VersionSpan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.devices import visible_devices
from asyncrl.weights.fetch import WeightFetcher

VLLM = ServerCommand(VLLM_PROGRAM, "vllm.entrypoints.cli.main", own_processes="VLLM::", has_socket=True)
STREAM_INTERVAL = 16  # tokens per piece, as for SGLang
SPARE_POSITIONS = (
    1  # a text as long as the model allows is scored with one more token, which vLLM samples and nothing reads
)
_BLOCK_TOKENS = 128  # of vLLM's cache on a CPU
_GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"  # vLLM puts it before our request ids
_encode = msgspec.json.Encoder().encode


# ------------------------------------------------------------------------------------------------------ how it is started


def own_server(
    config: GenerationConfig,
    model_path: str,
    *,
    tensor: int,
    seed: int,
    log: Path,
    gpus: Sequence[str] = (),
    lora: LoraConfig | None = None,
    num_versions: int = 1,
    clock: Clock = SYSTEM_CLOCK,
) -> ServerProcess:
    """Make a server for this model without starting it. It runs on the GPUs that this process may use, or on the CPU.

    gpus: those that the launcher gave this process. lora: versions are adapters. num_versions: that it keeps.
    """
    python = str(Path(config.python or sys.executable).expanduser().absolute())
    on_gpu = bool(gpus or visible_devices())
    arguments = server_arguments(
        config, model_path, tensor=tensor, seed=seed, on_gpu=on_gpu, lora=lora, num_versions=num_versions
    )
    return ServerProcess(
        VLLM,
        python=python,
        arguments=lambda port: arguments,
        environment=lambda tmp: server_environment(
            os.environ, python=python, tmp=tmp, on_gpu=on_gpu, adapters=lora is not None
        ),
        log=log,
        on_gpu=on_gpu,
        clock=clock,
    )


def server_arguments(
    config: GenerationConfig,
    model_path: str,
    *,
    tensor: int,
    seed: int,
    on_gpu: bool,
    lora: LoraConfig | None = None,
    num_versions: int = 1,
) -> list[str]:
    """The arguments of vllm's command line. generation.server_args override them.

    vLLM loads the weights in model_path at its start, because it can replace only loaded ones. The engine serves none of them, or,
    with adapters, none of them alone.
    """
    arguments = {
        "uds": SOCKET,
        "tensor-parallel-size": str(tensor),
        "dtype": config.dtype,
        "seed": str(seed),
        "max-num-seqs": str(config.max_running_requests),
        "skip-tokenizer-init": "true",  # requests and responses are token ids
        "generation-config": "vllm",  # no sampling parameters from the model's files
        "enable-scale-out": "true",  # token ids in, token ids out
        "logprobs-mode": "processed_logprobs",
        "stream-interval": str(STREAM_INTERVAL),
        "disable-uvicorn-access-log": "true",
    }
    max_length = ModelLimits.of(model_path).max_length
    most = [max_length + SPARE_POSITIONS] if max_length < UNLIMITED else []
    if not on_gpu:
        cache = config.num_blocks * config.page_size
        arguments |= {"enforce-eager": "true", "num-gpu-blocks-override": str(-(-cache // _BLOCK_TOKENS) + 1)}
        most.append(cache)
    if most:
        arguments["max-model-len"] = str(min(most))
    if not config.prefix_sharing or config.interrupt == "in_place":
        arguments["no-enable-prefix-caching"] = "true"
    if lora is not None:
        traits = ENGINES["vllm"]
        rank, slots = traits.adapter_rank(lora.rank), traits.adapter_slots(num_versions)
        arguments |= {"enable-lora": "true", "max-lora-rank": str(rank), "max-loras": str(slots)}
        if num_versions > 1:
            # Beside all requests the logprob check decodes two samples of the newest version and one of each other, and scores one
            arguments["max-num-seqs"] = str(config.max_running_requests + num_versions + 2)
    return ["serve", model_path, *options(arguments, config.server_args)]


def server_environment(
    base: Mapping[str, str], *, python: str, tmp: str, on_gpu: bool, adapters: bool = False
) -> dict[str, str]:
    """The environment of vLLM's process."""
    environment = program_environment(base, python=python, tmp=tmp)
    environment.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)  # it would let requests carry pickles
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that pause, load and resume
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # max-model-len exceeds the model's limit by SPARE_POSITIONS
        "VLLM_RPC_BASE_PATH": tmp,
        "VLLM_HOST_IP": LOOPBACK,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # seconds; the client closes idle connections first, also if it is held up
        "HF_HUB_OFFLINE": "1",  # a path that it does not find is no repository
    }
    if adapters:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the endpoints that load and unload adapters
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; num-gpu-blocks-override is what it takes
    return environment


# --------------------------------------------------------------------------------------------------------------- protocol


class _Logprob(Struct, frozen=True):
    token_id: int
    logprob: float


class _Logprobs(Struct, frozen=True):
    content: list[_Logprob] | None = None


class _Choice(Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None


class _Chunk(Struct, frozen=True):
    """A server-sent event of a response. One of both is set."""

    choices: list[_Choice] = []
    error: Any = None


class _PromptLogprob(Struct, frozen=True):
    logprob: float


class _Scored(Struct, frozen=True):
    """For each token of the prompt its id and logprob; None for the first."""

    prompt_logprobs: list[dict[str, _PromptLogprob] | None]


class _Served(Struct, frozen=True):
    weight_version: str


class _Flushed(Struct, frozen=True):
    success: bool


class _Model(Struct, frozen=True):
    id: str
    max_model_len: int | None = None  # None: an adapter


class _Models(Struct, frozen=True):
    """The base, then the adapters."""

    data: list[_Model]


class VLLMClient(ServerClient):
    """Client of one vLLM server."""

    def wanted(self, params: SamplingParams, stop_token_ids: list[int], version: str) -> dict[str, Any]:
        """In vLLM, too, temperature 0 is greedy, with logprobs at temperature 1."""
        return {
            **self._model(version),
            "cache_salt": version,
            "sampling_params": {
                "max_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "stop_token_ids": stop_token_ids,
                "ignore_eos": True,  # stop_token_ids has all tokens that end the response
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
            },
        }

    async def generate(
        self, rid: str, input_ids: list[int], wanted: dict[str, Any], *, idle_limit_s: float
    ) -> AsyncGenerator[Piece, None]:
        body = _encode({"request_id": rid, "token_ids": input_ids, "stream": True, **wanted})
        total = 0
        async with contextlib.aclosing(
            self._events(_GENERATE, body, streamed=True, idle_limit_s=idle_limit_s)
        ) as events:
            async for event in events:
                chunk = decode(event, _Chunk, _GENERATE)
                if chunk.error is not None:
                    raise ServerError(f"{_GENERATE}: {chunk.error}", 500)
                for choice in chunk.choices:
                    total += len(choice.token_ids or ())
                    yield _piece(choice, total)

    async def score(self, rid: str, input_ids: list[int], version: str, *, limit_s: float) -> list[float]:
        params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {
            "request_id": rid,
            "token_ids": input_ids,
            "cache_salt": rid,
            "sampling_params": params,
            **self._model(version),
        }
        answer = await self._request("POST", _GENERATE, _encode(body), limit_s)
        rows = decode(answer, _Scored, _GENERATE).prompt_logprobs
        if len(rows) != len(input_ids):
            raise ServerError(f"{_GENERATE} returned {len(rows)} scores for {len(input_ids)} tokens")
        scores = [0.0]
        for token, row in zip(input_ids[1:], rows[1:], strict=True):
            found = (row or {}).get(str(token))
            if found is None:
                raise ServerError(f"{_GENERATE} returned no score of the token {token} that was sent")
            scores.append(found.logprob)
        return scores

    async def abort(self, rid: str = "", *, limit_s: float) -> None:
        await self._post("/abort_requests", {"request_ids": [f"{_ID_PREFIX}{rid}"]} if rid else {}, limit_s)

    async def hold(self, *, limit_s: float) -> None:
        await self._post("/pause?mode=keep", {}, limit_s)

    async def resume(self, *, limit_s: float) -> None:
        await self._post("/resume", {}, limit_s)

    async def load(self, path: str, version: str, *, limit_s: float) -> None:
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}, limit_s)
        await self._post("/update_weight_version", {"new_version": version}, limit_s)

    def _model(self, version: str) -> dict[str, str]:
        """The field of a request that names what runs it. {}: the loaded weights do."""
        return {}

    async def flush_cache(self, *, limit_s: float) -> bool:
        path = "/reset_prefix_cache"
        return decode(await self._post(path, {}, limit_s), _Flushed, path).success

    async def served_version(self, *, limit_s: float) -> str:
        path = "/weight_info"
        return decode(await self._request("GET", path, None, limit_s), _Served, path).weight_version

    async def used_tokens(self, *, limit_s: float) -> None:
        await self._request("GET", "/health", None, limit_s)  # refused when vLLM's engine has failed

    async def max_length(self, *, limit_s: float) -> int:
        """Tokens of a request, prompt and response together."""
        if (found := (await self._models(limit_s))[0].max_model_len) is None:
            raise ServerError("/v1/models does not have the base's max_model_len")
        return found

    async def _models(self, limit_s: float) -> list[_Model]:
        path = "/v1/models"
        found = decode(await self._request("GET", path, None, limit_s), _Models, path).data
        if not found:
            raise ServerError(f"{path} names no model")
        return found

    async def _post(self, path: str, body: dict[str, Any], limit_s: float) -> bytes:
        return await self._request("POST", path, _encode(body), limit_s)


class AdapterClient(VLLMClient):
    """Client of a vLLM server whose versions are adapters."""

    not_changed: ClassVar = {"expected target modules": ErrorClass.PERMANENT}

    def __init__(self, url: str, api_key: str = "", *, keeps: bool = False) -> None:
        """keeps: `load` leaves the other adapters loaded, for `unload`."""
        super().__init__(url, api_key)
        self._keeps, self._load_id = keeps, ""

    def wanted(self, params: SamplingParams, stop_token_ids: list[int], version: str) -> dict[str, Any]:
        """An adapter may be loaded again under its name, with other tensors, and no flush is possible while others run. So the salt
        names the last load, too."""
        return super().wanted(params, stop_token_ids, version) | {"cache_salt": f"{version}-{self._load_id}"}

    async def generate(
        self, rid: str, input_ids: list[int], wanted: dict[str, Any], *, idle_limit_s: float
    ) -> AsyncGenerator[Piece, None]:
        """All tokens are of the adapter that the request names. vLLM's own label is of the base's weights."""
        pieces = super().generate(rid, input_ids, wanted, idle_limit_s=idle_limit_s)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                span = VersionSpan(version=wanted["model"], start=0, end=piece.meta_info.completion_tokens)
                yield replace(piece, meta_info=replace(piece.meta_info, weight_versions=[span]))

    async def load(self, path: str, version: str, *, limit_s: float) -> None:
        """Load an adapter under its version's name, and unload the others unless they are kept. An adapter of this name is unloaded
        first, because vLLM would refuse the name."""
        loaded = {model.id for model in (await self._models(limit_s))[1:]}
        if version in loaded:
            await self.unload(version, limit_s=limit_s)
        await self._post("/v1/load_lora_adapter", {"lora_name": version, "lora_path": path}, limit_s)
        self._load_id = uuid.uuid4().hex
        for name in loaded - {version} if not self._keeps else ():
            await self.unload(name, limit_s=limit_s)

    async def unload(self, version: str, *, limit_s: float) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": version}, limit_s)

    async def served_version(self, *, limit_s: float) -> str:
        """The adapter that was loaded last; the base if there is none."""
        return (await self._models(limit_s))[-1].id

    def _model(self, version: str) -> dict[str, str]:
        """Raises ServerError for no version: vLLM would take it for the base."""
        if not version:
            raise ServerError("no adapter is loaded")
        return {"model": version}


def _piece(choice: _Choice, total: int) -> Piece:
    """A piece with the new tokens. total: number of all tokens so far. Raises ServerError if the request failed."""
    ids, rows = choice.token_ids or [], (choice.logprobs.content if choice.logprobs else None) or []
    finish = None
    match choice.finish_reason:
        case "stop":
            finish = Finish(type="stop", matched=choice.stop_reason)
        case "length":
            finish = Finish(type="length")
        case "abort":
            finish = Finish(type="abort", message="aborted")
        case str(other):
            raise ServerError(f"a response ended with the finish reason {other!r}", 500)
    meta = PieceMeta(
        finish_reason=finish,
        completion_tokens=total,
        weight_versions=choice.weight_versions or [],
        output_token_logprobs=[(row.logprob, row.token_id, None) for row in rows],
    )
    return Piece(output_ids=ids, meta_info=meta)


# ----------------------------------------------------------------------------------------------------------------- engine


class VLLMEngine(ServerEngine[VLLMClient]):
    """Runs requests on a vLLM server; see the module's docstring."""

    program = "vLLM"

    def __init__(self, arguments: EngineArguments, server: ServerLink, local: WeightFetcher | None = None) -> None:
        keeps = arguments.num_versions > 1
        client = VLLMClient("", server.api_key) if arguments.lora is None else AdapterClient("", keeps=keeps)
        super().__init__(arguments, server, client, local)

    async def _ask_settings(self) -> None:
        try:
            most = await self._client.max_length(limit_s=ASK_LIMIT_S)
        except ServerError as error:
            raise ConfigError(f"{self._client.url} does not answer like vLLM {VLLM_PROGRAM.tested}: {error}") from error
        self._max_prompt = self._max_length = min(self._limits.max_length, most - SPARE_POSITIONS)

    async def _load(self, path: Path, version: WeightVersion) -> None:
        """With several versions the served one is not loaded again: meanwhile its requests would name no adapter."""
        if not (self.keeps_versions and version == self._version):
            await super()._load(path, version)

    async def _unload(self, version: WeightVersion) -> None:
        assert isinstance(self._client, AdapterClient)
        try:
            await self._client.unload(str(version), limit_s=self._config.load_limit_s)
        except ServerError as error:
            raise self.fail(f"vLLM did not unload {version}: {error}") from error

    def _check(self, request: EngineRequest) -> None:
        params = request.params
        if params.temperature > 0 and (params.top_p < 1 or params.top_k != -1):
            raise RequestRefused(
                f"top_p={params.top_p} and top_k={params.top_k}: vLLM's logprobs would be renormalised among the tokens that they "
                "keep, and would not be the trainer's; use top_p=1 and top_k=-1"
            )
        super()._check(request)
