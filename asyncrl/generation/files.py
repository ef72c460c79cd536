"""The transport of files, in a generation server: fetches, verifies and loads the files of a version.

POST /fetch_weights             FetchWeightsRequest -> UpdateWeightsReply, while requests run
POST /update_weights_from_disk  UpdateWeightsRequest -> UpdateWeightsReply, 200 or 400 (nothing has changed; or the logprob
                                check failed, and the server has no version)

If this host does not see the run's folder, the server fetches a version into the host's memory first:

gserver manager -- version, source --> this server -- WeightFetcher, on a thread --> memory of this host --> the engine loads them

A request cannot choose the source of the files: its `source` must equal the address in name resolve.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from aiohttp import web

from asyncrl.generation.engine import WeightsRefused
from asyncrl.generation.server_side import Means, ServerSide, refuse, reply_with
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import name_of
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import FetchWeightsRequest, UpdateWeightsReply, UpdateWeightsRequest
from asyncrl.weights.versions import version_dir


class FilesInServer(ServerSide):
    """Two equal requests at the same time are one."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self._load_weights = means.engine.load_weights if means.verified is None else means.verified.load

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/fetch_weights", self._fetch_weights),
            web.post("/update_weights_from_disk", self._update_weights),
        ]

    async def _update_weights(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=UpdateWeightsRequest)
        try:
            version = WeightVersion.parse(wanted.weight_version)
            self._means.fence.check(version)
            self._check_place(wanted.model_path, version)
            key = "load", wanted.model_path, str(version), wanted.abort_all_requests
            count = await self._means.work.once(key, lambda: self._load(wanted, version))
        except (WeightsRefused, ValueError) as error:
            return refuse(error)
        return reply_with(UpdateWeightsReply(success=True, message=f"serving {version}", num_paused_requests=count))

    async def _fetch_weights(self, request: web.Request) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=FetchWeightsRequest)
        try:
            key = "fetch", wanted.model_path, wanted.weight_version
            where = await self._means.work.once(key, lambda: self._fetch(wanted))
        except (WeightsRefused, ValueError) as error:
            return refuse(error)
        return reply_with(UpdateWeightsReply(success=True, message=f"{wanted.weight_version} is in {where}"))

    async def _fetch(self, wanted: FetchWeightsRequest) -> str:
        """Fetch and verify the version; returns its directory. After that, generation must pause only for the load."""
        version, where = WeightVersion.parse(wanted.weight_version), wanted.model_path
        self._check_place(where, version)
        if self._means.fetched is not None and wanted.source:
            await self._means.fence.check_published(version)
            where = await self._means.fetched.fetch(wanted)
        await self._means.engine.verify_ahead(Path(where), version)
        return where

    def _check_place(self, model_path: str, version: WeightVersion) -> None:
        """Raises WeightsRefused or OutsideRunError unless model_path is the run's directory of this version. Without a run_dir
        every path is allowed."""
        own = version_dir(self._means.run_dir, ACTOR, version)
        if self._means.run_dir and name_of(self._means.run_dir, Path(model_path)) != name_of(self._means.run_dir, own):
            raise WeightsRefused(
                f"model_path is {model_path!r}, but this run stores {version} only in {own}", ErrorClass.PERMANENT
            )

    async def _load(self, wanted: UpdateWeightsRequest, version: WeightVersion) -> int:
        with contextlib.ExitStack() as stack:
            path = Path(wanted.model_path)
            if self._means.fetched is not None:
                path = stack.enter_context(self._means.fetched.loading(wanted.model_path, version))
            count = await self._load_weights(path, version, abort_running=wanted.abort_all_requests)
        self._means.fence.loaded(version)
        return count
