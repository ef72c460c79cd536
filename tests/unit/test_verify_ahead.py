"""The servers verify a version at the same time as the manager. No server loads it before the manager's check has passed."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.manager.files import FilesInManager
from asyncrl.manager.fleet import Fleet
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.update_plan import UpdatePlan
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.form import WeightsError
from tests.support.services import make_services

V1 = WeightVersion(1, 1)
LIMIT_S = 20.0


class Desk:
    """A fleet with two servers. Its check of files waits until the test sets the verdict."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.checking, self.verdict = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.asked: asyncio.Queue[str] = asyncio.Queue()
        self.table = ServerTable("round_robin", dead_after_s=10.0)
        self.plan = UpdatePlan(self.table)
        self.refused = asyncio.Event()
        logger = logging.getLogger(f"asyncrl.test.{id(self)}")
        logger.addFilter(self._note)
        no_session: Any = None
        self.fleet = Fleet(
            self.table,
            self.plan,
            make_services(logger=logger),
            session=no_session,
            path_of=lambda version: Path(str(version)),
            verify=self._verify,
            probe_every_s=1.0,
            probe_limit_s=1.0,
            verify_limit_s=LIMIT_S,
            **options,
        )

        async def fetch(side: FilesInManager, url: str, version: WeightVersion, limit_s: float) -> None:
            self.asked.put_nowait(url)

        monkeypatch.setattr(FilesInManager, "fetch", fetch)
        for name in ("a", "b"):
            self.fleet.announce(name, name)

    def _note(self, record: logging.LogRecord) -> bool:
        if "are not served" in record.getMessage():
            self.refused.set()
        return True

    def _verify(self, path: Path, version: WeightVersion) -> Any:
        self.checking.set()
        assert self.verdict.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(num_bytes=1)

    async def published(self) -> None:
        """The fleet has told its plan of the version."""
        while self.plan.target is None:
            self.fleet.news.clear()
            await self.fleet.news.wait()

    @contextlib.asynccontextmanager
    async def verifying(self) -> AsyncIterator["asyncio.Task[None]"]:
        """The manager's check has begun, and has not ended."""
        self.fleet.publish(str(V1))
        loop = asyncio.create_task(self.fleet.verify_loop())
        try:
            assert await asyncio.to_thread(self.checking.wait, LIMIT_S)
            yield loop
        finally:
            self.verdict.set()
            loop.cancel()
            await asyncio.wait({loop})
            await self.fleet.close()


async def test_servers_verify_while_the_manager_does_and_load_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    async with asyncio.timeout(LIMIT_S), desk.verifying():
        assert {await desk.asked.get(), await desk.asked.get()} == {"a", "b"}
        assert desk.plan.due(0.0) == []
        desk.verdict.set()
        await desk.published()
        assert [update.version for update in desk.plan.due(0.0)] == [V1, V1]


async def test_no_server_loads_what_only_the_servers_have_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    desk.error = WeightsError("torn", ErrorClass.PASSING)
    async with asyncio.timeout(LIMIT_S), desk.verifying():
        assert {await desk.asked.get(), await desk.asked.get()} == {"a", "b"}
        desk.verdict.set()
        await desk.refused.wait()
        assert desk.plan.target is None
        assert desk.plan.due(0.0) == []


@pytest.mark.parametrize(
    "options", [{"transport": "broadcast"}, {"shares_devices": True}, {"files_url": "http://files"}], ids=str
)
async def test_servers_that_load_no_files_of_this_folder_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    desk = Desk(monkeypatch, **options)
    async with asyncio.timeout(LIMIT_S), desk.verifying():
        assert desk.asked.empty()
