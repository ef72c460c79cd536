"""Generation servers and model workers share their devices: they take turns, with the same result as on devices of their own.

On a CPU the device is the memory of the machine, so resident memory shows which side holds it.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from whole_runs import BATCH, ROOT, STEPS, launch_sorter, launch_synchronous, starting, trained_events

from asyncrl.testing.runs import RunHandle, assert_nothing_left, evaluations, journal, make_tiny_run, train_steps
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.lineage import audit
from tests.support.replays import (
    AHEAD,
    LOGPROB_ERROR,
    check_versions_of_tokens,
    final_weights,
    largest_difference,
    recording_of_lineage,
    trained_apart,
)

LIMIT_S = 400.0
SHARED = "allocation=transformers.d2p1m1@0-1+d2p1m1@0-1"
MEGABYTE = 1 << 20

pytestmark = pytest.mark.timeout(1800)


def manager_log(run: RunHandle) -> str:
    return (run.run_dir / "logs" / "attempt_1" / "gserver_manager_0.log").read_text()


def sleeps(run: RunHandle, server: int) -> int:
    """How often a server has released its devices."""
    return len(re.findall(rf"generation_server/{server} sleeps", manager_log(run)))


def test_weights_equal_those_of_a_run_on_devices_of_its_own(
    sorter: Path, synchronous: RunHandle, tmp_path: Path
) -> None:
    with launch_synchronous(sorter, tmp_path, SHARED) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert [len(event["groups"]) for event in trained_events(run.run_dir)] == [BATCH] * STEPS
        expected, weights = final_weights(synchronous.run_dir), final_weights(run.run_dir)
        assert expected.keys() == weights.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        # Asleep at the start, in each of the turns of training, and in the turn that saves the model
        assert {sleeps(run, server) for server in (0, 1)} == {STEPS + 1}
        assert not (run.run_dir / "weights").exists(), (
            "the versions were in shared memory, which does not outlive the run"
        )
        assert_nothing_left(run.run_dir)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunHandle]]:
    config = make_tiny_run(tmp_path / "tiny", num_prompts=4000)
    settings = ("manager.max_head_offpolicyness=0", "train.batch_size=4", "train.max_steps=0")
    with starting(config, "allocation=transformers.d1@0+d1@0", *settings) as start_run:
        yield start_run


@pytest.mark.release
def test_devices_are_shared_until_a_step_and_then_each_side_has_its_own(start: Callable[..., RunHandle]) -> None:
    run = start(
        "allocation=transformers.d1@0+d1@0 until 2 then transformers.d1+d2",
        "manager.max_head_offpolicyness=2",
        "train.max_steps=4",
    )
    assert run.wait(LIMIT_S) == 0, run.output()
    steps = [(event["attempt"], event["step"]) for event in journal(run.run_dir) if event["event"] == "trained"]
    assert steps == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert "next phase of the allocation begins after step 2" in run.output()
    assert sleeps(run, 0) > 0
    later = run.run_dir / "logs" / "attempt_2"
    assert "sleeps" not in (later / "gserver_manager_0.log").read_text()
    assert (later / "model_worker_1.log").exists()
    assert not list((run.run_dir / "logs" / "attempt_1").glob("model_worker_1*"))
    assert audit(run.run_dir).problems == []
    assert_nothing_left(run.run_dir)


def stop(run: RunHandle) -> None:
    run.signal(signal.SIGINT)
    assert run.wait(LIMIT_S) == 130, run.output()
    assert_nothing_left(run.run_dir)


def steps_of(run: RunHandle, attempt: int) -> int:
    return sum(event["event"] == "trained" and event["attempt"] == attempt for event in journal(run.run_dir))


def is_trainings_turn(run: RunHandle) -> bool:
    return re.findall(r"generation_server/0 (sleeps|serves)", manager_log(run))[-1:] == ["sleeps"]


def freeze_trainer_in_its_turn(run: RunHandle) -> psutil.Process:
    """Freeze the model worker while the server sleeps for it. In generation's turn it would receive no trajectories."""
    worker = run.worker("model_worker/0")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if is_trainings_turn(run):
            worker.suspend()
            time.sleep(0.5)
            if is_trainings_turn(run):
                return worker
            worker.resume()
    raise AssertionError(f"training had no turn:\n{run.output()}")


def test_a_server_killed_asleep_and_a_trainer_killed_while_servers_sleep_lose_nothing(
    start: Callable[..., RunHandle],
) -> None:
    run = start("checkpoint.every_steps=1", "runtime.frozen_after_s=0")
    run.wait_for_step(3, LIMIT_S)
    worker = freeze_trainer_in_its_turn(run)
    run.worker("generation_server/0").kill()
    run.wait_for_output("generation_server/0 was killed by signal SIGKILL", LIMIT_S)
    before = sleeps(run, 0)
    run.wait_until(lambda: sleeps(run, 0) > before, "the new server was told to sleep", LIMIT_S)
    worker.resume()
    step = len(train_steps(run.run_dir))
    run.wait_for_step(step + 2, LIMIT_S)

    worker = freeze_trainer_in_its_turn(run)
    worker.kill()
    run.wait_until(lambda: steps_of(run, attempt=2) >= 2, "two steps of the second attempt", LIMIT_S)
    stop(run)
    found = audit(run.run_dir)
    assert found.problems == []
    assert [stretch.attempt for stretch in found.lineage] == [1, 2]


@pytest.mark.release
def test_responses_go_on_over_turns_and_the_updates_equal_those_on_devices_of_their_own(
    start: Callable[..., RunHandle], tmp_path: Path
) -> None:
    """With eta = 2, and a trainer that is killed in its turn: what the run has trained is trained again on devices of its own."""
    run = start(*AHEAD, "train.max_steps=12", "checkpoint.every_steps=1", "runtime.frozen_after_s=0")
    run.wait_for_step(4, LIMIT_S)
    freeze_trainer_in_its_turn(run).kill()
    assert run.wait(LIMIT_S) == 0, run.output()
    assert audit(run.run_dir).problems == []
    assert [stretch.attempt for stretch in audit(run.run_dir).lineage] == [1, 2]
    assert max(step["offpolicy/head_max"] for step in train_steps(run.run_dir)) == 2

    recorded = recording_of_lineage(run.run_dir, tmp_path / "recorded")
    metas = [group.header.meta for group in recorded]
    mixed = [meta for meta in metas if min(meta.version_start) < max(meta.version_end)]
    assert len(mixed) > 3, f"{len(mixed)} of {len(metas)} groups were interrupted by a turn of training"
    with trained_apart(tmp_path / "tiny" / "tiny.yaml", tmp_path / "recorded", *AHEAD) as apart:
        assert apart.wait(LIMIT_S) == 0, apart.output()
        weights, begun = final_weights(run.run_dir), load_file(tmp_path / "tiny" / "model" / "model.safetensors")
        assert largest_difference(weights, final_weights(apart.run_dir)) < 1e-5
        assert largest_difference(weights, begun) > 1e-3
        assert check_versions_of_tokens(recorded, apart.run_dir) > 10 * LOGPROB_ERROR
    assert_nothing_left(run.run_dir)


@pytest.mark.release
@pytest.mark.parametrize("eta", [0, 2])
def test_the_colocated_mode_of_relax_learns(sorter: Path, tmp_path: Path, eta: int) -> None:
    """Its roles actor, critic and rollout on the same devices, the actor in two tensor ranks, and the reference on the actor's
    devices. Its max_staleness is 0; with 2 responses go on over the turns."""
    with launch_sorter(
        sorter,
        tmp_path,
        "allocation=transformers.d2@0-1+d1m2@0-1",
        f"manager.max_head_offpolicyness={eta}",
        "train.max_steps=36",
        config=ROOT / "configs" / "actor_critic_cpu.yaml",
    ) as run:
        assert run.wait(1500) == 0, run.output()
        start, *_, end = evaluations(run.run_dir)
        assert start["eval/sampled_reward"] < 0.25
        assert end["eval/sampled_reward"] >= 0.80
        assert end["eval/greedy_reward"] >= 0.93
        assert max(step["offpolicy/head_max"] for step in train_steps(run.run_dir)) == eta
        assert audit(run.run_dir).problems == []
        assert_nothing_left(run.run_dir)


class Memory(threading.Thread):
    """Samples the resident memory of two processes at the same times, until `end`."""

    def __init__(self, *processes: psutil.Process) -> None:
        super().__init__(daemon=True)
        self._processes, self._ended = processes, threading.Event()
        self.samples: list[tuple[int, ...]] = []

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._ended.wait(0.01):
                self.samples.append(tuple(process.memory_info().rss for process in self._processes))

    def end(self) -> None:
        self._ended.set()
        self.join()


@pytest.mark.release
def test_the_servers_cache_and_the_trainers_optimizer_never_exist_at_the_same_time(
    start: Callable[..., RunHandle], tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "large", hidden_size=512, intermediate_size=2048, num_layers=4)
    optimizer = 2 * 4 * sum(tensor.numel() for tensor in load_file(tmp_path / "large" / "model.safetensors").values())
    cache = 4096 * 32 * 4 * 2 * 2 * 128 * 4  # pages * tokens * layers * (keys, values) * heads * their size * float32
    run = start(f"model_path={tmp_path / 'large'}", "generation.num_blocks=4096", "eval.prompts=null")
    run.wait_for_step(2, LIMIT_S)
    memory = Memory(run.worker("generation_server/0"), run.worker("model_worker/0"))
    memory.start()
    step = len(train_steps(run.run_dir))
    run.wait_for_step(step + 6, LIMIT_S)
    memory.end()
    stop(run)
    assert len(memory.samples) > 100
    server, worker = zip(*memory.samples, strict=True)
    assert max(server) - min(server) > 0.8 * cache, "the cache came and went"
    assert max(worker) - min(worker) > 0.8 * optimizer, "the optimizer came and went"
    both = [
        (one - min(server), other - min(worker))
        for one, other in memory.samples
        if one - min(server) > 0.5 * cache and other - min(worker) > 0.5 * optimizer
    ]
    assert both == [], f"{len(both)} of {len(memory.samples)} samples: {[x // MEGABYTE for x in both[0]]} MB"
