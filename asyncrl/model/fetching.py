"""Transfers data between model workers of different worker groups (worker_groups.py). A collective cannot cross the border of a
group, so the transfers use HTTP.

    master -- FetchData(parts) --> DataFetcher of a worker: requests, checks, stores copies
    DataFetcher -- POST /held_data: ids, keys --> HeldData, at each worker of a run with several groups
    HeldData -- as many of these ids, from the first on, as fit into one answer --> DataFetcher

Data moves only on the master's request. The master names the incarnation of the source's worker group: a restarted worker is asked
under its new URL, and a worker that is gone does not answer. A failed fetch ends no process, and copies that have arrived stay in
the store. The reply tells the master, which repeats the fetch.

An answer is a list of the header and the frames of data/sequence.py. Dtypes are kept, nothing is unpickled, and the fetcher checks
that the answer matches its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated

import aiohttp
import msgspec
from aiohttp import web

from asyncrl.data.sequence import MAX_HEADER_BYTES, SequenceSample, decode_sample, encode_sample
from asyncrl.model.store import DataStore
from asyncrl.protocol.calls import FetchPart, HeldDataRequest
from asyncrl.protocol.errors import DECODE_ERRORS, CodecError, ErrorClass, class_of_status
from asyncrl.runtime.board import StatusBoard, WaitTimeoutError
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.http_server import listen_routes

PATH = "/held_data"
LIMIT_S = 10.0  # for an answer; after that the fetch fails and the master, which knows the source's state, decides when to retry
_ANSWER_BYTES = 64_000_000  # of one answer: quick to send; a large batch takes several answers, each with its own limit
_RETRY_S = 0.1
_TRIES = 4  # attempts in a row; few: a lost connection may come back soon, but a refused one stays refused
_MAX_IDS = 1024  # per request
_MAX_KEYS = 256
_MAX_REQUEST_BYTES = 1_000_000
_READ_BYTES = 1 << 18
_TYPE = "application/octet-stream"

_encode = msgspec.msgpack.Encoder().encode
# The header and a frame for each key. The limit holds before any part is made
_decode_answer = msgspec.msgpack.Decoder(Annotated[list[memoryview], msgspec.Meta(max_length=_MAX_KEYS + 1)]).decode
_decode_request = msgspec.msgpack.Decoder(HeldDataRequest).decode


class FetchError(RuntimeError):
    """Data could not be fetched; the message names the source and the cause. A retry may succeed."""


# ---------------------------------------------------------------------------------------------------------------- on the wire


def read_request(body: bytes) -> HeldDataRequest:
    """Decode a request. Raises one of DECODE_ERRORS, or ValueError for a request without ids or keys, or with too many."""
    wanted = _decode_request(body)
    if not 1 <= len(wanted.ids) <= _MAX_IDS or not 1 <= len(wanted.keys) <= _MAX_KEYS:
        message = f"{len(wanted.ids)} ids and {len(wanted.keys)} keys"
        raise ValueError(f"{message} requested; 1 to {_MAX_IDS} ids and 1 to {_MAX_KEYS} keys are allowed")
    return wanted


def pack_sample(sample: SequenceSample) -> bytes:
    """Encode a sample as the body of an answer."""
    header, frames = encode_sample(sample)
    return _encode([header, *(memoryview(frame).cast("B") for frame in frames)])


def unpack_sample(body: bytes, *, max_bytes: int) -> SequenceSample:
    """Inverse of pack_sample, into newly allocated memory. Raises CodecError if the body is inconsistent."""
    try:
        header, *frames = _decode_answer(body)
    except (*DECODE_ERRORS, ValueError) as error:
        raise CodecError(f"an answer of {len(body)} bytes cannot be read: {error}") from error
    return decode_sample(header, frames, max_bytes=max_bytes)


# --------------------------------------------------------------------------------------------------------------- server


class HeldData:
    """Serves the content of a data store, read-only: POST /held_data.

    waits for: requests.  unblocked by: requests; the end of `serving`.
    """

    def __init__(self, store: DataStore, *, host: str, max_bytes: int) -> None:
        """max_bytes: of an answer. An answer with a single group may exceed this limit: the group arrived here in one message."""
        self._store, self._host, self._max_bytes = store, host, min(max_bytes, _ANSWER_BYTES)

    def serving(self, *others: web.RouteDef) -> AbstractAsyncContextManager[str]:
        """Bind a free port and yield the URL to publish. others: routes that the same server answers."""
        routes = web.post(PATH, self._answer), *others
        return listen_routes(*routes, host=self._host, max_body_bytes=_MAX_REQUEST_BYTES)

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            wanted = read_request(await request.read())
        except (*DECODE_ERRORS, ValueError) as error:
            return web.Response(status=400, text=f"{error}\n")
        try:
            body = await asyncio.to_thread(self._pack, wanted)
        except ValueError as error:  # a group or key is missing
            return web.Response(status=404, text=f"{error}\n")
        return web.Response(body=body, content_type=_TYPE)

    def _pack(self, wanted: HeldDataRequest) -> bytes:
        """Return the body of an answer: the first requested group, and as many of the next ones as fit. Runs on a thread. Raises
        ValueError if a requested group or key is missing."""
        groups: list[SequenceSample] = []
        num_bytes = 0
        for group_id in wanted.ids:
            group = self._store.select([group_id], wanted.keys)
            assert group is not None, "one id"
            num_bytes += group.num_bytes
            if groups and num_bytes > self._max_bytes:
                break
            groups.append(group)
        return pack_sample(SequenceSample.gather(groups))


# --------------------------------------------------------------------------------------------------------------- client


class DataFetcher:
    """consumes: the parts named by a call.  produces: copies in the store.

    waits for: the sources' answers, LIMIT_S for each.  unblocked by: the answers, or that limit.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        store: DataStore,
        directory: Directory,
        board: StatusBoard,
        *,
        attempt: int,
        max_bytes: int,
    ) -> None:
        """max_bytes: of a message (runtime.max_message_bytes)."""
        self._session, self._store, self._directory, self._board = session, store, directory, board
        self._attempt, self._max_bytes = attempt, max_bytes
        self._urls: dict[tuple[int, int], str] = {}  # by (worker, incarnation of its group)

    async def fetch(self, parts: Sequence[FetchPart]) -> int:
        """Fetch and store all parts. Returns the number of bytes received. After a FetchError some groups may be stored already."""
        asking = [asyncio.create_task(self._fetch(part)) for part in parts]
        try:
            return sum(await asyncio.gather(*asking))
        finally:
            for task in asking:
                task.cancel()

    async def _fetch(self, part: FetchPart) -> int:
        """Fetch a whole part in bounded answers."""
        num_bytes, num_failures, left = 0, 0, list(part.ids)
        while left:  # each iteration receives at least one id, or fails
            answer, source = self._ask(part, left[:_MAX_IDS]), f"model_worker/{part.source}"
            try:
                body = await self._board.bounded(
                    answer, what="data of another worker group", on=source, limit_s=LIMIT_S
                )
                sample = await asyncio.to_thread(partial(unpack_sample, body, max_bytes=self._limit_of_body))
            except WaitTimeoutError as error:
                raise FetchError(str(error)) from error
            except (aiohttp.ClientError, TimeoutError, ConnectionError, CodecError) as error:
                num_failures += 1
                if num_failures == _TRIES:
                    raise FetchError(f"{source} delivers no data: {error!r}") from error
                await asyncio.sleep(_RETRY_S)
                continue
            num_failures, come = 0, list(sample.ids)
            if not come or come != left[: len(come)] or set(sample.keys) != set(part.keys):
                asked = f"{source} was asked for {part.keys} of {left[:4]}"
                raise FetchError(f"{asked}; it sent {list(sample.keys)} of {come[:4]}")
            self._store.add_copies(sample)
            num_bytes, left = num_bytes + len(body), left[len(come) :]
        return num_bytes

    @property
    def _limit_of_body(self) -> int:
        """Largest answer that is accepted, in bytes. It has room for one whole group: the group arrived at its head in one message,
        and keys added later have only a few numbers per token."""
        return 2 * self._max_bytes + MAX_HEADER_BYTES

    async def _ask(self, part: FetchPart, ids: Sequence[str]) -> bytes:
        url = await self.url_of(part.source, part.group_incarnation)
        request = _encode(HeldDataRequest(ids=list(ids), keys=part.keys))
        async with self._session.post(url + PATH, data=request) as response:
            if class_of_status(response.status) is not ErrorClass.PERMANENT:
                response.raise_for_status()  # the caller asks again
            if response.status != 200:
                message = (await response.content.read(500)).decode(errors="replace").strip()
                raise FetchError(f"model_worker/{part.source} answered {response.status}: {message}")
            body = bytearray()
            async for some in response.content.iter_chunked(_READ_BYTES):
                body += some
                if len(body) > self._limit_of_body:
                    raise FetchError(f"model_worker/{part.source} sent more than {self._limit_of_body} bytes")
            return bytes(body)

    async def url_of(self, source: int, group_incarnation: int) -> str:
        """Return a worker's URL, which is cached for each incarnation of the source's group. The source publishes its URL when it
        starts, and the URL stays the same within the incarnation."""
        if (source, group_incarnation) not in self._urls:
            key = self._directory.names.held_data(source, self._attempt, group_incarnation)
            url = await asyncio.to_thread(self._directory.resolver.wait, key, LIMIT_S)
            self._urls = {known: there for known, there in self._urls.items() if known[0] != source}
            self._urls[source, group_incarnation] = url
        return self._urls[source, group_incarnation]
