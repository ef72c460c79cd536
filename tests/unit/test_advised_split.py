"""The advice about an idle side, against all splits tried: on three workloads at a set pace."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from asyncrl.cli.advice import advise
from tests.support.paced_split import Workload

DEVICES = 8


@pytest.mark.parametrize(
    ("workload", "present", "title"),
    [
        (Workload(generation=12.0, training=3.0), 4, "the trainer is idle"),
        (Workload(generation=2.0, training=10.0), 4, "the servers are idle"),
        (Workload(generation=5.0, training=5.0), 6, "the servers are idle"),
    ],
    ids=["generation is slow", "training is slow", "both are equal"],
)
def test_the_idle_side_is_named_and_the_split_is_within_a_tenth_of_the_best(
    workload: Workload, present: int, title: str
) -> None:
    tried = {servers: workload.step_s(servers, DEVICES - servers) for servers in range(1, DEVICES)}
    (found,) = advise(workload.run(present, DEVICES - present))
    assert found.title == title
    advised, share = re.search(r"about (\d) should generate .* A step then takes about (\d+)%", found.remedy).groups()  # type: ignore[union-attr]
    assert tried[int(advised)] <= 1.1 * min(tried.values())
    assert tried[present] > 1.2 * min(tried.values())
    assert int(share) / 100 == pytest.approx(tried[int(advised)] / tried[present], abs=0.15)


def test_bursts_of_tokens_do_not_count_as_what_servers_can_generate() -> None:
    """A server that catches up after a pause emits several times its rate for a moment."""
    run = Workload(generation=5.0, training=5.0).run(1, DEVICES - 1)
    bursts = tuple(
        tuple((tenth, tokens * (4 if tenth % 15 == 0 else 1)) for tenth, tokens in server)
        for server in run.newest_tokens
    )
    (found,) = advise(replace(run, newest_tokens=bursts))
    assert found.title == "the trainer is idle"
    assert "about 4 should generate" in found.remedy


def test_a_run_at_the_best_split_gets_no_advice_to_change_it() -> None:
    workload = Workload(generation=12.0, training=4.0)
    tried = {servers: workload.step_s(servers, DEVICES - servers) for servers in range(1, DEVICES)}
    best = min(tried, key=lambda servers: tried[servers])
    assert not any("should generate" in found.remedy for found in advise(workload.run(best, DEVICES - best)))
