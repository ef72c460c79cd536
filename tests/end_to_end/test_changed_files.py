"""A file that a run reads is removed, replaced or edited while the run trains, or before it is resumed.

No process goes on with content that the others do not have. The run names the file, and loses no finished step.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from whole_runs import resumed

from asyncrl.cli import main as cli
from asyncrl.testing.runs import RunHandle, journal, launch, make_tiny_run, processes_of
from asyncrl.weights.checkpoints import list_checkpoints
from asyncrl.weights.lineage import audit
from asyncrl.weights.versions import side_files

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 300.0
STEPS = 30
REWARD = """\
import time
from beside import worth

def reward(prompt, completion, answer):
    time.sleep(0.1)  # the run is at work long enough for the test to change it
    return worth(completion)
"""
BESIDE = """\
def worth(completion):
    return float(len(set(completion)))
"""
CHANGED = (
    "files that the run reads have changed since it began, and a process that starts would read them as they are now:"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny run. Its model folder is that of a Hub cache: a link to a snapshot, whose files are links to blobs."""
    folder = tmp_path / "files"
    config = make_tiny_run(folder, num_prompts=2 * STEPS)
    (folder / "reward.py").write_text(REWARD)
    (folder / "beside.py").write_text(BESIDE)
    snapshot, blobs = folder / "hub" / "snapshots" / "0", folder / "hub" / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    (folder / "model").rename(snapshot)
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("../../blobs") / file.name)
    (folder / "model").symlink_to(snapshot)
    return config


def start(config: Path, *overrides: str) -> RunHandle:
    return launch(config, f"train.max_steps={STEPS}", "checkpoint.every_s=3600", *overrides)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))


def kill(run: RunHandle, victim: str) -> None:
    if victim != "nursery":
        run.worker(victim).kill()
        return
    nurseries = [process for process in processes_of(run.run_dir) if "judge_main.py" in " ".join(process.cmdline()[:4])]
    assert nurseries
    for process in nurseries:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def last_trained(run_dir: Path) -> int:
    return max(event["step"] for event in journal(run_dir) if event["event"] == "trained")


def repoint(folder: Path) -> None:
    """The link `model` leads to another snapshot, with another generation config."""
    other = folder / "hub" / "snapshots" / "1"
    shutil.copytree(folder / "model", other)
    edit(other / "generation_config.json", "{", '{"top_k": 7, ')
    (folder / "model").unlink()
    (folder / "model").symlink_to(other)


Change = Callable[[Path], None]
CHANGES: dict[str, tuple[str, str, Change]] = {  # the process that is killed, the file that is named, the change
    "prompts in another order": (
        "rollout_worker/0",
        "prompts.path: {folder}/prompts.jsonl was changed",
        lambda folder: (
            (folder / "prompts.jsonl").write_text(
                "".join(reversed((folder / "prompts.jsonl").read_text().splitlines(keepends=True)))
            )
            and None
        ),
    ),
    "prompts cut short": (
        "rollout_worker/0",
        "prompts.path: {folder}/prompts.jsonl was changed",
        lambda folder: (folder / "prompts.jsonl").write_text((folder / "prompts.jsonl").read_text()[:200]) and None,
    ),
    "prompts removed": (
        "rollout_worker/0",
        "prompts.path: {folder}/prompts.jsonl was removed",
        lambda folder: (folder / "prompts.jsonl").unlink(),
    ),
    "reward edited": (
        "nursery",
        "rollout.tasks.default.reward: {folder}/reward.py was changed",
        lambda folder: edit(folder / "reward.py", "return worth(completion)", "return -1.0"),
    ),
    "module of the reward edited": (
        "nursery",
        "rollout.tasks.default.reward: {folder}/beside.py was changed",
        lambda folder: edit(folder / "beside.py", "float(len(set(completion)))", "-1.0"),
    ),
    "reward removed": (
        "nursery",
        "rollout.tasks.default.reward: {folder}/reward.py was removed",
        lambda folder: (folder / "reward.py").unlink(),
    ),
    "blob of the tokenizer gone": (
        "generation_server/0",
        "model_path: {folder}/model/tokenizer.json was removed",
        lambda folder: (folder / "hub" / "blobs" / "tokenizer.json").unlink(),
    ),
    "model link repointed": (
        "generation_server/0",
        "model_path: {folder}/model/generation_config.json was changed",
        repoint,
    ),
}
QUICK = ("prompts in another order", "module of the reward edited", "blob of the tokenizer gone")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.release) for name in CHANGES]
)
def test_no_process_starts_with_other_content(config: Path, name: str) -> None:
    """The run ends with a checkpoint of its last step. With the file as it was, `resume` trains the rest."""
    victim, named, change = CHANGES[name]
    folder = config.parent
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept, symlinks=True)
    with start(config) as run:
        run.wait_for_step(2, LIMIT_S)
        change(folder)
        kill(run, victim)
        assert run.wait(LIMIT_S) == 1, run.output()
        said = run.output()
    assert CHANGED in said
    assert named.format(folder=folder) in said
    ((attempt, step),) = list_checkpoints(run.run_dir)
    assert (attempt, step) == (1, last_trained(run.run_dir))
    assert step < STEPS, "the run was over before the process was killed"
    for entry in ("model", "hub"):
        (folder / entry).unlink() if (folder / entry).is_symlink() else shutil.rmtree(folder / entry)
    shutil.copytree(kept, folder, symlinks=True, dirs_exist_ok=True)
    with resumed(run.run_dir) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert f"going on from step {step} of attempt 1" in run.output()
        assert "have changed" not in run.output()
    found = audit(run.run_dir)
    assert (found.problems, found.steps, found.voided_steps, found.complete) == ([], STEPS, 0, True)


def test_the_trainer_group_does_not_begin_with_another_model(config: Path) -> None:
    """Its steps since the newest checkpoint are lost with it. It is not started again and again."""
    folder = config.parent
    with start(config, "checkpoint.every_steps=1") as run:
        run.wait_until(lambda: list_checkpoints(run.run_dir), "a checkpoint", LIMIT_S)
        (folder / "model").rename(folder / "away")
        kill(run, "master/0")
        assert run.wait(LIMIT_S) == 1, run.output()
        assert f"model_path: {folder}/model/config.json was removed" in run.output()
        assert "asyncrl-launch resume" in run.output()
    assert sorted(entry.name for entry in (run.run_dir / "logs").glob("attempt_*")) == ["attempt_1", "attempt_2"]
    (folder / "away").rename(folder / "model")
    with resumed(run.run_dir) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    assert (audit(run.run_dir).problems, audit(run.run_dir).complete) == ([], True)


def test_processes_that_run_need_no_file_again(config: Path) -> None:
    """Versions and the final model have config and tokenizer as they were when the run began."""
    folder = config.parent
    expected = side_files(folder / "model")
    with start(config) as run:
        run.wait_for_step(2, LIMIT_S)
        shutil.rmtree(folder / "hub")
        for name in ("prompts.jsonl", "reward.py", "beside.py"):
            (folder / name).unlink()
        assert run.wait(LIMIT_S) == 0, run.output()
    newest = max((run.run_dir / "weights" / "actor").iterdir())
    assert side_files(newest) == expected
    final = side_files(run.run_dir / "checkpoints" / "final")
    assert final.keys() == expected.keys()
    assert [name for name, content in final.items() if name != "config.json" and content != expected[name]] == []


def test_a_resumed_run_names_what_has_changed(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other answers, other code and another generation config are named. Another vocabulary is refused."""
    folder = config.parent
    with start(config) as run:
        run.wait_for_step(2, LIMIT_S)
        assert cli.main(["stop", str(run.run_dir)]) == 0
        run.wait(LIMIT_S)
    vocabulary = (folder / "model" / "tokenizer.json").read_text()
    tokenizer = json.loads(vocabulary)
    ids = tokenizer["model"]["vocab"]
    first, second = list(ids)[-2:]
    ids[first], ids[second] = ids[second], ids[first]
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with resumed(run.run_dir) as run:
        assert run.wait(LIMIT_S) == 2, run.output()
        assert f"model_path='{folder}/model': the vocabulary of its tokenizer is not that of the run" in run.output()
    (folder / "model" / "tokenizer.json").write_text(vocabulary)
    edit(folder / "prompts.jsonl", '"answer": ""', '"answer": "7"')
    edit(folder / "beside.py", "float(len", "2.0 * float(len")
    repoint(folder)
    with resumed(run.run_dir) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        said = run.output()
    assert "warning: files that the run reads have changed since its last launch" in said
    assert f"prompts.path: {folder}/prompts.jsonl was changed" in said
    assert f"rollout.tasks.default.reward: {folder}/beside.py was changed" in said
    assert f"model_path: {folder}/model/generation_config.json was changed" in said
    found = audit(run.run_dir)
    assert (found.problems, found.steps, found.voided_steps, found.complete) == ([], STEPS, 0, True)
