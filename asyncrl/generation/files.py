"""The transport of files, in a generation server: fetches, verifies and loads the files of a version.

POST /fetch_weights             FetchWeightsRequest -> UpdateWeightsReply, while requests run
POST /update_weights_from_disk  UpdateWeightsRequest -> UpdateWeightsReply, 200 or 400 (nothing has changed; or the logprob
                                check failed, and the server has no version)

If this host does not see the run's folder, the server fetches a version into the host's memory first:

gserver manager -- version, source --> this server -- WeightFetcher, on a thread --> memory of this host --> the engine loads them

A request cannot choose the source of the files: its `source` must equal the address in name resolve.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from asyncrl.generation.engine import WeightsRefused
from asyncrl.generation.server_side import Means, ServerSide, refuse, reply_with
from asyncrl.protocol.errors import ErrorClass, classify
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.run_folder import name_of
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import FetchWeightsRequest, UpdateWeightsReply, UpdateWeightsRequest
from asyncrl.weights.fetch import WeightFetcher
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import version_dir

_MAX_KNOWN = 8
_LOCK_LIMIT_S = 30.0  # limit of the wait while another process on this host fetches or removes the version to load


class FetchedWeights:
    """The newest _MAX_KNOWN versions that this server has fetched, and their directories."""

    def __init__(self, fetcher: WeightFetcher, source: Callable[[], Awaitable[str]]) -> None:
        """source: returns the base URL under which the run's gserver manager serves versions; "": not known."""
        self._fetcher = fetcher
        self._source = source
        self._where: OrderedDict[WeightVersion, tuple[str, Path]] = OrderedDict()

    async def fetch(self, wanted: FetchWeightsRequest) -> str:
        """Fetch a version within the request's limit; returns its directory. Raises WeightsRefused if it cannot be fetched."""
        if wanted.source != (source := await self._source()):
            raise WeightsRefused(
                f"source is {wanted.source!r}; the run's weights are at {source or 'no known address'}",
                ErrorClass.PASSING,  # the server may learn the new address of a manager later than the manager itself
            )
        try:
            version = WeightVersion.parse(wanted.weight_version)
            path = await asyncio.to_thread(
                self._fetcher.fetch, Path(wanted.model_path), version, wanted.source, wanted.limit_s
            )
        except (WeightsError, ValueError) as error:
            raise WeightsRefused(str(error), classify(error)) from error
        self._where[version] = (wanted.model_path, path)
        self._where.move_to_end(version)
        if len(self._where) > _MAX_KNOWN:
            self._where.popitem(last=False)
        return str(path)

    @contextlib.contextmanager
    def loading(self, asked: str, version: WeightVersion) -> Iterator[Path]:
        """Yield the directory to load the version from: the fetched files' if `asked` is the model_path of that fetch, otherwise
        `asked`. Fetched files are not removed before the block ends.
        """
        model_path, path = self._where.get(version, ("", Path(asked)))
        if model_path != asked or str(path) == asked:
            yield Path(asked)
            return
        try:
            with self._fetcher.loading(version, _LOCK_LIMIT_S):
                yield path
        except WeightsError as error:
            raise WeightsRefused(str(error), classify(error)) from error

    def close(self) -> None:
        self._fetcher.close()


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
