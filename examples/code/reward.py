"""Reward of the code task: 1 if the model's program prints the right output for every hidden input, else 0.

The program runs in a sandbox (asyncrl/rewards/sandbox/), because it is untrusted. A program that exceeds a limit, does not end, or
makes too many forbidden system calls is wrong. The run does not start on a machine without isolation. Set
ASYNCRL_EXAMPLE_SANDBOX=limits in the environment to run programs without it.
"""

from __future__ import annotations

import functools
import json
import os
import re
from typing import Any

from asyncrl.rewards.sandbox.pool import Limits, Program, SandboxPool

MAX_CHARS = 20_000  # of a completion; longer ones get reward 0

sandboxes = SandboxPool(
    limits=Limits(cpu_s=2.0, memory_bytes=256 << 20),
    isolation="limits" if os.environ.get("ASYNCRL_EXAMPLE_SANDBOX") == "limits" else "required",
)


def reward(prompt: str, completion: str, answer: Any, *, finished: bool = True) -> float:
    """answer: a list of [input, output], or the same as JSON. completion: an expression of a and b, or a program in a fenced
    block."""
    if not finished or len(completion) > MAX_CHARS:
        return 0.0
    return passes(program_of(completion), answer if isinstance(answer, str) else json.dumps(answer))


@functools.lru_cache(4096)  # members of a group often give the same answer
def passes(source: str, tests: str) -> float:
    with sandboxes.open(Program({"main.py": source})) as sandbox:
        for given, wanted in json.loads(tests):
            result = sandbox.run(given)
            if not result.ok or result.stdout.split() != wanted.split():
                return 0.0
    return 1.0


def program_of(completion: str) -> str:
    """Return the last fenced code block, because chat models write code in such blocks. Without one, return a program that reads a
    and b from each line of input and prints the value of the completion, taken as an expression."""
    blocks = re.findall(r"```(?:python|py)?\n(.*?)```", completion, flags=re.DOTALL)
    if blocks:
        return str(blocks[-1])
    return f"import sys\nfor line in sys.stdin:\n    a, b = map(int, line.split())\n    print({completion.strip()})\n"
