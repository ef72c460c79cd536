"""Simulates many seeds on several cores. For a failing seed, finds a small set of faults that still makes it fail.

Seeds run in separate interpreters with a fixed hash seed, so that sets of strings have the same order everywhere. A failing seed
then fails in the same way on any machine with the same code and the same Python.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from tests.simulation.scenario import Fault, Scenario, scenario_of

if TYPE_CHECKING:
    from tests.simulation.run import Outcome

_CHUNK = 10  # seeds per task of a worker process
_HASH_SEED = "PYTHONHASHSEED"
_TRIES = 200  # most simulations for shrinking


@dataclass(frozen=True)
class Result:
    """Result of one seed, without its events."""

    seed: int
    violation: str
    num_steps: int
    virtual_s: float
    num_faults: int


@dataclass(frozen=True)
class Progress:
    """Progress of a campaign."""

    num_seeds: int
    num_steps: int
    virtual_s: float
    wall_s: float
    failed: Result | None = None


@dataclass(frozen=True)
class Explained:
    """A simulated seed with its events. If the seed fails and shrinking is on, this is its shrunk scenario (see `shrunk`)."""

    violation: str
    scenario: Scenario
    digest: str
    events: tuple[str, ...]
    log: tuple[str, ...] = ()


def campaign(
    first: int, count: int, *, jobs: int, bug: str = "", faults: bool = True, **changes: Any
) -> Iterator[Progress]:
    """Simulate `count` seeds from `first` on. After a failure no further seeds are submitted, but submitted ones still run. The
    last Progress has the failing seed with the lowest number among those that ran, if any. changes: of each seed's scenario."""
    began = time.monotonic()
    num_seeds = num_steps = 0
    virtual_s = 0.0
    failed: Result | None = None
    chunks = iter([range(start, min(start + _CHUNK, first + count)) for start in range(first, first + count, _CHUNK)])
    with _interpreters(jobs) as pool:
        pending: set[Future[list[Result]]] = set()
        while True:
            while failed is None and len(pending) < 2 * jobs and (seeds := next(chunks, None)) is not None:
                pending.add(pool.submit(_simulate_seeds, seeds, bug, faults, changes))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for result in sorted((result for chunk in done for result in chunk.result()), key=lambda one: one.seed):
                num_seeds += 1
                num_steps += result.num_steps
                virtual_s += result.virtual_s
                if result.violation and (failed is None or result.seed < failed.seed):
                    failed = result
            yield Progress(num_seeds, num_steps, virtual_s, time.monotonic() - began, failed)


def explain(
    seed: int,
    *,
    bug: str = "",
    shrink: bool = True,
    faults: bool = True,
    log: bool = False,
    extra: tuple[Fault, ...] = (),
) -> Explained:
    """Simulate a seed again and keep its events. If it fails, shrink its scenario, unless `shrink` is False. extra: faults in
    addition to the seed's."""
    with _interpreters(1) as pool:
        return pool.submit(_explain, seed, bug, shrink, faults, log, extra).result()


@contextmanager
def _interpreters(jobs: int) -> Iterator[ProcessPoolExecutor]:
    before = os.environ.get(_HASH_SEED)
    os.environ[_HASH_SEED] = "0"  # interpreters read this at their start
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            yield pool
    finally:
        if before is None:
            del os.environ[_HASH_SEED]
        else:
            os.environ[_HASH_SEED] = before


# -------------------------------------------------------------------------------------------------- in those interpreters


def _simulate_seeds(seeds: range, bug: str, faults: bool, changes: dict[str, Any]) -> list[Result]:
    from tests.simulation import seams
    from tests.simulation.bugs import BUGS
    from tests.simulation.run import simulate

    results = []
    with seams.installed(BUGS[bug] if bug else ()):
        for seed in seeds:
            outcome = simulate(scenario_of(seed, faults=faults, **changes))
            number = len(outcome.scenario.faults)
            results.append(Result(seed, outcome.violation, outcome.num_steps, outcome.virtual_s, number))
            if outcome.violation:
                break
    return results


def _explain(seed: int, bug: str, shrink: bool, faults: bool, log: bool, extra: tuple[Fault, ...] = ()) -> Explained:
    from tests.simulation import seams
    from tests.simulation.bugs import BUGS
    from tests.simulation.run import simulate

    scenario = scenario_of(seed, faults=faults)
    scenario = replace(scenario, faults=(*scenario.faults, *extra))
    with seams.installed(BUGS[bug] if bug else ()):
        outcome = simulate(scenario, keep_events=True)
        if shrink and outcome.violation:
            outcome = shrunk(outcome, lambda smaller: simulate(smaller, keep_events=True))
    return Explained(outcome.violation, outcome.scenario, outcome.digest, tuple(map(str, outcome.events)))


def shrunk(outcome: Outcome, simulate: Callable[[Scenario], Outcome]) -> Outcome:
    """Shrink a scenario: try fewer faults, then shorter and simpler ones. Keep each change with which the same invariant is still
    broken; the details may differ. At most _TRIES simulations."""
    name, tries = outcome.violation.partition(":")[0], 0

    def still(scenario: Scenario) -> bool:
        nonlocal outcome, tries
        if tries >= _TRIES:
            return False
        tries += 1
        again = simulate(scenario)
        if again.violation.partition(":")[0] != name:
            return False
        outcome = again
        return True

    smaller = True
    while smaller:
        smaller = False
        for index in range(len(outcome.scenario.faults)):
            faults = outcome.scenario.faults
            if still(replace(outcome.scenario, faults=(*faults[:index], *faults[index + 1 :]))):
                smaller = True
                break
    for simple in (
        replace(outcome.scenario, reject_share=0.0, release_share=0.0, slow_share=0.0),
        replace(outcome.scenario, reject_share=0.0),
        replace(outcome.scenario, release_share=0.0),
        replace(outcome.scenario, slow_share=0.0),
    ):
        if simple != outcome.scenario and still(simple):
            break
    for index in range(len(outcome.scenario.faults)):
        for simpler in _simpler(outcome.scenario.faults[index]):
            faults = outcome.scenario.faults
            still(replace(outcome.scenario, faults=(*faults[:index], simpler, *faults[index + 1 :])))
    return outcome


def _simpler(fault: Fault) -> Iterator[Fault]:
    if fault.lasts_s > 0.1:
        yield replace(fault, lasts_s=fault.lasts_s / 4)
        yield replace(fault, lasts_s=fault.lasts_s / 2)
    if fault.event and fault.at > 0:
        yield replace(fault, at=0.0)
