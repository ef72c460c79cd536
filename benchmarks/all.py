"""Run the benchmarks one after another and write one table of their figures, with the commit and the machine.

    python benchmarks/all.py                      # with their defaults; writes the table to benchmarks/results.md
    python benchmarks/all.py --quick              # each with --quick: shows that all work; writes nothing
    python benchmarks/all.py manager startup      # only these; replaces their rows of the table

`soak`, `scale` and `chaos_matrix` take hours. They run only with --quick or when they are named. For a benchmark that
fails, the end of its output is printed. The others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.md"
COMMANDS: dict[str, tuple[str, ...]] = {
    "push_pull": ("push_pull.py",),
    "push_pull_curve": ("push_pull.py", "--curve"),
    "request_reply": ("request_reply.py",),
    "request_reply_curve": ("request_reply.py", "--curve"),
    "manager": ("manager.py",),
    "weights": ("weights.py",),
    "weights_adapter": ("weights.py", "--adapter"),
    "shares": ("shares.py",),
    "redistribute": ("redistribute.py",),
    "train_step": ("train_step.py",),
    "train_step_prefixes": ("train_step.py", "--prefixes"),
    "logprobs": ("logprobs.py",),
    "plan_accuracy": ("plan_accuracy.py",),
    "generation": ("generation.py",),
    "sandbox": ("sandbox.py",),
    "startup": ("startup.py",),
    "recovery": ("recovery.py",),
    "end_to_end": ("end_to_end.py",),
    "overlap": ("overlap.py",),
    "colocated": ("colocated.py",),
    "streaming": ("streaming.py",),
    "arriving": ("arriving.py",),
    "scale": ("scale.py",),
    "soak": ("soak.py",),
    "chaos_matrix": ("chaos_matrix.py",),
}
LONG = ("scale", "soak", "chaos_matrix")
_QUICK_LIMIT_S = 300.0  # of one benchmark
_LIMIT_S = 6 * 3600.0
_TITLE = "| benchmark | value | unit | ratios | rounds | minutes | commit | date |"


@dataclass(frozen=True)
class Outcome:
    """The result that one benchmark printed as its last line. `result` is empty if it failed."""

    name: str
    result: dict[str, Any]
    seconds: float
    error: str = ""


def run(name: str, *, quick: bool, baselines: bool) -> Outcome:
    options = ["--quick"] if quick else ["--write-baseline"] if baselines else []
    command = [sys.executable, str(HERE / COMMANDS[name][0]), *COMMANDS[name][1:], *options]
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    late = ""
    try:
        output, errors = process.communicate(timeout=_QUICK_LIMIT_S if quick else _LIMIT_S)
    except subprocess.TimeoutExpired:
        late = f"{name} did not end within its time limit; "
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # a benchmark ends its own processes on SIGTERM
            output, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    if late or process.returncode:
        said = "\n".join((output + errors).splitlines()[-20:])
        return Outcome(name, {}, seconds, f"{late}exit code {process.returncode}\n{said}")
    return Outcome(name, json.loads(output.splitlines()[-1]), seconds)


def row(outcome: Outcome) -> str:
    """One row of the table."""
    result = outcome.result
    ratios = ", ".join(f"{peer} {_ratio(found)}" for peer, found in result.get("ratio", {}).items())
    machine = result["machine"]
    value = "" if result.get("value") is None else f"{result['value']:g}"
    cells = [outcome.name, value, result.get("unit", ""), ratios, str(result.get("rounds", 1))]
    cells += [f"{outcome.seconds / 60:.1f}", machine["commit"], machine["date"]]
    return "| " + " | ".join(cells) + " |"


def _ratio(found: Any) -> str:
    if isinstance(found, dict):
        return "(" + ", ".join(f"{case} {value:g}" for case, value in found.items()) + ")"
    return f"{found:g}"


def table(outcomes: list[Outcome], written: str) -> str:
    """The table as Markdown. Rows of `written` that were not measured now are kept."""
    rows = {line.split("|")[1].strip(): line for line in written.splitlines() if line.startswith("| ")}
    rows |= {outcome.name: row(outcome) for outcome in outcomes if outcome.result}
    machine = next(outcome.result["machine"] for outcome in outcomes if outcome.result)
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}"
    lines = [_TITLE, "|" + "---|" * _TITLE.count(" | ") + "---|", *(rows[name] for name in COMMANDS if name in rows)]
    text = "\n".join(lines)
    return f"""# Results

`python benchmarks/all.py` wrote this table. Medians; `ratios` are asyncrl over the peer. Spreads and single cases:
`baselines/<benchmark>.json`. Machine: {where}, torch {machine["torch"]}.

{text}
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "names", nargs="*", metavar="BENCHMARK", help=f"benchmarks to run (default: all): {', '.join(COMMANDS)}"
    )
    options.add_argument("--quick", action="store_true", help="run each benchmark with --quick; write nothing")
    args = options.parse_args()
    if unknown := [name for name in args.names if name not in COMMANDS]:
        options.error(f"unknown benchmark {unknown[0]}; use one of {', '.join(COMMANDS)}")
    names = args.names or [name for name in COMMANDS if args.quick or name not in LONG]
    outcomes = []
    for name in names:
        outcome = run(name, quick=args.quick, baselines=name not in LONG)
        outcomes.append(outcome)
        print(f"{name}: {outcome.error or row(outcome)} ({outcome.seconds:.0f} s)", file=sys.stderr, flush=True)
        if not args.quick and outcome.result:  # written at once: later benchmarks may take hours
            RESULTS.write_text(table([outcome], RESULTS.read_text() if RESULTS.exists() else ""), encoding="utf-8")
    failed = [outcome.name for outcome in outcomes if not outcome.result]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} benchmarks in {seconds / 60:.1f} min; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
