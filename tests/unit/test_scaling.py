"""Scaling of generation servers: their starts, drains and stops, exits that do not fail the run, and the processes' specs."""

from __future__ import annotations

import signal
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from asyncrl.cli.commands.scale import crowding
from asyncrl.config.processes import GserverManagerConfig
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.dataflow.topology import Allocation
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import ProcessSpec, can_scale, plan, server_spec
from asyncrl.launch.scaling import Scaling
from asyncrl.launch.supervisor.children import Child
from asyncrl.launch.supervisor.pool import NoRoomError
from asyncrl.manager.scaling import ServerTarget, servers_reply
from asyncrl.protocol.manager import ServerView
from asyncrl.protocol.names import Names
from asyncrl.protocol.scaling import DesiredServers
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.names.interface import Lease, NameResolveTimeout, WatchEvent
from tests.support.clock import ManualClock
from tests.support.memory_names import MemoryNameResolver

CONFIG = """
allocation: transformers.d1+d1
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
"""
SERVERS = [f"generation_server/{index}" for index in range(4)]


class FakeProcess:
    pid = 99

    def wait(self) -> int:
        return 0


class FakeChild(Child):
    """Records requests to stop or kill it instead of sending signals."""

    def __init__(self, spec: ProcessSpec, log: Path) -> None:
        super().__init__(spec, FakeProcess(), log, -1, None)  # type: ignore[arg-type]
        self.told: list[str] = []

    def ask_to_stop(self) -> None:
        self.told.append("stop")

    def kill(self) -> None:
        self.told.append("kill")


class World:
    """A launcher with its Scaling, a manual clock, and a name resolve that the test controls."""

    def __init__(self, folder: Path, allocated: int = 1) -> None:
        file = folder / "run.yaml"
        file.write_text(CONFIG)
        self.config = load_experiment(file)
        self.log = folder / "a.log"
        self.log.write_text("last words\n")
        self.clock = ManualClock()
        self.told: list[str] = []
        self.revoked: list[int] = []
        self.leases: list[Future[Lease]] = []
        self.answers = True  # whether name resolve grants leases
        self.is_full = False  # whether no host has room
        self.children = [self.child(self.spec(index)) for index in range(allocated)]
        for child in self.children:
            self.run(child)
        self.scaling = Scaling(
            allocated,
            spec_of=self.spec,
            start=self.start,
            grant_lease_soon=self.grant,
            revoke=lambda lease: self.revoked.append(lease.id),
            notice=self.told.append,
            drain_limit_s=30.0,
            stop_limit_s=10.0,
            clock=self.clock,
        )
        self.num_requests = 0

    def spec(self, index: int) -> ProcessSpec:
        return server_spec(index, self.config, attempt=1, num_prompts=100)

    def child(self, spec: ProcessSpec) -> FakeChild:
        return FakeChild(spec, self.log)

    def grant(self) -> Future[Lease]:
        lease: Future[Lease] = Future()
        self.leases.append(lease)
        if self.answers:
            lease.set_result(Lease(None, 7, 30.0))  # type: ignore[arg-type]
        return lease

    def start(self, spec: ProcessSpec, lease: Lease) -> None:
        if self.is_full:
            raise NoRoomError(f"{spec.name} fits nowhere")
        self.children.append(self.child(spec))

    @staticmethod
    def run(child: FakeChild) -> None:
        status = WorkerStatus(worker=child.name, pid=99, attempt=1, state="running", time=0.0, progress=1)
        child.status, child.was_running = status, True

    def scale(self, count: int) -> str:
        self.num_requests += 1
        desired = DesiredServers(count=count, id=f"request{self.num_requests}")
        self.scaling.observe_desired(WatchEvent("put", "k", msgspec.json.encode(desired).decode()))
        return desired.id

    def drained(self, index: int, request: str) -> None:
        self.scaling.observe_drained(WatchEvent("put", f"x/{index}", request))

    def turn(self, *elsewhere: str, after_s: float = 0.1) -> list[str]:
        """Run one turn. Returns the changes by index: +1 means server 1 has joined, -1 that it is gone."""
        self.clock.now += after_s
        before = list(self.children)
        gone = self.scaling.turn(before, elsewhere)
        joined = [child for child in self.children if child not in before]
        self.children = [child for child in self.children if child not in gone]
        return [f"+{child.name[-1]}" for child in joined] + [f"-{child.name[-1]}" for child in gone]

    def __getitem__(self, index: int) -> FakeChild:
        return next(child for child in self.children if child.name == SERVERS[index])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_servers_join_and_those_with_the_highest_indexes_leave_once_drained(world: World) -> None:
    assert world.turn() == []
    world.scale(3)
    assert world.turn() == ["+1", "+2"]
    assert world.told == ["generation servers: 1 -> 3"]
    assert world[2].spec.config.worker.index == 2
    world.run(world[1])
    world.run(world[2])
    assert world.turn() == []
    request = world.scale(1)
    assert world.turn() == []
    assert world[1].told == world[2].told == []
    waits = world.scaling.shown(world[1], world[1].status).waits  # type: ignore[arg-type]
    assert waits[-1].what == "its last groups (it leaves the run)"
    assert world.scaling.shown(world[0], world[0].status).waits == []  # type: ignore[arg-type]
    world.drained(2, request)
    world.turn()
    world.turn()
    assert (world[1].told, world[2].told) == ([], ["stop"])
    world[2].returncode = 0
    assert world.scaling.outlives(world[2])
    assert world.turn() == ["-2"]
    world.drained(1, request)
    world.turn()
    assert world[1].told == ["stop"]
    world[1].returncode = -signal.SIGKILL  # a leaving server counts as gone regardless of how it ends
    assert world.scaling.outlives(world[1])
    assert world.turn() == ["-1"]
    assert world.turn() == []
    assert "generation_server/2 has left the run" in world.told
    assert world.told[-1].startswith("generation_server/1 has left the run: it was killed by signal SIGKILL")
    world.scale(2)
    assert world.turn() == ["+1"]  # the name is free again


def test_a_new_desired_number_takes_effect_during_a_drain(world: World) -> None:
    first = world.scale(2)
    world.turn()
    world.run(world[1])
    world.scale(1)
    world.turn()
    world.scale(2)
    world.drained(1, first)  # a report for an older request is ignored
    world.turn()
    assert world[1].told == []
    assert not world.scaling.outlives(world[1])  # it is desired, so its end does not count as leaving
    request = world.scale(1)
    world.drained(1, request)
    world.turn()
    assert world[1].told == ["stop"]
    world.scale(2)  # this process was already asked to stop: a new one starts after its end
    assert world.turn() == []
    world[1].returncode = 0
    assert world.turn() == ["+1", "-1"]
    assert world[1].told == []


def test_a_server_that_is_still_starting_is_stopped_at_once(world: World) -> None:
    world.scale(2)
    world.turn()
    world.scale(1)
    world.turn()
    assert world[1].told == ["stop"]
    world.turn(after_s=10.1)
    assert world[1].told == ["stop", "kill"]


def test_a_drain_that_is_never_reported_ends_at_its_limit(world: World) -> None:
    world.scale(2)
    world.turn()
    world.run(world[1])
    world.scale(1)
    world.turn()
    world.turn(after_s=29.8)
    assert world[1].told == []
    world.turn(after_s=0.5)
    assert world[1].told == ["stop"]
    assert world.told[-1] == "generation_server/1 has not drained within 30 s and is stopped"


def test_a_server_that_cannot_join_is_given_up_until_the_next_request(world: World) -> None:
    world.scale(2)
    world.turn()
    child = world[1]
    failed = WorkerStatus(
        worker=child.name,
        pid=99,
        attempt=1,
        state="error",
        time=world.clock.now,
        progress=1,
        error="Traceback\nNo memory",
    )
    child.status = failed
    assert world.scaling.outlives(child)
    assert world.turn() == []
    child.returncode = 1
    assert world.turn() == ["-1"]
    assert (
        "generation_server/1 could not join the run, which continues without it: it failed: No memory" in world.told[-1]
    )
    assert world.turn() == []
    world.scale(2)
    assert world.turn() == ["+1"]
    world.run(world[1])
    world.turn()
    world[1].returncode = 1
    assert not world.scaling.outlives(world[1])  # once it has run, its end is no failure to join, and not tolerated


def test_a_server_that_fails_to_join_and_is_no_longer_desired_is_removed_once(world: World) -> None:
    world.scale(2)
    world.turn()
    world[1].returncode = 1
    world.scale(1)
    assert world.turn() == ["-1"]
    assert world.turn() == []


def test_a_server_for_which_no_host_has_room_is_given_up_until_the_next_request(world: World) -> None:
    world.is_full = True
    world.scale(2)
    assert world.turn() == []
    assert world.told[-1].endswith(
        "could not join the run, which continues without it: generation_server/1 fits nowhere"
    )
    assert world.revoked == [7]
    world.is_full = False
    assert world.turn() == []
    world.scale(2)
    assert world.turn() == ["+1"]


def test_servers_that_other_components_start_are_not_started(world: World) -> None:
    world.scale(3)
    assert world.turn(SERVERS[1]) == ["+2"]
    world.children = [child for child in world.children if child.name != SERVERS[0]]  # dead, its restart is pending
    assert world.turn(SERVERS[0], SERVERS[1]) == []


def test_no_server_starts_without_a_lease_and_the_lease_of_an_obsolete_request_is_revoked(world: World) -> None:
    world.answers = False
    world.scale(2)
    assert world.turn() == []
    world.leases[0].set_exception(NameResolveTimeout("away"))
    assert world.turn() == []
    assert world.told[-1] == "generation_server/1 cannot be started yet: away"
    assert world.turn(after_s=0.5) == []
    world.scale(1)
    world.leases[1].set_result(Lease(None, 8, 30.0))  # type: ignore[arg-type]
    assert world.turn(after_s=1.0) == []
    assert world.revoked == [8]


def test_an_invalid_desired_number_changes_nothing(world: World) -> None:
    world.scaling.observe_desired(WatchEvent("put", "k", '{"count":0,"id":"x"}'))
    world.scaling.observe_desired(WatchEvent("delete", "k"))
    assert world.turn() == []
    assert "Expected `int` >= 1" in world.told[0]


# ----------------------------------------------------------------------------------------------------------- the processes


def config_of(tmp_path: Path, *overrides: str) -> ExperimentConfig:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    return load_experiment(file, overrides)


def test_a_server_beyond_the_allocation_has_the_same_spec_as_the_others(tmp_path: Path) -> None:
    config = config_of(tmp_path, "allocation=transformers.d2+d1")
    planned = {spec.name: spec for spec in plan(config, attempt=3, num_prompts=100)}
    assert server_spec(1, config, attempt=3, num_prompts=100) == planned["generation_server/1"]
    fourth = server_spec(3, config, attempt=3, num_prompts=100)
    assert (fourth.name, fourth.config.worker.index, fourth.config.worker.attempt) == ("generation_server/3", 3, 3)
    assert fourth.env == planned["generation_server/1"].env


def test_additional_servers_take_the_remaining_gpus(tmp_path: Path) -> None:
    def devices_of(allocation: str, count: int) -> list[str | None]:
        config = config_of(tmp_path, f"allocation={allocation}")
        devices = [str(number) for number in range(count)]
        specs = [server_spec(index, config, attempt=1, num_prompts=100, devices=devices) for index in range(5)]
        assert {spec.config.generation.dtype for spec in specs} == {plan_dtype(config, devices)}  # type: ignore[union-attr]
        return [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs]

    def plan_dtype(config: ExperimentConfig, devices: list[str]) -> str:
        (first, *_) = plan(config, attempt=1, num_prompts=100, devices=devices)
        return str(first.config.generation.dtype)  # type: ignore[union-attr]

    assert devices_of("transformers.d2+d1", 5) == ["0", "1", "3", "4", "0"]  # GPU 2 belongs to the trainer
    assert devices_of("sglang.d1m2+d1", 8) == ["0,1", "3,4", "5,6", "7,0", "1,2"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("manager.drain_timeout_s=-1", r"manager\.drain_timeout_s=-1\.0: must be 0 \(move what runs at once\) or more"),
        (
            "manager.max_groups_per_server=-1",
            r"manager\.max_groups_per_server=-1: must not be negative; 0 switches it off",
        ),
    ],
)
def test_negative_limits_are_refused(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(tmp_path, override)


@pytest.mark.parametrize(
    ("overrides", "count", "told"),
    [
        ([], 2, ""),
        ([], 0, "generation is 0; use a number from 1 to 256"),
        ([], 257, "generation is 257; use a number from 1 to 256"),
        (
            [
                "debug.leave_out=[rollout_worker/0,generation_server/0,generation_server/2]",
                "allocation=transformers.d3+d1",
            ],
            2,
            r"you start generation_server/2 yourself \(debug.leave_out\), so it stays; use at least 3",
        ),
        (["debug.leave_out=[generation_server/0]"], 1, ""),
        (
            ["allocation=external.d1p1m1+d1p1m1", "generation.urls=['http://a:1']"],
            2,
            "asyncrl does not start the servers of this run",
        ),
        (
            ["allocation=transformers.d1@0+d1@0", "manager.max_head_offpolicyness=0"],
            2,
            "or they share devices with training: their number is fixed",
        ),
    ],
)
async def test_the_manager_refuses_a_number_that_the_run_cannot_have(
    tmp_path: Path, overrides: list[str], count: int, told: str
) -> None:
    specs = plan(config_of(tmp_path, *overrides), attempt=1, num_prompts=100)
    (config,) = (spec.config for spec in specs if isinstance(spec.config, GserverManagerConfig))
    with MemoryNameResolver(str(tmp_path)) as resolver:
        target = ServerTarget(
            resolver,
            Names("e", "t"),
            allocated=config.num_servers,
            new_id=lambda: "i",
            least=config.least_servers,
            is_external=config.external_servers,
        )
        with pytest.raises(ValueError, match=told) if told else nullcontext():
            await target.set(count)
        assert await target.get() == (config.num_servers if told else count)


def test_the_reply_names_desired_servers_that_the_manager_has_not_seen() -> None:
    view = ServerView(server="generation_server/1", url="u", state="stale", version="", running=0)
    reply = servers_reply(3, [view])
    assert (reply.target, reply.servers) == (3, [view])
    assert reply.missing == ["generation_server/0", "generation_server/2"]


def test_only_runs_with_generation_servers_can_be_scaled(tmp_path: Path) -> None:
    assert can_scale(config_of(tmp_path))
    assert can_scale(config_of(tmp_path, "mode=rollout_only"))
    assert not can_scale(config_of(tmp_path, "mode=train_only", "replay.path=x"))


@pytest.mark.parametrize(
    ("count", "devices", "cores", "told"),
    [
        (2, 0, 4, []),
        (4, 0, 4, ["4 servers and the trainer need 6 cores, there are 4: each will be slower"]),
        (2, 4, 1, []),
        (3, 4, 64, ["3 servers and the trainer need 5 GPUs, there are 4: some will be shared"]),
    ],
)
def test_a_lack_of_cores_or_gpus_is_reported(count: int, devices: int, cores: int, told: list[str]) -> None:
    assert crowding(Allocation.parse("transformers.d1+d2"), count, devices, cores) == told
