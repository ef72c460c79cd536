"""The engine `sglang`: what is SGLang's own. `external` is the same engine with a server that another program runs.

SGLang aborts every request with an id that begins with the given one, so no key is a prefix of another. A pause in place needs a
SGLang without overlap scheduling, which makes its labels exact, and without a prefix cache.

Weights over the network are forwarded to SGLang step by step; its schedulers are the ranks of the group. SGLang loads each bucket
on arrival. From the first bucket until SGLang has confirmed the version its weights are unknown: meanwhile the engine has no
version and generates nothing. A SGLang server that hangs in a group can only be killed.
"""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.config.schema import ConfigError
from asyncrl.generation.engine import (
    EngineArguments,
    EngineRequest,
    RequestRefused,
    WeightReceiver,
    WeightsRefused,
)
from asyncrl.generation.server_client import Piece, ServerError
from asyncrl.generation.server_engine import ASK_LIMIT_S, UPDATE_FLUSH_TRIES, GrowingResponse, ServerEngine
from asyncrl.generation.server_process import ServerLink
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.generation.sglang_routes import SGLangRoutes
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import (
    BeginWeightUpdate,
    EndWeightUpdate,
    JoinUpdateGroup,
    ReceiveWeights,
    TensorSpecs,
)
from asyncrl.weights.fetch import WeightFetcher

logger = logging.getLogger(__name__)

_LOAD_LIMIT_S = 60.0
# Time that SGLang gets beyond a step's limit: if a group fails at the sender at that limit, SGLang reports it a moment later
_HANG_SLACK_S = 5.0


class SGLangEngine(ServerEngine[SGLangClient]):
    """Runs requests on a SGLang server; see the module's docstring."""

    program = "SGLang"

    def __init__(self, arguments: EngineArguments, server: ServerLink, local: WeightFetcher | None = None) -> None:
        client = SGLangClient("", server.api_key, returns_routes=arguments.returns_routes)
        super().__init__(arguments, server, client, local)
        self._routes = SGLangRoutes.of(arguments.model_path) if arguments.returns_routes else None
        self._overlaps = True
        self._num_ranks = 1  # tensor parallel
        self._receiver: SGLangReceiver | None = None
        self._is_released = False  # SGLang runs and has released its memory

    async def _ask_settings(self) -> None:
        try:
            settings = await self._client.settings(limit_s=ASK_LIMIT_S)
        except ServerError as error:
            raise ConfigError(f"{self._client.url} does not answer like SGLang 0.5.23: {error}") from error
        self._keeps_prefixes, self._overlaps = not settings.disable_radix_cache, not settings.disable_overlap_schedule
        self._num_ranks = settings.tp_size
        if settings.dp_size != 1:
            raise ConfigError(
                f"{self._client.url} runs with --dp-size {settings.dp_size}: its schedulers would be updated at different times; "
                "run one server per replica (allocation d)"
            )
        if self._config.interrupt not in self.pause_modes:
            raise ConfigError(
                f"generation.interrupt={self._config.interrupt!r}: {self._client.url} runs with a prefix cache or the overlap "
                "scheduler; start it with --disable-radix-cache --disable-overlap-schedule, or use abort, retract or wait"
            )
        if self._routes is not None and self._keeps_prefixes:
            raise ConfigError(
                f"train.routes: {self._client.url} runs with a prefix cache, whose experts were not compared with the trainer's: "
                "leave disable-radix-cache out of generation.server_args, or set train.routes=off"
            )
        self._max_prompt = settings.max_req_input_len - 1
        # max_req_input_len is the context less 6 positions; prompt and response together may use all but 2
        self._max_length = min(self._limits.max_length, settings.max_req_input_len + 4)
        logger.info("SGLang %s answers at %s", settings.version, self._client.url)

    async def _release_devices(self) -> None:
        """Have SGLang release its memory; if it cannot, stop it. After a failed release the engine fails: its state is unknown."""
        if not self._server.can_sleep:
            await super()._release_devices()
            return
        try:
            if not await self.flushed(UPDATE_FLUSH_TRIES):
                raise ServerError("it reports running requests")
            await self._client.release_memory(limit_s=_LOAD_LIMIT_S)
        except ServerError as error:
            raise self.fail(f"SGLang did not release its memory: {error}") from error
        self._is_released = True

    async def _acquire_devices(self) -> None:
        if not self._is_released:
            await super()._acquire_devices()
            return
        try:
            await self._client.resume_memory(limit_s=_LOAD_LIMIT_S)
        except ServerError as error:
            raise self.fail(f"SGLang did not get its memory back: {error}") from error
        self._is_released = False

    def _check(self, request: EngineRequest) -> None:
        if request.params.ignore_eos and request.params.stop_token_ids:
            raise RequestRefused(
                "ignore_eos and stop_token_ids are both set: SGLang would ignore both; set only one of them"
            )
        super()._check(request)

    def _new_key(self) -> str:
        return f"{super()._new_key()}."  # the final dot ensures that no key is a prefix of another

    def _take_routes(self, pending: GrowingResponse, last: Piece) -> None:
        if self._routes is None or len(pending.token_ids) == pending.begin:
            return  # without a token nothing was sampled with these routes
        num_tokens = len(pending.request.input_ids) + len(pending.token_ids)
        try:
            pending.add_routes(self._routes.decode(last.meta_info.routed_experts, num_tokens=num_tokens))
        except ValueError as error:
            raise ServerError(f"the routed experts of a response: {error}") from error

    @property
    def _can_hold(self) -> bool:
        return not (self._keeps_prefixes or self._overlaps)

    async def _abandon_update(self) -> None:
        if self._receiver is not None:
            await self._receiver.abandon()

    # Weights over the network: the methods that SGLangReceiver calls

    def weight_receiver(self, host: str) -> SGLangReceiver:
        self._receiver = SGLangReceiver(self._client, self, num_ranks=self._num_ranks)
        return self._receiver

    def check_tensors(self, specs: TensorSpecs, *, complete: bool) -> None:
        self._tensors.check_sent(specs, complete=complete)

    def check_network_update(self, version: WeightVersion) -> bool:
        """Raises WeightsRefused unless an update is possible now. Returns whether prefixes must be flushed after it."""
        self._check_alive()
        self.check_version(version)
        if not self._paused or (self._running and not self._held):
            raise WeightsRefused(
                "pause generation before an update over the network, and continue after it", ErrorClass.PASSING
            )
        return self._keeps_prefixes and not self._held

    def network_updated(self, version: WeightVersion) -> None:
        self._version = version
        self._num["updates"] += 1


class SGLangReceiver(WeightReceiver):
    """Forwards the steps of an update to SGLang."""

    def __init__(self, client: SGLangClient, engine: SGLangEngine, *, num_ranks: int) -> None:
        self._client, self._engine, self.num_ranks = client, engine, num_ranks
        self._version: WeightVersion | None = None  # of the open update
        self._flush = True

    async def join(self, group: JoinUpdateGroup) -> None:
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.group_name,
            "backend": group.backend,
        }
        await self._call("/init_weights_update_group", body, group.limit_s)

    async def begin(self, update: BeginWeightUpdate) -> None:
        try:
            version = WeightVersion.parse(update.weight_version)
        except ValueError as error:
            raise WeightsRefused(str(error), ErrorClass.PERMANENT) from error
        if update.specs.names:
            self._engine.check_tensors(update.specs, complete=True)
        self._flush = self._engine.check_network_update(version)
        await self.abandon()
        await self._call("/begin_weight_update", {}, ASK_LIMIT_S)
        self._version = version

    async def receive(self, bucket: ReceiveWeights) -> None:
        if self._version is None:
            raise WeightsRefused(
                "update_weights_from_distributed must come between begin_ and end_weight_update", ErrorClass.PASSING
            )
        self._engine.check_tensors(bucket, complete=False)
        self._engine.forget_version()
        body: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": bucket.group_name,
            "load_format": bucket.load_format,
            # If SGLang cannot flush here, because it still counts a request as running, it reports a failed update and keeps its
            # old version label. `end` flushes instead, with retries.
            "flush_cache": False,
        }
        if bucket.weight_version is not None:
            body["weight_version"] = bucket.weight_version
        await self._call("/update_weights_from_distributed", body, bucket.limit_s)

    async def end(self, update: EndWeightUpdate) -> None:
        version, self._version = self._version, None
        if version is None:
            raise WeightsRefused("no weight update is open; call begin_weight_update first", ErrorClass.PASSING)
        await self._call("/end_weight_update", {}, _LOAD_LIMIT_S)
        if self._flush and not await self._engine.flushed(UPDATE_FLUSH_TRIES):
            raise WeightsRefused(
                "SGLang did not flush its prefix cache after the update: it reports running requests",
                ErrorClass.PASSING,
            )
        served = await self._client.served_version(limit_s=ASK_LIMIT_S)
        if served != str(version):
            raise WeightsRefused(f"SGLang received {version} but reports {served!r}", ErrorClass.PASSING)
        self._engine.network_updated(version)

    async def leave(self, group_name: str) -> None:
        await self.abandon()
        await self._call("/destroy_weights_update_group", {"group_name": group_name}, ASK_LIMIT_S)

    async def abandon(self) -> None:
        """Close an update that was left open. The next load overwrites the tensors that this update brought."""
        if self._version is not None:
            self._version = None
            await self._call("/end_weight_update", {}, _LOAD_LIMIT_S)

    async def _call(self, path: str, body: dict[str, Any], limit_s: float) -> None:
        """POST to SGLang. Raises ServerError if SGLang refuses or does not answer.

        If it does not answer, the engine fails, too: SGLang has died, or a scheduler hangs in a group.
        """
        try:
            await self._client.call(path, body, limit_s=limit_s + _HANG_SLACK_S)
        except ServerError as error:
            if error.status == 0:
                self._engine.fail(f"SGLang did not answer {path}: {error}")
            raise
