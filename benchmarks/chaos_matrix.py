"""The whole fault matrix: {kind of process} x {SIGKILL, SIGSTOP 20 s, SIGTERM} x {phase of the run}, in whole runs.

    python benchmarks/chaos_matrix.py [--kinds kill,stop,restart] [--phases ...] [--targets ...] [--write] [key=value ...]
    python benchmarks/chaos_matrix.py --targets engine,generation_server --sglang-python .venv-sglang/bin/python

There is one run for each signal and phase. In it each target receives the signal in turn, the launcher last. The next target is
struck after the run trains again. A cell is `ok` if the process restarted or survived and the run trained on. A run is `ok` if it
completed with exit code 0 and left no process behind, its audit is clean, its off-policyness is within the bound, and the reward
was reached. Seconds: from the signal to the end of a further train step. --write puts the table into docs/chaos-matrix.md (with
SGLang: chaos-matrix-sglang.md). Rows of the page that were not measured now are kept. 45 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import BenchmarkParser, machine

from asyncrl.testing.chaos import Cell, ChaosRun, Outcome, make_chaos_run
from asyncrl.testing.faults.schedule import KINDS, PHASES, Kind, Phase

ROOT = Path(__file__).parent.parent
TABLE, SGLANG_TABLE = ROOT / "docs" / "chaos-matrix.md", ROOT / "docs" / "chaos-matrix-sglang.md"
TARGETS = (
    "rollout_worker",
    "nursery",
    "generation_server",
    "gserver_manager",
    "model_worker",
    "master",
    "etcd",
    "launcher",
)
SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP 20 s", "restart": "SIGTERM"}
# Enough steps for all cells of a run. With `stop` the run trains on while most kinds of process are frozen.
_STEPS = {"kill": 90, "stop": 300, "restart": 90}


@dataclass
class Row:
    """One run: one signal in one phase, for all targets."""

    kind: Kind
    phase: Phase
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and not any(outcome.problem for outcome in self.outcomes.values())


def measure(config: Path, kind: Kind, phase: Phase, targets: Sequence[str], overrides: Sequence[str]) -> Row:
    """Run the cells of one signal and phase in one run, until one of them has a problem."""
    row = Row(kind, phase)
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-", ignore_cleanup_errors=True) as folder:
        with ChaosRun(config, f"fileroot={folder}", *overrides) as run:
            for target in targets:
                outcome = row.outcomes[target] = run.strike(Cell(target, kind, phase))
                if outcome.problem:
                    break
                say(f"  {outcome.cell}: {text_of(outcome)}")
            report = run.finish()
            row.problems = report.problems
            for outcome in row.outcomes.values():
                if outcome.problem:
                    row.problems.insert(0, f"{outcome.cell}: {outcome.problem}")
        if row.problems:
            keep = Path(tempfile.mkdtemp(prefix="asyncrl-chaos-failed-"))
            run.run_dir.rename(keep / run.run_dir.name)
            say(f"  FAILED, kept in {keep}:\n" + "\n".join(row.problems))
    return row


def text_of(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    if outcome.problem:
        return "FAILED"
    late = "" if outcome.in_phase else " (at another time: the phase did not occur)"
    return f"ok {outcome.useful_s or 0.0:.1f} s{late}"


def line(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"


def header(targets: Sequence[str]) -> str:
    return line(["signal", "phase", *targets, "the run"])


def table(rows: Sequence[Row], targets: Sequence[str], written: str = "") -> str:
    """The table as Markdown. written: the page so far; its rows of the same targets that were not measured now are kept."""
    lines = {}
    for row in rows:
        cells = [text_of(row.outcomes.get(target)) for target in targets]
        lines[row.kind, row.phase] = line([*names_of(row.kind, row.phase), *cells, "ok" if row.ok else "FAILED"])
    earlier = written.splitlines() if header(targets) in written else []
    every = [(kind, phase) for kind in KINDS for phase in PHASES]
    for kind, phase in every:
        start = line(names_of(kind, phase)).removesuffix("|")
        for known in earlier:
            if known.startswith(start):
                lines.setdefault((kind, phase), known)
    found = [lines[cell] for cell in every if cell in lines]
    return "\n".join([header(targets), "|" + "---|" * (len(targets) + 3), *found])


def names_of(kind: Kind, phase: Phase) -> list[str]:
    return [SIGNALS[kind], phase.replace("_", " ")]


def write(rows: Sequence[Row], targets: Sequence[str], *, sglang: bool) -> None:
    where, extra, path = machine(), "", TABLE
    if sglang:
        extra, path = " --targets engine,generation_server --sglang-python PYTHON", SGLANG_TABLE
    measured = table(rows, targets, path.read_text(encoding="utf-8") if path.exists() else "")
    num_rows = len(measured.splitlines()) - 2
    size = f"{num_rows * len(targets)} cells in {num_rows} runs"
    text = f"""# Chaos matrix

`python benchmarks/chaos_matrix.py --write{extra}` measured:
{size}. In each run every kind of process receives the signal once, in the named phase. The
next signal is sent after the run trains again. `ok 3.1 s`: the process restarted or survived, and a further train step
ended 3.1 s after the signal. For SIGSTOP this time includes the freeze of at most 20 s.

`the run` is ok if all of these hold: it completed with exit code 0 and left no process behind, the lineage of the final
weights trained each prompt exactly once (`asyncrl-launch audit`), no group was beyond
`manager.max_head_offpolicyness`, and the reward was reached. A launcher that receives SIGKILL or SIGTERM ends the
run: all its processes end within 10 s, and `asyncrl-launch resume` continues the run.

{measured}

{where["cpu"]}, {where["cores"]} cores, Python {where["python"]}, torch {where["torch"]}, {where["date"]}, commit {where["commit"]}.

The six phases and their detection from outside are in asyncrl/testing/faults/phases.py. About ten of these cells run in
CI (tests/chaos).
"""
    path.write_text(text, encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    options = BenchmarkParser(__doc__ or "", quick={"kinds": "kill", "phases": "train_step"})
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--kinds", default=",".join(KINDS))
    options.add_argument("--phases", default=",".join(PHASES))
    options.add_argument("--targets", default=",".join(TARGETS))
    options.add_argument(
        "--sglang-python",
        default="",
        help="interpreter whose SGLang generates; SGLang's own process is then the target `engine`",
    )
    options.add_argument("--write", action="store_true", help="write the table into docs/")
    options.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the small run's config")
    args = options.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends its child processes, too
    targets, rows, began = words(args.targets), [], time.monotonic()
    overrides = [*args.overrides]
    if args.sglang_python:
        overrides += [f"generation.python={args.sglang_python}", "allocation=sglang.d1+d1"]
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-config-") as folder:
        config = make_chaos_run(Path(folder))
        for kind in words(args.kinds):
            ours = [f"train.max_steps={_STEPS[kind]}"]
            if kind == "stop":
                ours.append("runtime.frozen_after_s=30")  # frozen processes survive and continue after SIGCONT
            for phase in words(args.phases):
                say(f"{SIGNALS[kind]} in {phase}, {time.monotonic() - began:.0f} s after the start")
                rows.append(measure(config, kind, phase, targets, [*ours, *overrides]))  # type: ignore[arg-type]
                if args.write:  # after each run, so that a later failure loses no results
                    write(rows, targets, sglang=bool(args.sglang_python))
    say(table(rows, targets))
    seconds = [o.useful_s for row in rows for o in row.outcomes.values() if o.useful_s and row.kind != "stop"]
    failed = sum(bool(o.problem) for row in rows for o in row.outcomes.values())
    result = {
        "name": "chaos_matrix",
        "cells": sum(len(row.outcomes) for row in rows),
        "failed_cells": failed,
        "failed_runs": sum(not row.ok for row in rows),
        "median_s": round(statistics.median(seconds), 2) if seconds else None,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "machine": machine(),
    }
    print(json.dumps(result), flush=True)
    raise SystemExit(0 if all(row.ok for row in rows) else 1)


if __name__ == "__main__":
    main()
