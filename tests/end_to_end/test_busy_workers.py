"""Rollout workers are not treated as frozen when their event loops are late because they compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.testing.runs import assert_nothing_left, launch, train_steps
from asyncrl.testing.tiny import make_chat_tokenizer, make_tiny_model

LIMIT_S = 240.0  # limit on a busy machine

pytestmark = [pytest.mark.timeout(300), pytest.mark.release]

AGENT = """\
import asyncio
import openai
from asyncrl.rollout.chat_agent import ChatAgent

class Agent(ChatAgent):
    num_here, all_here = 0, asyncio.Event()

    async def chat(self, session, prompt):
        Agent.num_here += 1
        if Agent.num_here == 200:
            Agent.all_here.set()
        await Agent.all_here.wait()  # all sessions make their clients in the same turn of the event loop
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        reply = await client.chat.completions.create(model="policy", messages=prompt.row["messages"])
        return float(len(set(reply.choices[0].message.content)))
"""

CONFIG = """\
experiment: busy
fileroot: {folder}/runs
allocation: transformers.d1+d1
model_path: {folder}/model
prompts: {{path: "{folder}/prompts.jsonl", max_prompt_length: 200, prompt_key: messages, answer_key: "", chat_template: true}}
rollout:
  num_workers: 1
  group_size: 100
  sampling: {{max_new_tokens: 2}}
  tasks: {{default: {{agent: "{folder}/agent.py:Agent"}}}}
generation: {{num_blocks: 1024}}
manager: {{max_head_offpolicyness: 0}}
train: {{batch_size: 2, max_steps: 1, ppo: {{minibatches: 1}}}}
runtime: {{frozen_after_s: 2}}
weights: {{fsync: false}}
tensorboard: false
"""


def test_200_sessions_that_make_openai_clients_at_once_do_not_freeze_their_worker(tmp_path: Path) -> None:
    """Making 200 clients takes 4.4 s of CPU in one event-loop turn, and longer on a busy machine."""
    make_tiny_model(tmp_path / "model", tokenizer=make_chat_tokenizer(None), hidden_size=32, num_layers=1)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 20)
    config = tmp_path / "busy.yaml"
    config.write_text(CONFIG.format(folder=tmp_path))
    with launch(config) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert "froze" not in run.output()
        assert "is killed; see" not in run.output()
        assert "rollout_worker/0 is busy: its event loop has not turned for" in " ".join(run.output().split())
        assert len(train_steps(run.run_dir)) == 1
    assert_nothing_left(run.run_dir)
