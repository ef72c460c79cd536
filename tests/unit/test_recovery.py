"""Resuming a run: the choice of the checkpoint, the refusal of settings that do not match it, and the config of `resume`."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from asyncrl import __version__
from asyncrl.cli import main as cli
from asyncrl.cli.commands.resume import draft_to_resume
from asyncrl.config.resolve import Facts, resolve, total_steps, with_absolute_paths
from asyncrl.config.schema import (
    CheckpointConfig,
    ConfigError,
    CriticConfig,
    ExperimentConfig,
    LoraConfig,
    OptimizerConfig,
    PromptSourceConfig,
    RoleConfig,
    TaskConfig,
    TrainConfig,
)
from asyncrl.data.prompts import PromptSource
from asyncrl.launch.experiment import load_experiment, validate
from asyncrl.launch.program import plan, save_config, writes_checkpoints
from asyncrl.launch.recovery import resumed_of, starting_point
from asyncrl.launch.rundir import (
    EXPERIMENT_FILE,
    LaunchError,
    RunRecord,
    begin_attempt,
    configs_dir,
    newest_experiment,
    write_record,
)
from asyncrl.launch.slurm import JobRecord, read_job, slurm_dir, write_job
from asyncrl.protocol.trajectories import Locator
from asyncrl.weights.checkpoints import (
    FORMAT,
    Checkpoint,
    DataIdentity,
    Manifest,
    MasterState,
    checkpoint_dir,
    list_checkpoints,
)
from asyncrl.weights.versions import FileEntry
from tests.support.mfcs import declare

SHAPES = {
    "model.embed.weight": (4, 2),
    "model.layers.0.w": (2, 2),
    "model.layers.1.w": (2, 2),
    "lm_head.weight": (4, 2),
}

RECORD = RunRecord(pid=1, attempt=1, experiment="asyncrl", trial="t0", endpoints=[], started=0.0)


class Notices(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def write_model(folder: Path, shapes: dict[str, tuple[int, ...]] = SHAPES) -> str:
    folder.mkdir(parents=True)
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    rows = "".join(json.dumps({"prompt": str(number), "answer": ""}) + "\n" for number in range(10))
    (tmp_path / "p.jsonl").write_text(rows)
    return ExperimentConfig(
        fileroot=str(tmp_path / "runs"),
        model_path=write_model(tmp_path / "model"),
        prompts=PromptSourceConfig(path=str(tmp_path / "p.jsonl")),
        train=TrainConfig(batch_size=2),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "asyncrl" / "t0"


@pytest.fixture
def save(config: ExperimentConfig, run_dir: Path) -> Callable[..., Path]:
    """Returns a function that writes a complete checkpoint of this config."""

    def write(
        attempt: int = 1,
        step: int = 2,
        models: tuple[str, ...] = ("actor",),
        tensors: dict[str, tuple[int, ...]] = SHAPES,
        **fields: Any,
    ) -> Path:
        data = DataIdentity.of(PromptSource(config.prompts, None, config.seed), config.train.num_epochs)
        given = {
            "attempt": attempt,
            "step": step,
            "time": 0.0,
            "parent": None,
            "data": data,
            "done_cursor": Locator(0, 2 * step),
            "done_beyond": [],
            "num_trained": 2 * step,
            "rejected": {},
            "schedules": {},
            "summary": {},
            "recent_rewards": [],
            "recent_outcomes": [],
            "batch_size": 2,
        }
        state = MasterState(**{**given, **fields})
        shapes = {f"{model}.{name}": shape for model in models for name, shape in tensors.items()}
        contents = {
            "state-00000.json": msgspec.json.encode({"shapes": shapes, "steps": {}}),
            "master.json": msgspec.json.encode(state),
        }
        path = checkpoint_dir(run_dir, attempt, step)
        path.mkdir(parents=True)
        for name, content in contents.items():
            (path / name).write_bytes(content)
        entries = {n: FileEntry(len(content), xxhash.xxh3_64(content).hexdigest()) for n, content in contents.items()}
        (path / "checkpoint.json").write_bytes(msgspec.json.encode(Manifest(FORMAT, entries, [0])))
        return path

    return write


def start(config: ExperimentConfig, run_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    notices = Notices()
    return starting_point(config, run_dir, notices), notices


class TestStartingPoint:
    def test_auto_resumes_an_interrupted_run(self, config, run_dir, save):
        assert start(config, run_dir) == (None, [])
        save(step=1)
        path = save(step=2)
        found, notices = start(config, run_dir)
        assert found is not None
        assert (found.path, found.attempt, found.step) == (path, 1, 2)
        assert notices == ["going on from step 2 of attempt 1 (recover=off starts anew)"]

    @pytest.mark.parametrize("mode", ["async", "train_only"])
    def test_auto_does_not_replace_a_complete_run(self, config, run_dir, save, mode):
        save()
        (run_dir / "summary.json").write_text("{}")
        (run_dir / "checkpoints" / "final").mkdir(parents=True)
        with pytest.raises(ConfigError, match=r"would replace its final model.*trial=NAME; .*recover=off") as error:
            start(replace(config, mode=mode), run_dir)
        assert ("asyncrl-launch resume" in str(error.value)) == (mode == "async")
        found, _ = start(replace(config, recover="off"), run_dir)
        assert found is None
        assert begin_attempt(run_dir) == 2  # removes the summary, so the run no longer counts as complete
        assert start(config, run_dir) == (None, [])  # interrupted before its first checkpoint: nothing to resume from

    def test_what_has_changed_since_the_checkpoint_is_told(self, config, run_dir, save):
        save(step=2)
        folder = run_dir / "configs" / "attempt_1"
        folder.mkdir(parents=True)
        save_config(with_absolute_paths(config), folder / "experiment.yaml")
        changed = replace(config, trial="x", train=replace(config.train, optimizer=OptimizerConfig(lr=0.5)))
        _, notices = start(changed, run_dir)
        assert notices == [
            "going on from step 2 of attempt 1, with other values than before: train.optimizer.lr=0.5 "
            f"(was {config.train.optimizer.lr}) (recover=off starts anew)"
        ]
        assert start(config, run_dir)[1] == ["going on from step 2 of attempt 1 (recover=off starts anew)"]

    def test_required_resumes_a_complete_run(self, config, run_dir, save):
        save()
        (run_dir / "summary.json").write_text("{}")
        found, _ = start(replace(config, recover="required"), run_dir)
        assert found is not None

    @pytest.mark.parametrize(
        ("train", "fields", "told"),
        [
            ({"max_steps": 2}, {}, "train.max_steps=2: the run is complete; .* with, for example, train.max_steps=4$"),
            ({}, {"done_cursor": Locator(1, 0)}, "train.num_epochs=1: .*, for example, train.num_epochs=2$"),
            (
                {"target_reward": 0.5},
                {"recent_rewards": [0.5] * 5},
                "train.target_reward=0.5: .* train.target_reward=null$",
            ),
        ],
    )
    def test_the_error_for_a_complete_run_without_further_steps_names_the_field_to_change(
        self, config, run_dir, save, train, fields, told
    ):
        save(**fields)
        config = replace(config, recover="required", train=replace(config.train, **train))
        assert start(config, run_dir)[0] is not None  # interrupted after its last checkpoint: the run still has to end
        (run_dir / "summary.json").write_text("{}")
        with pytest.raises(ConfigError, match=told) as raised:
            start(config, run_dir)
        assert "\n" not in str(raised.value)
        longer = replace(config, train=replace(config.train, max_steps=3, num_epochs=2, target_reward=None))
        assert start(longer, run_dir)[0] is not None

    def test_required_refuses_to_start_without_a_checkpoint(self, config, run_dir):
        with pytest.raises(ConfigError, match=r"^recover='required': there is no checkpoint to resume from in .*t0/ch"):
            start(replace(config, recover="required"), run_dir)

    def test_off_starts_anew_and_later_launches_ignore_the_old_checkpoints(self, config, run_dir, save):
        save()
        assert start(replace(config, recover="off"), run_dir) == (None, [])
        assert list_checkpoints(run_dir) == [(1, 2)]  # the old checkpoint is still there
        begin_attempt(run_dir)
        assert start(config, run_dir) == (None, [])

    def test_an_unreadable_began_anew_file_is_named(self, config, run_dir, save):
        path = save()
        (path.parent / "began_anew.json").write_text("{")
        with pytest.raises(ConfigError, match=r"^recover='auto': .*began_anew.json cannot be read: .*; delete it"):
            start(config, run_dir)

    def test_modes_without_checkpoints_start_anew(self, config, run_dir, save):
        save()
        assert start(replace(config, mode="rollout_only"), run_dir) == (None, [])

    def test_a_new_attempt_has_a_higher_number_than_those_of_checkpoints(self, run_dir, save):
        save(attempt=4)
        assert begin_attempt(run_dir) == 5


class TestMismatches:
    def refused(self, config: ExperimentConfig, run_dir: Path, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            start(config, run_dir)

    def test_other_prompts_are_refused(self, config, run_dir, save):
        save()
        path = Path(config.prompts.path)
        rows = path.read_text().splitlines()
        path.write_text("\n".join(rows[:9]) + "\n")
        self.refused(
            config, run_dir, r"^prompts.path='.*p.jsonl': it has 9 prompts, but the checkpoint of step 2 \(attempt 1\) "
        )
        self.refused(
            config,
            run_dir,
            r"was made with 10 prompts, so the prompts already done cannot be identified; use the original prompts, or ",
        )
        path.write_text("\n".join(rows[::-1]) + "\n")
        self.refused(
            config, run_dir, "it has 10 prompts, .* was made with other prompts, .* or start anew with recover=off"
        )

    def test_another_order_of_prompts_is_refused(self, config, run_dir, save):
        save()
        self.refused(replace(config, seed=2), run_dir, "^seed=2: .* has the prompt order of seed=1; use that")
        unshuffled = replace(config, prompts=replace(config.prompts, shuffle=False))
        self.refused(unshuffled, run_dir, "^prompts.shuffle=False: .* of prompts.shuffle=True")

    def test_fewer_epochs_than_are_done_are_refused(self, config, run_dir, save):
        save(done_cursor=Locator(1, 4))
        self.refused(config, run_dir, "^train.num_epochs=1: .* is in epoch 2; use 2 or more")
        two = replace(config, train=replace(config.train, num_epochs=2))
        assert start(two, run_dir)[0] is not None

    def test_a_checkpoint_with_all_epochs_done_is_accepted(self, config, run_dir, save):
        save(done_cursor=Locator(1, 0))
        assert start(config, run_dir)[0] is not None

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (
                {"model.embed.weight": (5, 2)},
                r"its tensor model.embed.weight has the shape \[5, 2\], not \[4, 2\] as in",
            ),
            (
                {"model.layers.2.w": (2, 2)},
                "its tensor model.layers.2.w is not in the actor of the checkpoint of step 2",
            ),
            ({"model.layers.1.w": None}, "it has no tensor model.layers.1.w, unlike the actor of"),
            ({"model.buffer": (1,)}, ""),
            ({"lm_head.weight": None}, ""),  # for example, because the output layer is tied
        ],
    )
    def test_another_model_is_refused_except_for_buffers_and_tied_tensors(
        self, config, run_dir, save, tmp_path, change, told
    ):
        save()
        shapes = {name: shape for name, shape in {**SHAPES, **change}.items() if shape is not None}
        other = replace(config, model_path=write_model(tmp_path / "other", shapes))
        if told:
            self.refused(other, run_dir, f"^model_path='.*other': {told}")
        else:
            assert start(other, run_dir)[0] is not None

    def test_a_critic_that_the_checkpoint_lacks_is_refused(self, config, run_dir, save):
        save()
        with_critic = replace(config, train=replace(config.train, critic=CriticConfig()))
        self.refused(
            with_critic, run_dir, "^train.critic: the checkpoint .* was made without a critic; leave train.critic out"
        )
        save(step=3, models=("actor", "critic"))
        assert start(with_critic, run_dir)[0] is not None
        assert start(config, run_dir)[0] is not None  # the critic of the checkpoint is not needed

    def test_adapters_are_compared_with_the_layers_that_they_belong_to(self, config, run_dir, save, tmp_path):
        layers = {f"model.layers.{number}.w": (6, 2) for number in range(2)}
        weights = {f"{name}.weight": shape for name, shape in layers.items()}
        parts = {f"{name}.lora_{which}": shape for name in layers for which, shape in (("A", (3, 2)), ("B", (6, 3)))}
        save(tensors=parts)
        base = replace(config, model_path=write_model(tmp_path / "base", weights))
        with_lora = replace(base, train=replace(config.train, lora=LoraConfig(rank=3)))
        assert start(with_lora, run_dir)[0] is not None
        self.refused(base, run_dir, "^train.lora: .* was made with adapters of the actor; set it as then")
        other_rank = replace(base, train=replace(config.train, lora=LoraConfig(rank=4)))
        self.refused(other_rank, run_dir, "^train.lora.rank=4: .* have rank 3")
        other = replace(with_lora, model_path=write_model(tmp_path / "other", dict.fromkeys(weights, (6, 4))))
        self.refused(other, run_dir, r"^model_path=.*has the shape \[6, 4\], not \[6, 2\]")
        save(step=3)
        self.refused(with_lora, run_dir, "^train.lora: .* was made without adapters of the actor; leave it out")

    def test_a_further_role_that_the_checkpoint_lacks_is_refused(self, config, run_dir, save):
        save()
        learn = declare("judge_learn", role="judge", kind="train_step", input_keys=["rewards"])
        train = replace(config.train, mfcs=[learn], roles={"judge": RoleConfig()})
        with_judge = replace(config, train=train)
        told = "^train.roles.judge: the checkpoint .* was made without a judge; leave train.roles.judge out"
        self.refused(with_judge, run_dir, told)
        save(step=3, models=("actor", "judge"))
        assert start(with_judge, run_dir)[0] is not None

    def test_allocation_batch_size_epochs_optimizer_and_workers_may_differ(self, config, run_dir, save):
        save()
        other = replace(
            config,
            allocation="transformers.d2+d2p2m1",
            train=replace(config.train, batch_size=4, num_epochs=3, optimizer=replace(config.train.optimizer, lr=1.0)),
            rollout=replace(config.rollout, num_workers=7),
        )
        assert start(other, run_dir)[0] is not None


def test_the_learning_rate_schedule_ends_with_the_last_step(config, run_dir, save):
    save()
    found, _ = start(config, run_dir)

    def planned(config, checkpoint=found):
        facts = Facts(num_prompts=10, resumed=resumed_of(checkpoint) if checkpoint else None)
        assert resolve(resolve(config, facts), replace(facts, resumed=None)) == resolve(config, facts)
        return resolve(config, facts).train.total_steps

    assert planned(config) == planned(config, None) == total_steps(config, 10)  # the schedule of an uninterrupted run
    other = replace(config, train=replace(config.train, batch_size=4))
    assert planned(other) == 2 + 2  # 4 of 10 prompts are done
    assert planned(replace(other, train=replace(other.train, max_steps=3))) == 3
    assert planned(replace(other, train=replace(other.train, total_steps=100))) == 100


def test_the_masters_config_has_the_checkpoint_fields(config):
    config = replace(config, rollout=replace(config.rollout, tasks={"default": TaskConfig(reward="m:f")}))
    master = next(s.config for s in plan(config, attempt=2, num_prompts=10, resume="/c") if s.kind == "master")
    assert (master.resume, master.checkpoint) == ("/c", config.checkpoint)
    sync = replace(config, mode="sync", allocation="d1")
    assert writes_checkpoints(sync)
    assert not writes_checkpoints(replace(config, checkpoint=CheckpointConfig(every_s=0.0)))
    rollouts = replace(config, mode="rollout_only")
    assert not writes_checkpoints(rollouts)
    master = next(s.config for s in plan(rollouts, attempt=2, num_prompts=10) if s.kind == "master")
    assert (master.checkpoint.every_s, master.resume) == (0.0, "")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"recover": "maybe"}, "recover='maybe': .*one of auto, required, off"),
        (
            {"recover": "required", "mode": "rollout_only"},
            "recover='required': mode=rollout_only writes no checkpoints",
        ),
        ({"checkpoint": CheckpointConfig(keep_last=0)}, "checkpoint.keep_last=0: must be at least 1"),
        ({"checkpoint": CheckpointConfig(every_s=-1.0)}, r"checkpoint.every_s=-1.0: must not be negative; 0 switches"),
    ],
)
def test_invalid_recovery_fields_are_refused(config, fields, told):
    with pytest.raises(ConfigError, match=told):
        validate(replace(config, **fields))


def test_a_checkpoint_of_a_newer_release_is_refused_and_no_older_one_replaces_it(config, run_dir, save):
    save(step=1)
    manifest = save(step=2) / "checkpoint.json"
    manifest.write_text(f'{{"format": {FORMAT + 1}, "files": []}}')
    with pytest.raises(
        ConfigError,
        match=rf"s00000002 has format {FORMAT + 1}; this is asyncrl {__version__}, which reads format {FORMAT}",
    ):
        start(config, run_dir)


def cut_short(content: bytes) -> bytes:
    """Return the first half, without newlines at its end. Where the half ends depends on the lengths of the paths in it."""
    return content[: len(content) // 2].rstrip(b"\n")


DAMAGES = {
    "truncated": cut_short,
    "empty": lambda _: b"",
    "garbage": lambda _: b"\x80\xff{]",
    "NULs": lambda content: b"\0" * len(content),
}


@pytest.mark.parametrize("damage", DAMAGES)
class TestDamagedFiles:
    """Damage to the files that a resume reads. See test_journal.py for metrics and journals, test_checkpoints.py for tensors."""

    @pytest.mark.parametrize("name", ["checkpoint.json", "master.json", "state-00000.json"])
    def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(self, config, run_dir, save, name, damage):
        save(step=1)
        file = save(step=2) / name
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
        found, notices = start(config, run_dir)
        assert found is not None
        assert found.step == 1
        assert notices[0].startswith("the checkpoint of step 2, attempt 1, is torn; using the one before it: ")
        assert name in notices[0]

    def test_a_damaged_began_anew_file_is_refused(self, config, run_dir, save, damage):
        save()
        start(replace(config, recover="off"), run_dir)
        file = run_dir / "checkpoints" / "recover" / "began_anew.json"
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
        with pytest.raises(ConfigError, match=r"began_anew.json cannot be read: .*; delete it"):
            start(config, run_dir)

    def test_a_damaged_config_is_refused(self, config, run_dir, damage):
        file = configs_dir(run_dir, 1) / EXPERIMENT_FILE
        with_reward = replace(config, rollout=replace(config.rollout, tasks={"default": TaskConfig(reward="m:f")}))
        save_config(with_reward, file)
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
        with pytest.raises(ConfigError, match=f"{file} is empty or cut short; remove it") as raised:
            draft_to_resume(run_dir, []).checked()
        assert "`asyncrl-launch run CONFIG recover=required` with a config that you name" in str(raised.value)

    def test_a_damaged_run_record_is_refused(self, run_dir, damage):
        run_dir.mkdir(parents=True)
        write_record(run_dir, RECORD)
        file = run_dir / "run.json"
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
        with pytest.raises(LaunchError, match=f"{file} cannot be read"):
            draft_to_resume(run_dir, []).checked()

    def test_a_damaged_slurm_record_is_refused(self, run_dir, damage):
        slurm_dir(run_dir).mkdir(parents=True)
        write_job(run_dir, JobRecord(job_id="7", script="", output="job-7.out"))
        file = slurm_dir(run_dir) / "job.json"
        file.write_bytes(DAMAGES[damage](file.read_bytes()))
        with pytest.raises(LaunchError, match=f"{file} cannot be read: .*; delete it if no job of the run is left"):
            read_job(run_dir)


def test_a_run_of_a_newer_release_is_refused_before_its_config_is_read(config, run_dir):
    file = configs_dir(run_dir, 1) / EXPERIMENT_FILE
    save_config(config, file)
    file.write_text(file.read_text() + "not_known_yet: 1\n")
    (run_dir / "run.json").write_text('{"format": 2, "release": "9.9", "pids": [1]}')
    told = rf"was written by asyncrl 9\.9 in format 2; this is asyncrl {__version__}, which supports format 1"
    with pytest.raises(LaunchError, match=told):
        draft_to_resume(run_dir, []).checked()


class TestResume:
    def test_the_config_is_saved_complete_and_readable_only_by_its_owner(self, config, run_dir, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        config = replace(
            config,
            model_path="model",
            fileroot="runs",
            rollout=replace(config.rollout, tasks={"default": TaskConfig(reward="r.py:f", env_args={"api_key": "s3"})}),
        )
        for attempt in (1, 2):
            save_config(with_absolute_paths(config), configs_dir(run_dir, attempt) / EXPERIMENT_FILE)
        (configs_dir(run_dir, 3)).mkdir()  # an attempt of a restarted trainer group saves no config of the experiment
        kept = newest_experiment(run_dir)
        assert kept == configs_dir(run_dir, 2) / EXPERIMENT_FILE
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        monkeypatch.chdir("/")
        again = load_experiment(kept)
        assert again == with_absolute_paths(again)
        assert again.model_path == str(tmp_path / "model")
        assert again.rollout.tasks["default"] == TaskConfig(reward=f"{tmp_path}/r.py:f", env_args={"api_key": "s3"})

    def test_resume_without_a_config_prints_the_remedy(self, tmp_path, capsys):
        assert cli.main(["resume", str(tmp_path)]) == 2
        told = capsys.readouterr().out.replace("\n", " ")
        assert "no run was started there; `asyncrl-launch run CONFIG recover=required` continues with a config" in told
        assert cli.main(["resume", str(tmp_path / "nowhere")]) == 2
        assert "is not a folder; name the folder of a run" in capsys.readouterr().out.replace("\n", " ")
