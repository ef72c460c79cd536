"""`asyncrl-launch rejudge`: recorded responses judged again, by real judge processes."""

from __future__ import annotations

import json
import shutil

import msgspec
import pytest

from asyncrl.cli.main import main
from asyncrl.config.schema import SamplingConfig
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.trajectories import TrajectoryHeader, recording_dir, write_trajectory
from asyncrl.launch.experiment import load_experiment
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample, summary_of
from asyncrl.testing.runs import make_tiny_run

TEXTS = [["ab", "aaa"], ["abcd", ""], ["b", "bb"]]
OTHER_REWARD = """
import time

def stricter(prompt, completion, answer):
    assert completion != "aaa", "no answer"
    return 10 * len(completion) + int(prompt == "0001")

def same(prompt, completion, answer, finished, task, row):
    assert finished and task == "default" and row["prompt"] == prompt
    return float(len(set(completion)))

def slow(prompt, completion, answer):
    time.sleep(600 if completion == "ab" else 0)
    return 0.0
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run that has recorded three groups of two responses, with the rewards of its reward function."""
    folder = tmp_path_factory.mktemp("rejudge")
    file = make_tiny_run(folder, num_prompts=8)
    (folder / "other.py").write_text(OTHER_REWARD)
    config = load_experiment(file)
    tokenizer = load_tokenizer(config.model_path)
    source = PromptSource(config.prompts, tokenizer, config.seed)
    run_dir = folder / "runs" / "tiny" / "t0"
    (run_dir / "configs" / "attempt_1").mkdir(parents=True)
    shutil.copy(file, run_dir / "configs" / "attempt_1" / "experiment.yaml")
    (run_dir / "run.json").write_text("{}")
    recording = recording_dir(run_dir, 1)
    recording.mkdir(parents=True)
    for position, texts in enumerate(TEXTS):
        write_group(recording, source.get(Locator(0, position)), position, texts, tokenizer)
    return run_dir


def write_group(recording, prompt, position, texts, tokenizer, *, turns=1):
    episodes = []
    for text in texts:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        episode = Episode(prompt.input_ids)
        for turn in range(turns):
            if turn:
                episode.add_observation(ids)
            response = Response(list(episode.input_ids), SamplingConfig())
            response.output_ids, response.logprobs = ids, [-1.0] * len(ids)
            response.versions, response.finished = [(WeightVersion(1, 0).pack(), len(ids))], True
            episode.add_response(response)
        episode.add_reward(float(len(set(text))))
        episodes.append(episode)
    sample = build_sample("g", episodes)
    sample = complete_sample(sample, ticket_id=f"t{position}", task_id=0, birth_time=1.0)
    summary = msgspec.structs.asdict(summary_of(sample))
    meta = TrajectoryMeta(
        **{"ticket_id": f"t{position}", "locator": Locator(0, position), "attempt": 1, "head": 0, "task_id": 0},
        **{"keys": list(sample.keys), "birth_time": 1.0},
        **summary,
    )
    header = TrajectoryHeader(
        meta=meta,
        seqlens={key: lengths[0] for key, lengths in sample.seqlens.items()},
        **{"step": 0, "position": position, "batch": 3, "trained": True, "recorded_by": "model_worker/0", "time": 1.0},
    )
    write_trajectory(recording, header, sample)


def rejudged(capsys, *words):
    code = main(["rejudge", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_same_function_gives_the_same_rewards(made, capsys):
    code, found = rejudged(capsys, made)
    (task,) = found["tasks"]
    assert (code, task["responses"], task["differ"], task["failed"]) == (0, 6, 0, 0)
    assert task["old"] == task["new"] == pytest.approx((2 + 1 + 4 + 0 + 1 + 1) / 6)


def test_the_function_gets_what_it_gets_in_a_run(made, capsys):
    code, found = rejudged(capsys, made, f"rollout.tasks.default.reward={made.parents[2]}/other.py:same")
    assert (code, found["tasks"][0]["differ"]) == (0, 0)


def test_another_function_is_compared_and_a_failed_reward_is_no_zero(made, capsys, tmp_path):
    out = tmp_path / "new.jsonl"
    other = f"rollout.tasks.default.reward={made.parents[2]}/other.py:stricter"
    code, found = rejudged(capsys, made, other, "--out", out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    by_text = {text: line for text, line in zip([text for texts in TEXTS for text in texts], lines, strict=True)}
    first = [line["prompt"] for line in lines]
    assert first == ["e0-p0", "e0-p0", "e0-p1", "e0-p1", "e0-p2", "e0-p2"]
    failed = by_text.pop("aaa")
    assert failed["new"] is None
    assert "no answer" in failed["error"]
    for text, line in by_text.items():
        assert line["new"] - 10 * len(text) in (0, 1)
        assert (line["old"], line["error"]) == (len(set(text)), "")
    (task,) = found["tasks"]
    assert (code, task["responses"], task["failed"]) == (1, 6, 1)
    assert task["old"] == pytest.approx((2 + 4 + 0 + 1 + 1) / 5)
    assert task["new"] == pytest.approx(sum(line["new"] for line in by_text.values()) / 5)


def test_a_tasks_own_limit_holds(made, capsys, tmp_path):
    out, slow = tmp_path / "new.jsonl", f"rollout.tasks.default.reward={made.parents[2]}/other.py:slow"
    code, found = rejudged(capsys, made, slow, "rollout.tasks.default.reward_timeout_s=1", "--out", out)
    assert (code, found["tasks"][0]["failed"]) == (1, 1)
    (error,) = filter(None, (json.loads(line)["error"] for line in out.read_text().splitlines()))
    assert error.endswith("took more than 1 s")


def test_responses_of_several_turns_are_refused(made, capsys, tmp_path):
    other = shutil.copytree(made, tmp_path / "runs" / "tiny" / "t1")
    config = load_experiment(other / "configs" / "attempt_1" / "experiment.yaml")
    tokenizer = load_tokenizer(config.model_path)
    prompt = PromptSource(config.prompts, tokenizer, config.seed).get(Locator(0, 3))
    write_group(recording_dir(other, 1), prompt, 3, ["ab"], tokenizer, turns=2)
    code, found = rejudged(capsys, other)
    assert (code, found["error"]["kind"]) == (2, "config")
    assert "have several turns" in found["error"]["message"]


def test_the_terminal_names_the_largest_differences(made, capsys):
    assert main(["rejudge", str(made), f"rollout.tasks.default.reward={made.parents[2]}/other.py:stricter"]) == 1
    text = capsys.readouterr().out
    assert "mean rewards" in text
    assert "1 rewards failed, for example step_00000000-group_0000-model_worker_0.safetensors, response 1" in " ".join(
        text.split()
    )
    assert (made / "rejudged.jsonl").is_file()


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("seed=2", "was made from another prompt than e0-p0"),
        ("prompts.default_task=other", "rollout.tasks.other is not in the config"),
        ("rollout.tasks.default.agent=asyncrl.rollout.agent:MultiStepAgent", "takes part in the judging"),
        ("mode=train_only replay.path=elsewhere", "trains on the responses of another run"),
    ],
)
def test_what_cannot_be_judged_again_is_refused(made, capsys, override, refused):
    code, found = rejudged(capsys, made, *override.split(" ", 1 if "=train" in override else 0))
    assert (code, found["error"]["kind"]) == (2, "config")
    assert refused in found["error"]["message"]


def test_a_run_without_a_recording_is_refused(made, capsys, tmp_path):
    empty = tmp_path / "runs" / "tiny" / "t1"
    shutil.copytree(made / "configs", empty / "configs")
    code, found = rejudged(capsys, empty)
    assert code == 2
    assert "record.trajectories=true" in found["error"]["message"]
