"""Throughput of judging untrusted programs in sandboxes of asyncrl/rewards/sandbox/pool.py, beside bare processes.

    python benchmarks/sandbox.py [--rounds 5] [--programs 200] [--inputs 5] [--workers 2]

Each program reads a line and prints a number, like an answer to a small coding task:

    asyncrl       SandboxPool: a separate sandbox for every program, one prepared in advance; as many threads as cores
    bare_process  subprocess.run of the same interpreter, without isolation or limits: the cost of Python alone

Cases: `programs` has one input for each program; `inputs` has --inputs of them for each program, in its one sandbox. `value` is
asyncrl's programs per minute with one input each.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import alternate, finish, parser, table

CODE = "n = int(input())\nprint(sum(i * i for i in range(n)))\n"
LIMIT_S = 60.0


def cpu_s() -> float:
    """CPU seconds of this process and of all children that it has waited for."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measured(args: argparse.Namespace, judge: Callable[[int], None]) -> tuple[float, float]:
    """Programs per minute, and CPU milliseconds per program."""
    before, start = cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(args.workers) as threads:
        for _ in threads.map(judge, range(args.programs)):
            pass
    took_s = time.perf_counter() - start
    return 60 * args.programs / took_s, 1e3 * (cpu_s() - before) / args.programs


def sides(args: argparse.Namespace, cpu_ms: dict[str, dict[str, float]]) -> dict[str, Callable[[], dict[str, float]]]:
    from asyncrl.rewards.sandbox.pool import Program, SandboxPool

    pool = SandboxPool(size=args.workers, spare=args.workers)
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))

    def expected(number: int) -> str:
        return f"{sum(i * i for i in range(number))}\n"

    def in_sandbox(inputs: int) -> Callable[[int], None]:
        def judge(number: int) -> None:
            with pool.open(Program({"main.py": f"{CODE}# {number}\n"})) as sandbox:
                for n in range(inputs):
                    assert sandbox.run(f"{n}\n").stdout == expected(n)

        return judge

    def in_process(inputs: int) -> Callable[[int], None]:
        def judge(number: int) -> None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "main.py"
                path.write_text(f"{CODE}# {number}\n")
                for n in range(inputs):
                    done = subprocess.run(
                        [python, "-I", "-S", str(path)], input=f"{n}\n", capture_output=True, text=True, timeout=LIMIT_S, check=True
                    )  # fmt: skip
                    assert done.stdout == expected(n)

        return judge

    def side(name: str, way: Callable[[int], Callable[[int], None]]) -> Callable[[], dict[str, float]]:
        def measure() -> dict[str, float]:
            rates = {}
            for case, inputs in (("programs", 1), ("inputs", args.inputs)):
                rates[case], cpu_ms[name][case] = measured(args, way(inputs))
            return rates

        return measure

    return {"asyncrl": side("asyncrl", in_sandbox), "bare_process": side("bare_process", in_process)}


def main() -> None:
    options = parser(__doc__ or "", quick={"programs": 20})
    options.add_argument("--programs", type=int, default=200, help="programs per round and case (default 200)")
    options.add_argument(
        "--inputs", type=int, default=5, help="inputs of each program in the case `inputs` (default 5)"
    )
    options.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="programs that run at once (default: one per core)",
    )
    args = options.parse_args()
    cpu_ms: dict[str, dict[str, float]] = {"asyncrl": {}, "bare_process": {}}
    rounds = alternate(args, sides(args, cpu_ms))
    cases = rounds.cases("asyncrl")
    table(
        args,
        "programs per minute",
        ["case", "asyncrl", "bare_process", "ours / bare", "CPU ms per program: ours", "bare"],
        [
            [
                case,
                rounds.median("asyncrl", case),
                rounds.median("bare_process", case),
                rounds.ratio("asyncrl", "bare_process", case),
                cpu_ms["asyncrl"][case],
                cpu_ms["bare_process"][case],
            ]
            for case in cases
        ],
    )
    finish(
        args,
        name="sandbox",
        value=rounds.median("asyncrl", "programs"),
        unit="programs/min",
        ratio=rounds.ratios("asyncrl", ["bare_process"], cases),
        sides=rounds.summary(),
        cpu_ms_per_program=cpu_ms,
        inputs=args.inputs,
    )


if __name__ == "__main__":
    main()
