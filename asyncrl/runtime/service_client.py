"""HTTP client of a service that is found through name resolve, such as the gserver manager.

A call is retried until its limit. This is safe because the services' calls are idempotent. A restarted service
publishes a new address under the same key. The client watches the key, so a call that waits for the old process is sent
to the new one at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Self, TypeVar

import aiohttp
import msgspec

from asyncrl.protocol.errors import ErrorClass, class_of_status, classify
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.names.interface import WatchEvent
from asyncrl.runtime.services import Services

R = TypeVar("R", bound=msgspec.Struct)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_ANSWER_S = 30.0  # for an answer that the service does not delay


class ServiceError(RuntimeError):
    """The service refused a call for a permanent reason, which the text carries. `status` is the HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class ServiceClient:
    """Posts messages to the service that publishes its URL under a key."""

    def __init__(self, session: aiohttp.ClientSession, url: str, service: str, services: Services) -> None:
        """Use `connect` instead. url: the service's current URL."""
        self._session, self._url, self._service = session, url, service
        self._board, self._logger = services.board, services.logger
        self.replaced = asyncio.Event()  # set when another process has replaced the service; its reader clears it
        self._moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when the address changes
        self._limits: set[asyncio.Timeout] = set()  # of the requests that wait for their answers

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, directory: Directory, services: Services, *, key: str, service: str) -> AsyncIterator[Self]:
        """Wait for the service to publish its address, and follow later changes. service: its name in messages."""
        async with open_session(max_connections=64) as session:
            url = await directory.wait_for_key(key, f"the address of the {service}")
            client = cls(session, url, service, services)
            services.tasks.spawn(client._follow(directory.watch(key)), f"follow the {service}")
            yield client

    async def post(
        self, path: str, message: msgspec.Struct, reply: type[R], *, limit_s: float, wait_s: float = 0.0
    ) -> R:
        """Post a message and decode the reply. wait_s: time for which the service may delay its reply (long polling).

        Raises ServiceError if the service refuses the call, WaitTimeoutError if no reply arrives within limit_s +
        wait_s, and aiohttp's error if the process is out of file descriptors.
        """
        return await self._board.bounded(
            self._post(path, msgspec.json.encode(message), reply, wait_s),
            what=f"{path}",
            on=self._service,
            limit_s=limit_s + wait_s,
        )

    async def _post(self, path: str, body: bytes, reply: type[R], wait_s: float) -> R:
        backoff_s = _FIRST_BACKOFF_S
        while True:  # the caller bounds it
            moved = self._moved
            try:
                async with asyncio.timeout(wait_s + _ANSWER_S) as limit:
                    self._limits.add(limit)
                    async with self._session.post(self._url + path, data=body) as response:
                        status, content = response.status, await response.read()
                if status == 200:
                    return msgspec.json.decode(content, type=reply)
                reason = content.decode(errors="replace")[:500]
                if class_of_status(status) is ErrorClass.PERMANENT:
                    raise ServiceError(f"{self._service} refused {path}: {status} {reason}", status)
                self._logger.warning("%s answered %s to %s: %s", self._service, status, path, reason)
            except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
                if classify(error) is ErrorClass.PERMANENT:  # of this process, such as a lack of file descriptors
                    raise
                why = "another process has replaced it" if moved.done() else repr(error)
                self._logger.warning("%s did not answer %s: %s; retrying", self._service, path, why)
            finally:
                self._limits.discard(limit)
            await asyncio.wait({moved}, timeout=backoff_s)
            backoff_s = _FIRST_BACKOFF_S if moved.done() else min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _follow(self, addresses: AsyncIterator[WatchEvent]) -> None:
        """consumes: addresses of the service. produces: the new URL. Ends requests that wait for the old one, because a frozen
        process or a lost machine does not close its connections.
        """
        async for event in addresses:
            if event.kind == "delete" or event.value == self._url:
                continue
            self._url = event.value
            moved, self._moved = self._moved, asyncio.get_running_loop().create_future()
            moved.set_result(None)
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(0.0)
            self.replaced.set()
