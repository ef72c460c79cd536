"""`python -m asyncrl.cli.attention_check`: the kernels of the trainer's attention on this machine, for `asyncrl-launch check`.

Reads a Task from stdin in JSON and writes the kernels to stdout. It imports torch and starts CUDA, so it has a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import TrainConfig
from asyncrl.launch.checks.checklist import Case, Finding
from asyncrl.runtime.process import die_with_parent

LIMIT_S = 120.0  # imports and the start of CUDA
_NAME = "attention of the trainer"


class Task(msgspec.Struct, frozen=True):
    """path: folder of the actor. train: resolved. gpus: those of the run."""

    path: str
    train: TrainConfig
    gpus: list[str]


def judge_attention(case: Case) -> list[Finding]:
    """One finding with the kernels of the actor's layers. waits for: its process, for LIMIT_S at most."""
    if not mode_of(case.config.mode).trains:
        return []
    if not case.devices:
        return [Finding(_NAME, "ok", "in rectangles, by sdpa: the trainer computes on the CPU")]
    task = Task(os.path.expanduser(case.resolved.model_path), case.resolved.train, list(case.devices))
    command = [sys.executable, "-P", "-m", "asyncrl.cli.attention_check"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(case.devices)}
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(task), capture_output=True, env=env, timeout=LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [Finding(_NAME, "warn", f"not checked: {error}", "the log of model_worker_0 names the kernels")]
    return [Finding(_NAME, "ok", done.stdout.decode(errors="replace").strip())]


def kernels_of(task: Task) -> str:
    from asyncrl.architectures.attention import read_attention
    from asyncrl.model.attention import kernels_text, long_tokens_of, reasons_of
    from asyncrl.model.engine import DTYPES
    from asyncrl.model.sharding import Skeleton, load_config
    from asyncrl.runtime.rank_device import rank_device

    device, dtype = rank_device(gpus=task.gpus), DTYPES[task.train.dtype]
    layers = read_attention(Skeleton.of(load_config(task.path, "lm"), "lm", dtype).model, task.path)
    return kernels_text(reasons_of(layers, device, dtype, long_tokens=long_tokens_of(device, task.train)))


def main() -> None:
    die_with_parent()
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    found = kernels_of(msgspec.json.decode(sys.stdin.buffer.read(), type=Task))
    with result:
        result.write(found)


if __name__ == "__main__":
    main()
