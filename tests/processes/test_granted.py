"""A push for a ticket that no manager has granted: a real manager, the master's stream, and a head with a false report."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from test_manager_http import LIMIT_S, Setup, ids, serving_one

from asyncrl.master.worker import MasterWorker
from asyncrl.protocol.tickets import TicketId, TicketSeal
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.runtime.ticket_key import make_key
from asyncrl.streams.push_pull import MetaPusher
from tests.support.master import master_config
from tests.support.memory_names import memory_system


def make_master(setup: Setup, folder: Path) -> MasterWorker:
    """A master whose model workers never start, so it does not train. It takes in metadata while it waits for them."""
    folder.mkdir()
    runtime = replace(setup.info.runtime, start_timeout_s=10 * LIMIT_S)
    config = master_config(folder, worker=replace(setup.info, kind="master", runtime=runtime))
    return MasterWorker(config, memory_system())


async def test_only_granted_tickets_are_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving_one(tmp_path / "run") as setup:
        (granted,) = ids(await setup.allocate())
        name = TicketId.parse(granted)
        assert name is not None
        meta = TrajectoryMeta(
            ticket_id=granted, locator=name.locator, attempt=1, head=name.head, keys=[], seqlens=[5],
            response_lengths=[3], rewards=[1.0], version_start=[1], version_end=[1], birth_time=0.0,
        )  # fmt: skip
        forged = str(structs.replace(name, locator=structs.replace(name.locator, position=1), nonce="ab12_1"))
        elsewhere = TicketSeal(make_key(tmp_path / "another run")).seal(structs.replace(name, nonce="ab12_1"))
        master = make_master(setup, tmp_path / "prompts")
        head = MetaPusher(setup.resolver, setup.names, head=0, runtime=setup.info.runtime, incarnation="h")
        main = asyncio.create_task(master.main())
        await head.start()
        try:
            for ticket in (forged, elsewhere, "a1-e0-p1-i1-v0-h0-x"):
                at = TicketId.parse(ticket)
                assert at is not None
                lie = structs.replace(meta, ticket_id=ticket, locator=at.locator, head=at.head)
                verdict = await head.push_meta(lie, timeout_s=LIMIT_S)
                assert (verdict.verdict, verdict.reason.split(":")[0]) == ("refused", "not_granted")
            assert master.board.snapshot().queues["not_granted"] == 3
            assert sum("has not granted its ticket" in record.getMessage() for record in caplog.records) == 1
            assert (await head.push_meta(meta, timeout_s=LIMIT_S)).verdict == "stored"
            await setup.stop_manager()  # the next manager has the same ticket key
            await setup.start_manager()
            await setup.report(full=True, stored=[granted])
            assert [live.ticket_id for live in (await setup.report()).live] == [granted]
        finally:
            await head.close()
            master.stopping.set()
            await asyncio.wait_for(main, LIMIT_S)


async def test_tickets_of_a_worker_that_lies_begin_no_attempt(tmp_path: Path) -> None:
    async with serving_one(tmp_path) as setup:
        (held,) = ids(await setup.allocate())
        assert (await setup.heartbeat(held, "a999-e0-p5-i1-v0-h0-x_1")).revoked == ["a999-e0-p5-i1-v0-h0-x_1"]
        assert setup.manager.seen.ledger.attempt == 1
        assert [live.ticket_id for live in (await setup.report()).live] == [held]
