"""weights.transport=broadcast in the manager: which servers load a version from memory or from disk, and how waves wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from test_update_plan import Setup, v

from asyncrl.config.schema import ConfigError, ExperimentConfig, WeightsConfig
from asyncrl.launch.experiment import validate
from asyncrl.manager.broadcast import Wave
from asyncrl.manager.update_plan import Update
from asyncrl.protocol.weight_updates import BroadcastReply

LIMIT_S = 60.0


# ----------------------------------------------------------------------------------------------------------------- plan


def test_serving_servers_load_from_memory_before_the_version_is_on_disk() -> None:
    setup = Setup(2)
    assert setup.plan.hold(v(1))
    first, second = setup.plan.due(1.0)
    assert (first.from_memory, second.from_memory, first.version) == (True, True, v(1))
    assert setup.plan.due(1.0) == []
    for update in (first, second):
        assert setup.plan.succeeded(update, 2.0)
    assert setup.versions() == [1, 1]
    assert setup.plan.publish(v(1))  # the files arrive, but no server needs them
    assert setup.plan.due(3.0) == []


def test_the_first_version_is_loaded_only_from_disk() -> None:
    setup = Setup(2, serving=None)
    setup.plan.hold(v(0))
    assert setup.plan.due(0.0) == []
    setup.plan.publish(v(0))
    assert [update.from_memory for update in setup.plan.due(0.0)] == [False, False]


def test_a_new_server_loads_from_disk_and_then_the_newest_from_memory() -> None:
    setup = Setup(1)
    setup.plan.hold(v(1))
    (update,) = setup.plan.due(0.0)
    setup.plan.succeeded(update, 0.0)
    setup.table.announce("generation_server/9", "http://new", 1.0)
    (late,) = setup.plan.due(1.0)
    assert (late.server, late.version, late.from_memory) == ("generation_server/9", v(0), False)
    setup.plan.succeeded(late, 2.0)
    (again,) = setup.plan.due(2.0)
    assert (again.server, again.version, again.from_memory) == ("generation_server/9", v(1), True)


def test_a_server_whose_broadcast_failed_is_stale_until_that_version_is_on_disk() -> None:
    setup = Setup(2)
    setup.plan.hold(v(1))
    bad, good = setup.plan.due(0.0)
    setup.plan.succeeded(good, 0.0)
    assert setup.plan.failed(bad, "refused", 0.0) == 0.0
    assert setup.states() == "sh"
    assert setup.plan.due(0.0) == []  # v0 is on disk, but the server may hold parts of v1
    setup.plan.publish(v(1))
    (update,) = setup.plan.due(0.0)
    assert (update.server, update.version, update.from_memory) == (bad.server, v(1), False)
    setup.plan.succeeded(update, 1.0)
    assert setup.versions() == [1, 1]


def test_broadcasts_that_keep_failing_are_tried_less_often() -> None:
    setup = Setup(1)
    tried = []
    for number in range(1, 40):
        setup.plan.hold(v(number))
        for update in setup.plan.due(0.0):
            if update.from_memory:
                tried.append(number)
                setup.plan.failed(update, "hangs", 0.0)
            else:
                setup.plan.succeeded(update, 0.0)
        setup.plan.publish(v(number))
        for update in setup.plan.due(0.0):
            assert not update.from_memory
            setup.plan.succeeded(update, 0.0)
        assert setup.versions() == [number]
    assert tried == [1, 2, 5, 12, 27]  # from each failed version on, 1, 3, 7, 15 ... versions come from disk


def test_one_successful_broadcast_ends_the_back_off() -> None:
    setup = Setup(1)
    for number, outcome in ((1, "fails"), (2, "succeeds"), (3, "fails"), (4, "succeeds")):
        setup.plan.hold(v(number))
        (update,) = setup.plan.due(0.0)
        assert update.from_memory, number
        if outcome == "succeeds":
            setup.plan.succeeded(update, 0.0)
        else:
            setup.plan.failed(update, "hangs", 0.0)
        setup.plan.publish(v(number))
        for update in setup.plan.due(0.0):
            setup.plan.succeeded(update, 0.0)


def test_broadcasts_follow_waves_and_never_load_an_older_version() -> None:
    setup = Setup(4, update_fraction=0.5)
    assert setup.plan.hold(v(2))
    assert not setup.plan.hold(v(1))
    assert not setup.plan.hold(v(9, attempt=0))
    first, second = setup.plan.due(0.0)
    setup.plan.hold(v(3))
    for update in (first, second):
        setup.plan.succeeded(update, 0.0)
    assert setup.versions() == [2, 2, 0, 0]
    assert {(update.version, update.from_memory) for update in setup.plan.due(0.0)} == {(v(3), True)}


def test_a_new_attempt_makes_all_servers_stale_and_begins_from_disk() -> None:
    setup = Setup(2, serving=5)
    assert setup.plan.hold(v(3, attempt=2))
    assert setup.states() == "ss"
    assert setup.plan.due(0.0) == []  # the servers cannot load the version on disk: it belongs to an earlier attempt
    setup.plan.publish(v(3, attempt=2))
    updates = setup.plan.due(0.0)
    assert [(update.version, update.from_memory) for update in updates] == [(v(3, attempt=2), False)] * 2


# ----------------------------------------------------------------------------------------------------------------- wave


def update_of(server: str) -> Update:
    return Update(server, f"http://{server}", 0, v(1), 60.0, from_memory=True)


class Trainer:
    """Records which servers a broadcast is sent to. Replies once `answer` is set."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.came = asyncio.Event()
        self.answer: asyncio.Future[BroadcastReply] = asyncio.get_running_loop().create_future()

    async def send(self, updates: Sequence[Update]) -> BroadcastReply:
        self.asked.append([update.server for update in updates])
        self.came.set()
        return await asyncio.shield(self.answer)


async def test_one_broadcast_is_sent_once_all_members_are_paused() -> None:
    a, b = update_of("a"), update_of("b")
    trainer = Trainer()
    wave = Wave([a, b], trainer.send, wait_s=LIMIT_S)
    first = asyncio.create_task(wave.ready(a))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert trainer.asked == []
    second = asyncio.create_task(wave.ready(b))
    await asyncio.wait_for(trainer.came.wait(), LIMIT_S)
    assert trainer.asked == [["a", "b"]]
    reply = BroadcastReply(errors={"b": "hangs"})
    trainer.answer.set_result(reply)
    assert await asyncio.gather(first, second) == [reply, reply]


async def test_a_wave_does_not_wait_for_a_server_that_could_not_be_paused() -> None:
    a, b = update_of("a"), update_of("b")
    trainer = Trainer()
    trainer.answer.set_result(BroadcastReply())
    wave = Wave([a, b], trainer.send, wait_s=LIMIT_S)
    first = asyncio.create_task(wave.ready(a))
    await asyncio.sleep(0)
    wave.leave(b)
    await asyncio.wait_for(first, LIMIT_S / 2)
    assert trainer.asked == [["a"]]


async def test_a_slow_server_is_left_behind_and_gets_its_own_broadcast() -> None:
    a, b = update_of("a"), update_of("b")
    trainer = Trainer()
    trainer.answer.set_result(BroadcastReply())
    wave = Wave([a, b], trainer.send, wait_s=0.01)
    await asyncio.wait_for(wave.ready(a), LIMIT_S)
    await asyncio.wait_for(wave.ready(b), LIMIT_S)
    assert trainer.asked == [["a"], ["b"]]


async def test_cancelling_one_member_does_not_affect_the_others() -> None:
    a, b = update_of("a"), update_of("b")
    trainer = Trainer()
    wave = Wave([a, b], trainer.send, wait_s=LIMIT_S)
    first, second = asyncio.create_task(wave.ready(a)), asyncio.create_task(wave.ready(b))
    await asyncio.wait_for(trainer.came.wait(), LIMIT_S)
    first.cancel()
    trainer.answer.set_result(BroadcastReply())
    assert await asyncio.wait_for(second, LIMIT_S) == BroadcastReply()


# --------------------------------------------------------------------------------------------------------------- config


def config_with(**options: object) -> ExperimentConfig:
    mode = str(options.pop("mode", "async"))
    return ExperimentConfig(weights=WeightsConfig(transport="broadcast", **options), mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "rollout_only"}, "weights.transport='broadcast': .*mode=rollout_only.*use disk"),
        ({"broadcast_timeout_s": 60.0}, "weights.broadcast_timeout_s=60.0: must be below manager.update_timeout_s=60"),
        ({"broadcast_timeout_s": 0.0}, "weights.broadcast_timeout_s=0.0: must be above 0"),
        ({"bucket_bytes": 0}, "weights.bucket_bytes=0: must be at least 1"),
        ({"broadcast_backend": "glo"}, "weights.broadcast_backend='glo': did you mean 'gloo'"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        validate(config_with(**options))


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights.transport='broadcst': did you mean 'broadcast'"):
        validate(ExperimentConfig(weights=WeightsConfig(transport="broadcst")))
