"""Whole runs with bad input: the run reports the first cause with its remedy, does not hang and loses nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from whole_runs import resumed

from asyncrl.cli import main as cli
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.runs import RunHandle, assert_nothing_left, journal, launch, make_tiny_run
from asyncrl.weights.checkpoints import checkpoint_dir, list_checkpoints, recover_dir, verify
from asyncrl.weights.lineage import audit
from asyncrl.weights.versions import list_versions, role_dir, verify_version, version_dir
from tests.support.etcd_server import EtcdServer

LIMIT_S = 300.0  # limit for one run, on a busy machine

pytestmark = pytest.mark.timeout(1200)

_REWARD = """\
import threading

def reward(prompt, completion, answer):
    if answer == "raise":
        raise KeyError(completion)
    if answer == "hang":
        threading.Event().wait(1000)
    return {"none": None, "nan": float("nan"), "text": "good", "list": [1.0]}.get(answer, float(len(set(completion))))
"""
# Answer of a prompt -> the reason for which the prompt is rejected. "ü" is a prompt for which the tokenizer has no token.
_REASONS = {
    "raise": "reward_error",
    "none": "reward_not_finite",
    "nan": "reward_not_finite",
    "text": "reward_not_finite",
    "list": "reward_not_finite",
    "hang": "reward_timeout",
    "long": "prompt_too_long",
    "ü": "bad_prompt",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


def test_what_will_not_do_is_rejected_with_its_reason_and_all_else_is_trained(config: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number:04d}", "answer": "fine"} for number in range(16)]
    for number, answer in enumerate(_REASONS):
        rows[2 * number] = {"prompt": {"long": "1" * 40, "ü": "ü"}.get(answer, f"{number:04d}"), "answer": answer}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(_REWARD)
    with launch(
        config,
        f"fileroot={tmp_path}",
        f"prompts.path={tmp_path / 'prompts.jsonl'}",
        "prompts.shuffle=false",
        f"rollout.tasks.default.reward={tmp_path / 'reward.py'}:reward",
        "rollout.reward_timeout_s=15",  # long enough for the other prompts' rewards, also on a busy machine
        "manager.max_rejected_share=1.0",
        "train.max_steps=0",
    ) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert_nothing_left(run.run_dir)
        events = journal(run.run_dir)
        rejected = {event["prompt"][1]: event["reason"] for event in events if event["event"] == "rejected"}
        assert rejected == {2 * number: reason for number, reason in enumerate(_REASONS.values())}
        trained = [group["prompt"][1] for event in events if event["event"] == "trained" for group in event["groups"]]
        assert sorted([*trained, *rejected]) == list(range(16))  # each prompt exactly once
        summary = json.loads((run.run_dir / "summary.json").read_text())
        assert summary["rejected"] == {
            "reward_error": 1,
            "reward_not_finite": 4,
            "reward_timeout": 1,
            "prompt_too_long": 1,
            "bad_prompt": 1,
        }
        assert "reward_not_finite: 4" in run.output()


def test_a_reward_that_always_fails_ends_the_run_with_its_error_and_the_remedy(config: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(prompt, completion, answer):\n    return answer[3]\n")
    reward = f"rollout.tasks.default.reward={tmp_path / 'reward.py'}:reward"
    with launch(config, f"fileroot={tmp_path}", reward, "train.max_steps=0") as run:
        assert run.wait(LIMIT_S) == 1, run.output()
        output = run.output()
        assert_nothing_left(run.run_dir)
    assert "failed: master/0 failed" in output
    assert "100% of the last 8 prompts were rejected; manager.max_rejected_share=0.9 is the limit" in output
    assert "reward.py:reward raised IndexError('string index out of range'). Fix the reward function" in output
    assert "Traceback" not in output


# Imported by every interpreter of a run. The class of the refusal is that of tensors that do not fit the model.
_REFUSING = """\
from asyncrl.generation import checks

def refuse(*arguments, **options):
    raise checks.WeightsRefused("the tensors do not fit the model: planted.weight is missing", checks.ErrorClass.PERMANENT)

checks.check_found = refuse
"""


def test_weights_that_every_server_refuses_end_the_run_with_the_cause_on_top(config: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_REFUSING)
    servers = "allocation=transformers.d2+d1"
    with launch(config, f"fileroot={tmp_path}", servers, "train.max_steps=0", env={"PYTHONPATH": str(tmp_path)}) as run:
        assert run.wait(LIMIT_S) == 1, run.output()
        output = run.output()
        log = (run.run_dir / "logs" / "latest" / "gserver_manager_0.log").read_text()
        assert_nothing_left(run.run_dir)
    text = output.partition("\nfailed: ")[2]
    assert re.match(
        r"gserver_manager/0 failed\s+no generation server can load the weights a0001-v00000000, so the run ends\. .*"
        r"generation_server/0, generation_server/1: loading a0001-v00000000 failed: .*the tensors do not fit the model: "
        r"planted\.weight is missing\. .* set model_path to one that both support",
        text,
        re.DOTALL,
    ), output
    assert "Traceback" not in output
    times = [datetime.fromisoformat(line[:19]) for line in log.splitlines() if line[:2] == "20"]
    refused = next(datetime.fromisoformat(line[:19]) for line in log.splitlines() if "did not load" in line)
    assert (times[-1] - refused).total_seconds() < 30


def test_a_disk_that_fills_up_while_the_run_goes_on(config: Path, tmp_path: Path, small_disk: Path) -> None:
    """The disk holds weights, journals and logs. etcd, which a full disk would also stop, is an external one."""
    with (
        EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log") as etcd,
        launch(
            config,
            f"fileroot={small_disk}",
            f"name_resolve.endpoints=[{etcd.endpoint}]",
            "weights.keep=2",
            "train.max_steps=0",
            "train.num_epochs=1000",
        ) as run,
    ):
        run.wait_for_step(2, LIMIT_S)
        fill_until_it_ends(small_disk, run)
        assert run.wait(LIMIT_S) == 1, run.output()
        output = run.output()
        assert_nothing_left(run.run_dir)
        first = next(line for line in output.splitlines() if "could not be written: No space left on device" in line)
        assert first.startswith(str(run.run_dir))
        assert "set fileroot=... to a larger disk" in first
        assert "Traceback" not in output
        versions = role_dir(run.run_dir, "actor")
        assert_versions_are_whole(run.run_dir, interrupted=not first.startswith(str(versions)))


def assert_versions_are_whole(run_dir: Path, *, interrupted: bool = False) -> None:
    """At least one version exists, and the folder holds nothing else.

    interrupted: the run ended for a reason other than a failed version write. It may have ended while it wrote a version or removed
    an old one. Such partial folders do not have the name of a version, and they remain.
    """
    versions = role_dir(run_dir, "actor")
    there = {path.name for path in versions.iterdir()}
    if interrupted:
        there = {name for name in there if not name.endswith((".writing", ".removing"))}
    assert list_versions(versions)
    assert there == {str(version) for version in list_versions(versions)}
    for version in list_versions(versions):
        verify_version(version_dir(run_dir, "actor", version), version)


def fill_until_it_ends(disk: Path, run: RunHandle) -> None:
    """Act as another process that takes all free space, also what the run frees when it removes old files, until the run ends."""
    with (disk / "somebody_elses").open("wb", buffering=0) as file:

        def filled_and_ended() -> bool:
            fill(file)
            return run.popen.poll() is not None

        run.wait_until(filled_and_ended, "the run ended of it", LIMIT_S)


def fill(file) -> None:  # type: ignore[no-untyped-def]
    """Write until the disk is full."""
    try:
        while True:
            file.write(bytes(65536))
    except OSError:
        try:
            while True:
                file.write(b"x")
        except OSError:
            return


def test_a_disk_that_is_full_when_the_model_is_saved(config: Path, tmp_path: Path, mount: Callable[..., Path]) -> None:
    """The disk holds only checkpoints. The weights of the last step are published before the save, and they remain."""
    run_dir = tmp_path / "tiny" / "t0"
    disk = mount("size=20k", run_dir / "checkpoints")
    with launch(config, f"fileroot={tmp_path}", "train.max_steps=1") as run:
        assert run.wait(LIMIT_S) == 1, run.output()
        output = run.output()
        assert_nothing_left(run_dir)
    assert (
        f"model_worker/0 failed\n\n{run_dir}/checkpoints/final could not be written: No space left on device; "
        in output
    )
    assert "20 kB are free on that disk" in output
    assert list(disk.iterdir()) == []
    assert_versions_are_whole(run_dir)
    assert list_versions(role_dir(run_dir, "actor"))[-1] == WeightVersion(1, 1)
    assert not (run_dir / "summary.json").exists()


def test_a_disk_too_small_for_a_run_is_refused_at_its_start(
    config: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", str(config), f"fileroot={small_disk}", "checkpoint.keep_last=2"]) == 2
    told = capsys.readouterr().out.replace("\n", " ")
    assert f"fileroot='{small_disk}': 8.4 MB are free there, but the run needs 130.6 MB" in told
    assert "free space, use a larger disk, or set weights.keep=1" in told
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_under_checkpoints(config: Path, tmp_path: Path, mount: Callable[..., Path]) -> None:
    """Complete checkpoints stay whole. Once there is space, the run goes on from the newest of them."""
    run_dir = tmp_path / "tiny" / "t0"
    disk = mount("size=20m", run_dir / "checkpoints")
    every_2 = [
        "checkpoint.every_steps=2",
        "checkpoint.every_s=0",
        "train.max_steps=0",
    ]  # all 1000 steps: the run does not end before the disk is full
    with launch(config, f"fileroot={tmp_path}", *every_2) as run:
        run.wait_until(lambda: list_checkpoints(run_dir), "a checkpoint was complete", LIMIT_S)
        fill_until_it_ends(disk, run)
        assert run.wait(LIMIT_S) == 1, run.output()
        output = run.output()
        assert_nothing_left(run_dir)
    first = next(line for line in output.splitlines() if "could not be written: No space left on device" in line)
    assert first.startswith(str(recover_dir(run_dir)))
    assert "set fileroot=... to a larger disk" in first
    assert f"To go on from the newest checkpoint: asyncrl-launch resume {run_dir}" in output
    there = list_checkpoints(run_dir)
    assert {path.name for path in recover_dir(run_dir).iterdir()} == {checkpoint_dir(run_dir, *at).name for at in there}
    for at in there:
        verify(checkpoint_dir(run_dir, *at))

    (disk / "somebody_elses").unlink()
    num_steps = there[-1][1] + 20
    with resumed(run_dir, f"train.max_steps={num_steps}") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert_nothing_left(run_dir)
    found = audit(run_dir)
    assert found.problems == []
    assert (found.complete, found.steps) == (True, num_steps)
