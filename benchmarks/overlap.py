"""Asynchrony in isolation: how close generation and training come to full overlap, without waits, at each eta.

    python benchmarks/overlap.py [--rounds 5] [--write-baseline]                                # eta 0 and 4, balanced
    python benchmarks/overlap.py --rounds 1 --etas 0 1 2 4 8 --scenarios balanced generation training abort default

Whole runs by the real launcher, with real manager, master, rollout workers, streams, etcd and weight versions. Only the computing
parts keep a fixed pace instead (tests/support/paced_workers.py): generation servers emit tokens at a fixed rate in a fixed
number of slots, and a trainer sleeps for the duration of a train step. Lengths are those of the long-tail task, drawn by a seeded
hash of prompt and member: the same at every eta, different in every round. Thus a busy machine has little influence. `cpu_share`
is the share of the machine's CPU that the run used.

- share of ideal: ideal time over measured time of --steps train steps. In the ideal pipeline the slower side never idles. The ideal
  time is the longer of steps * step_s and tokens / (slots * tokens_per_s), with the tokens that these steps train. Only the steady
  state is measured: the first 2 + eta steps, in which the pipeline fills, are skipped, and the run continues after the last
  measured step. trainer busy, slots busy: each side separately. Slots are counted from the servers' journals, which include more
  than is trained while a stock of responses still grows.
- scenarios: balanced (both sides need step_s for a batch), generation (needs twice as long as training), training (generation needs
  half as long). In these, manager.max_concurrent_rollouts lets the prompts in flight fill the slots 1.5 times, and servers keep
  their requests through an update (generation.interrupt=retract). Two scenarios differ from balanced in one respect each: abort
  (servers return their requests to the rollout workers, which send them again) and default (a config that sets neither: abort, and
  as many prompts in flight as eta allows; they wait in the servers' queues and grow old there).
- ratio.ideal.etaN: the share, balanced. `value` is that of eta 4 in percent. ratio.eta0.etaN: steps/s over those of eta 0. AReaL's
  headline figure, 2.77, is such a ratio: for a 1.5B model on 128 GPUs, the hours of 250 steps, and tokens/s at eta 4 over eta 0.
- updating: share of the time in which servers were interrupted by updates. off-policy: trained version minus the version of a
  group's oldest first token. dropped: too old to be trained. bias: mean response length of trained data over that of all finished
  responses. 1 means that short responses are not favoured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from common import Rounds, alternate, finish, parser, table

from asyncrl.testing.runs import journal, processes_of, train_steps
from tests.support.paced_run import PROMPT_TOKENS, launch_paced, make_paced_run, response_lengths
from tests.support.paced_workers import Pace

ETAS = (0, 4)
QUOTED_ETA = 4
AREAL_HEADLINE = 2.77
# Ratio of generation's time for a batch to training's
SCENARIOS = {"balanced": 1.0, "generation": 2.0, "training": 0.5, "abort": 1.0, "default": 1.0}
_FILLED = 1.5  # number of responses in flight, as a multiple of the number of slots
_FILL_STEPS = 2  # this number plus eta is the number of steps at the start that are not measured
_SPARE_STEPS = 1  # number of steps after the last measured one
_SLACK = 20.0  # limit of a run: this multiple of its ideal time, plus _START_S
_START_S = 180.0

COLUMNS = {
    "share": "share of ideal",
    "steps_per_s": "steps/s",
    "trainer_busy": "trainer busy",
    "slots_busy": "slots busy",
    "waits_data": "waits for data",
    "waits_weights": "for weights",
    "servers_updating": "updating",
    "offpolicy_mean": "off-policy",
    "offpolicy_max": "max",
    "dropped": "dropped",
    "rejected": "rejected",
    "length_bias": "bias",
    "cpu_share": "CPU share",
}


class Overlap:
    """Runs the pipeline at one size."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self._num_runs: Counter[str] = Counter()
        most_steps = _FILL_STEPS + max(args.etas) + args.steps + _SPARE_STEPS
        num_prompts = (most_steps + max(args.etas) + 2) * args.batch
        self._config = make_paced_run(
            folder,
            num_prompts=num_prompts,
            batch_size=args.batch,
            group_size=args.group,
            servers=args.servers,
            slots=args.slots,
        )
        self._prompts = range(most_steps * args.batch)

    @property
    def slots(self) -> int:
        return int(self.args.servers * self.args.slots)

    def pace(self, scenario: str, seed: int) -> Pace:
        """Return the pace of a run.

        The rate of one slot is chosen so that all slots together generate a batch in SCENARIOS[scenario] times the duration of a
        train step.
        """
        args = self.args
        lengths = response_lengths(seed, self._prompts, args.group)
        batch_tokens = args.batch * args.group * fmean(length for group in lengths for length in group)
        tokens_per_s = batch_tokens / (self.slots * args.step_s * SCENARIOS[scenario])
        return Pace(
            tokens_per_s=tokens_per_s, step_s=args.step_s, load_s=args.load_s, seed=seed, prompt_tokens=PROMPT_TOKENS
        )

    def run(self, scenario: str, eta: int) -> dict[str, float]:
        """Run once to the end. Returns the numbers of `measure`."""
        name = side(scenario, eta)
        self._num_runs[name] += 1
        first = _FILL_STEPS + eta
        last = first + self.args.steps
        pace = self.pace(scenario, seed=self._num_runs[name])
        # no limit of concurrent rollouts is set; eta 0 needs none, because at most one batch is in flight
        unbounded = scenario == "default" or eta == 0
        concurrent = 0 if unbounded else math.ceil(_FILLED * self.slots / self.args.group)
        interrupt = "abort" if scenario in ("abort", "default") else "retract"
        limit_s = _START_S + _SLACK * self.args.step_s * max(1.0, SCENARIOS[scenario]) * last
        overrides = [
            f"trial={name}-{self._num_runs[name]}",
            f"manager.max_head_offpolicyness={eta}",
            f"manager.max_concurrent_rollouts={concurrent}",
            f"generation.interrupt={interrupt}",
            f"train.max_steps={last + _SPARE_STEPS}",
            *self.args.overrides,
        ]
        with launch_paced(self._config, pace, *overrides) as run:
            run.wait_for_step(first, limit_s)
            before = {process: cpu_seconds(process) for process in processes_of(run.run_dir)}
            run.wait_for_step(last, limit_s)
            used_s = sum(max(0.0, cpu_seconds(process) - then) for process, then in before.items())
            if code := run.wait(limit_s):
                raise SystemExit(f"the run at eta {eta} ended with code {code}:\n{run.output()[-4000:]}")
            return {**measure(run.run_dir, first, last, pace, self.slots), "cpu_s": used_s}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process so far, or 0 if it is gone: the run may end during the call. The launcher, which is this process's
    child, can still be read after its end."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def measure(run_dir: Path, first: int, last: int, pace: Pace, slots: int) -> dict[str, float]:
    """Numbers of steps first + 1 to last. Drops, rejections and bias are of the whole run."""
    every = train_steps(run_dir)
    steps = every[first:last]
    began, ended = every[first - 1]["time"], every[last - 1]["time"]
    measured_s = ended - began
    trainer_s = len(steps) * pace.step_s
    generation_s = sum(step["batch/num_generated_tokens"] for step in steps) / (slots * pace.tokens_per_s)
    slots_s = sampled_tokens(run_dir, began, ended) / (slots * pace.tokens_per_s)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return {
        "share": max(trainer_s, generation_s) / measured_s,
        "steps_per_s": len(steps) / measured_s,
        "trainer_busy": trainer_s / measured_s,
        "slots_busy": slots_s / measured_s,
        "waits_data": sum(step["time/wait_data_s"] for step in steps) / measured_s,
        "waits_weights": sum(step["time/wait_weights_s"] for step in steps) / measured_s,
        "servers_updating": sum(step["time/servers_updating_s"] for step in steps) / measured_s,
        "offpolicy_mean": fmean(step["offpolicy/head_mean"] for step in steps),
        "offpolicy_max": max(step["offpolicy/head_max"] for step in steps),
        "dropped": float(summary["dropped_groups"]),
        "rejected": float(sum(summary["rejected"].values())),
        "length_bias": summary["trained_response_length_mean"] / summary["finished_response_length_mean"],
        "measured_s": measured_s,
    }


def sampled_tokens(run_dir: Path, began: float, ended: float) -> int:
    """Tokens that the servers sampled in a span of time."""
    journals = (run_dir / "journal").glob("generation_server_*.jsonl")
    records = [record for path in journals for record in journal(run_dir, path.stem)]
    return sum(record["tokens"] for record in records if began <= record["time"] < ended)


def main() -> None:
    options = parser(
        __doc__.split("\n")[0],
        quick={"etas": [0, 4], "scenarios": ["balanced"], "steps": 2, "step_s": 0.5},
    )
    options.add_argument("--etas", type=int, nargs="+", default=list(ETAS), help="etas of the balanced scenario")
    options.add_argument(
        "--scenarios", nargs="+", choices=list(SCENARIOS), default=["balanced"], help="default: balanced"
    )
    options.add_argument(
        "--steps", type=int, default=20, help="number of measured steps, after the pipeline has filled (default 20)"
    )
    options.add_argument("--step-s", type=float, default=2.5, help="duration of a train step (default 2.5)")
    options.add_argument(
        "--load-s", type=float, default=0.0, help="duration of a server's load of new weights (default 0)"
    )
    options.add_argument("--batch", type=int, default=32, help="prompts per train step (default 32)")
    options.add_argument("--group", type=int, default=4, help="responses per prompt (default 4)")
    options.add_argument("--servers", type=int, default=2, help="number of generation servers (default 2)")
    options.add_argument("--slots", type=int, default=32, help="slots of each server (default 32)")
    options.add_argument(
        "--folder", default="", help="folder in which the runs are written and kept (default: a temporary folder)"
    )
    options.add_argument("--set", dest="overrides", nargs="*", default=[], help="further overrides, key=value")
    args = options.parse_args()
    with contextlib.nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        bench = Overlap(args, Path(folder))
        # No warm-up: every run starts fresh processes.
        rounds = alternate(args, sides(args, bench), warm_up=0)
    report(args, bench, rounds)


def sides(args: argparse.Namespace, bench: Overlap) -> dict[str, Callable[[], dict[str, float]]]:
    """Return the sides by name, as functions that run once: each of --etas in the balanced scenario, and in the other scenarios
    only the quoted eta, if it is among them."""
    found: dict[str, Callable[[], dict[str, float]]] = {}
    for scenario in args.scenarios:
        for eta in args.etas:
            if scenario == "balanced" or eta == QUOTED_ETA:
                found[side(scenario, eta)] = lambda scenario=scenario, eta=eta: bench.run(scenario, eta)
    return found


def side(scenario: str, eta: int) -> str:
    return f"eta{eta}" if scenario == "balanced" else f"{scenario}_eta{eta}"


def report(args: argparse.Namespace, bench: Overlap, rounds: Rounds) -> None:
    cores = psutil.cpu_count() or 1
    names = list(rounds.values)
    medians = {name: {case: rounds.median(name, case) for case in rounds.cases(name)} for name in names}
    for found in medians.values():
        found["cpu_share"] = found["cpu_s"] / (found["measured_s"] * cores)
    rows = [[name, *(medians[name][case] for case in COLUMNS)] for name in names]
    table(args, f"{args.steps} steps of {args.step_s:g} s, medians of {args.rounds}", ["", *COLUMNS.values()], rows)
    quoted = medians.get(side("balanced", QUOTED_ETA))
    finish(
        args,
        name="overlap",
        value=100 * quoted["share"] if quoted else None,
        unit="% of the ideal pipeline at eta 4",
        ratio={"ideal": {name: round(found["share"], 4) for name, found in medians.items()}, "eta0": speedups(medians)},
        cases={name: {case: round(value, 4) for case, value in found.items()} for name, found in medians.items()},
        areal_headline=AREAL_HEADLINE,
        tokens_per_s={name: round(bench.pace(name, seed=1).tokens_per_s, 2) for name in args.scenarios},
        slots=bench.slots,
        batch_size=args.batch,
        group_size=args.group,
        step_s=args.step_s,
        steps=args.steps,
        peers_missing=[],
    )


def speedups(medians: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return steps/s over those of the run at eta 0 in the same scenario, for each side with such a run."""
    found = {}
    for name, numbers in medians.items():
        scenario, _, eta = name.rpartition("eta")
        base = medians.get(f"{scenario}eta0")
        if base and eta != "0":
            found[name] = round(numbers["steps_per_s"] / base["steps_per_s"], 4)
    return found


if __name__ == "__main__":
    main()
