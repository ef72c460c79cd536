"""A launch ends with the cause of the first failure, even if a signal or the end of the run comes before the launch decides."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from test_supervisor import World

from asyncrl.launch.local import Launch, Plans, StopRequest
from asyncrl.launch.program import run_directory
from asyncrl.launch.rundir import LaunchError, RunRecord, read_record
from asyncrl.launch.supervisor.policy import EVERYTHING, TRAINER_GROUP
from asyncrl.launch.supervisor.state_machine import BeginAttempt


class Pool:
    """Holds the children of a world. Runs the event planned for each turn."""

    def __init__(self, world: World) -> None:
        self.world, self.turns = world, 0
        self.happens: dict[int, object] = {}

    @property
    def children(self) -> list[object]:
        return list(self.world.children)

    alive: tuple[object, ...] = ()

    def turn(self, wait_s: float) -> list[object]:
        self.turns += 1
        self.world.clock.now += 0.1
        if (event := self.happens.get(self.turns)) is not None:
            event()  # type: ignore[operator]
        return []


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def launch(world: World, pool: Pool, stop: StopRequest) -> Launch:
    external = MagicMock(master_is_done=False, names=[])
    external.visible_statuses.return_value = []
    record, lock = MagicMock(attempt=1), MagicMock()
    lock.lost.return_value = ""
    lock.is_challenged.return_value = False
    plans = Plans(world.config, 100, ())
    parts = (plans, world.specs, pool, external, MagicMock(), record, lock, stop, MagicMock(), world.clock)
    return Launch(*parts, changed_inputs=list)  # type: ignore[arg-type]


@pytest.mark.parametrize("meanwhile", ["signal", "master done"])
def test_the_first_cause_decides_how_the_launch_ends(world: World, meanwhile: str) -> None:
    pool, stop = Pool(world), StopRequest(MagicMock(), world.clock)
    made = launch(world, pool, stop)

    def master_is_done() -> None:
        status = world["master/0"].status
        assert status is not None
        world["master/0"].status = msgspec.structs.replace(status, state="done")

    pool.happens = {
        2: lambda: world.fail("model_worker/0", "asyncrl.config.schema.ConfigError: no such model", fatal=True),
        4: master_is_done if meanwhile == "master done" else lambda: stop.on_signal(signal.SIGTERM, None),
    }
    with pytest.raises(LaunchError, match="no such model"):
        made.watch_over()
    assert (pool.turns < 8) == (meanwhile == "signal")  # after a signal the launch does not wait for further errors


def test_the_record_of_a_later_attempt_says_when_it_began(world: World, tmp_path: Path) -> None:
    world.config = replace(world.config, fileroot=str(tmp_path))
    made = launch(world, Pool(world), StopRequest(MagicMock(), world.clock))
    run_dir = run_directory(world.config)
    run_dir.mkdir(parents=True)
    made._record = RunRecord(pid=4, attempt=1, experiment="e", trial="t", endpoints=[], started=3.0)
    world.clock.now = 50.0
    made._begin_attempt(BeginAttempt(TRAINER_GROUP, "master/0 failed"))
    record = read_record(run_dir)
    assert record is not None
    assert (record.attempt, record.started, record.attempt_began) == (2, 3.0, world.clock.time())


@pytest.mark.parametrize(("unit", "named"), [(TRAINER_GROUP, TRAINER_GROUP), (EVERYTHING, "the run")])
def test_the_notice_of_a_new_attempt_names_the_unit_that_restarts(
    world: World, tmp_path: Path, unit: str, named: str
) -> None:
    world.config = replace(world.config, fileroot=str(tmp_path))
    run_directory(world.config).mkdir(parents=True)
    made = launch(world, Pool(world), StopRequest(MagicMock(), world.clock))
    made._record = RunRecord(pid=4, attempt=1, experiment="e", trial="t", endpoints=[], started=3.0)
    made._view = MagicMock()
    made._begin_attempt(BeginAttempt(unit, "master/0 failed"))
    told = f"{named} starts anew, because there is no checkpoint yet, as attempt 2"
    made._view.notice.assert_called_once_with(told)
