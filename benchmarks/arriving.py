"""Frozen models on arriving groups: the time of a step with and without train.arriving_inference, if the reference takes as long as
training.

    python benchmarks/arriving.py [--rounds 3] [--write-baseline]

Whole runs by the real launcher, with real manager, master, rollout workers, streams, etcd and weight versions. Only the
computing parts keep a fixed pace (tests/support/paced_workers.py): generation emits tokens at a fixed rate, the trainer sleeps
for --step-s, and a detached reference sleeps for --step-s for a batch, or for a part's share of it. It fetches no data, so the cost
of moving data between worker groups is not part of the figures. All three need --step-s for a batch.

- within: the reference processes a batch within its step, so a step takes the sum of both. arriving: train.arriving_inference=true.
- ideal: the longest of generation, reference and training for the tokens and groups of the measured steps.
- value: share of the ideal with arriving groups, in percent. ratio.within: seconds per step within, over those arriving.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from statistics import fmean

from common import alternate, finish, parser, table

from asyncrl.testing.runs import train_steps
from tests.support.paced_run import PROMPT_TOKENS, launch_paced, make_paced_run, response_lengths
from tests.support.paced_workers import Pace

ETA = 4
_FIRST = 2 + ETA  # steps at the start that are not measured: the pipeline fills
_START_S = 180.0
_SLACK = 20.0  # limit of a run: this multiple of its ideal time, plus _START_S
SIDES = {"within": "false", "arriving": "true"}
SETTINGS = [
    f"manager.max_head_offpolicyness={ETA}",
    "generation.interrupt=retract",
    "train.ppo.kl_coef=0.1",
    "train.max_tokens_per_mb=1024",  # also the size of a chunk of arriving groups, for which a step may have to wait
]
COLUMNS = {
    "step_s": "s/step",
    "ideal_s": "ideal s/step",
    "share": "share of ideal",
    "processed": "processed before its step",
}


class Arriving:
    """Runs at one size."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._num_runs: Counter[str] = Counter()
        self._last = _FIRST + args.steps
        self._slots = args.servers * args.slots
        self._config = make_paced_run(
            folder,
            num_prompts=(self._last + 2 + ETA) * args.batch,
            batch_size=args.batch,
            group_size=args.group,
            servers=args.servers,
            slots=args.slots,
        )

    def run(self, side: str) -> dict[str, float]:
        args = self._args
        self._num_runs[side] += 1
        seed = self._num_runs[side]
        lengths = response_lengths(seed, range(self._last * args.batch), args.group)
        batch_tokens = args.batch * args.group * fmean(length for group in lengths for length in group)
        rate = batch_tokens / (self._slots * args.step_s)
        pace = Pace(
            tokens_per_s=rate, step_s=args.step_s, ref_step_s=args.step_s, seed=seed, prompt_tokens=PROMPT_TOKENS
        )
        overrides = [
            f"trial={side}-{seed}",
            f"allocation=transformers.d{args.servers}p1m1+d1p1m1+ref_inf:d1p1m1",
            f"train.arriving_inference={SIDES[side]}",
            f"manager.max_concurrent_rollouts={int(1.5 * self._slots / args.group)}",
            f"train.max_steps={self._last + 1}",
            *SETTINGS,
        ]
        limit_s = _START_S + _SLACK * args.step_s * self._last
        with launch_paced(self._config, pace, *overrides) as run:
            if code := run.wait(limit_s):
                raise SystemExit(f"the run {side} ended with code {code}:\n{run.output()[-4000:]}")
            every = train_steps(run.run_dir)
        steps = every[_FIRST : self._last]
        measured_s = every[self._last - 1]["time"] - every[_FIRST - 1]["time"]
        generation_s = sum(step["batch/num_generated_tokens"] for step in steps) / (self._slots * rate)
        ideal_s = max(len(steps) * args.step_s, generation_s)
        return {
            "step_s": measured_s / len(steps),
            "ideal_s": ideal_s / len(steps),
            "share": ideal_s / measured_s,
            "processed": fmean(step.get("arriving/ref_inf_share", 0.0) for step in steps),
        }


def main() -> None:
    options = parser(__doc__.split("\n\n")[0].replace("\n", " "), rounds=3, quick={"steps": 2, "step_s": 0.5})
    options.add_argument("--steps", type=int, default=12, help="number of measured steps (default 12)")
    options.add_argument(
        "--step-s",
        type=float,
        default=2.5,
        help="seconds for a batch, of generation, reference and training (default 2.5)",
    )
    options.add_argument("--batch", type=int, default=32, help="prompts per train step (default 32)")
    options.add_argument("--group", type=int, default=4, help="responses per prompt (default 4)")
    options.add_argument("--servers", type=int, default=2, help="number of generation servers (default 2)")
    options.add_argument("--slots", type=int, default=32, help="slots of each server (default 32)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Arriving(args, Path(folder))
        rounds = alternate(args, {side: lambda side=side: bench.run(side) for side in SIDES}, warm_up=0)
    medians = {side: {case: rounds.median(side, case) for case in rounds.cases(side)} for side in SIDES}
    rows = [[side, *(medians[side][case] for case in COLUMNS)] for side in SIDES]
    table(args, f"{args.steps} steps of {args.step_s:g} s, medians of {args.rounds}", ["", *COLUMNS.values()], rows)
    finish(
        args,
        name="arriving",
        value=100 * medians["arriving"]["share"],
        unit="% of the ideal pipeline",
        ratio={"within": {"step": round(medians["within"]["step_s"] / medians["arriving"]["step_s"], 4)}},
        cases={side: {case: round(value, 4) for case, value in found.items()} for side, found in medians.items()},
        step_s=args.step_s,
        steps=args.steps,
        peers_missing=[],
    )


if __name__ == "__main__":
    main()
