"""Simulated runs: they keep the invariants, replay exactly, and fail if a known bug is planted.

Simulations run in separate interpreters (tests/simulation/campaign.py), so nothing is replaced in this one.
"""

import itertools
import os
from pathlib import Path

import pytest

from asyncrl.launch.experiment import validate
from tests.simulation.bugs import BUGS
from tests.simulation.campaign import campaign, explain
from tests.simulation.scenario import NUM_STEPS, Fault, scenario_of

JOBS = min(4, os.cpu_count() or 1)
SEEDS = 300
BUG_SEEDS = 1000  # each known bug must be found within this many seeds
# The bugs were: a restart that waited for the end of an outage never came when the outage was prolonged; two sockets had the same
# address.
FAILED_ONCE = [201191, 211075]


def run(first, count, **options):
    *_, last = campaign(first, count, jobs=JOBS, **options)
    return last


@pytest.mark.oracle
@pytest.mark.timeout(600)
def test_seeds_have_no_violation_and_enough_steps():
    done = run(0, SEEDS)
    assert done.failed is None, f"python -m tests.simulation --trace {done.failed.seed}: {done.failed.violation}"
    assert done.num_seeds == SEEDS
    assert done.num_steps >= NUM_STEPS * SEEDS


@pytest.mark.release
@pytest.mark.timeout(600)
def test_seeds_in_which_requests_finish_under_their_version_have_no_violation():
    """The asynchronous rule holds although servers sample with versions older than the one that they serve."""
    done = run(0, 40, interrupt="finish", shares_devices=False, full_every=1, generates=False)
    assert done.failed is None, f"seed {done.failed.seed}: {done.failed.violation}"
    assert done.num_steps >= NUM_STEPS * 40


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_a_seed_that_failed_once_has_no_violation(seed):
    assert run(seed, 1).failed is None


@pytest.mark.oracle
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS)
def test_a_known_bug_is_found(bug):
    done = run(0, BUG_SEEDS, bug=bug)
    assert done.failed is not None, f"{BUG_SEEDS} seeds did not find {bug}"


def test_the_oracle_plants_every_known_bug():
    oracle = Path(__file__).parents[1] / "oracle" / "check.py"
    assert [bug for bug in BUGS if f'"{bug}"' not in oracle.read_text(encoding="utf-8")] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 5])
def test_weights_damaged_on_disk_are_replaced_and_the_run_goes_on(seed):
    """A damaged first version is written again, because no newer one is published before servers have loaded it. Later, a newer
    version replaces a damaged one."""
    damage = tuple(Fault("damage", event="published", count=count) for count in (1, 3, 7))
    done = explain(seed, faults=False, extra=damage)
    assert done.violation == ""
    committed = [event for event in done.events if " committed " in event and "/weights/actor/a0001-v00000000" in event]
    assert len(committed) == 2


def test_a_seed_replays_exactly():
    one, other = explain(7), explain(7)
    assert one.violation == ""
    assert one.digest == other.digest
    assert one.events == other.events
    kinds = {word for event in one.events for word in event.split()[1:3]}  # third word, or second without a process
    expected = {
        "granted",
        "answered",
        "pushed",
        "stored",
        "acked",
        "trained",
        "committed",
        "published",
        "loaded",
        "echoed",
    }
    assert expected <= kinds  # the invariants check only recorded events


def test_on_shared_devices_responses_go_on_over_turns_of_training():
    seeds = [seed for seed in range(200) if (found := scenario_of(seed)).shares_devices and found.eta >= 2]
    assert len(seeds) > 10  # the campaign has them
    done = [explain(seed, faults=False) for seed in seeds[:2]]
    assert [one.violation for one in done] == ["", ""]
    assert all(sum(" pushed " in event and "mixed=True" in event for event in one.events) > 5 for one in done)


def test_another_seed_is_another_run():
    assert explain(7).digest != explain(8).digest


@pytest.mark.release
@pytest.mark.timeout(300)
def test_a_failing_seed_is_shrunk_to_the_faults_that_make_it_fail():
    """A lease that is never returned needs one fault: the end of its holder."""
    failed = run(0, BUG_SEEDS, bug="lease_never_returned").failed
    shrunk = explain(failed.seed, bug="lease_never_returned")
    assert shrunk.violation.partition(":")[0] == failed.violation.partition(":")[0]
    assert len(shrunk.scenario.faults) <= len(scenario_of(failed.seed).faults)
    assert 1 <= len(shrunk.scenario.faults) <= 2
    whole = explain(failed.seed, bug="lease_never_returned", shrink=False)
    assert whole.violation == failed.violation


def test_the_seed_determines_the_scenario():
    assert scenario_of(11) == scenario_of(11)
    assert scenario_of(11) != scenario_of(12)
    kinds = {fault.kind for seed in range(200) for fault in scenario_of(seed).faults}
    assert kinds == {
        "cut",
        "freeze",
        "kill",
        "late_disk",
        "messages",
        "outage",
        "power",
        "requests",
        "slow_disk",
        "torn",
    }
    assert scenario_of(11, faults=False).faults == ()


def test_scenarios_have_all_features_in_combinations_that_the_checks_accept():
    found = set()
    for scenario in map(scenario_of, range(60)):
        validate(scenario.config())
        names = ("streaming", "reference", "arriving", "has_cpu_worker", "shares_devices", "has_step", "generates")
        features = [name for name in names if getattr(scenario, name)] + ["full_every"] * (scenario.full_every > 1)
        found |= {*features, *itertools.combinations(features, 2)}
    assert {
        *names,
        "full_every",
        ("streaming", "arriving"),
        ("arriving", "has_step"),
        ("streaming", "full_every"),
    } <= found
