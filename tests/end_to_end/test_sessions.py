"""Agents with several sequences in a session: all of them are trained, through kills, with the tokens that the servers sampled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from asyncrl.testing.runs import assert_nothing_left, evaluations, launch, make_tiny_run, train_steps
from asyncrl.testing.tiny import make_chat_tokenizer, make_tiny_model
from asyncrl.weights.lineage import audit
from tests.support.replays import (
    AHEAD,
    check_versions_of_tokens,
    final_weights,
    largest_difference,
    recording_of_lineage,
    trained_apart,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]

STEPS, BATCH, GROUP, LEAVES, LIMIT_S = 6, 4, 2, 4, 300.0
AGENT = """\
import asyncio

from asyncrl.rollout.chat_agent import ChatAgent


def said(role, content):
    return {"role": role, "content": content}


class Planner(ChatAgent):
    \"\"\"A plan, two sub-agents in contexts of their own at the same time, and two branches that go on from the plan.\"\"\"

    async def chat(self, session, prompt):
        async def ask(*messages):
            return await session.client().chat.completions.create(model="policy", messages=list(messages))

        question = said("user", prompt.text)
        plan = await ask(question)
        answer = said("assistant", plan.choices[0].message.content or "")
        leaves = await asyncio.gather(
            ask(said("user", "one")),
            ask(said("user", "two")),
            ask(question, answer, said("user", "again")),
            ask(question, answer, said("user", "other")),
        )
        return {leaf.id: float(len(set(leaf.choices[0].message.content or ""))) for leaf in leaves}
"""


# Asks twice, the second time with the first answer's conversation as the policy's tokens have it
PROGRAM = r"""
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"messages": messages, "max_tokens": 12}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)["choices"][0]["message"]

question = {"role": "user", "content": json.load(sys.stdin)["text"]}
ask([question, ask([question]), {"role": "user", "content": "again"}])
"""


# An environment's library. The first episode of some prompts fails, each in a way of its own
FAULTY = r"""
import json, os, pathlib, subprocess, sys, time, urllib.request

def play(settings, item, address):
    body = json.dumps({"messages": [{"role": "user", "content": item["prompt"]}], "max_tokens": 12}).encode()
    with urllib.request.urlopen(urllib.request.Request(address["base_url"] + "/chat/completions", body)) as reply:
        json.load(reply)
    tried = pathlib.Path(settings["folder"], item["prompt"])
    if item["fault"] and not tried.exists():
        tried.touch()
        exec(item["fault"])
    return 1.0
"""
FAULTS = {
    "time.sleep(600)": "episode_timeout",
    "subprocess.run(['sleep', '601.5'])": "episode_timeout",  # a slow tool
    "sys.exit(0)": "episode_error",
    "raise KeyError('gone')": "episode_error",
    "held = bytearray(3_000_000_000)": "episode_error",
    "os._exit(0)": "episode_died",
}


def num_answers(mask_T: np.ndarray) -> int:
    """Stretches of sampled tokens."""
    return int(np.count_nonzero(np.diff(np.r_[0, mask_T.astype(np.int8)]) == 1))


def test_branches_and_sub_agents_are_trained_through_kills(tmp_path: Path) -> None:
    """A rollout worker and the trainer are killed on the way. What the run has trained is trained again from its recording."""
    config = make_tiny_run(tmp_path / "tiny")
    make_tiny_model(
        tmp_path / "chat", tokenizer=make_chat_tokenizer(None), hidden_size=32, intermediate_size=64, num_layers=1
    )
    (tmp_path / "planner.py").write_text(AGENT)
    settings = [
        *AHEAD,
        f"model_path={tmp_path / 'chat'}",
        f"rollout.tasks.default={{agent: '{tmp_path}/planner.py:Planner', agent_args: {{trained: all, max_sequences: {LEAVES}}}}}",
        f"rollout.group_size={GROUP}",
        "rollout.sampling.max_new_tokens=12",
        "train.branches=true",
    ]
    with launch(config, *settings, f"train.max_steps={STEPS}", "checkpoint.every_steps=1") as run:
        run.wait_for_step(1, LIMIT_S)
        run.worker("rollout_worker/0").kill()
        run.wait_for_step(3, LIMIT_S)
        run.worker("model_worker/0").kill()
        assert run.wait(LIMIT_S) == 0, run.output()
    assert [step["step"] for step in train_steps(run.run_dir)][-1] == STEPS
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, STEPS)
    assert len(found.lineage) == 2

    recorded = recording_of_lineage(run.run_dir, tmp_path / "recorded")
    assert len(recorded) == STEPS * BATCH
    for trajectory in recorded:
        sample = trajectory.sample
        assert sample.data["sessions"].tolist() == [member for member in range(GROUP) for _ in range(LEAVES)]
        answers = [num_answers(mask_T) for mask_T in sample.slices("loss_mask")[0]]
        for member in range(GROUP):
            mine = answers[member * LEAVES : (member + 1) * LEAVES]
            assert sorted(mine) == [1, 1, 1, 2], "two leaves contain the plan, and one of them trains it"
    with trained_apart(config, tmp_path / "recorded", *settings) as apart:
        assert apart.wait(LIMIT_S) == 0, apart.output()
        weights = final_weights(run.run_dir)
        assert largest_difference(weights, final_weights(apart.run_dir)) < 1e-5
        assert largest_difference(weights, load_file(tmp_path / "chat" / "model.safetensors")) > 1e-3
        check_versions_of_tokens(recorded, apart.run_dir)
    assert_nothing_left(run.run_dir)


def numbers_of_answers(tmp_path: Path, *settings: str) -> list[int]:
    """Of each trained sequence, after a run of three steps whose tokens are those that the servers sampled."""
    config = make_tiny_run(tmp_path / "tiny")
    make_tiny_model(
        tmp_path / "chat", tokenizer=make_chat_tokenizer(None), hidden_size=32, intermediate_size=64, num_layers=1
    )
    short = (f"rollout.group_size={GROUP}", "rollout.sampling.max_new_tokens=12", "train.max_steps=3")
    short += ("weights.keep=1000",)
    with launch(config, *AHEAD, f"model_path={tmp_path / 'chat'}", *short, *settings) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, 3)
    assert_nothing_left(run.run_dir)
    recorded = recording_of_lineage(run.run_dir, tmp_path / "recorded")
    check_versions_of_tokens(recorded, run.run_dir)
    return [num_answers(mask_T) for one in recorded for mask_T in one.sample.slices("loss_mask")[0]]


def test_a_fault_of_an_environment_costs_one_rollout_and_its_cause_is_a_metric(tmp_path: Path) -> None:
    """Each prompt is trained with the rewards of episodes that ended, and none is rejected."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "tried").mkdir()
    faults = [*FAULTS, *[""] * (3 * BATCH - len(FAULTS))]
    lines = [json.dumps({"prompt": f"p{at}", "answer": "", "fault": fault}) for at, fault in enumerate(faults)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    arguments = {
        "play": f"{tmp_path}/faulty.py:play",
        "settings": {"folder": f"{tmp_path}/tried"},
        "limit_s": 20.0,
        "memory_bytes": 1_000_000_000,
    }
    task = {"agent": "asyncrl.rollout.episodes:EpisodeAgent", "agent_args": arguments}
    answers = numbers_of_answers(
        tmp_path, f"prompts.path={tmp_path}/prompts.jsonl", f"rollout.tasks.default={json.dumps(task)}"
    )
    assert answers == [1] * (3 * BATCH * GROUP)
    assert len(list((tmp_path / "tried").iterdir())) == len(FAULTS)
    (run_dir,) = (tmp_path / "tiny" / "runs").glob("*/*")
    *_, last = train_steps(run_dir)
    causes = {name.removeprefix("released/"): count for name, count in last.items() if name.startswith("released/")}
    assert causes == Counter(FAULTS.values())
    assert [name for name in last if name.startswith("rejected/")] == []
    assert (last["reward/mean"], last["reward/min"]) == (1.0, 1.0)
    assert subprocess.run(["pgrep", "-f", "sleep 601.5"], capture_output=True, check=False).stdout == b""


def test_a_program_is_trained(tmp_path: Path) -> None:
    """A shell script starts a program for each member of a group, which asks twice."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    script = tmp_path / "agent.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} -S {tmp_path}/agent.py\n")
    script.chmod(0o755)
    answers = numbers_of_answers(tmp_path, f"rollout.tasks.default.agent=command:{script}")
    assert answers == [2] * (3 * BATCH * GROUP)


def test_an_environment_of_openenv_is_trained(tmp_path: Path) -> None:
    """The rollout worker starts its servers. Episodes have two turns, unless an answer is cut."""
    server = Path(__file__).parents[1] / "environments" / "openenv_server.py"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -P {server} $@\n")
    program.chmod(0o755)
    answers = numbers_of_answers(
        tmp_path,
        f"rollout.tasks.default={{agent: 'openenv:game:app', agent_args: {{python: {program}, observation: text}}}}",
    )
    assert len(answers) == 3 * BATCH * GROUP
    assert set(answers) <= {1, 2}


def test_two_seats_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example: one model plays both seats. Its likeliest answer is wrong at first."""
    for file in ("relay.py", "config.yaml"):
        shutil.copy(Path(__file__).parents[2] / "examples" / "relay" / file, tmp_path)
    monkeypatch.chdir(tmp_path)  # paths in the config are relative to it
    subprocess.run([sys.executable, "relay.py"], check=True, timeout=LIMIT_S)
    settings = (f"fileroot={tmp_path}/runs", "weights.fsync=false")
    with launch("config.yaml", *settings) as run:
        assert run.wait(700.0) == 0, run.output()
    steps = train_steps(run.run_dir)
    rewards = [step["reward/mean"] for step in steps]
    assert np.mean(rewards[:2]) < 0.4
    assert np.mean(rewards[-5:]) > 0.8
    first, last = (one["eval/greedy_reward"] for one in evaluations(run.run_dir))
    assert first < 0.5
    assert last > 0.9
    assert all(step["batch/num_sequences"] > 4 * 8 for step in steps), "both seats are trained"
    found = audit(run.run_dir)
    assert (found.problems, found.complete, found.steps) == ([], True, len(steps))


ENVIRONMENTS_OF_VERIFIERS = {
    "one turn": ("capitals", {}, [1]),
    "several turns": ("echoes", {}, [3]),
    "tools by MCP": ("adder", {}, [1]),
    "several seats": ("duel", {"num_guesses": 2}, [2, 1, 1]),
    "a judge": ("echoes", {"with_critic": True}, [3]),
}


@pytest.mark.parametrize("name", ENVIRONMENTS_OF_VERIFIERS)
def test_an_environment_of_verifiers_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The prompts are the environment's tasks, which its module writes."""
    environment, config, answers_of_member = ENVIRONMENTS_OF_VERIFIERS[name]
    environments = str(Path(__file__).parents[1] / "environments")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [environments, os.environ.get("PYTHONPATH", "")])))
    write = [sys.executable, "-m", "asyncrl.rollout.verifiers_episode", environment]
    tasks = subprocess.run(write, check=True, capture_output=True, timeout=LIMIT_S).stdout
    (tmp_path / "tasks.jsonl").write_bytes(tasks * 16)
    answers = numbers_of_answers(
        tmp_path,
        f"prompts={{path: {tmp_path}/tasks.jsonl, prompt_key: text}}",
        f"rollout.tasks.default={{agent: 'verifiers:{environment}', agent_args: {{config: {json.dumps(config)}}}}}",
        f"train.branches={str(len(answers_of_member) > 1).lower()}",
    )
    assert sorted(answers) == sorted(answers_of_member * (3 * BATCH * GROUP))
