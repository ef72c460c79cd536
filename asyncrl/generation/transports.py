"""The table of the server's sides of transports. What other code needs to know of a transport: config/transports.py."""

from __future__ import annotations

from asyncrl.config.transports import FILES
from asyncrl.generation.files import FilesInServer
from asyncrl.generation.receive import BroadcastInServer
from asyncrl.generation.server_side import ServerSide

KINDS: dict[str, type[ServerSide]] = {
    FILES: FilesInServer,
    "broadcast": BroadcastInServer,
}
