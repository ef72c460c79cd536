"""The workers of a detached reference are killed and frozen in mid-run. They restart alone, and the final weights equal those of an
undisturbed run.

eta = 0, greedy decoding and one response a prompt make the runs deterministic, as in test_resume.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from whole_runs import DETERMINISTIC, LEARNABLE, Gate, resumed, starting

from asyncrl.testing.runs import RunHandle, assert_nothing_left, make_tiny_run, train_steps
from asyncrl.weights.checkpoints import checkpoint_dir
from asyncrl.weights.lineage import audit
from tests.support.replays import final_weights

pytestmark = [pytest.mark.timeout(1800), pytest.mark.release]

STEPS, BATCH, LIMIT_S = 40, 4, 400.0
# Numbers of steps allowed before each strike, after the last strike, and in total. On a machine of any speed, the run still goes on
# at each strike and has steps left afterwards.
ALLOWED = (12, 22, 32, 38, STEPS)
TRAINERS = ("master/0", "model_worker/0")
REFERENCE = ("model_worker/1", "model_worker/2")  # a detached group of two ranks
EXACT = [
    *DETERMINISTIC,
    Gate.OVERRIDE,
    "allocation=transformers.d1+d1+ref_inf:d2",
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    "train.ppo.advantage_norm=batch",
    "train.ppo.kl_coef=0.5",
    "runtime.frozen_after_s=12",  # a busy machine may delay a start by up to 6 s
]


STEADY: list[str] = []
MOVING = ["train.ref.update_interval=2", "train.ref.update_share=0.5"]  # the reference follows the actor


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("detached"), num_prompts=STEPS * BATCH)


@pytest.fixture(scope="module")
def gate(config: Path) -> Gate:
    return Gate(config, BATCH, LEARNABLE)


@pytest.fixture(scope="module")
def start(config: Path, gate: Gate) -> Iterator[Callable[..., RunHandle]]:
    with starting(config, *EXACT) as start_run:
        yield start_run


def pids(run: RunHandle, names: tuple[str, ...]) -> dict[str, int]:
    return {name: run.worker(name).pid for name in names}


def strike(run: RunHandle, name: str, number: int) -> None:
    """Send the signal `number` to the worker. Return once all of the reference's workers have been replaced."""
    before = pids(run, REFERENCE)
    os.kill(before[name], number)

    def replaced() -> bool:
        try:
            now = pids(run, REFERENCE)
        except AssertionError:  # one of them has not started yet
            return False
        return not set(now.values()) & set(before.values())

    run.wait_until(replaced, f"others took the places of {before}", LIMIT_S)
    assert not any(psutil.pid_exists(pid) for pid in before.values())


def goes_on(run: RunHandle, num_steps: int = 3) -> None:
    count = len(train_steps(run.run_dir)) + num_steps
    run.wait_until(lambda: len(train_steps(run.run_dir)) >= count, f"{num_steps} more steps", LIMIT_S)


@pytest.mark.parametrize("reference", [pytest.param(STEADY, id="steady"), pytest.param(MOVING, id="moving")])
def test_it_comes_back_alone_and_the_weights_are_those_of_an_undisturbed_run(
    start: Callable[..., RunHandle], gate: Gate, reference: list[str], request: pytest.FixtureRequest
) -> None:
    trial = request.node.callspec.id
    gate.open()
    whole = start(*reference, f"trial={trial}_whole")
    assert whole.wait(LIMIT_S) == 0, whole.output()

    allowed = iter(ALLOWED)
    gate.let(next(allowed))
    run = start(*reference, f"trial={trial}_struck")
    goes_on(run)
    others = pids(run, (*TRAINERS, "generation_server/0", "gserver_manager/0", "rollout_worker/0"))
    for name, number in (
        ("model_worker/1", signal.SIGKILL),
        ("model_worker/2", signal.SIGSTOP),
        ("model_worker/2", signal.SIGKILL),
    ):
        strike(run, name, number)
        gate.let(next(allowed))
        goes_on(run)
    assert pids(run, tuple(others)) == others, "nobody else was started again"
    gate.let(next(allowed))
    assert run.wait(LIMIT_S) == 0, run.output()

    told = " ".join(run.output().split())
    assert "model_worker/1 was killed by signal SIGKILL" in told
    assert "its worker group (model_worker/1, model_worker/2) is started again at once (1 of" in told
    assert "model_worker/2 froze" in told
    assert "the trainer group" not in told
    assert [folder.name for folder in sorted((run.run_dir / "logs").glob("attempt_*"))] == ["attempt_1"]
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps, found.trained) == ([], True, STEPS, STEPS * BATCH)
    assert (found.voided_steps, [stretch.attempt for stretch in found.lineage]) == (0, [1])
    assert_nothing_left(run.run_dir)

    one, other = train_steps(whole.run_dir), train_steps(run.run_dir)
    for key in ("reward/mean", "batch/num_generated_tokens", "kl/sequence_mean", "actor/grad_norm"):
        assert [step[key] for step in one] == [step[key] for step in other], key
    expected, weights = final_weights(whole.run_dir), final_weights(run.run_dir)
    assert expected.keys() == weights.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []
    assert abs(one[-1]["kl/sequence_mean"]) > 1e-4, "the reference is another model than the actor by then"


def test_a_moving_reference_has_the_same_weights_in_the_trainer_group_and_detached_and_after_a_resume(
    start: Callable[..., RunHandle], gate: Gate
) -> None:
    steps = "train.max_steps=12"
    gate.let(12)
    together = start(*MOVING, "trial=together", "allocation=transformers.d1+d1", steps)
    assert together.wait(LIMIT_S) == 0, together.output()
    detached = [*MOVING, "trial=resumed", "allocation=transformers.d1+d1+ref_inf:d1", "checkpoint.every_steps=3", steps]
    gate.let(9)
    run = start(*detached)
    run.wait_until(checkpoint_dir(run.run_dir, 1, 6).exists, "the second checkpoint", LIMIT_S)
    run.close()
    gate.let(12)
    assert not (run.run_dir / "summary.json").exists(), "the run was over before it was killed"
    with resumed(run.run_dir) as again:
        assert again.wait(LIMIT_S) == 0, again.output()
    expected, weights = final_weights(together.run_dir), final_weights(run.run_dir)
    assert [name for name, tensor in expected.items() if not torch.equal(weights[name], tensor)] == []
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, 12)
    assert [stretch.attempt for stretch in found.lineage] == [1, 2]
