"""The transport of files, in the manager: a server verifies a version, which it first fetches unless it sees the files, then loads.

POST /fetch_weights (while the server generates), POST /update_weights_from_disk (paused)
"""

from __future__ import annotations

import msgspec

from asyncrl.manager.manager_side import ManagerSide, MismatchError, RefusedError
from asyncrl.manager.update_plan import Update
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import FetchWeightsRequest, UpdateWeightsReply, UpdateWeightsRequest


class FilesInManager(ManagerSide):
    """Every run has it: servers that do not get a version from memory load its files."""

    async def prepare(self, update: Update) -> None:
        await self.fetch(update.url, update.version, update.limit_s)

    async def fetch(self, url: str, version: WeightVersion, limit_s: float) -> None:
        """Have the server verify the version, which it first fetches unless it sees the files. Raises any of FAILURES."""
        request = FetchWeightsRequest(
            model_path=str(self._means.path_of(version)),
            weight_version=str(version),
            source=self._means.files_url,
            limit_s=limit_s,
        )
        reply = await self._ask(f"{url}/fetch_weights", request)
        if not reply.success:
            raise RefusedError(f"not fetched: {reply.message}", reply.error_class)

    async def load(self, update: Update) -> None:
        path = str(self._means.path_of(update.version))
        request = UpdateWeightsRequest(model_path=path, weight_version=str(update.version))
        reply = await self._ask(f"{update.url}/update_weights_from_disk", request)
        if not reply.success:
            if reply.mismatch:
                raise MismatchError(f"refused: {reply.message}")
            raise RefusedError(f"refused: {reply.message}", reply.error_class)

    async def _ask(self, url: str, request: msgspec.Struct) -> UpdateWeightsReply:
        answer = await self._means.calls.post(url, msgspec.json.encode(request), also_ok=400)
        return msgspec.json.decode(answer, type=UpdateWeightsReply)
