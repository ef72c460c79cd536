"""A hybrid allocation has several phases."""

from dataclasses import replace

import pytest

from asyncrl.config.schema import ConfigError, ExperimentConfig, ManagerConfig, TrainConfig, WeightsConfig
from asyncrl.dataflow.phases import phase_after, phases
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.experiment import validate

SHARED, OWN = "transformers.d2@0-1+d2@0-1", "transformers.d2+d2"
HYBRID = replace(
    ExperimentConfig(),
    allocation=f"{SHARED} until 20 then {OWN} until 30 then sglang.d1+d1",
    manager=ManagerConfig(max_head_offpolicyness=4),
    weights=WeightsConfig(transport="broadcast"),
    train=TrainConfig(streaming=True),
)


def test_a_phase_that_shares_devices_neither_streams_nor_broadcasts_and_the_others_keep_the_settings():
    shared, own, last = phases(HYBRID)
    assert [allocation_of(phase).until for phase in (shared, own, last)] == [20, 30, 0]
    assert allocation_of(shared).shared_workers == (0, 1)
    assert (shared.manager.max_head_offpolicyness, shared.weights.transport, shared.train.streaming) == (
        4,
        "disk",
        False,
    )
    for phase, text in ((own, f"{OWN} until 30"), (last, "sglang.d1+d1")):
        assert phase == replace(HYBRID, allocation=text)


@pytest.mark.parametrize(("step", "number"), [(0, 0), (19, 0), (20, 1), (29, 1), (30, 2), (99, 2)])
def test_the_phase_after_a_step(step, number):
    assert phase_after(HYBRID, step) == phases(HYBRID)[number]


def test_a_single_allocation_is_one_phase():
    config = replace(HYBRID, allocation=OWN)
    assert phases(config) == (config,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"allocation": f"{OWN} until 20"}, "every allocation but the last must end at a step"),
        ({"allocation": f"{OWN} then {SHARED}"}, "every allocation but the last must end at a step"),
        ({"allocation": f"{SHARED} until 20 then {OWN} until 20 then {OWN}"}, "each at a later one"),
        ({"allocation": f"{SHARED} until 20 then d2"}, "'d2' is not an allocation"),
        ({"allocation": f"{SHARED} until soon then {OWN}"}, "'soon' in .* is not a step"),
        ({"mode": "sync"}, "needs mode=async and cluster=local"),
        ({"cluster": "hosts"}, "needs mode=async and cluster=local"),
        ({"checkpoint": replace(ExperimentConfig().checkpoint, every_s=0.0)}, "set checkpoint.every_s"),
        (
            {"allocation": f"{OWN} until 20 then transformers.d1p2+d1"},
            "the engine transformers runs data parallel only",
        ),
    ],
)
def test_phases_that_cannot_follow_each_other_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        validate(replace(HYBRID, **changes))
