"""Tickets whose seal proves that they were granted: the seal, the run's key, and the master's check."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncrl.master.buffer import Grants
from asyncrl.protocol.tickets import TicketId, TicketSeal
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.runtime.ticket_key import KEY_FILE, make_key, read_key

KEY = b"k" * 32
TICKET = TicketId(1, Locator(0, 3), 1, 4, 0, "ab12_7")
LOGGER = logging.getLogger("test")


def meta_of(ticket_id: str) -> TrajectoryMeta:
    return TrajectoryMeta(
        ticket_id=ticket_id,
        locator=Locator(0, 3),
        attempt=1,
        head=0,
        keys=[],
        seqlens=[5],
        response_lengths=[3],
        rewards=[1.0],
        version_start=[0],
        version_end=[0],
        birth_time=0.0,
    )


def test_only_a_ticket_with_a_valid_seal_is_read() -> None:
    seal = TicketSeal(KEY)
    text = seal.seal(TICKET)
    name = seal.read(text)
    assert name is not None
    assert (str(name), name.attempt, name.locator, name.head) == (text, 1, Locator(0, 3), 0)
    assert TicketSeal(KEY).read(text) == name  # an earlier manager with this key made the seal
    for other in (
        "",
        "_",
        str(TICKET),
        text[:-1],
        text + "0",
        text.replace("p3", "p4"),
        text.replace("a1-", "a999-"),
        "ü",
    ):
        assert seal.read(other) is None, other
    assert TicketSeal(b"another" * 5).read(text) is None


def test_a_run_has_one_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    assert read_key(tmp_path) is None
    key = make_key(tmp_path)
    assert len(key) == 32
    assert make_key(tmp_path) == read_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_trajectories_without_a_grant_are_refused_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grants = Grants(lambda: KEY, LOGGER)
    granted = meta_of(TicketSeal(KEY).seal(TICKET))
    assert grants.refusal(granted, 0.0) == ""
    forged = meta_of(str(TICKET))
    others = [replace(granted, locator=Locator(0, 4)), replace(granted, head=1), replace(granted, attempt=2)]
    for now, meta in enumerate([forged, forged, *others]):
        assert grants.refusal(meta, float(now)).startswith("not_granted: ")
    assert grants.num_refused == len(caplog.records) + 4 == 5
    assert grants.refusal(forged, 60.0)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "refused a trajectory, 1 so far",
        "refused a trajectory, 6 so far",
    ]
    assert grants.refusal(granted, 61.0) == ""


def test_every_ticket_is_refused_until_a_manager_has_made_the_key(tmp_path: Path) -> None:
    grants = Grants(lambda: read_key(tmp_path), LOGGER)
    assert grants.refusal(meta_of(TicketSeal(b"").seal(TICKET)), 0.0)
    assert grants.refusal(meta_of(TicketSeal(make_key(tmp_path)).seal(TICKET)), 0.0) == ""
