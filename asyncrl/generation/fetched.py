"""The versions that a generation server has fetched because its host does not see the run's folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from asyncrl.generation.engine import WeightsRefused
from asyncrl.protocol.errors import ErrorClass, classify
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import FetchWeightsRequest
from asyncrl.weights.fetch import WeightFetcher
from asyncrl.weights.form import WeightsError

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
