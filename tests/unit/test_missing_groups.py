"""A detached group stays down: steps wait, continue without its work, or end the run (on_missing)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from test_detached_groups import WorldOfGroups
from test_detached_groups import running as running_groups
from test_executor import DATASET, NAMES, mfc, placement
from test_interfaces import FakeEngine, fake_ranks, interfaces, make_batch, run_mfcs, train_config

from asyncrl.config.schema import ConfigError, ExperimentConfig, RefConfig, RewardModelConfig, TrainConfig
from asyncrl.dataflow.axes import SAMPLES
from asyncrl.dataflow.graph import DataflowGraph
from asyncrl.dataflow.worker_groups import WorkerGroups, dispensable
from asyncrl.launch.experiment import validate
from asyncrl.launch.supervisor.policy import EVERYTHING, End, StartAgain, Supervision
from asyncrl.master.detached import Absence, GroupMissingEndsRunError
from asyncrl.master.report import RunSummary
from asyncrl.protocol.calls import ExecuteMFC
from asyncrl.streams.request_reply import request_stream

GRAPH = DataflowGraph(
    [
        mfc("actor_inf", "actor", ["tokens"], ["prox"]),
        mfc("ref_inf", "ref", ["tokens"], ["ref"]),
        mfc("actor_train", "actor", ["tokens", "prox", "ref"], kind="train_step"),
    ],
    DATASET,
)
PLACES = [placement("actor", "d2", [0, 1]), placement("ref", "d2", [2, 3])]


# --------------------------------------------------------------------------------------------------------------- decisions


def test_a_group_is_missing_when_no_work_has_succeeded_for_the_limit():
    absence = Absence(10.0)
    assert not absence.failed(100.0)
    assert not absence.failed(109.0)
    assert absence.failed(110.0)
    assert absence.failed(200.0)  # also if it has started meanwhile and has failed again
    absence.worked()
    assert not absence.failed(300.0)
    assert absence.failed(310.0)


def test_the_run_can_miss_a_group_if_it_can_miss_all_its_models():
    places = [placement("actor", "d1", [0]), placement("ref", "d1", [1]), placement("reward", "d2", [1, 2])]
    groups = WorkerGroups((0,), ((1, 2),))
    ref = RefConfig(on_missing="continue")
    assert dispensable(groups, places, TrainConfig(ref=ref)) == []
    assert dispensable(groups, places, TrainConfig(ref=ref, reward_model=RewardModelConfig())) == []
    reward = RewardModelConfig(on_missing="continue")
    assert dispensable(groups, places, TrainConfig(ref=ref, reward_model=reward)) == [(1, 2)]


def test_a_group_that_the_run_can_miss_restarts_without_limit():
    def end(number: int) -> End:
        return End("model_worker/1", "was killed", f"cause {number}", could_run=True)

    policy = Supervision(2, groups={("model_worker/1",): True})
    decisions = [policy.decide(end(number), 0.0, float(number)) for number in range(6)]
    assert [decision.unit for decision in decisions] == ["model_worker/1"] * 6
    assert [decision.pause_s for decision in decisions] == [0.0, 1.0, 30.0, 30.0, 30.0, 30.0]
    needed = Supervision(2, groups={("model_worker/1",): False})
    assert [needed.decide(end(number), 0.0, float(number)) for number in range(3)][-1] == StartAgain(EVERYTHING, 2.0)


@pytest.mark.parametrize(
    ("allocation", "train", "problem"),
    [
        ("transformers.d1+d1+ref_inf:d1", {"ref": RefConfig(on_missing="continue")}, ""),
        ("transformers.d1+d1+ref_inf:d1", {"ref": RefConfig(on_missing="maybe")}, "train.ref.on_missing='maybe'"),
        ("transformers.d1+d1", {"ref": RefConfig(on_missing="stop")}, r"needs workers of its own, .*\+ref_inf:d1p1m1"),
        (
            "transformers.d1+d1+ref_inf:d1",
            {"ref": RefConfig(on_missing="continue"), "extra_train_keys": ["packed_ref_logprobs"]},
            "a step cannot continue without packed_ref_logprobs",
        ),
        (
            "transformers.d1+d1",
            {"reward_model": RewardModelConfig("/m", on_missing="continue")},
            r"train\.reward_model\.on_missing='continue': needs workers of its own, .*\+rew_inf:d1p1m1",
        ),
        ("transformers.d1+d1+actor_inf:d1", {"actor_inf_on_missing": "continue"}, ""),
        ("transformers.d1+d1+actor_inf:d1", {"actor_inf_on_missing": "maybe"}, "train.actor_inf_on_missing='maybe'"),
        (
            "transformers.d1+d1",
            {"actor_inf_on_missing": "stop"},
            r"needs actor_inf on workers of its own, .*\+actor_inf:d1p1m1",
        ),
        (
            "transformers.d1+d1+actor_inf:d1",
            {"actor_inf_on_missing": "continue", "use_decoupled_loss": False, "recompute_logprob": True},
            "use wait or stop with use_decoupled_loss=false",
        ),
        (
            "transformers.d1+d1+actor_inf:d1",
            {"actor_inf_on_missing": "continue", "extra_train_keys": ["proximal_logprobs"]},
            "a step cannot continue without proximal_logprobs",
        ),
    ],
)
def test_settings_without_effect_are_refused(allocation, train, problem):
    config = ExperimentConfig(model_path="/m", allocation=allocation, train=train_config(kl_coef=0.1, **train))
    found = ""
    try:
        validate(config)
    except ConfigError as error:
        found = str(error)
    lines = [line for line in found.splitlines() if "on_missing" in line]
    assert bool(lines) == bool(problem), found
    if problem:
        with pytest.raises(ConfigError, match=problem):
            validate(config)


def test_without_an_asynchronous_run_actor_inf_is_never_missing():
    train = train_config(actor_inf_on_missing="wait")
    with pytest.raises(
        ConfigError, match=r"train.actor_inf_on_missing='wait': with mode=sync no worker restarts alone"
    ):
        validate(ExperimentConfig(model_path="/m", mode="sync", allocation="d1+actor_inf:d1", train=train))


@pytest.mark.parametrize("mode", ["sync", "train_only", "rollout_only"])
@pytest.mark.parametrize(
    ("train", "field"),
    [
        ({"ref": RefConfig(on_missing="continue")}, "train.ref.on_missing='continue'"),
        ({"ref": RefConfig(on_missing="stop")}, "train.ref.on_missing='stop'"),
        ({"reward_model": RewardModelConfig("/m", on_missing="continue")}, "train.reward_model.on_missing='continue'"),
        (
            {"reward_models": {"a": RewardModelConfig("/m", on_missing="stop")}},
            "train.reward_models.a.on_missing='stop'",
        ),
    ],
)
def test_without_an_asynchronous_run_no_model_is_ever_missing(mode, train, field):
    config = ExperimentConfig(model_path="/m", mode=mode, train=train_config(kl_coef=0.1, **train))
    with pytest.raises(ConfigError) as error:
        validate(config)
    lines = [line for line in str(error.value).splitlines() if "on_missing" in line]
    assert lines == [f"{field}: with mode={mode} no worker restarts alone; set it to wait"]


# ------------------------------------------------------------------------------------------------------------ computation


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_without_the_reference_a_step_is_that_without_a_kl_term(kl_in):
    """Both runs train two steps: the KL coefficient of the first does not adapt, and the weights become equal."""
    batch = make_batch()
    settings = {"kl_estimator": "k3", "kl_in": kl_in, "kl_adaptive": kl_in == "reward", "kl_horizon": 100.0}
    train, plain = train_config(kl_coef=0.5, **settings), train_config(kl_coef=0.0)
    with_ref = interfaces(train)
    coefficient = with_ref["advantages"].state()
    read = {"packed_ref_logprobs"}
    lacking = {
        name: interface.without(read) if name in ("advantages", "actor_train") else interface
        for name, interface in with_ref.items()
        if name != "ref_inf"
    }
    (one,), (other,), (whole,) = fake_ranks(1), fake_ranks(1), fake_ranks(1)
    without_ref = batch.select_keys([key for key in batch.keys if key != "packed_ref_logprobs"])
    for version in range(2):
        _, stats = run_mfcs(lacking, train, one, without_ref, batch.ids, version)
        _, expected = run_mfcs(interfaces(plain), plain, other, without_ref, batch.ids, version)
        run_mfcs(interfaces(train), train, whole, batch, batch.ids, version)
        assert stats == expected
    assert torch.equal(one["actor"].table, other["actor"].table)
    assert not torch.equal(one["actor"].table, whole["actor"].table), "the KL term had no effect in this batch"
    assert with_ref["advantages"].state() == coefficient


def test_without_the_reward_model_the_rewards_are_those_of_the_reward_functions():
    batch = make_batch()
    train = train_config(reward_model=RewardModelConfig(scale=0.5))
    plain = interfaces(train_config())["advantages"]
    advantages = interfaces(train)["advantages"].without({"model_rewards"})
    made, stats = advantages.run(FakeEngine(), batch, batch_ids=batch.ids, step=advantages.begin(0))
    expected, expected_stats = plain.run(FakeEngine(), batch, batch_ids=batch.ids, step=plain.begin(0))
    assert (made.data["advantages"] == expected.data["advantages"]).all()
    assert stats == expected_stats


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_without_actor_inf_a_step_has_the_servers_logprobs_as_proximal_ones(kl_coef):
    batch = make_batch()
    train = train_config(kl_coef=kl_coef, actor_inf_on_missing="continue")
    naive = train_config(kl_coef=kl_coef, use_decoupled_loss=False)
    mfcs, missing = interfaces(train), {"proximal_logprobs"}
    lacking = {
        name: interface.without(missing) if name in ("advantages", "actor_train") else interface
        for name, interface in mfcs.items()
        if name != "actor_inf"
    }
    (one,), (other,), (whole,) = fake_ranks(1), fake_ranks(1), fake_ranks(1)
    rest = batch.select_keys([key for key in batch.keys if key not in missing])
    _, stats = run_mfcs(lacking, train, one, rest, batch.ids, 0)
    _, expected = run_mfcs(interfaces(naive), naive, other, rest, batch.ids, 0)
    run_mfcs(interfaces(train), train, whole, batch, batch.ids, 0)
    assert stats == expected
    assert torch.equal(one["actor"].table, other["actor"].table)
    assert not torch.equal(one["actor"].table, whole["actor"].table), "both logprobs are equal in this batch"


def test_other_keys_cannot_be_missing():
    mfcs = interfaces(train_config(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"AdvantagesInterface cannot run without the keys \['rewards'\]"):
        mfcs["advantages"].without({"rewards", "packed_ref_logprobs"})
    with pytest.raises(ValueError, match="LogprobsInterface cannot run without the keys"):
        mfcs["actor_inf"].without({"packed_input_ids"})


# ------------------------------------------------------------------------------------------------------------------ steps


class LosingWorld(WorldOfGroups):
    """The names of a detached group that ends are deleted, as by the launcher. `come_back` starts the group."""

    delete = None

    async def bring_back(self, group, number):
        for member in group:
            self.serving[member].cancel()
            await self.servers[member].close()
            self.delete(NAMES.stream(request_stream(member)))

    async def come_back(self):
        for member in (2, 3):
            await self.start(member)

    async def run(self, body, me):
        function = self.graph.mfcs[body.mfc]
        part = body.parts[self.placements[function.model].part_of(me, SAMPLES)]
        self.held[me].update(
            (group, key) for group in part for key in body.missing
        )  # so that the check below accepts it
        result = await super().run(body, me)
        self.held[me].difference_update((group, key) for group in part for key in body.missing)
        return result


def running(train, **options):
    return running_groups(GRAPH, PLACES, 4, [[2, 3]], train=train, world_of=LosingWorld, **options)


async def step(master, version):
    ticket = f"t{version}"
    master.store(ticket, version, version % 2, 5)
    return (await master.step([ticket], version, detached=False)).stats


def missing_in(world, version):
    return {
        tuple(body.missing)
        for _, body in world.calls(ExecuteMFC)
        if (body.mfc, body.version) == ("actor_train", version)
    }


@pytest.mark.parametrize("moment", ["idle", "computed"])
async def test_steps_continue_without_a_group_that_is_missing_and_with_it_once_it_is_back(moment):
    train = TrainConfig(ref=RefConfig(on_missing="continue"), missing_after_s=0.3)
    async with running(train) as (world, master):
        assert (await step(master, 0))["missing/ref_inf"] == 0.0
        if moment == "idle":
            world.begin_again(2)
        else:
            world.ends = {("computed", 0)}
        for version in (1, 2):
            assert (await step(master, version))["missing/ref_inf"] == 1.0
        await world.come_back()
        assert (await step(master, 3))["missing/ref_inf"] == 0.0
        assert [missing_in(world, version) for version in range(4)] == [{()}, {("ref",)}, {("ref",)}, {()}]
        assert all(not held for held in world.held[:2]), "workers still hold data"


async def test_a_group_that_is_back_before_the_limit_does_the_work():
    train = TrainConfig(ref=RefConfig(on_missing="continue"), missing_after_s=30.0)
    async with running(train) as (world, master):
        world.begin_again(2)
        stepping = asyncio.create_task(step(master, 0))
        await asyncio.sleep(0.7)
        assert not stepping.done()
        await world.come_back()
        assert (await stepping)["missing/ref_inf"] == 0.0
        assert missing_in(world, 0) == {()}


async def test_a_group_that_fails_in_every_incarnation_is_missing():
    train = TrainConfig(ref=RefConfig(on_missing="continue"), missing_after_s=0.3)
    places = [PLACES[0], placement("ref", "d1", [2])]
    async with running_groups(GRAPH, places, 3, [[2]], train=train, world_of=LosingWorld) as (world, master):
        world.bring_back = partial(WorldOfGroups.bring_back, world)
        world.fails = set(range(1000))
        assert (await step(master, 0))["missing/ref_inf"] == 1.0
        assert world.incarnations[2] > 1
        world.fails = set()


async def test_on_missing_stop_ends_the_run_and_wait_adds_no_metric():
    train = TrainConfig(ref=RefConfig(on_missing="stop"), missing_after_s=0.3)
    async with running(train) as (world, master):
        assert "missing/ref_inf" not in await step(master, 0)
        world.begin_again(2)
        with pytest.raises(GroupMissingEndsRunError, match=r"model_worker/2, model_worker/3 has not worked for 0\.3 s"):
            await step(master, 1)
    async with running(TrainConfig(missing_after_s=0.0)) as (world, master):
        world.begin_again(2)
        stepping = asyncio.create_task(step(master, 0))
        await asyncio.sleep(0.7)
        await world.come_back()
        assert "missing/ref_inf" not in await stepping


@pytest.mark.parametrize("share", [1.0, 0.5])
async def test_a_group_that_was_missing_takes_the_current_weights(share):
    """It takes those of an undisturbed run.

    Weights are numbers here: the actor's weight is its version, the reference's weight on disk is 2.
    """
    ref = RefConfig(on_missing="continue", update_interval=1, update_share=share)
    async with running(TrainConfig(ref=ref, missing_after_s=0.3)) as (world, master):
        world.weights, world.expected = [0.0, 0.0, 2.0, 2.0], 2.0
        for version in range(1, 7):
            world.weights[:2] = [float(version)] * 2
            if version == 3:
                world.begin_again(2)
            if version == 5:
                await world.come_back()
            is_missing = (await step(master, version - 1))["missing/ref_inf"]
            assert is_missing == (version in (3, 4))
            world.expected = share * version + (1 - share) * world.expected
        await master.refresher.refreshed("ref")
        assert world.weights[2:] == [world.expected] * 2


def test_the_summary_counts_the_steps_without_a_group():
    summary = RunSummary()
    names = "batch/num_sequences batch/num_generated_tokens batch/num_prompts batch/num_sequences_of_two_versions reward/mean"
    names += " offpolicy/head_mean offpolicy/head_max time/wait_data_s time/train_s time/wait_weights_s"
    usual = dict.fromkeys(names.split(), 1.0)
    for value in (0.0, 1.0, 1.0):
        summary.add_step({**usual, "missing/ref_inf": value})
    found = summary.as_dict(mode="async", attempt=1, wall_s=1.0, version=3, rejected={}, generation_idle=None)
    assert found["steps_without"] == {"ref_inf": 2}
