"""The desired number of generation servers: HTTP of the gserver manager, and its record in name resolve."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Struct

from asyncrl.protocol.manager import ServerView


class ScaleRequest(Struct, frozen=True, kw_only=True):
    """POST /scale of the gserver manager: the desired number of generation servers. Repeating a request changes nothing."""

    generation: int


class ServersReply(Struct, frozen=True, kw_only=True):
    """The reply to GET /servers and POST /scale. A server with an index of `target` or more is leaving the run."""

    target: int  # desired number of generation servers
    servers: list[ServerView]  # without servers that have left the run
    missing: list[str]  # desired servers that the manager has not seen: they are starting, or could not start


class DesiredServers(Struct, frozen=True, kw_only=True):
    """The desired number of generation servers. `asyncrl-launch scale` and POST /scale write it to name resolve."""

    count: Annotated[int, msgspec.Meta(ge=1)]
    id: str  # id of this request; a server that drained under an older id does not count as drained
