"""train.streaming: a step trains on groups before its batch is complete. The trainer is killed while half of a batch is missing.

eta = 0, greedy decoding and one response a prompt make the runs deterministic, as in test_resume.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import DETERMINISTIC, LEARNABLE, Gate, resumed

from asyncrl.testing.runs import RunHandle, assert_nothing_left, journal, launch, make_tiny_run, train_steps
from asyncrl.weights.lineage import audit
from tests.support.replays import final_weights

pytestmark = pytest.mark.timeout(900)

STEPS, BATCH, HALF = 6, 8, 4
STRIKE = 3  # the trainer is killed in the step after this one
LIMIT_S = 200.0
PARTS = "streaming/parts"
EXACT = [
    *DETERMINISTIC,
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    "train.optimizer.eps=1e-6",
    "train.ppo.advantage_norm=none",
    "train.ppo.minibatches=1",
    "train.ppo.kl_coef=0.1",
    "train.ppo.kl_adaptive=true",
    "train.ppo.kl_horizon=100",
    "checkpoint.every_steps=1",
    Gate.OVERRIDE,
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("streaming"), num_prompts=STEPS * BATCH)


@pytest.fixture(scope="module")
def gate(config: Path) -> Gate:
    """Holds half batches: let(2 * n + 1) allows n steps and the first half of the next."""
    return Gate(config, HALF, LEARNABLE)


@pytest.fixture(scope="module")
def whole(config: Path, gate: Gate) -> Path:
    """A run without streaming."""
    with launch(config, *EXACT, "trial=whole") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    assert all(PARTS not in step for step in train_steps(run.run_dir))
    return run.run_dir


def assert_same_run(found: Path, expected: Path, config: Path) -> None:
    start = load_file(next((config.parent / "model").glob("*.safetensors")))
    ours, theirs = final_weights(found), final_weights(expected)
    assert max(float((start[name] - tensor).abs().max()) for name, tensor in theirs.items()) > 1e-3
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    steps, others = ({step["step"]: step for step in train_steps(run_dir)} for run_dir in (found, expected))
    assert list(steps) == list(others)
    for number, step in steps.items():
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "batch/num_tokens", "kl/coef", "actor/entropy"):
            assert step[name] == pytest.approx(others[number][name], rel=1e-3, abs=1e-6), (number, name)


def wait_for_half_a_batch(run: RunHandle, attempt: int) -> None:
    """Until the master has stored the first half of the batch after step STRIKE."""
    half = {(0, STRIKE * BATCH + place) for place in range(HALF)}

    def stored() -> bool:
        events = [event for event in journal(run.run_dir) if event["event"] == "stored" and event["attempt"] == attempt]
        return half <= {tuple(event["prompt"]) for event in events}

    run.wait_until(stored, f"half a batch in attempt {attempt}", LIMIT_S)


def test_the_trainer_dies_in_a_step_that_has_begun(config: Path, gate: Gate, whole: Path) -> None:
    with gate.shut(2 * STRIKE + 1), launch(config, *EXACT, "trial=streamed", "train.streaming=true") as run:
        wait_for_half_a_batch(run, attempt=1)
        run.worker("model_worker/0").kill()
        wait_for_half_a_batch(run, attempt=2)
        gate.open()
        assert run.wait(LIMIT_S) == 0, run.output()
    parts = {step["step"]: step.get(PARTS, 1) for step in train_steps(run.run_dir)}
    assert parts[STRIKE + 1] > 1
    assert audit(run.run_dir).problems == []
    assert_same_run(run.run_dir, whole, config)
    assert_nothing_left(run.run_dir)


@pytest.mark.release
def test_ppo_in_parts(config: Path, gate: Gate) -> None:
    """Values, returns and advantages of the whole batch, two minibatches, two passes. The trainer is killed within a step, the CPU
    worker of the advantages in another one."""
    settings = [
        *(entry for entry in EXACT if not entry.startswith(("train.ppo.advantage_norm", "train.ppo.minibatches"))),
        "train.algorithm=ppo",
        "train.ppo.gae_lambda=0.9",
        "train.ppo.minibatches=2",
        "train.ppo.epochs=2",
        "train.critic.minibatches=2",
        "train.critic.value_norm=true",
        "train.critic.optimizer.eps=1e-6",
    ]
    gate.open()
    with launch(config, *settings, "trial=whole_ppo") as expected:
        assert expected.wait(LIMIT_S) == 0, expected.output()
    layout = "allocation=transformers.d1+d1+advantages:cpu1"
    with (
        gate.shut(2 * STRIKE + 1),
        launch(config, *settings, "trial=ppo", layout, "train.streaming=true") as run,
    ):
        wait_for_half_a_batch(run, attempt=1)
        run.worker("model_worker/0").kill()
        wait_for_half_a_batch(run, attempt=2)
        run.worker("model_worker/1").kill()
        gate.open()
        assert run.wait(LIMIT_S) == 0, run.output()
    parts = {step["step"]: step.get(PARTS, 1) for step in train_steps(run.run_dir)}
    assert parts[STRIKE + 1] > 1
    assert audit(run.run_dir).problems == []
    assert_same_run(run.run_dir, expected.run_dir, config)


@pytest.mark.release
def test_two_ranks_and_a_detached_reference(config: Path, gate: Gate, whole: Path) -> None:
    layout = ["allocation=transformers.d1+d2+ref_inf:d1", "train.streaming_order=balanced"]
    with gate.shut(2 * STRIKE + 1), launch(config, *EXACT, "trial=layout", "train.streaming=true", *layout) as run:
        wait_for_half_a_batch(run, attempt=1)
        gate.open()
        assert run.wait(LIMIT_S) == 0, run.output()
    assert_same_run(run.run_dir, whole, config)


@pytest.mark.release
def test_a_run_that_is_stopped_within_a_step_goes_on(config: Path, gate: Gate, whole: Path) -> None:
    """The last checkpoint is that of the step before. The resumed run repeats the step."""
    with gate.shut(2 * STRIKE + 1):
        with launch(config, *EXACT, "trial=stopped", "train.streaming=true") as run:
            wait_for_half_a_batch(run, attempt=1)
            run.signal(signal.SIGINT)
            assert run.wait(LIMIT_S) == 130, run.output()
        assert train_steps(run.run_dir)[-1]["step"] == STRIKE
        assert_nothing_left(run.run_dir)
    with resumed(run.run_dir) as again:
        assert again.wait(LIMIT_S) == 0, again.output()
    assert audit(run.run_dir).problems == []
    assert_same_run(run.run_dir, whole, config)


@pytest.mark.release
def test_a_recording_is_replayed_in_parts(config: Path, gate: Gate, tmp_path: Path) -> None:
    """mode=train_only: the same recorded responses give the same weights, with and without streaming."""
    gate.open()
    finals = []
    with launch(config, *EXACT, "trial=recorded", "train.max_steps=3", "record.trajectories=true") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    for trial in ("true", "false"):
        again = [f"trial=replayed_{trial}", "mode=train_only", "train.max_steps=3", f"replay.path={run.run_dir}"]
        with launch(config, *EXACT, *again, f"train.streaming={trial}") as replayed:
            assert replayed.wait(LIMIT_S) == 0, replayed.output()
        finals.append(final_weights(replayed.run_dir))
        print(trial, [step.get(PARTS) for step in train_steps(replayed.run_dir)])
    for name, tensor in finals[1].items():
        torch.testing.assert_close(finals[0][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.release
def test_all_functions_on_workers_of_their_own(config: Path, tmp_path: Path) -> None:
    """As Relax runs it: reference, proximal policy and advantages beside the trainer, eta 2, several optimizer steps and parts of a
    batch. A CPU worker is killed on the way."""
    layout = "allocation=transformers.d1+d1+ref_inf:d1+actor_inf:d1+advantages:cpu1"
    settings = [
        "trial=relax",
        layout,
        "manager.max_head_offpolicyness=2",
        "train.streaming=true",
        "train.streaming_parts=4",
        "train.ppo.minibatches=2",
        "train.ppo.use_decoupled_loss=true",
        "train.ppo.recompute_logprob=false",
        "train.actor_inf_on_missing=wait",
    ]
    with launch(config, *[entry for entry in EXACT if entry != Gate.OVERRIDE], *settings) as run:
        run.wait_until(lambda: len(train_steps(run.run_dir)) >= 2, "step 2", LIMIT_S)
        run.worker("model_worker/3").kill()
        assert run.wait(LIMIT_S) == 0, run.output()
    steps = train_steps(run.run_dir)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert {step[PARTS] for step in steps} == {4}
    assert {step["actor/optimizer_steps"] for step in steps} == {2}
    assert all(step["batch/num_groups"] == BATCH for step in steps)
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
    assert_nothing_left(run.run_dir)
