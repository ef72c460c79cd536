"""Whole runs at eta = 0, 1, 2, 4: gain and cost of asynchrony.

    python benchmarks/end_to_end.py [--rounds 5] [--write-baseline]
    python benchmarks/end_to_end.py --steps 6 --rounds 1                       # a quick trial
    python benchmarks/end_to_end.py --config configs/long_tail_cpu.yaml        # a run in which generation dominates

Each run is `asyncrl-launch run CONFIG manager.max_head_offpolicyness=ETA` in a scratch folder, without evaluations. Runs do not
overlap. Round r runs all etas with seed r. All figures come from files of the finished run: metrics, journals, summary.

- seconds to the target: from the possible start of training (the first weights are published) to the end of the first step whose
  sampled reward, averaged over it and the two steps before, is at least --target. `value` is this time at eta = 2. With --target 0
  it is the time of all steps. That is the default for configs other than the quickstart: there the steps are the same work at
  every eta.
- ratio.eta0: these seconds over those of the synchronous run, by eta.
- idle: shares of training time in which the trainer waited for data, and in which a server generated nothing (mean of the servers).
- bias: mean response length of trained data over that of all finished responses. 1 means that short responses are not favoured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Rounds, alternate, finish, parser, table

from asyncrl.runtime.metrics import JOURNAL_BUCKET_S
from asyncrl.testing.runs import RunHandle, journal, launch, train_steps

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = "configs/quickstart_cpu.yaml"
ETAS = (0, 1, 2, 4)
QUOTED_ETA = 2
TARGET = 0.8
WINDOW = 3  # number of steps that the reward is averaged over
_RUN_LIMIT_S = 1800.0
_PREPARE_LIMIT_S = 600.0

# case -> (head of the column, field of `measure`)
COLUMNS = {
    "to_target_s": "s to target",
    "steps_s": "s, all steps",
    "tokens_per_s": "tokens/s",
    "trainer_waits_data": "trainer waits",
    "servers_idle": "servers idle",
    "offpolicy_mean": "off-policy",
    "offpolicy_max": "max",
    "dropped": "dropped",
    "rejected": "rejected",
    "length_bias": "bias",
    "last_reward": "last reward",
}


class EndToEnd:
    """Runs one config at several etas."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._seeds = dict.fromkeys(args.etas, 0)

    def prepare(self) -> None:
        """Make the example's model and data if they are missing."""
        command = [sys.executable, "-m", "asyncrl.cli.main", "prepare", self._args.config]
        subprocess.run(command, check=True, timeout=_PREPARE_LIMIT_S, stdout=sys.stderr)

    def run(self, eta: int) -> dict[str, float]:
        """Run once to the end. Returns the numbers of `measure`."""
        self._seeds[eta] += 1
        overrides = [
            f"fileroot={self._folder}",
            f"trial=eta{eta}-{self._seeds[eta]}",
            f"seed={self._seeds[eta]}",
            f"manager.max_head_offpolicyness={eta}",
            "tensorboard=false",
            "eval.prompts=null",
            *([f"train.max_steps={self._args.steps}"] if self._args.steps else []),
            *self._args.overrides,
        ]
        with launch(self._args.config, *overrides) as run:
            code = run.wait(_RUN_LIMIT_S)
            if code != 0:
                raise SystemExit(f"the run at eta {eta} ended with code {code}:\n{run.output()[-4000:]}")
            return measure(run, self._args.target)


def measure(run: RunHandle, target: float) -> dict[str, float]:
    """Numbers of a finished run. `to_target_s` is infinite if the target was not reached, so that medians count such runs."""
    steps = train_steps(run.run_dir)
    summary: dict[str, Any] = json.loads((run.run_dir / "summary.json").read_text())
    began, ended = steps[0]["time"] - steps[0]["time/step_s"], steps[-1]["time"]
    reached = reached_at(steps, target) if target > 0 else ended
    return {
        "to_target_s": math.inf if reached is None else reached - began,
        "steps_s": ended - began,
        "tokens_per_s": sum(step["batch/num_generated_tokens"] for step in steps) / (ended - began),
        "trainer_waits_data": summary["trainer_waits_data_share"],
        "servers_idle": servers_idle(run.run_dir, began, ended),
        "offpolicy_mean": summary["head_offpolicyness_mean"],
        "offpolicy_max": summary["head_offpolicyness_max"],
        "dropped": float(summary["dropped_groups"]),
        "rejected": float(sum(summary["rejected"].values())),
        "length_bias": summary["trained_response_length_mean"] / summary["finished_response_length_mean"],
        "last_reward": moving_mean([step["reward/mean"] for step in steps])[-1],
    }


def reached_at(steps: Sequence[dict[str, Any]], target: float) -> float | None:
    """End time of the first step at which the mean reward of WINDOW steps was at least the target, or None."""
    means = moving_mean([step["reward/mean"] for step in steps])
    for step, mean in zip(steps[WINDOW - 1 :], means[WINDOW - 1 :], strict=True):
        if mean >= target:
            return float(step["time"])
    return None


def moving_mean(values: Sequence[float]) -> list[float]:
    """Each value averaged with up to WINDOW - 1 values before it."""
    parts = [values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


def servers_idle(run_dir: Path, began: float, ended: float) -> float:
    """Share of the time in which a server sampled no token, mean of the servers. Resolution: one bucket of the journal."""
    num_buckets = max(1, math.floor((ended - began) / JOURNAL_BUCKET_S))
    shares = []
    for path in sorted((run_dir / "journal").glob("generation_server_*.jsonl")):
        records = [record for record in journal(run_dir, path.stem) if began <= record["time"] < ended]
        busy = {round(record["time"] / JOURNAL_BUCKET_S) for record in records if record["tokens"] > 0}
        shares.append(max(0.0, 1.0 - len(busy) / num_buckets))
    return sum(shares) / len(shares)


def main() -> None:
    options = parser(__doc__.split("\n")[0], quick={"etas": [0, QUOTED_ETA], "steps": 3, "target": 0.0})
    options.add_argument("--config", default=QUICKSTART, help=f"default {QUICKSTART}")
    options.add_argument("--etas", type=int, nargs="+", default=list(ETAS), help="default 0 1 2 4")
    options.add_argument(
        "--steps", type=int, default=0, help="train.max_steps; the schedule of the learning rate also depends on it"
    )
    options.add_argument(
        "--target",
        type=float,
        default=None,
        help=f"measure the time until the sampled reward (mean of {WINDOW} steps) reaches this value; 0: measure the time of "
        f"all steps (default: {TARGET} for the quickstart, else 0)",
    )
    options.add_argument("--folder", default=None, help="folder of the runs (default: a temporary folder)")
    options.add_argument("--set", dest="overrides", nargs="*", default=[], help="further overrides, key=value")
    args = options.parse_args()
    os.chdir(ROOT)  # the configs' paths are relative to it
    if args.target is None:
        args.target = TARGET if args.config == QUICKSTART else 0.0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench = EndToEnd(args, Path(folder))
        bench.prepare()
        # No warm-up: every run starts fresh processes.
        rounds = alternate(args, {f"eta{eta}": lambda eta=eta: bench.run(eta) for eta in args.etas}, warm_up=0)
    report(args, rounds)


def report(args: argparse.Namespace, rounds: Rounds) -> None:
    sides = [f"eta{eta}" for eta in args.etas]
    medians = {side: {case: rounds.median(side, case) for case in rounds.cases(side)} for side in sides}
    rows = [[side, *(medians[side][case] for case in COLUMNS)] for side in sides]
    table(args, f"{args.config}, medians of {args.rounds}", ["", *COLUMNS.values()], rows)
    seconds = {side: medians[side]["to_target_s"] for side in sides if math.isfinite(medians[side]["to_target_s"])}
    base = seconds.get("eta0")
    ratio = {side: round(s / base, 4) for side, s in seconds.items() if side != "eta0"} if base else {}
    quoted = f"eta{QUOTED_ETA}"
    name = "end_to_end" if args.config == QUICKSTART else f"end_to_end_{Path(args.config).stem}"
    finish(
        args,
        name=name,
        value=seconds.get(quoted),
        unit=f"s to reward {args.target:g}" if args.target > 0 else "s for all steps",
        ratio={"eta0": ratio},
        cases={
            side: {case: round(value, 4) for case, value in medians[side].items() if math.isfinite(value)}
            for side in sides
        },
        to_target_s={side: [_seconds(value) for value in rounds.values[side]["to_target_s"]] for side in sides},
        steps_s={side: [_seconds(value) for value in rounds.values[side]["steps_s"]] for side in sides},
        config=args.config,
        steps=args.steps,
        peers_missing=[],
    )


def _seconds(value: float) -> float | None:
    """Rounded seconds. None if the target was not reached, because JSON has no infinity."""
    return round(value, 2) if math.isfinite(value) else None


if __name__ == "__main__":
    main()
