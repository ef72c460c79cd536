"""The table of the manager's sides of transports. What other code needs to know of a transport: config/transports.py."""

from __future__ import annotations

from asyncrl.config.transports import FILES
from asyncrl.manager.broadcast import BroadcastInManager
from asyncrl.manager.files import FilesInManager
from asyncrl.manager.manager_side import ManagerSide

KINDS: dict[str, type[ManagerSide]] = {
    FILES: FilesInManager,
    "broadcast": BroadcastInManager,
}
