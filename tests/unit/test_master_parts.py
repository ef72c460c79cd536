"""Pure parts of the master: progress of prompts, schedules, buffer, tracker of holders, parameter hooks, step metrics, ages."""

import msgspec
import pytest

from asyncrl.config.schema import EmaConfig, RefConfig, TrainConfig
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.master.buffer import AsyncIOSequenceBuffer, PromptProgress, StorageTracker
from asyncrl.master.parameter_hooks import ParameterHooks
from asyncrl.master.report import (
    Ages,
    RunSummary,
    StepTimes,
    UpdateSeconds,
    head_offpolicyness,
    of_whole_batch,
    step_metrics,
    tail_offpolicyness,
)
from asyncrl.master.schedule import Schedule, checkpoint_period_s
from asyncrl.protocol.calls import Reallocate, RedistribStep
from asyncrl.protocol.manager import ServerView
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.metrics import JsonLinesWriter, read_json_lines


def make_meta(ticket, position=0, *, epoch=0, attempt=1, versions=((0, 0),), rewards=(1.0,), task_id=0):
    return TrajectoryMeta(
        ticket_id=ticket,
        locator=Locator(epoch, position),
        attempt=attempt,
        head=0,
        keys=["packed_input_ids", "rewards"],
        seqlens=[5] * len(rewards),
        response_lengths=[3] * len(rewards),
        rewards=list(rewards),
        version_start=[WeightVersion(attempt, first).pack() for first, _ in versions],
        version_end=[WeightVersion(attempt, last).pack() for _, last in versions],
        birth_time=0.0,
        task_id=task_id,
    )


class TestPromptProgress:
    def test_the_cursor_moves_past_prompts_that_are_done(self):
        progress = PromptProgress(num_prompts=3, num_epochs=2)
        progress.mark_trained([Locator(0, 1), Locator(0, 2)])
        assert (progress.cursor, progress.beyond_cursor) == (Locator(0, 0), [Locator(0, 1), Locator(0, 2)])
        progress.mark_rejected(Locator(0, 0), "too_hard")
        assert (progress.cursor, progress.beyond_cursor) == (Locator(1, 0), [])
        assert (progress.num_done, progress.num_trained, dict(progress.rejected)) == (3, 2, {"too_hard": 1})

    def test_finishing_a_prompt_twice_is_an_error(self):
        progress = PromptProgress(num_prompts=3, num_epochs=1)
        progress.mark_trained([Locator(0, 1)])
        with pytest.raises(ValueError, match="done already"):
            progress.mark_rejected(Locator(0, 1), "late")

    def test_progress_is_restored_from_a_checkpoint(self):
        progress = PromptProgress(num_prompts=3, num_epochs=2)
        progress.mark_trained([Locator(0, 0), Locator(0, 2)])
        progress.mark_rejected(Locator(1, 1), "too_hard")
        other = PromptProgress(num_prompts=3, num_epochs=2)
        other.restore(progress.cursor, progress.beyond_cursor, progress.num_trained, progress.rejected)
        for each in (progress, other):
            each.mark_trained([Locator(0, 1)])
            assert (each.cursor, each.beyond_cursor) == (Locator(1, 0), [Locator(1, 1)])
            assert (each.num_done, each.num_trained, dict(each.rejected)) == (4, 3, {"too_hard": 1})

    def test_a_prompt_outside_the_run_is_an_error(self):
        progress = PromptProgress(num_prompts=3, num_epochs=1)
        assert not progress.contains(Locator(1, 0))
        with pytest.raises(ValueError, match="outside"):
            progress.is_done(Locator(0, 3))


class TestSchedule:
    def test_steps_epochs_and_seconds_each_make_it_due(self):
        schedule = Schedule(every_steps=3, every_epochs=1, every_s=10.0, now=0.0)
        assert not schedule.check(step=2, epochs=0.9, now=9.0)
        assert schedule.check(step=3, epochs=0.9, now=9.0)
        assert schedule.check(step=4, epochs=1.1, now=9.0)
        assert not schedule.check(step=5, epochs=1.2, now=18.0)
        assert schedule.check(step=5, epochs=1.2, now=19.0)

    def test_a_restored_schedule_continues_its_intervals(self):
        """The time between saving and restoring does not count."""
        schedule = Schedule(every_steps=3, every_s=10.0, now=100.0)
        assert schedule.check(step=3, epochs=1.5, now=104.0)
        other = Schedule(every_steps=3, every_s=10.0, now=0.0)
        other.restore(schedule.state(now=108.0), now=1000.0)
        assert not other.check(step=5, epochs=1.5, now=1005.9)
        assert other.check(step=5, epochs=1.5, now=1006.0)
        other.restore(schedule.state(now=108.0), now=1000.0)
        assert other.check(step=6, epochs=1.5, now=1000.0)

    def test_writing_checkpoints_takes_at_most_two_percent_of_the_time_within_the_bounds(self):
        assert [checkpoint_period_s("auto", write_s) for write_s in (0.0, 12.0, 49.0, 144.0, 1000.0)] == [
            600.0,
            600.0,
            pytest.approx(2450.0),  # 98 GB at 2 GB/s
            pytest.approx(7200.0),
            7200.0,
        ]
        assert [checkpoint_period_s(asked, 49.0) for asked in (0.0, 5, 60.0)] == [0.0, 5.0, 60.0]

    def test_a_schedule_without_intervals_is_never_due(self):
        assert not Schedule().check(step=100, epochs=9.0, now=1e9)


class TestBuffer:
    def make(self, capacity=4):
        return AsyncIOSequenceBuffer(PromptProgress(4, 1), capacity=capacity, attempt=1)

    def test_the_first_trajectory_of_a_prompt_is_kept(self):
        buffer = self.make()
        assert buffer.put(make_meta("t1", 0)).verdict == "stored"
        assert buffer.put(make_meta("t1", 0)).verdict == "stored"  # repeated: no change
        assert buffer.put(make_meta("t2", 0)).verdict == "duplicate"
        assert len(buffer) == 1
        assert buffer.holds(Locator(0, 0))
        assert not buffer.holds(Locator(0, 1))

    def test_trajectories_are_refused_for_an_old_attempt_an_unknown_prompt_or_lack_of_room(self):
        buffer = self.make(capacity=1)
        assert buffer.put(make_meta("old", 0, attempt=0)).reason == "attempt 0 is over; the current attempt is 1"
        assert buffer.put(make_meta("nowhere", 9)).verdict == "refused"
        buffer.put(make_meta("t1", 0))
        assert "holds 1 trajectories" in buffer.put(make_meta("t2", 1)).reason

    def test_a_trajectory_of_a_trained_prompt_is_a_duplicate(self):
        progress = PromptProgress(4, 1)
        buffer = AsyncIOSequenceBuffer(progress, capacity=4, attempt=1)
        buffer.put(make_meta("t1", 0))
        buffer.begin_batch(["t1"])
        buffer.end_batch()
        progress.mark_trained([Locator(0, 0)])
        assert buffer.put(make_meta("t2", 0)).verdict == "duplicate"

    def test_a_batch_is_formed_from_stored_tickets_after_the_previous_step(self):
        buffer = self.make()
        buffer.put(make_meta("t1", 0))
        for tickets in (["t1", "unknown"], []):
            with pytest.raises(ValueError, match="cannot form a batch"):
                buffer.begin_batch(tickets)
        buffer.begin_batch(["t1"])
        with pytest.raises(RuntimeError, match="the previous batch is still in its step"):
            buffer.begin_batch(["t1"])

    def test_a_run_has_at_least_one_prompt_and_one_epoch(self):
        for numbers in ((0, 1), (1, 0)):
            with pytest.raises(ValueError, match="use at least 1 of each"):
                PromptProgress(*numbers)

    def test_stored_trajectories_are_those_outside_the_batch(self):
        buffer = self.make()
        buffer.put(make_meta("t1", 0))
        buffer.put(make_meta("t2", 1))
        buffer.begin_batch(["t1"])
        assert [meta.ticket_id for meta in buffer.stored] == ["t2"]
        assert buffer.stored_tickets == ["t1", "t2"]


class TestTracker:
    def test_the_holders_of_each_key_are_tracked(self):
        tracker = StorageTracker()
        tracker.add(0, ["a", "b"], ["ids", "rewards"])
        tracker.apply(
            [RedistribStep("bcast", 0, [1, 2], [["a"]], ["ids"]), RedistribStep("gather", 2, [0], [["b"]], ["ids"])]
        )
        assert tracker.holders["a"] == {"ids": {0, 1, 2}, "rewards": {0}}
        assert tracker.num_missing("a", [0, 1, 3], ["ids", "rewards"]) == 3
        assert tracker.num_missing("unheard of", [0, 1], ["ids"]) == 2
        assert tracker.drop(["b", "unheard of"]) == [0, 2]
        assert tracker.drop(["a", "b"]) == [0, 1, 2]
        assert len(tracker) == 0


class TestHooks:
    def make(self, **train):
        def mfc(name, model, kind="inference"):
            return MFCDef(name, model.partition("@")[0], kind, "x:y", ("ids",), (), model)

        self.inf = mfc("actor_inf", "actor@1")
        self.ref_inf = mfc("ref_inf", "ref")
        mfcs = [self.inf, self.ref_inf, mfc("other", "critic"), mfc("actor_train", "actor", "train_step")]
        return ParameterHooks(mfcs, TrainConfig(**train))

    def test_a_replica_in_another_layout_gets_weights_once_per_change(self):
        hooks = self.make()
        assert hooks.before(self.inf) == []  # all replicas start with the same weights
        assert hooks.after_step(1) == []
        assert hooks.before(self.inf) == [Reallocate(source="actor", target="actor@1")]
        assert hooks.before(self.inf) == []
        assert hooks.before(self.ref_inf) == []

    def test_replicas_are_updated_after_a_checkpoint_is_loaded_into_the_trained_model(self):
        hooks = self.make()
        hooks.loaded()
        assert hooks.before(self.inf) == [Reallocate(source="actor", target="actor@1")]
        assert hooks.before(self.inf) == []
        assert hooks.before(self.ref_inf) == []

    def test_a_detached_replica_gets_weights_after_each_step_that_trains_the_actor_and_after_a_checkpoint(self):
        hooks = self.make(actor_inf_on_missing="continue", num_critic_only_steps=1)
        to_replica = [Reallocate(source="actor", target="actor@1")]
        assert hooks.loaded() == to_replica
        assert hooks.after_step(1) == []
        assert hooks.after_step(2) == to_replica
        assert hooks.before(self.inf) == []

    def test_the_first_steps_train_only_the_critic(self):
        hooks = self.make(num_critic_only_steps=2)
        assert [hooks.left_out(version) for version in range(3)] == [{"actor_train"}, {"actor_train"}, set()]
        hooks.after_step(2)
        assert hooks.before(self.inf) == []
        hooks.after_step(3)
        assert len(hooks.before(self.inf)) == 1

    def test_the_reference_is_updated_at_its_interval(self):
        hooks = self.make(ref=RefConfig(update_interval=3, update_share=0.25))
        refresh = [Reallocate(source="actor", target="ref", share=0.25)]
        assert [hooks.after_step(version) for version in range(1, 7)] == [[], [], refresh, [], [], refresh]

    def test_the_average_follows_each_step_of_the_actor(self):
        hooks = self.make(ema=EmaConfig(decay=0.75), num_critic_only_steps=1)
        assert hooks.after_step(1) == []  # the step did not train the actor
        update = [Reallocate(source="actor", target="ema", share=0.25)]
        assert [hooks.after_step(version) for version in (2, 3)] == [update, update]

    def test_average_and_reference_follow_the_actor_side_by_side(self):
        hooks = self.make(ema=EmaConfig(decay=0.75), ref=RefConfig(update_interval=2, update_share=0.5))
        targets = [[copy.target for copy in hooks.after_step(version)] for version in (1, 2)]
        assert targets == [["ema"], ["ema", "ref"]]


def test_step_metrics_of_a_batch():
    metas = [
        make_meta("a", 0, versions=((3, 4), (4, 4)), rewards=(1.0, 0.0)),
        make_meta("b", 1, versions=((5, 5), (5, 5)), rewards=(1.0, 1.0)),
    ]
    assert [head_offpolicyness(meta, 5) for meta in metas] == [2, 0]
    assert [tail_offpolicyness(meta, 5) for meta in metas] == [1, 0]
    metrics = step_metrics(metas, 5, StepTimes(1.0, 2.0, 1.0))
    assert metrics["reward/mean"] == 0.75
    assert (metrics["offpolicy/head_mean"], metrics["offpolicy/head_max"], metrics["offpolicy/tail_mean"]) == (
        1.0,
        2.0,
        0.5,
    )
    assert metrics["batch/num_sequences_of_two_versions"] == 1
    assert metrics["throughput/tokens_per_s"] == 3.0
    assert (metrics["offpolicy/head_count/0"], metrics["offpolicy/head_count/2"]) == (1.0, 1.0)


def test_a_step_function_that_trains_some_groups():
    """It computes advantages for group b only. Figures of the batch are of both groups, and no share exceeds 1."""
    metas = [
        make_meta("a", 0, versions=((3, 4),) * 4, rewards=(0.0,) * 4),
        make_meta("b", 1, versions=((5, 5), (5, 5)), rewards=(1.0, 1.0)),
    ]
    stats = {"batch/num_groups": 1.0, "batch/num_sequences": 2.0, "reward/mean": 1.0, "kl/coef": 0.1}
    summary = RunSummary()
    for _ in range(2):
        metrics = of_whole_batch(stats, step_metrics(metas, 5, StepTimes(1.0, 2.0, 1.0), trained={"b"}))
        assert (metrics["batch/num_sequences"], metrics["reward/mean"], metrics["kl/coef"]) == (6, 2 / 6, 0.1)
        assert (metrics["batch/num_trained_prompts"], metrics["batch/num_trained_sequences"]) == (1, 2)
        summary.add_step(metrics)
    found = summary.as_dict(mode="async", attempt=1, wall_s=9.0, version=2, rejected={}, generation_idle=None)
    assert (found["groups"], found["sequences"], found["generated_tokens"]) == (
        4,
        4,
        2 * sum(metas[1].response_lengths),
    )
    assert found["sequences_of_two_versions_share"] == 4 / 6
    assert found["trained_response_length_mean"] == sum(metas[1].response_lengths) / 2
    whole = of_whole_batch({"batch/num_groups": 2.0, "reward/mean": 0.5}, step_metrics(metas, 5, StepTimes(1, 2, 1)))
    assert whole["reward/mean"] == 0.5  # also of dense rewards, which the master does not know
    assert whole["batch/num_trained_sequences"] == 6


def test_ages_of_all_trained_responses():
    """Response lengths 1, 2, 3 and 4 are in the bins 1, 2 to 3, and 4 to 7."""
    ages = Ages()
    assert ages.as_dict() == {"head": {}, "tail": {}, "by_length": []}
    groups = [([1, 3], ((3, 4), (4, 4))), ([2, 4], ((5, 5), (1, 5)))]
    metas = [
        msgspec.structs.replace(make_meta("t", versions=versions, rewards=(1.0, 1.0)), response_lengths=lengths)
        for lengths, versions in groups
    ]
    ages.add(metas, 5)
    ages.add(metas[:1], 6)
    assert ages.as_dict() == {
        "head": {"0": 1, "1": 1, "2": 2, "3": 1, "4": 1},
        "tail": {"0": 2, "1": 2, "2": 2},
        "by_length": [
            {"tokens_min": 1, "tokens_max": 1, "responses": 2, "head_mean": 2.5, "head_max": 3},
            {"tokens_min": 2, "tokens_max": 3, "responses": 3, "head_mean": 1.0, "head_max": 2},
            {"tokens_min": 4, "tokens_max": 7, "responses": 1, "head_mean": 4.0, "head_max": 4},
        ],
    }


def test_a_line_torn_by_a_crash_is_cut_off(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a":1}\n{"a":')
    assert read_json_lines(file) == [{"a": 1}]
    with JsonLinesWriter(file) as writer:
        writer.write({"a": 2})
    assert read_json_lines(file) == [{"a": 1}, {"a": 2}]
    assert read_json_lines(tmp_path / "none") == []


def test_a_run_with_several_tasks_has_metrics_per_task():
    metas = [
        make_meta("a", versions=((4, 4),) * 2, rewards=(1.0, 0.0), task_id=1),
        make_meta("b", versions=((4, 4),), rewards=(1.0,), task_id=1),
    ]
    times = StepTimes(1.0, 2.0, 1.0)
    metrics = step_metrics(metas, 5, times, ["fractions", "gsm8k"])
    assert (metrics["reward/gsm8k"], metrics["count/gsm8k"]) == (pytest.approx(2 / 3), 3.0)
    assert metrics["count/fractions"] == 0.0
    assert "reward/fractions" not in metrics
    for tasks in (["default"], []):
        assert not any(key.startswith("count/") for key in step_metrics(metas, 5, times, tasks))


def test_seconds_of_interruption_are_averaged_over_servers():
    def servers(**update_s):
        return [
            ServerView(server=name, url="", state="healthy", version="", running=0, update_s=seconds)
            for name, seconds in update_s.items()
        ]

    seconds = UpdateSeconds()
    assert seconds.since_last([]) == 0.0
    assert seconds.since_last(servers(a=1.0, b=3.0)) == 2.0
    assert seconds.since_last(servers(a=1.5, b=3.0)) == 0.25
    assert seconds.since_last(servers(a=0.5, b=0.5)) == 0.0  # a new manager counts from zero
    assert seconds.since_last(servers(a=0.5, b=1.0, c=1.0)) == 0.5
