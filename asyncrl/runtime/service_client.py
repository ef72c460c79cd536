"""HTTP client of a service that is found through name resolve, such as the gserver manager.

A call is retried until its limit: the services' calls are idempotent, and a service that was restarted publishes a new address
under the same key.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

import aiohttp
import msgspec

from asyncrl.runtime.name_resolve import NameResolveError
from asyncrl.runtime.worker import Worker

R = TypeVar("R", bound=msgspec.Struct)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


class ServiceError(RuntimeError):
    """The service refused a call (4xx): asking again would not help. Carries its reason."""


class ServiceClient:
    """Posts messages to the service whose URL is published under `key`."""

    def __init__(self, worker: Worker, key: str, service: str) -> None:
        self._worker = worker
        self._key = key
        self._service = service
        self._url = ""
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64))
        self._url = await self._worker.wait_for_key(self._key, f"the address of the {self._service}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(
        self, path: str, message: msgspec.Struct, reply: type[R], *, limit_s: float, wait_s: float = 0.0
    ) -> R:
        """Post a message and decode the answer. `wait_s` is how long the service may hold the answer back by agreement.

        Raises ServiceError if the service refuses the call, WaitTimeoutError if no answer came within limit_s.
        """
        return await self._worker.board.bounded(
            self._post(path, msgspec.json.encode(message), reply, wait_s),
            what=f"{path}",
            on=self._service,
            limit_s=limit_s + wait_s,
        )

    async def _post(self, path: str, body: bytes, reply: type[R], wait_s: float) -> R:
        assert self._session is not None, "start() first"
        backoff_s = _FIRST_BACKOFF_S
        timeout = aiohttp.ClientTimeout(total=wait_s + 30.0)
        while True:  # bounded by the caller
            try:
                async with self._session.post(self._url + path, data=body, timeout=timeout) as response:
                    content = await response.read()
                    if response.status == 200:
                        return msgspec.json.decode(content, type=reply)
                    reason = content.decode(errors="replace")[:500]
                    if 400 <= response.status < 500:
                        raise ServiceError(f"{self._service} refused {path}: {response.status} {reason}")
                    self._worker.logger.warning(
                        "%s answered %s to %s: %s", self._service, response.status, path, reason
                    )
            except (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError) as error:
                self._worker.logger.warning("%s did not answer %s: %r; asking again", self._service, path, error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            await self._find()

    async def _find(self) -> None:
        """The service may have come back somewhere else."""
        started = time.monotonic()
        try:
            self._url = await asyncio.to_thread(self._worker.resolver.get, self._key)
        except NameResolveError as error:
            waited_s = time.monotonic() - started
            self._worker.logger.debug("no address of %s (%r after %.1f s)", self._service, error, waited_s)
