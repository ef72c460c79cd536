"""Runs in which generation and training keep a fixed pace instead of computing, to time everything between them.

pace = Pace(...)
config = make_paced_run(folder, num_prompts=1000, group_size=4, ...)
with launch_paced(config, pace, "manager.max_head_offpolicyness=4") as run:
    run.wait(60)

The launcher is the real one. It leaves out the paced processes (debug.leave_out), and this module starts them (paced_workers.py).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.dataflow.topology import Allocation
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.rundir import configs_dir, logs_dir
from asyncrl.testing.runs import RunHandle, launch
from asyncrl.testing.tiny import ALPHABET, make_char_tokenizer
from tests.support.paced_agent import FIRST_MEMBER
from tests.support.paced_engine import LongTail
from tests.support.paced_workers import Pace

_ROOT = Path(__file__).parents[2]  # of the repository
PROMPT_DIGITS = 6
PROMPT_TOKENS = PROMPT_DIGITS + 1  # including the member's token
_START_LIMIT_S = 180.0  # limit for the start of each process, on a busy machine
_STOP_LIMIT_S = 60.0

_CONFIG = """\
# Generation and training keep a fixed pace and compute nothing; everything between them is real.
experiment: paced
fileroot: {folder}/runs
allocation: transformers.d{servers}p1m1+d1p1m1
model_path: {folder}/model
prompts: {{path: "{folder}/prompts.jsonl", max_prompt_length: 16, shuffle: false}}
rollout:
  num_workers: {rollout_workers}
  group_size: {group_size}
  max_concurrent_per_worker: 1024
  sampling: {{max_new_tokens: 256}}
  tasks:
    default:
      agent: {support}/paced_agent.py:MemberAgent
      reward: {support}/paced_agent.py:reward
generation: {{max_running_requests: {slots}}}
weights: {{verify_logprobs: false}}
train: {{batch_size: {batch_size}}}
debug: {{wait_s: {wait_s}}}
tensorboard: false
"""


def make_paced_run(
    folder: Path,
    *,
    num_prompts: int,
    batch_size: int,
    group_size: int,
    servers: int,
    slots: int,
    rollout_workers: int = 2,
    weight_bytes: int = 1_000_000,
) -> Path:
    """Write a config, prompts and a placeholder for a model. slots: of one server. Return the config's path."""
    model = folder / "model"
    model.mkdir(parents=True)
    make_char_tokenizer(model)
    sizes = {"model_type": "qwen2", "vocab_size": len(ALPHABET) + 1, "max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    _save_weights(model / "model.safetensors", weight_bytes)
    prompts = (json.dumps({"prompt": f"{number:0{PROMPT_DIGITS}d}", "answer": ""}) for number in range(num_prompts))
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    config = folder / "paced.yaml"
    text = _CONFIG.format(
        folder=folder,
        support=_ROOT / "tests" / "support",
        servers=servers,
        slots=slots,
        rollout_workers=rollout_workers,
        group_size=group_size,
        batch_size=batch_size,
        wait_s=_START_LIMIT_S,
    )
    config.write_text(text, encoding="utf-8")
    return config


def _save_weights(file: Path, num_bytes: int) -> None:
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros(max(1, num_bytes // 4), np.float32)}, file)


def response_lengths(seed: int, positions: range, group_size: int) -> list[list[int]]:
    """Response lengths of the groups of these prompts, as the engines will generate them."""
    tail = LongTail(seed, PROMPT_TOKENS)
    digits = [1 + ALPHABET.index(digit) for digit in "0123456789"]  # 0 is EOS
    return [
        [
            tail.length([*(digits[int(digit)] for digit in f"{position:0{PROMPT_DIGITS}d}"), FIRST_MEMBER + member])
            for member in range(group_size)
        ]
        for position in positions
    ]


@contextlib.contextmanager
def launch_paced(config_path: Path, pace: Pace, *overrides: str) -> Iterator[RunHandle]:
    """Start `asyncrl-launch run` with paced servers and trainer. Leaving the block kills all remaining processes."""
    allocation = Allocation.parse(load_experiment(config_path, overrides).allocation)
    names = [f"generation_server/{index}" for index in range(allocation.num_servers)]
    names += [f"model_worker/{index}" for index in range(allocation.num_model_workers)]
    started: list[subprocess.Popen[bytes]] = []
    with launch(config_path, *overrides, f"debug.leave_out=[{','.join(names)}]") as run:
        try:
            for name in names:
                run.wait_for_output(f"{name} is left to you", _START_LIMIT_S)
                started.append(_start(run.run_dir, name, pace))
            yield run
            for process in started:  # the launcher has asked them to stop
                process.wait(_STOP_LIMIT_S)
        finally:
            for process in started:
                process.kill()
                process.wait()


def _start(run_dir: Path, name: str, pace: Pace) -> subprocess.Popen[bytes]:
    stem = name.replace("/", "_")
    config = str(configs_dir(run_dir, 1) / f"{stem}.yaml")
    command = [sys.executable, "-m", "tests.support.paced_workers", config, msgspec.json.encode(pace).decode()]
    with (logs_dir(run_dir, 1) / f"{stem}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
