"""Worker groups and their incarnations (pure rules): detached groups, repeated work, and fetches between workers."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import ConfigError, ExperimentConfig, TrainConfig
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.redistribution import plan_fetches
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.dataflow.worker_groups import GroupIncarnations, WorkerGroups, worker_groups_of
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import placed_groups, plan
from asyncrl.master.buffer import StorageTracker
from asyncrl.master.detached import GroupEndedError, Repeats, UnfetchedError
from asyncrl.protocol.calls import RedistribStep


def placement(name: str, *workers: int) -> ModelPlacement:
    return ModelPlacement(name, ParallelGrid.parse(f"d{len(workers)}"), workers)


def node(model: str, kind: str = "inference") -> MFCDef:
    return MFCDef(f"{model}_{kind}", model.partition("@")[0], kind, "x:y", ("tokens",), (), model)


def groups(
    *placements: ModelPlacement, mode: str = "async", mfcs: list[MFCDef] | None = None, on_missing: str = ""
) -> WorkerGroups:
    nodes = mfcs or [node(p.name, "train_step" if p.name in ("actor", "critic") else "inference") for p in placements]
    num_workers = 1 + max(worker for p in placements for worker in p.workers)
    train = TrainConfig(actor_inf_on_missing=on_missing)
    return worker_groups_of(placements, nodes, train, num_workers=num_workers, mode=mode)


# -------------------------------------------------------------------------------------------------------------------- groups


def test_a_reference_and_a_reward_model_on_workers_of_their_own_are_detached() -> None:
    assert groups(placement("actor", 0, 1), placement("ref", 2)) == WorkerGroups((0, 1), ((2,),))
    assert groups(placement("actor", 1, 2), placement("ref", 0)) == WorkerGroups((1, 2), ((0,),))
    both = groups(placement("actor", 0), placement("ref", 1, 2), placement("reward", 3))
    assert both == WorkerGroups((0,), ((1, 2), (3,)))
    assert (both.of(0), both.of(2), both.of(3), [both.is_local(worker) for worker in range(4)]) == (
        (0,),
        (1, 2),
        (3,),
        [True, False, False, False],
    )


def test_stateless_models_that_share_workers_are_one_group() -> None:
    assert groups(placement("actor", 0), placement("ref", 1, 2), placement("reward", 2)) == WorkerGroups(
        (0,), ((1, 2),)
    )
    chain = [placement("actor", 0), placement("ref", 1, 2), placement("ref@1", 3, 4), placement("reward", 2, 3)]
    assert groups(*chain) == WorkerGroups((0,), ((1, 2, 3, 4),))


def test_models_that_share_workers_with_training_directly_or_indirectly_are_in_the_trainer_group() -> None:
    assert groups(placement("actor", 0, 1), placement("ref", 1)).detached == ()
    assert groups(placement("actor", 0), placement("ref", 0, 1), placement("reward", 1, 2)).detached == ()
    mixed = groups(placement("actor", 0), placement("reward", 3), placement("ref", 0, 1), placement("ref@1", 1, 2))
    assert mixed == WorkerGroups((0, 1, 2), ((3,),))


def test_trained_models_and_their_copies_are_in_the_trainer_group_on_any_workers() -> None:
    found = groups(placement("actor", 0), placement("actor@1", 1), placement("critic", 2), placement("critic@1", 3))
    assert found == WorkerGroups((0, 1, 2, 3))
    trained = [node("actor", "train_step"), node("ref", "train_step")]
    assert groups(placement("actor", 0), placement("ref", 1), mfcs=trained).detached == ()


def test_a_further_layout_of_the_actor_is_detached_if_a_step_can_do_without_it() -> None:
    own = [placement("actor", 0), placement("actor@1", 1), placement("critic", 2), placement("critic@1", 3)]
    assert groups(*own, on_missing="wait") == WorkerGroups((0, 2, 3), ((1,),))
    assert groups(placement("actor", 0), placement("actor@1", 1), placement("ref", 1), on_missing="stop").detached == (
        (1,),
    )
    assert groups(placement("actor", 0, 1), placement("actor@1", 1), on_missing="wait").detached == ()


@pytest.mark.parametrize("mode", ["sync", "train_only"])
def test_modes_that_restart_no_worker_alone_have_one_group(mode: str) -> None:
    assert groups(placement("actor", 0), placement("ref", 1), mode=mode) == WorkerGroups((0, 1))


@given(st.integers(0, 10_000))
def test_groups_partition_the_workers_and_split_no_model(seed: int) -> None:
    rng = Random(seed)
    names = ["actor", *rng.sample(["ref", "ref@1", "reward", "reward@1", "critic", "actor@1"], rng.randint(0, 6))]
    placements = [placement(name, *sorted(rng.sample(range(7), rng.randint(1, 3)))) for name in names]
    nodes = [node(p.name, "train_step" if p.name in ("actor", "critic") else "inference") for p in placements]
    found = worker_groups_of(placements, nodes, TrainConfig(), num_workers=7, mode="async")
    members = [worker for group in found.all for worker in group]
    assert sorted(members) == list(range(7))
    for each in placements:
        of = {found.of(worker) for worker in each.workers}
        assert len(of) == 1
        assert each.role in ("ref", "reward") or of == {found.trainer}
    for group in found.detached:
        assert list(group) == sorted(group)
        assert any(set(each.workers) <= set(group) for each in placements)
    assert WorkerGroups.of_config([list(group) for group in found.all], 7) == found


def test_the_configs_of_a_run_name_the_detached_groups(tmp_path) -> None:
    def load(*overrides: str) -> ExperimentConfig:
        config = tmp_path / "c.yaml"
        config.write_text(
            f"experiment: e\nmodel_path: {tmp_path}\nprompts: {{path: {tmp_path}/p.jsonl}}\n"
            f"rollout: {{tasks: {{default: {{reward: '{tmp_path}/r.py:reward'}}}}}}\n"
        )
        return load_experiment(config, overrides)

    config = load("allocation=transformers.d1+d2+ref_inf:d1", "train.ppo.kl_coef=0.1")
    assert placed_groups(config)[0] == WorkerGroups((0, 1), ((2,),))
    for spec in plan(config, attempt=1, num_prompts=8):
        if spec.kind in ("master", "model_worker"):
            assert spec.config.worker_groups == [[0, 1], [2]]
    assert placed_groups(load("allocation=transformers.d1+d2", "train.ppo.kl_coef=0.1"))[0].detached == ()
    with pytest.raises(ConfigError):
        load("allocation=transformers.d1+d2+ref_inf:d1")


# ------------------------------------------------------------------------------------------------------------ incarnations


def test_a_group_is_complete_when_all_workers_have_connected_in_its_newest_incarnation() -> None:
    group = GroupIncarnations([2, 3])
    assert group.number == 0
    assert not group.connected(2, 0)
    assert group.connected(3, 1)  # the earlier incarnation is over for both workers
    assert (group.number, group.missing) == (None, [2])
    assert not group.connected(2, 1)
    assert (group.number, group.missing) == (1, [])
    assert not group.connected(2, 0)  # a late message
    assert group.number == 1


@given(st.lists(st.tuples(st.sampled_from([4, 5, 6]), st.integers(0, 4)), max_size=30))
def test_each_incarnation_begins_once_and_no_earlier_one_returns(words: list[tuple[int, int]]) -> None:
    group, begun, whole = GroupIncarnations([4, 5, 6]), [0], [0]
    for worker, number in words:
        if group.connected(worker, number):
            begun.append(number)
        if group.number is not None and group.number != whole[-1]:
            whole.append(group.number)
    assert begun == sorted(set(begun))
    assert whole == sorted(set(whole))
    assert set(whole) <= set(begun)


def test_work_is_repeated_in_the_next_incarnation_and_missing_data_is_requested_within_a_limit() -> None:
    repeats = Repeats(10.0)
    assert repeats.first_incarnation(GroupEndedError(), 0, 0.0) == 1
    assert repeats.first_incarnation(UnfetchedError(), 1, 5.0) == 1
    assert repeats.first_incarnation(UnfetchedError(), 1, 15.0) == 1
    assert repeats.first_incarnation(UnfetchedError(), 2, 16.0) == 2  # another incarnation has the full limit again
    assert repeats.first_incarnation(UnfetchedError(), 2, 26.0) == 2
    with pytest.raises(UnfetchedError, match="the first cause"):
        repeats.first_incarnation(UnfetchedError("the first cause"), 2, 26.1)
    assert repeats.first_incarnation(GroupEndedError(), 2, 1000.0) == 3


# ------------------------------------------------------------------------------------------------------------- holders of data


def test_data_in_transit_does_not_count_as_held() -> None:
    tracker = StorageTracker(WorkerGroups(detached=((5,),)))
    tracker.add(0, ["a"], ["tokens"])
    tracker.apply([RedistribStep("bcast", 0, [1], [["a"]], ["tokens"])])
    tracker.add(5, ["a"], ["tokens", "ref"])
    assert tracker.holders == {"a": {"tokens": {0, 1}}}  # holders in the trainer group
    assert tracker.there == {"a": {"tokens": {0, 5}, "ref": {5}}}
    tracker.forget([5])
    assert tracker.there == {"a": {"tokens": {0}, "ref": set()}}
    tracker.add(5, ["b"], ["ref"])
    assert tracker.drop(["a", "b"]) == [0, 1, 5]
    assert len(tracker) == 0


def test_each_pair_is_fetched_once_from_a_holder() -> None:
    there = {
        "a": {"tokens": {0, 5}, "mask": {0}},
        "b": {"tokens": {1}, "mask": {1}},
        "c": {"tokens": {0, 1}, "mask": {0, 1}},
    }
    fetches = plan_fetches({5: ["a", "b", "c"]}, ["tokens", "mask"], there, [0, 1])
    found = {(f.source, f.targets, f.keys): f.ids for f in fetches}
    assert found == {
        (0, (5,), ("mask",)): ("a",),
        (1, (5,), ("tokens", "mask")): ("b",),
        (0, (5,), ("tokens", "mask")): ("c",),
    } or (sum(len(f.ids) * len(f.keys) for f in fetches) == 5)
    assert all(f.source in there[group][key] for f in fetches for group in f.ids for key in f.keys)
    with pytest.raises(ValueError, match="key 'mask' of id 'a', which worker 5 needs"):
        plan_fetches({5: ["a"]}, ["mask"], there, [1])


@given(st.integers(0, 10_000))
def test_fetches_bring_each_worker_its_missing_pairs_exactly_once(seed: int) -> None:
    rng = Random(seed)
    ids, keys, sources = [f"g{i}" for i in range(rng.randint(1, 6))], ["x", "y", "z"], range(3)
    there = {
        group: {key: {rng.randrange(3), *(worker for worker in (3, 4) if rng.random() < 0.3)} for key in keys}
        for group in ids
    }
    needed = {worker: rng.sample(ids, rng.randint(0, len(ids))) for worker in (3, 4)}
    fetched = []
    for fetch in plan_fetches(needed, keys, there, sources):
        assert fetch.source in sources
        fetched += [(fetch.targets[0], group, key) for group in fetch.ids for key in fetch.keys]
        assert all(fetch.source in there[group][key] for group in fetch.ids for key in fetch.keys)
    lacking = {
        (w, group, key) for w, of in needed.items() for group in of for key in keys if w not in there[group][key]
    }
    assert len(fetched) == len(set(fetched))
    assert set(fetched) == lacking
