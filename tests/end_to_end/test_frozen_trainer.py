"""A frozen trainer: admission stops and memory stays flat. After the trainer wakes up the run goes on as if undisturbed."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from whole_runs import assert_each_prompt_trained_once, assert_nobody_left_behind, launch_sorter

from asyncrl.protocol.names import ACTOR, Names
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import RunHandle, assert_nothing_left, train_steps
from tests.support.live_runs import entry, told_by

STEPS, BATCH, ETA = 36, 16, 2
CAPACITY = (1 + ETA) * BATCH
MASTER_FROZEN_S, TRAINER_FROZEN_S = 8.0, 30.0
MAX_GROWTH_BYTES = 8_000_000  # measured growth: some kilobytes

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


def test_a_run_survives_a_frozen_master_and_frozen_trainers(sorter: Path, tmp_path: Path) -> None:
    with launch_sorter(
        sorter,
        tmp_path,
        f"train.batch_size={BATCH}",
        f"train.max_steps={STEPS}",
        "rollout.group_size=4",
        "eval.prompts=null",
        "runtime.frozen_after_s=0",
    ) as run:
        run.wait_for_step(3, limit_s=300)
        manager = entry(run, Names.gserver_manager)
        master = run.worker("master/0")
        trainers = [run.worker("model_worker/0"), run.worker("model_worker/1")]
        with frozen([master]):
            stands_still(run, manager, MASTER_FROZEN_S)
        run.wait_for_step(train_steps(run.run_dir)[-1]["step"] + 3, limit_s=300)
        with frozen(trainers):
            stands_still(run, manager, TRAINER_FROZEN_S)
        assert train_steps(run.run_dir)[-1]["step"] < STEPS  # the run is not over
        assert run.wait(300) == 0, run.output()
    assert_each_prompt_trained_once(run.run_dir, STEPS, BATCH)
    assert_nobody_left_behind(run.run_dir, ETA)
    assert max(record["offpolicy/head_max"] for record in train_steps(run.run_dir)) <= ETA
    assert_nothing_left(run.run_dir)


@contextmanager
def frozen(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def stands_still(run: RunHandle, manager: str, seconds: float) -> None:
    """While the trainer is frozen, admission stops at the bound. Then no counter changes and memory does not grow."""
    run.wait_until(lambda: has_come_to_rest(run, Ledger.of(run, manager)), f"{CAPACITY} tickets are live", limit_s=120)
    for half in range(2):
        early, before, until = memory(run), Ledger.of(run, manager), time.monotonic() + seconds / 2
        while True:
            left, now = until - time.monotonic(), Ledger.of(run, manager)
            assert now.live + BATCH * now.num_behind <= CAPACITY
            if left <= 0:
                break
            time.sleep(min(left, 0.5))  # the test waits for real time to pass
        if half == 1:  # in the first half, weights on their way to name resolve may still arrive
            assert now == before
            assert now.is_full
        for name, rss in memory(run).items():
            assert rss < early[name] + MAX_GROWTH_BYTES, f"{name} grew from {early[name]} to {rss} bytes"


def has_come_to_rest(run: RunHandle, ledger: Ledger) -> bool:
    """Whether all allowed tickets are live and the newest published version is served. How long this takes is not bounded."""
    published = entry(run, lambda names: names.model_version(ACTOR))
    return ledger.is_full and ledger.served == WeightVersion.parse(published).version


@dataclass(frozen=True)
class Ledger:
    """The manager's counters, as it reports them."""

    live: int
    trained: int
    served: int
    granted: int

    @classmethod
    def of(cls, run: RunHandle, manager: str) -> Ledger:
        text = told_by(run, f"{manager}/metrics")
        names = ("live", "trained_version", "served_version", 'tickets_total{event="granted",reason="train"}')
        found = [re.search(rf"^asyncrl_manager_{re.escape(name)} (\S+)$", text, re.MULTILINE) for name in names]
        assert all(found), text
        return cls(*(int(float(match[1])) for match in found if match))

    @property
    def num_behind(self) -> int:
        """Versions trained but not served. A trainer that froze before it wrote its weights holds one version back."""
        return self.trained - self.served

    @property
    def is_full(self) -> bool:
        return self.live + BATCH * self.num_behind == CAPACITY


def memory(run: RunHandle) -> dict[str, int]:
    names = ("gserver_manager/0", "rollout_worker/0", "rollout_worker/1")
    return {name: run.worker(name).memory_info().rss for name in names}
