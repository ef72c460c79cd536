"""The gserver manager's side of a transport of weights: has a paused server load a version.

    Fleet -- begin, prepare, load, end --> ManagerSide -- HTTP --> the server, or the trainer

`config/transports.py` describes the life of a version. `transports.py` has the table of kinds.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from asyncrl.manager.offers import Offers
from asyncrl.manager.update_plan import Update
from asyncrl.protocol.errors import ErrorClass, class_of_status
from asyncrl.protocol.versions import WeightVersion

M = TypeVar("M", bound=msgspec.Struct)

FAILURES = (
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    ValueError,
)  # errors of an HTTP call to a server; msgspec's errors are ValueErrors


class UpdateError(ValueError):
    """A server did not carry out a request."""

    def __init__(self, text: str, error_class: ErrorClass = ErrorClass.UNKNOWN) -> None:
        super().__init__(text)
        self.error_class = error_class


class OfferError(UpdateError):
    """A server did not get a version from memory. The transport has logged the cause."""


class RefusedError(UpdateError):
    """A server refuses a version. Its files may have been damaged after verification."""


class MismatchError(UpdateError):
    """A server has loaded a version, but its logprobs differ from the trainer's (weights.verify_logprobs)."""


class ServerCalls:
    """Sends HTTP calls to servers and to the trainer. The caller sets a time limit."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def get(self, url: str, kind: type[M]) -> M:
        return msgspec.json.decode(await self.request("GET", url), type=kind)

    async def post(self, url: str, body: bytes, *, also_ok: int = 200) -> bytes:
        return await self.request("POST", url, body, also_ok)

    async def request(self, method: str, url: str, body: bytes | None = None, also_ok: int = 200) -> bytes:
        """Return the answer's body. Raises UpdateError for a status other than 200 and also_ok."""
        headers = {"Content-Type": "application/json"}
        async with self._session.request(method, url, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status not in (200, also_ok):
                message = answer[:500].decode(errors="replace")
                raise UpdateError(f"{url} answered {response.status}: {message}", class_of_status(response.status))
            return answer


@dataclass(frozen=True)
class Means:
    """The fleet's means that a transport uses."""

    calls: ServerCalls
    path_of: Callable[[WeightVersion], Path]  # the folder of a version
    files_url: str  # from which servers that do not see the run's folder fetch versions; "": all servers see the folder
    limit_s: float  # of one transfer from memory, without the time for its bytes
    counters: Counter[tuple[str, str]]  # (event, server) -> count
    logger: logging.Logger


class ManagerSide(ABC):
    """Order of calls for an update: `begin` with all updates that begin together, `prepare`, `load`, `end`. After a failure `end`
    follows at once. Errors are FAILURES; the server then stays out of service until a load succeeds.
    """

    offers = Offers  # decides which servers may get a version from memory

    def __init__(self, means: Means) -> None:
        self._means = means
        self._trainer_url = ""

    def trainer_at(self, url: str) -> None:
        """Set the URL at which the trainer's side accepts requests."""
        self._trainer_url = url

    def begin(self, updates: Sequence[Update]) -> None:  # noqa: B027
        """These updates begin now."""

    async def prepare(self, update: Update) -> None:  # noqa: B027
        """Do what can be done while the server still generates."""

    @abstractmethod
    async def load(self, update: Update) -> None:
        """Have the server, which is paused, load the version; the fleet then checks its echo. The caller bounds the wait. Raises
        OfferError if the transport has logged the cause, RefusedError, MismatchError or another of FAILURES."""

    def end(self, update: Update) -> None:  # noqa: B027
        """The update is over, or will never come to `load`."""
