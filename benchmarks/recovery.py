"""Seconds from the death of a process to the next useful work of its replacement, by kind.

    python benchmarks/recovery.py [--rounds 5] [--config CONFIG] [--write-baseline] [key=value ...]

A round is one run of the config (evaluations off, a scratch folder, a checkpoint every 5 steps). One process of each kind in turn
is killed (SIGKILL) during generation or a train step. Each kill waits until the run trains again. Useful work is
  rollout_worker      the next ticket granted to it for which it later pushes a trajectory
  gserver_manager     the next ticket that it grants
  generation_server   the next token that it samples; `engine_start`: from the first line of the new process until it serves
  model_worker,       the start of the next train step. They restart together as one trainer group, and a whole batch is
  master              generated before the step; `trainer_group_start`: from the first line of the first of them until they are
                      connected and have loaded the model
A run has two deaths of the trainer group. The first restart is immediate; the second is delayed by 1 s, by design.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from common import Numbers, alternate, finish, parser, table
from startup import ROOT, prepare

from asyncrl.testing.faults import Fault, Injector
from asyncrl.testing.runs import RunHandle, assert_nothing_left, journal, launch, train_steps

KINDS = {
    "rollout_worker": "generation",
    "gserver_manager": "generation",
    "generation_server": "generation",
    "model_worker": "train_step",
    "master": "train_step",
}
GOALS = {"rollout_worker": 3.0, "gserver_manager": 3.0, "generation_server": 2.0, "model_worker": 5.0, "master": 5.0}
_LIMIT_S = 120.0
_STEPS_BETWEEN = 3
_BUCKET_S = 0.1  # resolution of the journal of tokens
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) \w+ +(\S+): (.*)$", re.MULTILINE)


def measure(args: argparse.Namespace) -> Numbers:
    """Run once and kill one process of each kind."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-recovery-", ignore_cleanup_errors=True) as folder:
        overrides = [
            f"fileroot={folder}",
            "eval.prompts=null",
            "checkpoint.every_steps=5",
            "train.max_steps=0",
            "runtime.max_restarts=10",
            *args.overrides,
        ]
        found: dict[str, float] = {}
        with launch(args.config, *overrides) as run:
            run.wait_for_step(6, _LIMIT_S)
            with Injector(run.run_dir) as injector:
                for number, (kind, phase) in enumerate(KINDS.items()):
                    strike = injector.strike(Fault(number=number, kind="kill", target=kind, at=0.0, phase=phase))  # type: ignore[arg-type]
                    if strike is None:
                        raise SystemExit(f"no running {kind} to kill was found in {run.run_dir}:\n{run.output()}")
                    found |= _recovery(run, kind, strike.name, strike.time)
                    injector.turn()
                    steps = len(train_steps(run.run_dir))
                    run.wait_until(
                        lambda: len(train_steps(run.run_dir)) >= steps + _STEPS_BETWEEN,  # noqa: B023
                        f"{_STEPS_BETWEEN} train steps after the death of {kind}",
                        _LIMIT_S,
                    )
            run.signal(signal.SIGINT)
            run.wait(60)
            assert_nothing_left(run.run_dir)
        return found


def _recovery(run: RunHandle, kind: str, name: str, struck: float) -> dict[str, float]:
    """Seconds until the process's replacement does useful work; for generation server and master also the seconds of the start."""
    at = run.wait_until(lambda: useful(run.run_dir, kind, name, struck), f"{name} worked again", _LIMIT_S)
    found = {kind: at - struck}
    if kind == "generation_server":
        found["engine_start"] = between(run.run_dir, "generation_server", name, struck, r"serving at")
    elif kind == "master":
        found["trainer_group_start"] = between(run.run_dir, "model_worker", name, struck, "running")
    return found


def useful(run_dir: Path, kind: str, name: str, struck: float) -> float | None:
    """Time of the next useful work, or None if there is none yet."""
    if kind == "rollout_worker":
        mine = {event["ticket"] for event in journal(run_dir, name.replace("/", "_")) if event["time"] > struck}
        return _first(run_dir, "gserver_manager", lambda event: event["ticket"] in mine, struck)
    if kind == "gserver_manager":
        return _first(run_dir, "gserver_manager", lambda event: event["event"] == "admitted", struck)
    if kind == "generation_server":
        return _first(run_dir, name.replace("/", "_"), lambda event: event["tokens"] > 0, struck + _BUCKET_S)
    trained = [event for event in journal(run_dir) if event["event"] == "trained"]
    return min((event["start"] for event in trained if event["start"] > struck), default=None)


def _first(run_dir: Path, worker: str, fits: Callable[[dict[str, Any]], bool], after: float) -> float | None:
    return min(
        (event["time"] for event in journal(run_dir, worker) if event["time"] > after and fits(event)), default=None
    )


def between(run_dir: Path, first: str, name: str, struck: float, last: str) -> float:
    """Seconds from the first log line of any process of kind `first` after the death to a line of worker `name`.

    last: regular expression of that line.
    """
    said = [
        (datetime.strptime(when, "%Y-%m-%d %H:%M:%S.%f").timestamp(), who, text)
        for log in run_dir.glob("logs/attempt_*/*.log")
        if not log.is_symlink()
        for when, who, text in _LINE.findall(log.read_text(errors="replace"))
    ]
    began = min(
        when for when, who, text in said if when > struck and who.startswith(f"{first}/") and text == "setting up"
    )
    return min(when for when, who, text in said if when >= began and who == name and re.match(last, text)) - began


def main() -> None:
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart_cpu.yaml")
    options.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the config's fields")
    args = options.parse_args()
    args.config = args.config.absolute()
    prepare(args)
    began = time.monotonic()
    rounds = alternate(args, {"asyncrl": lambda: measure(args)}, warm_up=0)
    medians = {case: rounds.median("asyncrl", case) for case in rounds.cases("asyncrl")}
    beyond = {
        "generation_server": medians["engine_start"],
        "model_worker": medians["trainer_group_start"],
        "master": medians["trainer_group_start"],
    }
    goals = {kind: goal + beyond.get(kind, 0.0) for kind, goal in GOALS.items()}
    rows = [
        [
            case,
            value,
            rounds.spread("asyncrl", case),
            *([goals[case], "met" if value < goals[case] else "MISSED"] if case in goals else ["", ""]),
        ]
        for case, value in medians.items()
    ]
    table(args, "seconds from a death to the next useful work", ["", "median", "iqr", "goal", ""], rows)
    finish(
        args,
        name="recovery",
        value=statistics.median(medians[kind] for kind in KINDS),
        unit="s",
        ratio={kind: round(medians[kind] / goal, 4) for kind, goal in goals.items()},  # over the goal
        medians={case: round(value, 3) for case, value in medians.items()},
        sides=rounds.summary(),
        minutes=round((time.monotonic() - began) / 60, 1),
        peers_missing=[],
    )


if __name__ == "__main__":
    main()
