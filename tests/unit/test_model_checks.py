"""Model checks: hypothesis drives the components that decide through any events in any order.

The asynchronous rule must hold whichever processes are killed (rule_model.py models the world around the components): no
group is trained more than eta versions late, each prompt of each epoch is trained once or rejected in the lineage of the
newest weights, nothing is lost, and without further faults the run completes. The guarantees of the update plan must hold
too: versions never decrease, and no server gets requests before a verified load.

ASYNCRL_MODEL_CHECKS=3000 tries that many random schedules of each, instead of the few that CI tries.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from fleet_model import Servers
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rule_model import HEARTBEAT_S, LEASE_S, OVERDUE_S, Worker, World

T = TypeVar("T")

_MANY = int(os.environ.get("ASYNCRL_MODEL_CHECKS", "0"))


def checks(num_examples: int, num_steps: int = 50) -> settings:
    return settings(
        max_examples=_MANY or num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        derandomize=not _MANY,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


class AnythingFails(RuleBasedStateMachine):
    """Messages are delayed, repeated, reordered and lost. Workers, managers and trainer groups die, and processes thought dead send
    messages."""

    world: World

    @initialize(
        batch_size=st.integers(1, 3),
        eta=st.integers(0, 2),
        num_prompts=st.integers(1, 12),
        num_epochs=st.integers(1, 2),
        max_concurrent=st.integers(0, 4),
        turns=st.integers(0, 5),
    )
    def begin(self, turns: int, **options: int) -> None:
        self.world = World(**options)
        for _ in range(turns):
            self.world.turn()

    def one(self, data: st.DataObject, choices: list[T]) -> T | None:
        return data.draw(st.sampled_from(choices)) if choices else None

    # ------------------------------------------------------------------------------------------------ events without faults

    @rule(turns=st.integers(1, 4), stragglers=st.integers(0, 255))
    def all_goes_well_but_for_stragglers(self, turns: int, stragglers: int) -> None:
        for _ in range(turns):
            self.world.turn(stragglers)

    @rule(data=st.data(), count=st.integers(1, 6))
    def a_worker_asks(self, data: st.DataObject, count: int) -> None:
        worker = self.one(data, [*self.world.workers, *self.world.ghosts])
        assert worker is not None
        self.world.allocate(worker, count)

    @rule(data=st.data())
    def a_worker_sends_a_heartbeat(self, data: st.DataObject) -> None:
        worker = self.one(data, [*self.world.workers, *self.world.ghosts])
        assert worker is not None
        self.world.heartbeat(worker)

    @rule(data=st.data())
    def a_worker_reports_results(self, data: st.DataObject) -> None:
        if worker := self.one(data, [w for w in [*self.world.workers, *self.world.ghosts] if w.results]):
            self.world.finish(worker)

    @rule(data=st.data(), count=st.integers(1, 4), last=st.sampled_from(["pushed", "at the head", "answered"]))
    def rollouts_end(self, data: st.DataObject, count: int, last: str) -> None:
        for _ in range(count):
            pairs = [(w, r) for w in [*self.world.workers, *self.world.ghosts] for r in w.held.values()]
            if pair := self.one(data, [(w, r) for w, r in pairs if r.verdict is None]):
                pushes, verdicts = len(self.world.pushes), len(self.world.verdicts)
                self.world.push(*pair)
                if last != "pushed" and len(self.world.pushes) > pushes:
                    self.world.push_arrives(-1)
                if last == "answered" and len(self.world.verdicts) > verdicts:
                    self.world.verdict_arrives(-1)

    @rule(data=st.data(), outcome=st.sampled_from(["rejected", "released"]))
    def a_rollout_fails(self, data: st.DataObject, outcome: Any) -> None:
        if pair := self.one(data, [(w, r) for w in self.world.workers for r in w.held.values()]):
            self.world.gives_up(*pair, outcome)

    @precondition(lambda self: self.world.pushes)
    @rule(data=st.data(), lost=st.booleans())
    def a_push_arrives(self, data: st.DataObject, lost: bool) -> None:
        self.world.push_arrives(data.draw(st.integers(0, len(self.world.pushes) - 1)))
        if lost:
            self.world.verdicts.pop()

    @precondition(lambda self: self.world.verdicts)
    @rule(data=st.data())
    def a_verdict_arrives(self, data: st.DataObject) -> None:
        self.world.verdict_arrives(data.draw(st.integers(0, len(self.world.verdicts) - 1)))

    @rule(data=st.data())
    def a_call_arrives(self, data: st.DataObject) -> None:
        """Deliver a call. A call that was delivered before may be drawn and delivered again."""
        if call := self.one(data, self.world.calls()):
            self.world.arrives(call)

    @rule(data=st.data(), newest=st.booleans())
    def an_answer_arrives(self, data: st.DataObject, newest: bool) -> None:
        if call := self.one(data, [call for call in self.world.calls() if call.answers]):
            self.world.answered(call, -1 if newest else 0)

    @rule(data=st.data())
    def a_new_manager_is_noticed(self, data: st.DataObject) -> None:
        world = self.world
        everybody = [*world.workers, *world.ghosts, world.master, *world.zombies]
        who = self.one(data, [who for who in everybody if who.knows != world.generation])
        if who is not None:
            world.notice(who)
            if isinstance(who, Worker):
                world.heartbeat(who)

    @rule(times=st.sampled_from([1, 1, 1, int(LEASE_S / HEARTBEAT_S) + 1, int(OVERDUE_S / HEARTBEAT_S)]))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.world.now += HEARTBEAT_S
            self.world.expire()

    @rule(zombie=st.booleans(), data=st.data())
    def the_master_reports(self, zombie: bool, data: st.DataObject) -> None:
        master = self.one(data, self.world.zombies) if zombie else self.world.master
        if master is not None:
            self.world.report(master)

    @rule()
    def a_step_begins(self) -> None:
        self.world.try_step()

    @precondition(lambda self: self.world.master.step)
    @rule()
    def a_step_ends(self) -> None:
        self.world.end_step()

    @rule()
    def weights_are_published(self) -> None:
        self.world.publish()

    @rule()
    def weights_are_served(self) -> None:
        self.world.serve()

    # ---------------------------------------------------------------------------------------------------------- faults

    @rule(data=st.data(), ghost=st.booleans())
    def a_worker_dies(self, data: st.DataObject, ghost: bool) -> None:
        self.world.restart_worker(data.draw(st.integers(0, self.world.num_workers - 1)), ghost=ghost)

    @rule(behind=st.integers(0, 2))
    def the_manager_dies(self, behind: int) -> None:
        """The new manager's config may be of an older attempt."""
        self.world.begin_manager(max(1, self.world.attempt - behind))

    @rule()
    def a_checkpoint_is_saved(self) -> None:
        self.world.save()

    @rule(zombie=st.booleans(), speaks=st.booleans(), turns=st.integers(0, 2))
    def the_trainer_group_dies(self, zombie: bool, speaks: bool, turns: int) -> None:
        """speaks: the old master reports once more, and with zombie=True again after `turns` turns of its successor."""
        old = self.world.master
        if speaks:
            self.world.report(old)
        self.world.restart_trainer_group(zombie=zombie)
        for _ in range(turns):
            self.world.turn()
        if zombie and old.call is not None:
            self.world.arrives(old.call)

    # ---------------------------------------------------------------------------------------------------- guarantees

    @invariant()
    def the_guarantees_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


class OnlyManagersDie(RuleBasedStateMachine):
    """If only managers die, no work is wasted: rollouts in progress continue, and no prompt is issued a second time."""

    world: World

    @initialize(
        batch_size=st.integers(1, 3),
        eta=st.integers(0, 2),
        num_prompts=st.integers(1, 8),
        num_epochs=st.integers(1, 2),
        max_concurrent=st.integers(0, 4),
    )
    def begin(self, **options: int) -> None:
        self.world = World(**options)

    @rule(data=st.data(), count=st.integers(1, 6))
    def a_worker_asks(self, data: st.DataObject, count: int) -> None:
        self.world.allocate(data.draw(st.sampled_from(self.world.workers)), count)

    @rule(data=st.data(), count=st.integers(1, 4))
    def rollouts_end(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            pairs = [(w, r) for w in self.world.workers for r in w.held.values() if r.verdict is None and not r.pushes]
            if pairs:
                self.world.push(*data.draw(st.sampled_from(pairs)))

    @precondition(lambda self: self.world.pushes)
    @rule(data=st.data())
    def a_push_arrives(self, data: st.DataObject) -> None:
        self.world.push_arrives(data.draw(st.integers(0, len(self.world.pushes) - 1)))

    @precondition(lambda self: self.world.verdicts)
    @rule(data=st.data())
    def a_verdict_arrives(self, data: st.DataObject) -> None:
        self.world.verdict_arrives(data.draw(st.integers(0, len(self.world.verdicts) - 1)))

    @rule(data=st.data())
    def a_worker_reports_results(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.workers)))

    @rule()
    def time_passes(self) -> None:
        """Heartbeats are sent in time, and arrive."""
        world = self.world
        world.now += HEARTBEAT_S
        for who in [*world.workers, world.master]:
            world.notice(who)
        for worker in world.workers:
            world.heartbeat(worker)
        self.calls_are_answered()
        world.expire()

    @rule(turns=st.integers(1, 4), stragglers=st.integers(0, 255))
    def all_goes_well_but_for_stragglers(self, turns: int, stragglers: int) -> None:
        for _ in range(turns):
            self.world.turn(stragglers)

    @rule(steps=st.integers(1, 3))
    def the_master_continues_alone(self, steps: int) -> None:
        """The master talks to the newest manager, and the workers do not know that manager yet."""
        world, master = self.world, self.world.master
        for _ in range(steps):
            world.end_step()
            world.notice(master)
            world.report(master)
            assert master.call is not None
            world.arrives(master.call)
            world.answered(master.call)
            world.try_step()

    @rule()
    def calls_are_answered(self) -> None:
        self.world.deliver_all()

    @rule()
    def the_master_reports(self) -> None:
        self.world.report(self.world.master)

    @rule()
    def a_step_begins(self) -> None:
        self.world.try_step()

    @rule()
    def a_step_ends(self) -> None:
        self.world.end_step()

    @rule(served=st.booleans())
    def weights_are_published(self, served: bool) -> None:
        self.world.publish()
        if served:
            self.world.serve()

    @rule(alone=st.integers(0, 3))
    def the_manager_dies(self, alone: int) -> None:
        self.world.begin_manager(1)
        self.the_master_continues_alone(alone)

    @invariant()
    def nothing_is_wasted(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.check()
        assert (world.num_dropped, world.num_duplicates, world.num_revoked) == (0, 0, 0)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.nothing_is_wasted()
            assert not self.world.master.progress.rejected


class UpdatesOfServers(RuleBasedStateMachine):
    """Weights arrive, attempts begin, servers die and freeze, and calls fail. Managers die, or only seem to."""

    servers: Servers

    @initialize(count=st.integers(1, 4), fraction=st.sampled_from([0.25, 0.5, 1.0]))
    def begin(self, count: int, fraction: float) -> None:
        self.servers = Servers(count, fraction)

    def name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.servers.names))

    @rule(on_disk=st.booleans(), in_memory=st.booleans())
    def a_version_is_made(self, on_disk: bool, in_memory: bool) -> None:
        self.servers.train()
        if in_memory:
            self.servers.hold()
        if on_disk:
            self.servers.write()

    @rule()
    def new_weights_are_written(self) -> None:
        self.servers.write()

    @rule()
    def the_manager_hears_of_weights(self) -> None:
        self.servers.hear()
        self.servers.begin_updates()

    @rule(data=st.data(), calls=st.integers(1, 5), fails=st.booleans())
    def an_update_continues(self, data: st.DataObject, calls: int, fails: bool) -> None:
        for number in range(calls):
            if self.servers.works:
                work = data.draw(st.sampled_from(self.servers.works))
                self.servers.go_on(work, fails=fails and number == calls - 1)
        self.servers.begin_updates()

    @precondition(lambda self: self.servers.zombies)
    @rule(data=st.data(), calls=st.integers(1, 5))
    def an_old_manager_continues(self, data: st.DataObject, calls: int) -> None:
        work = data.draw(st.sampled_from(self.servers.zombies))
        for _ in range(calls):
            if work in self.servers.zombies:
                self.servers.go_on(work)

    @rule(written=st.booleans())
    def all_goes_well(self, written: bool) -> None:
        if written:
            self.servers.train()
            self.servers.write()
        self.servers.turn()

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.servers.now += seconds

    @rule()
    def servers_are_probed(self) -> None:
        for name in self.servers.names:
            self.servers.probe(name)
        self.servers.begin_updates()

    @rule(data=st.data())
    def a_server_dies(self, data: st.DataObject) -> None:
        self.servers.kill(self.name(data))

    @rule(data=st.data())
    def a_server_is_started_again(self, data: st.DataObject) -> None:
        self.servers.restart(self.name(data))

    @rule(data=st.data())
    def a_server_freezes_or_thaws(self, data: st.DataObject) -> None:
        process = self.servers.processes[self.name(data)]
        process.frozen = not process.frozen

    @rule(back=st.integers(0, 3))
    def the_trainer_group_dies(self, back: int) -> None:
        self.servers.begin_attempt(back)

    @rule(behind=st.integers(0, 1), turns=st.integers(0, 2))
    def the_manager_dies(self, behind: int, turns: int) -> None:
        self.servers.begin_manager(max(1, self.servers.newest.attempt - behind))
        for _ in range(turns):
            self.all_goes_well(True)

    @invariant()
    def the_guarantees_hold(self) -> None:
        if hasattr(self, "servers"):
            self.servers.check()

    def teardown(self) -> None:
        if hasattr(self, "servers"):
            self.servers.drain()


TestAnythingFails = AnythingFails.TestCase
TestAnythingFails.settings = checks(120)
TestOnlyManagersDie = OnlyManagersDie.TestCase
TestOnlyManagersDie.settings = checks(100)
TestUpdatesOfServers = UpdatesOfServers.TestCase
TestUpdatesOfServers.settings = checks(100)
