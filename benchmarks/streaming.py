"""Accumulation on arriving groups: the time of a step with and without train.streaming, at eta = 0 and with long-tailed arrivals.

    python benchmarks/streaming.py [--rounds 3] [--write-baseline]

Whole runs by the real launcher, with real manager, master, rollout workers, streams, etcd and weight versions. Only generation and
training keep a fixed pace (tests/support/paced_workers.py). All responses of a batch run at once, so that groups arrive one after
another, the longest last. A train step on a whole batch takes --step-s, and on a part of a batch its share by groups. Lengths are
those of the long-tail task: the same on all sides, different in every round. That the updates are equal is not measured here but
asserted (tests/end_to_end/test_streaming.py).

- ideal: seconds of a step in which the trainer begins each group as soon as it has arrived, without any overhead: for groups that
  arrive at a_1 <= ... <= a_n and take w each, the largest of a_i + (n - i + 1) * w.  serial: the last arrival, plus a step.
- value: seconds per step with streaming (order `groups`) over those without, in percent. ratio.ideal: ideal over measured time.
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

_FILL_STEPS = 1  # steps at the start that are not measured
_LIMIT_S = 300.0  # of a run, in addition to 20 times its serial time
SIDES = {
    "whole": [],
    "groups": ["train.streaming=true"],
    "balanced": ["train.streaming=true", "train.streaming_order=balanced"],
    "tokens": ["train.streaming=true", "train.streaming_order=tokens"],
}


class Streaming:
    """Runs at one size."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._num_runs: Counter[str] = Counter()
        self._last = _FILL_STEPS + args.steps
        self._config = make_paced_run(
            folder,
            num_prompts=(self._last + 2) * args.batch,
            batch_size=args.batch,
            group_size=args.group,
            servers=1,
            slots=args.batch * args.group,
        )

    def run(self, side: str) -> dict[str, float]:
        args = self._args
        self._num_runs[side] += 1
        seed = self._num_runs[side]
        lengths = response_lengths(seed, range(self._last * args.batch), args.group)
        batches = [lengths[step * args.batch : (step + 1) * args.batch] for step in range(_FILL_STEPS, self._last)]
        longest = fmean(max(map(max, batch)) for batch in batches)
        pace = Pace(
            tokens_per_s=longest / args.generation_s, step_s=args.step_s, seed=seed, prompt_tokens=PROMPT_TOKENS
        )
        arrivals = [sorted(max(group) / pace.tokens_per_s for group in batch) for batch in batches]
        serial_s = fmean(each[-1] + args.step_s for each in arrivals)
        part_tokens = sum(sum(group) for batch in batches for group in batch) // (4 * len(batches))
        overrides = [
            f"trial={side}-{seed}",
            "manager.max_head_offpolicyness=0",
            "train.ppo.minibatches=1",
            "train.ppo.use_decoupled_loss=false",
            f"train.max_steps={self._last}",
            f"train.streaming_tokens={part_tokens}",
            *SIDES[side],
        ]
        with launch_paced(self._config, pace, *overrides) as run:
            if code := run.wait(_LIMIT_S + 20 * serial_s * self._last):
                raise SystemExit(f"the run {side} ended with code {code}:\n{run.output()[-4000:]}")
        steps = train_steps(run.run_dir)
        return {
            "step_s": (steps[-1]["time"] - steps[_FILL_STEPS - 1]["time"]) / args.steps,
            "parts": fmean(step.get("streaming/parts", 1.0) for step in steps[_FILL_STEPS:]),
            "serial_s": serial_s,
            "ideal_s": fmean(ideal(each, args.step_s / args.batch) for each in arrivals),
        }


def ideal(arrivals: list[float], work_s: float) -> float:
    """Seconds until all groups are trained, if each is trained as soon as it has arrived and the trainer is free.

    arrivals: seconds, in increasing order. work_s: of one group.
    """
    return max(arrived + (len(arrivals) - place) * work_s for place, arrived in enumerate(arrivals))


def main() -> None:
    options = parser(
        __doc__.split("\n")[0],
        rounds=3,
        quick={"steps": 2, "step_s": 1.0, "generation_s": 1.0, "sides": ["whole", "groups"]},
    )
    options.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="default: all")
    options.add_argument("--steps", type=int, default=8, help="number of measured steps (default 8)")
    options.add_argument("--step-s", type=float, default=4.0, help="duration of a train step (default 4)")
    options.add_argument(
        "--generation-s", type=float, default=4.0, help="mean time until the longest response ends (default 4)"
    )
    options.add_argument("--batch", type=int, default=16, help="prompts per train step (default 16)")
    options.add_argument("--group", type=int, default=4, help="responses per prompt (default 4)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Streaming(args, Path(folder))
        # No warm-up: every run starts fresh processes.
        rounds = alternate(args, {side: lambda side=side: bench.run(side) for side in args.sides}, warm_up=0)
    medians = {name: {case: rounds.median(name, case) for case in rounds.cases(name)} for name in rounds.values}
    cases = ("step_s", "parts", "ideal_s", "serial_s")
    rows = [[name, *(found[case] for case in cases)] for name, found in medians.items()]
    header = ["", "s/step", "parts", "ideal", "serial"]
    table(args, f"{args.steps} steps at eta 0, medians of {args.rounds}", header, rows)
    times = {name: found["step_s"] for name, found in medians.items()}
    both = {"whole", "groups"} <= times.keys()
    finish(
        args,
        name="streaming",
        value=100 * times["groups"] / times["whole"] if both else None,
        unit="% of the step's time without streaming",
        ratio={"ideal": {name: round(found["ideal_s"] / found["step_s"], 4) for name, found in medians.items()}},
        cases={name: {case: round(value, 4) for case, value in found.items()} for name, found in medians.items()},
        batch_size=args.batch,
        group_size=args.group,
        steps=args.steps,
        peers_missing=[],
    )


if __name__ == "__main__":
    main()
