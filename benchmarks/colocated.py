"""Shared devices: the time of a step in which generation and training take turns on the same cores.

    python benchmarks/colocated.py [--rounds 5] [--steps 12] [--write-baseline] [key=value ...]

The quickstart with eta = 0, with as many generation servers and model workers in both cases:

- disjoint: every process keeps its memory, as on devices of its own.
- shared: the servers sleep while the trainer works, and the models leave the devices while the servers work.

Both run on the same cores and never compute at the same time, because eta = 0. So the difference is the price of the turns: servers
that start their engine again, and models that leave memory and return. `value` is the median time of a shared step in seconds,
between the ends of steps 2 to N; ratio.disjoint is it over that of a disjoint step. `turns`: the part of it in which the trainer
waits for data or weights.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from functools import partial
from pathlib import Path

from common import alternate, finish, parser, table
from startup import ROOT, prepare

from asyncrl.testing.runs import launch, train_steps

ALLOCATIONS = {
    "disjoint": "allocation=transformers.d2p1m1+d2p1m1",
    "shared": "allocation=transformers.d2p1m1@0-1+d2p1m1@0-1",
}
_LIMIT_S = 600.0


def step_time(args: argparse.Namespace, side: str) -> dict[str, float]:
    """Run once to the end. Returns the medians of a step's times, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            ALLOCATIONS[side],
            f"fileroot={folder}",
            "manager.max_head_offpolicyness=0",
            f"train.max_steps={args.steps}",
            "eval.prompts=null",
            *args.overrides,
        ]
        with launch(args.config, *overrides, cwd=ROOT) as run:
            if code := run.wait(_LIMIT_S):
                raise SystemExit(f"the run ended with code {code}:\n{run.output()[-4000:]}")
            steps = train_steps(run.run_dir)
    ends = [step["time"] for step in steps]
    return {
        "step_s": statistics.median(after - before for before, after in itertools.pairwise(ends[1:])),
        "turns_s": statistics.median(step["time/wait_data_s"] + step["time/wait_weights_s"] for step in steps[2:]),
    }


def main() -> None:
    options = parser(__doc__ or "", quick={"steps": 4})
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart_cpu.yaml")
    options.add_argument("--steps", type=int, default=12, help="train steps of each run (default 12)")
    options.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the config's fields")
    args = options.parse_args()
    args.config = args.config.absolute()
    prepare(args)
    rounds = alternate(args, {side: partial(step_time, args, side) for side in ALLOCATIONS}, warm_up=0)
    cases = rounds.cases("shared")
    rows = [[side, *(f"{rounds.median(side, case):.2f}" for case in cases)] for side in ALLOCATIONS]
    table(args, f"seconds, medians of {args.rounds} rounds", ["", *cases], rows)
    shared, disjoint = rounds.median("shared", "step_s"), rounds.median("disjoint", "step_s")
    finish(
        args,
        name="colocated",
        value=shared,
        unit="s",
        ratio={"disjoint": round(shared / disjoint, 3)},
        cases={side: {case: round(rounds.median(side, case), 4) for case in cases} for side in ALLOCATIONS},
        spread={side: {case: round(rounds.spread(side, case), 4) for case in cases} for side in ALLOCATIONS},
        steps=args.steps,
        peers_missing=[],
    )


if __name__ == "__main__":
    main()
