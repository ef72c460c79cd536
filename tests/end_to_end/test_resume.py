"""A run killed with its launcher goes on from its newest checkpoint and ends with the weights of an uninterrupted run.

eta = 0, greedy decoding and one response a prompt make it deterministic.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from whole_runs import DETERMINISTIC, LEARNABLE, Gate, resumed

from asyncrl.cli import main as cli
from asyncrl.cli.run_files import read_runs
from asyncrl.testing.runs import (
    RunHandle,
    assert_nothing_left,
    journal,
    launch,
    make_tiny_run,
    processes_of,
)
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.checkpoints import checkpoint_dir, list_checkpoints
from asyncrl.weights.lineage import audit
from tests.support.replays import final_weights

pytestmark = pytest.mark.timeout(900)

STEPS, BATCH, EVERY = 24, 8, 3
LIMIT_S = 300.0
TOLERANCE = 1e-5  # another layout adds the same numbers in another order; seen: 2e-7, for weights that move by 1e-2
EXACT = [
    *DETERMINISTIC,
    f"train.batch_size={BATCH}",
    f"train.max_steps={STEPS}",
    "train.optimizer.schedule=cosine",
    "train.ppo.advantage_norm=batch",
    f"checkpoint.every_steps={EVERY}",
    Gate.OVERRIDE,
]


@dataclass(frozen=True)
class Runs:
    config: Path
    gate: Gate  # shut only while a run is about to be stopped or killed
    whole: Path  # never interrupted
    killed: Path  # killed, then resumed
    elsewhere: Path  # a copy of the killed run with its newest checkpoint torn, resumed in another layout
    torn: int  # step of the torn checkpoint
    whole_one: int  # step of the checkpoint before the torn one
    said: str
    said_elsewhere: str


def kill_everything(run: RunHandle) -> None:
    """Kill all processes, much as a power cut does."""
    run.signal(signal.SIGKILL)
    for process in processes_of(run.run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    run.wait(LIMIT_S)


def written(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that the master reports as written."""
    return [event["step"] for event in journal(run_dir) if event["event"] == "checkpoint"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    run = make_tiny_run(folder, num_prompts=STEPS * BATCH)
    make_tiny_model(folder / "model", hidden_size=32, intermediate_size=64, num_layers=2)  # for two stages
    return run


@pytest.fixture(scope="module")
def gate(config: Path) -> Gate:
    return Gate(config, BATCH, LEARNABLE)


@pytest.fixture(scope="module")
def runs(config: Path, gate: Gate) -> Iterator[Runs]:
    with launch(config, *EXACT, "trial=whole") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        whole = run.run_dir
    with gate.shut(STEPS - 1), launch(config, *EXACT, "trial=killed") as run:
        killed = run.run_dir
        run.wait_until(lambda: len(list_checkpoints(killed)) >= 2, "the second checkpoint", LIMIT_S)
        kill_everything(run)
        assert_nothing_left(killed)
    assert not (killed / "summary.json").exists(), "the run was over before it was killed"
    elsewhere = killed.with_name("elsewhere")
    shutil.copytree(killed, elsewhere, symlinks=True)
    (_, whole_one), (_, torn) = list_checkpoints(elsewhere)[-2:]
    part = next(checkpoint_dir(elsewhere, 1, torn).glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    with resumed(killed) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        said = run.output()
    with resumed(elsewhere, "allocation=transformers.d1+d2p1m1") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        yield Runs(config, gate, whole, killed, elsewhere, torn, whole_one, said, run.output())


def test_it_ends_with_the_weights_of_a_run_that_was_not_interrupted(runs: Runs) -> None:
    """The final weights are equal bit for bit, so the learning rate schedule and the optimizer also went on where they were."""
    expected, found = final_weights(runs.whole), final_weights(runs.killed)
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    start = load_file(next((runs.config.parent / "model").glob("*.safetensors")))
    moved = max(float((start[name] - tensor).abs().max()) for name, tensor in expected.items())
    assert moved > 100 * TOLERANCE  # training has changed the weights; otherwise equal weights would prove nothing


def test_the_summary_counts_the_ages_of_all_steps(runs: Runs) -> None:
    """Steps before the checkpoint count once, and void steps of the killed attempt do not count. eta is 0, so all ages are 0."""
    for run_dir in (runs.whole, runs.killed, runs.elsewhere):
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["offpolicyness"]["head"] == {"0": STEPS * BATCH} == {"0": summary["sequences"]}


def test_it_trains_each_prompt_once(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    step = audit(runs.killed).lineage[0].last
    assert step is not None
    assert step == runs.torn  # the newest checkpoint when the run was killed
    assert f"going on from step {step} of attempt 1 (recover=off starts anew)" in runs.said
    for run_dir, first in ((runs.killed, step), (runs.elsewhere, runs.whole_one)):
        assert cli.main(["audit", str(run_dir)]) == 0
        told = capsys.readouterr().out
        assert f"lineage   attempt 1 to step {first}, then attempt 2 from step {first + 1}\n" in told
        assert f"trained   {STEPS * BATCH} prompts, in {STEPS} steps\n" in told
        found = audit(run_dir)
        trained_in_all = sum(event["event"] == "trained" for event in journal(run_dir))
        assert (found.voided_steps, found.complete) == (trained_in_all - STEPS, True)
    assert audit(runs.elsewhere).voided_steps >= runs.torn - runs.whole_one > 0


def test_its_curves_show_each_step_once(runs: Runs) -> None:
    whole, killed = read_runs([runs.whole, runs.killed])
    assert [record["step"] for record in killed.steps] == list(range(1, STEPS + 1))
    assert [record["reward/mean"] for record in killed.steps] == [record["reward/mean"] for record in whole.steps]
    assert [record["actor/lr"] for record in killed.steps] == [record["actor/lr"] for record in whole.steps]


def test_another_layout_goes_on_from_the_checkpoint_before_a_torn_one(runs: Runs) -> None:
    assert (
        f"warning: the checkpoint of step {runs.torn}, attempt 1, is torn; using the one before it"
        in runs.said_elsewhere
    )
    assert f"going on from step {runs.whole_one} of attempt 1" in runs.said_elsewhere
    found = final_weights(runs.elsewhere)
    for name, tensor in final_weights(runs.whole).items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.release
@pytest.mark.parametrize("layout", ["m2", "m2p2", "d2m2", "d2m2r2", "d2c2"])
def test_tensor_ranks_that_are_killed_end_with_the_weights_of_one_rank(runs: Runs, layout: str) -> None:
    """Each process of the run is killed within a step. Tensor and context ranks split the rows of tokens; `r` makes copies of the
    weights."""
    overrides = [f"allocation=transformers.d1+{layout}", f"trial={layout}"]
    with runs.gate.shut(STEPS - 1), launch(runs.config, *EXACT, *overrides) as run:
        killed = run.run_dir
        run.wait_until(lambda: len(list_checkpoints(killed)) >= 2, "the second checkpoint", LIMIT_S)
        kill_everything(run)
    assert not (killed / "summary.json").exists(), "the run was over before it was killed"
    with resumed(killed) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert "going on from step" in run.output()
    found, expected = final_weights(killed), final_weights(runs.whole)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_run_that_is_told_to_stop_writes_a_checkpoint_first(runs: Runs) -> None:
    """`stop` makes the run write a checkpoint that no schedule would have written. It contains all steps trained before the stop,
    so the resumed run repeats none."""
    options = [*EXACT, "trial=stopped", "checkpoint.every_steps=0", "checkpoint.every_s=3600"]
    with runs.gate.shut(STEPS - 1), launch(runs.config, *options) as run:
        stopped = run.run_dir
        run.wait_for_step(3, LIMIT_S)
        assert not list_checkpoints(stopped)
        assert cli.main(["stop", str(stopped)]) == 0
        assert run.wait(LIMIT_S) == 128 + signal.SIGTERM, run.output()
        said = run.output()
    ((attempt, step),) = list_checkpoints(stopped)
    assert attempt == 1
    assert 3 <= step < STEPS
    assert step == max(event["step"] for event in journal(stopped) if event["event"] == "trained")
    assert f"checkpoint of step {step} is the newest; asyncrl-launch resume {stopped} resumes from it" in said
    with resumed(stopped) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert f"going on from step {step} of attempt 1" in run.output()
    expected = final_weights(runs.whole)
    assert [name for name, tensor in final_weights(stopped).items() if not torch.equal(expected[name], tensor)] == []
    found = audit(stopped)
    assert (found.voided_steps, found.complete) == (0, True)


@pytest.mark.release
def test_told_to_stop_now_it_writes_none(runs: Runs) -> None:
    options = [*EXACT, "trial=now", "checkpoint.every_steps=0", "checkpoint.every_s=3600"]
    with runs.gate.shut(STEPS - 1), launch(runs.config, *options) as run:
        run.wait_for_step(1, LIMIT_S)
        run.worker("master/0").suspend()  # otherwise the master might end before the second signal
        assert cli.main(["stop", str(run.run_dir), "--now"]) == 0
        assert run.wait(LIMIT_S) == 128 + signal.SIGTERM, run.output()
        assert not list_checkpoints(run.run_dir)


def test_few_checkpoints_are_kept(runs: Runs) -> None:
    """The last two checkpoints are kept. One is due every three steps. It is taken a step later if the previous one is still being
    written."""
    for run_dir in (runs.whole, runs.killed, runs.elsewhere):
        done = written(run_dir)
        assert done[0] == EVERY
        assert len(done) > 2
        assert [step for _, step in list_checkpoints(run_dir)] == done[-2:]
        assert len(list((run_dir / "checkpoints" / "recover").iterdir())) == 2


def test_without_a_checkpoint_required_refuses(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(runs.config), *EXACT, "trial=none", "recover=required"]) == 2
    assert "recover='required': there is no checkpoint to resume from in" in capsys.readouterr().out


@pytest.mark.release
def test_a_complete_run_begins_anew(runs: Runs) -> None:
    """With recover=off. Without it, its final model stays."""
    with launch(runs.config, *EXACT, "trial=whole", "train.max_steps=4") as run:
        assert run.wait(LIMIT_S) == 2, run.output()
        assert "would replace its final model" in run.output()
    with launch(runs.config, *EXACT, "trial=whole", "train.max_steps=4", "recover=off") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    assert list_checkpoints(runs.whole) == [
        (2, 3),
        (2, 4),
    ]  # the first of these removed the checkpoints of the earlier run; step 4 is the last step
    found = audit(runs.whole)
    assert ([stretch.attempt for stretch in found.lineage], found.steps, found.problems) == ([2], 4, [])


@pytest.mark.release
def test_a_complete_run_goes_on_for_more_steps(config: Path) -> None:
    """A complete run that is resumed with a higher train.max_steps goes on as if it had never ended. For this the learning rate
    must not depend on the total number of steps."""
    overrides = [option for option in EXACT if option != Gate.OVERRIDE]
    overrides += ["train.optimizer.schedule=constant", "checkpoint.every_steps=0", "checkpoint.every_s=3600"]
    weights = {}
    for trial, steps in (("six", 6), ("three", 3)):
        with launch(config, *overrides, f"trial={trial}", f"train.max_steps={steps}") as run:
            assert run.wait(LIMIT_S) == 0, run.output()
        assert list_checkpoints(run.run_dir) == [(1, steps)]  # no schedule causes a checkpoint
        weights[trial] = run.run_dir
    with resumed(weights["three"]) as run:
        assert run.wait(LIMIT_S) == 2, run.output()
        assert "train.max_steps=3: the run is complete" in run.output()
        assert "train.max_steps=6" in run.output()
    with resumed(weights["three"], "train.max_steps=6") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert "going on from step 3 of attempt 1" in run.output()
    assert list_checkpoints(weights["three"]) == [(1, 3), (2, 6)]
    expected, found = final_weights(weights["six"]), final_weights(weights["three"])
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    told = audit(weights["three"])
    assert (told.problems, told.steps, told.voided_steps, told.complete) == ([], 6, 0, True)


# ------------------------------------------------------------------------------------------- mode=sync, and several models


@pytest.mark.release
def test_mode_sync_with_a_critic_and_a_moving_reference_goes_on_as_well(config: Path, gate: Gate) -> None:
    """Separate generation workers hold a copy of the actor that no checkpoint contains. The reference is a separate model by then.
    The KL coefficient and the value normalization continue too."""
    overrides = [
        *EXACT,
        "mode=sync",
        "allocation=d1+actor_gen:d1",
        "train.critic.value_norm=true",
        "train.ppo.advantage_norm=none",
        "train.ppo.kl_coef=0.1",
        "train.ppo.kl_adaptive=true",
        "train.ref.update_interval=2",
        "train.ref.update_share=0.5",
        "train.max_steps=12",
    ]
    with launch(config, *overrides, "trial=sync_whole") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        whole = run.run_dir
    with gate.shut(11), launch(config, *overrides, "trial=sync_killed") as run:
        killed = run.run_dir
        run.wait_until(lambda: list_checkpoints(killed), "the first checkpoint", LIMIT_S)
        kill_everything(run)
    with resumed(killed) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    for name in ("final", "final-critic"):
        expected, found = (load_file(folder / "checkpoints" / name / "model.safetensors") for folder in (whole, killed))
        assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == []
    one, other = (read_runs([folder])[0].steps for folder in (whole, killed))
    for key in ("reward/mean", "kl/coef", "critic/norm_mean", "actor/lr"):
        assert [step[key] for step in one] == [step[key] for step in other], key
    assert len({step["kl/coef"] for step in one}) > 1
    found = audit(killed)
    assert (found.problems, found.steps, found.trained, len(found.lineage)) == ([], 12, 12 * BATCH, 2)
