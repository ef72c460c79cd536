"""Rollouts to disk with one process started by the test, then training on them twice, then an inspection."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.data.trajectories import list_recording, read_trajectory, recording_dir
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import RunHandle, assert_nothing_left, journal, launch, make_tiny_run, train_steps
from asyncrl.weights.versions import tensor_files, verify_version, version_dir

pytestmark = pytest.mark.timeout(900)

BATCHES, BATCH = 3, 2
LIMIT_S = 300.0


# Four random tokens are mostly four different ones. If that were the reward, no group might have a learning signal.
REWARD = """\
def reward(prompt, completion, answer):
    return sum(map(ord, completion)) / 1000
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    config = make_tiny_run(tmp_path_factory.mktemp("tiny"), num_prompts=50)
    (config.parent / "reward.py").write_text(REWARD)
    return config


@pytest.fixture(scope="module")
def rolled_out(tiny):
    """A finished run and its external rollout worker, started from the command that the run printed."""
    with launch(
        tiny,
        "mode=rollout_only",
        "trial=rollouts",
        f"train.max_steps={BATCHES}",
        "debug.leave_out=[rollout_worker/0]",
        f"debug.wait_s={LIMIT_S}",
    ) as run:
        printed = run.wait_for_output("--pdb", LIMIT_S)
        command = next(line for line in printed.splitlines() if "rollout_worker_0.yaml --pdb" in line)
        by_hand = subprocess.run(
            command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert run.wait(LIMIT_S) == 0, run.output() + by_hand.stderr
        yield run, by_hand


def replay(tiny: Path, trial: str, source: Path) -> RunHandle:
    return launch(
        tiny,
        "mode=train_only",
        f"trial={trial}",
        f"replay.path={source}",
        f"manager.max_head_offpolicyness={BATCHES - 1}",
        "train.max_steps=0",
        "record.trajectories=true",
        "train.ppo.proximal_pass=always",
    )


@pytest.fixture(scope="module")
def trained(tiny, rolled_out):
    """Folders of two runs trained on the same rollouts: one on the original recording, one on the recording of the first."""
    run_dirs = [rolled_out[0].run_dir]
    for trial in ("one", "two"):
        with replay(tiny, trial, run_dirs[-1]) as run:
            assert run.wait(LIMIT_S) == 0, run.output()
            run_dirs.append(run.run_dir)
    return run_dirs[1:]


def test_what_is_rolled_out_is_on_disk(rolled_out, tiny):
    run, _ = rolled_out
    recorded = [read_trajectory(file) for file in list_recording(recording_dir(run.run_dir, 1))]
    assert [(r.header.step, r.header.position) for r in recorded] == [
        (b, p) for b in range(BATCHES) for p in range(BATCH)
    ]
    assert {r.header.trained for r in recorded} == {False}
    assert len({r.header.meta.locator for r in recorded}) == BATCHES * BATCH
    initial = WeightVersion(1, 0)
    assert {v for r in recorded for v in r.header.meta.version_start + r.header.meta.version_end} == {initial.pack()}
    published = version_dir(run.run_dir, "actor", initial)
    verify_version(published, initial)
    (weights,) = tensor_files(published)
    assert weights.read_bytes() == (tiny.parent / "model" / "model.safetensors").read_bytes()
    assert [entry.name for entry in published.parent.iterdir()] == [str(initial)]  # nothing was trained
    assert not (run.run_dir / "checkpoints").exists()
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["mode"], summary["groups"], summary["version"]) == ("rollout_only", BATCHES * BATCH, 0)
    rewards = [reward for r in recorded for reward in r.header.meta.rewards]
    assert summary["mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert f"{BATCHES * BATCH} groups" in run.output()
    assert_nothing_left(run.run_dir)


def test_a_left_out_process_is_started_by_hand(rolled_out):
    run, by_hand = rolled_out
    assert by_hand.returncode == 0, by_hand.stderr
    assert "rollout_worker/0 has started" in run.output()
    logs = {file.name for file in (run.run_dir / "logs" / "attempt_1").iterdir()}
    assert "rollout_worker_0.log" not in logs  # the launcher started only the other workers
    assert "generation_server_0.log" in logs


def test_the_same_rollouts_give_the_same_weights(trained, tiny):
    one, two = (load_file(tensor_files(version_dir(run, "actor", WeightVersion(1, BATCHES)))[0]) for run in trained)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-6)
    start = load_file(tiny.parent / "model" / "model.safetensors")
    assert max(float((start[name] - tensor).abs().max()) for name, tensor in one.items()) > 1e-5


def test_a_replay_trains_on_the_recorded_batches_and_counts_their_age(rolled_out, trained):
    recorded = [read_trajectory(file).header for file in list_recording(recording_dir(rolled_out[0].run_dir, 1))]
    for run_dir in trained:
        steps = [event["groups"] for event in journal(run_dir) if event["event"] == "trained"]
        assert [group["ticket"] for groups in steps for group in groups] == [
            header.meta.ticket_id for header in recorded
        ]
        assert [record["offpolicy/head_max"] for record in train_steps(run_dir)] == [0.0, 1.0, 2.0]
        configs = {file.stem for file in (run_dir / "configs" / "attempt_1").iterdir()}
        assert configs == {"experiment", "inputs", "master_0", "model_worker_0", "replayer_0"}
        assert_nothing_left(run_dir)


def test_recording_beside_training_holds_what_the_mfcs_made(rolled_out, trained):
    first = read_trajectory(list_recording(recording_dir(trained[0], 1))[0])
    source = read_trajectory(list_recording(recording_dir(rolled_out[0].run_dir, 1))[0])
    assert "proximal_logprobs" in first.sample.keys
    sampled = source.sample.data["loss_mask"]
    behaviour, proximal = source.sample.data["packed_logprobs"], first.sample.data["proximal_logprobs"]
    assert abs(behaviour[sampled] - proximal[sampled]).max() < 1e-3  # the same weights sampled and recomputed
    assert first.header.trained
    assert set(first.header.meta.keys) == set(source.sample.keys)


def inspect(*arguments) -> str:
    command = [sys.executable, "-m", "asyncrl.cli.main", "inspect", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_inspect(trained):
    answer = json.loads(inspect(trained[0], "--json"))
    assert answer["total"] == BATCHES * BATCH
    view = answer["trajectory"]
    assert (view["step"], view["trained"], view["notes"]) == (BATCHES - 1, True, [])
    responses = [row for row in view["tokens"] if row["loss_mask"]]
    assert "".join(row["text"] for row in responses) == view["sequences"][0]["text"]
    assert all(isinstance(row["advantage"], float) for row in responses)
    assert all(row["proximal_logprob"] < 0 for row in responses)
    text = inspect(trained[0], "--ticket", view["ticket"])
    for expected in (view["ticket"], view["prompt_text"], "advantage", "proximal", f"train step {BATCHES}"):
        assert expected in text
