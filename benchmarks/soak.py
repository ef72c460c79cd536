"""Long runs: half an hour under faults, which measures lost throughput, or 2,000 steps without faults, which measures growth.

    python benchmarks/soak.py --minutes 30 [--rounds 5] [--seed 1] [--every 5-15] [--kinds kill,stop] [--write-baseline] [key=value]
    python benchmarks/soak.py --steps 2000 [key=value]

--minutes: one run of the config (default: the quickstart without evaluations), divided into rounds. Each round first trains
undisturbed for a sixth of its time. Then every 5 to 15 s a fault hits one of the workers: SIGKILL, or SIGSTOP for 1 to 20 s. --seed
determines the faults. The result is the share of the undisturbed step rate that is lost, as the median of the rounds. Only steps of
the surviving lineage count. The benchmark fails if the run ends or the audit finds a problem.
--steps: one run without faults. Every few seconds the benchmark samples the resident memory, file descriptors and threads of each
process, and the bytes of each subfolder of the run folder. `slope` is the growth of each in 1,000 steps, by least squares over the
samples after the first fifth. The slope over the second half follows in brackets: for a cache that fills up and stays full it is
about zero. --samples FILE: write the samples as JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from common import Rounds, finish, parser, say, table
from msgspec import structs
from startup import ROOT, prepare

from asyncrl.testing.faults import Fault, Injector, RunProcesses, cost_lines, read_costs, schedule
from asyncrl.testing.runs import RunHandle, assert_nothing_left, launch, train_steps
from asyncrl.weights.lineage import audit

TARGETS = ("rollout_worker", "generation_server", "gserver_manager", "model_worker", "master")
# Relative frequency of faults; 1 for kinds not named: the trainer group gets fewer faults, because each costs steps
WEIGHTS = {"rollout_worker": 3.0, "generation_server": 3.0, "gserver_manager": 2.0}
KINDS = ("kill", "stop")
_LIMIT_S = 180.0
_SAMPLE_S = 5.0
_CALM = 1 / 6  # share of a round
WARM_UP, LATE = 0.2, 0.5  # shares of the samples that are left out, because caches fill first
_MB = 1e6


# ----------------------------------------------------------------------------------------------------------- under fire


def under_fire(args: argparse.Namespace) -> None:
    overrides = ["train.max_steps=0", "checkpoint.every_steps=5", "runtime.max_restarts=10000"]
    rates: dict[str, dict[str, list[float]]] = {"undisturbed": {"steps/s": []}, "under fire": {"steps/s": []}}
    with scratch_run(args, overrides) as run:
        run.wait_for_step(5, _LIMIT_S)
        with Injector(run.run_dir, notice=lambda text: say(args, text)) as injector:
            for faults in faults_by_round(args):
                calm = rate(run, args.minutes * 60 / args.rounds * _CALM)
                began, first = time.monotonic(), newest_step(run)
                injector.run(faults, until=lambda: run.popen.poll() is not None)
                struck = rate_since(run, first, began)
                rates["undisturbed"]["steps/s"].append(calm)
                rates["under fire"]["steps/s"].append(struck)
                say(args, f"{calm:.3f} steps/s undisturbed, {struck:.3f} under faults: {1 - struck / calm:.0%} lost")
        ended = run.popen.poll()
        stop(run)
        found, costs = audit(run.run_dir), read_costs(run.run_dir)
        if ended is not None or found.problems:
            raise SystemExit(
                f"the run ended, or its audit found problems (exit code {ended}): {run.output()[-4000:]}\n"
                + "\n".join(found.problems)
            )
    rounds = Rounds(rates)
    lost = [
        1 - struck / calm for struck, calm in zip(*(rates[side]["steps/s"] for side in reversed(rates)), strict=True)
    ]
    by = Counter(f"{strike.fault.kind} {strike.fault.target}" for strike in injector.strikes)
    back = list(injector.recovered_s.values())
    table(args, "faults", ["", "number"], sorted(by.items()))
    for line in cost_lines(costs) if costs is not None else ():
        say(args, line)
    say(args, f"{statistics.median(lost):.0%} lost, median of {args.rounds} rounds (goal: less than 15 %)")
    finish(
        args,
        name="soak_faults",
        variant="" if set(args.kinds) == set(KINDS) else "_".join(args.kinds),
        value=statistics.median(lost),
        unit="share of throughput lost",
        ratio={"undisturbed": rounds.ratio("under fire", "undisturbed", "steps/s")},
        measured=rounds.summary(),
        lost=[round(share, 3) for share in lost],
        faults=dict(by),
        minutes=args.minutes,
        back_s={"median": round(statistics.median(back), 2), "max": round(max(back), 2)} if back else {},
        lost_s={cost.what: cost.lost_s for cost in costs.of_faults} if costs is not None else {},
        voided_steps=found.voided_steps,
        trained=found.trained,
        rejected=found.rejected,
        peers_missing=[],
    )


def faults_by_round(args: argparse.Namespace) -> list[list[Fault]]:
    """One schedule of faults, cut into rounds. Times count from the start of the faults of a round."""
    least, _, most = args.every.partition("-")
    fire_s = args.minutes * 60 / args.rounds * (1 - _CALM)
    every = (float(least), float(most or least))
    faults = schedule(
        seed=args.seed, every=every, for_s=fire_s * args.rounds, kinds=args.kinds, targets=TARGETS, weights=WEIGHTS
    )
    rounds: list[list[Fault]] = [[] for _ in range(args.rounds)]
    for fault in faults:
        number = min(int(fault.at / fire_s), args.rounds - 1)
        rounds[number].append(structs.replace(fault, at=fault.at - number * fire_s))
    return rounds


def rate(run: RunHandle, seconds: float) -> float:
    """Train steps per second, measured over the next `seconds`."""
    began, first = time.monotonic(), newest_step(run)
    deadline = began + seconds
    run.wait_until(lambda: time.monotonic() > deadline, f"the end of {seconds:.0f} s", seconds + _LIMIT_S)
    return rate_since(run, first, began)


def rate_since(run: RunHandle, first: int, began: float) -> float:
    return (newest_step(run) - first) / (time.monotonic() - began)


def newest_step(run: RunHandle) -> int:
    """The latest step of the surviving lineage. After a restart it may be lower than before."""
    return int(train_steps(run.run_dir)[-1]["step"])


# ------------------------------------------------------------------------------------------------------------ undisturbed


def undisturbed(args: argparse.Namespace) -> None:
    samples: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    with (
        scratch_run(args, [f"train.max_steps={args.steps}"]) as run,
        open(args.samples or os.devnull, "w", encoding="utf-8") as out,
    ):
        run.wait_for_step(1, _LIMIT_S)
        while run.popen.poll() is None:
            step = float(newest_step(run))
            for name, figures in look(run.run_dir).items():
                samples[name].append((step, figures))
                print(json.dumps({"time": time.time(), "step": step, "name": name, **figures}), file=out, flush=True)
            with contextlib.suppress(psutil.TimeoutExpired):
                psutil.Process(run.popen.pid).wait(_SAMPLE_S)
        if run.wait(_LIMIT_S) != 0:
            raise SystemExit(run.output())
        found = audit(run.run_dir)
        if found.problems:
            raise SystemExit("\n".join(found.problems))
    enough = {name: seen for name, seen in sorted(samples.items()) if len(seen) > 8}
    slopes = {name: slopes_of(seen, WARM_UP) for name, seen in enough.items()}
    late = {name: slopes_of(seen, LATE) for name, seen in enough.items()}
    figures = sorted({figure for slope in slopes.values() for figure in slope})
    rows = [
        [name, *(f"{slope[figure]:.2f} ({late[name][figure]:.2f})" if figure in slope else "" for figure in figures)]
        for name, slope in slopes.items()
    ]
    table(args, "growth per 1,000 steps (in the second half)", ["", *figures], rows)
    finish(
        args,
        name="soak_steps",
        value=max((slope.get("memory_mb", 0.0) for slope in slopes.values()), default=0.0),
        unit="MB of resident memory in 1,000 steps, of the process that grows most",
        ratio={},
        slopes=slopes,
        slopes_late=late,
        last={name: seen[-1][1] for name, seen in sorted(samples.items())},
        steps=args.steps,
        peers_missing=[],
    )


def look(run_dir: Path) -> dict[str, dict[str, float]]:
    """Current resources of each process, and the bytes on disk by folder."""
    found: dict[str, dict[str, float]] = {}
    for name, process in RunProcesses(run_dir).by_name().items():
        with contextlib.suppress(psutil.Error, OSError), process.oneshot():
            found[name] = {
                "memory_mb": process.memory_info().rss / _MB,
                "descriptors": float(process.num_fds()),
                "threads": float(process.num_threads()),
            }
    for part in sorted(path for path in run_dir.iterdir() if path.is_dir()):
        size = 0
        for folder, _, files in os.walk(part):  # os.walk skips folders that are pruned meanwhile
            for file in files:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(folder, file)).st_size
        found[f"{part.name}/"] = {"disk_mb": size / _MB}
    return found


def slopes_of(samples: Sequence[tuple[float, dict[str, float]]], after: float) -> dict[str, float]:
    """Growth of each figure per 1,000 steps, without the first `after` (a share) of the samples."""
    later = samples[int(len(samples) * after) :]
    steps = np.array([step for step, _ in later])
    return {
        figure: round(float(np.polyfit(steps, [figures[figure] for _, figures in later], 1)[0] * 1000), 3)
        for figure in later[0][1]
    }


# ---------------------------------------------------------------------------------------------------------------- the run


@contextlib.contextmanager
def scratch_run(args: argparse.Namespace, overrides: Sequence[str]):  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-", ignore_cleanup_errors=True) as folder:
        ours = [f"fileroot={folder}", "eval.prompts=null", "train.num_epochs=1000", *overrides]
        with launch(args.config, *ours, *args.overrides) as run:
            yield run


def stop(run: RunHandle) -> None:
    run.signal(signal.SIGINT)
    run.wait(_LIMIT_S)
    assert_nothing_left(run.run_dir)


def main() -> None:
    options = parser(__doc__ or "", quick={"minutes": 0.3, "every": "3-6"})
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart_cpu.yaml")
    what = options.add_mutually_exclusive_group()
    what.add_argument("--minutes", type=float, help="duration of the run with faults")
    what.add_argument("--steps", type=int, help="number of steps of the run without faults")
    options.add_argument("--samples", metavar="FILE", default="", help="with --steps: write the samples as JSON lines")
    options.add_argument("--seed", type=int, default=1, help="seed of the faults")
    options.add_argument(
        "--every", metavar="A-B", default="5-15", help="range of seconds between two faults (default 5-15)"
    )
    options.add_argument(
        "--kinds", default=KINDS, metavar="KIND,KIND", type=lambda text: tuple(text.split(",")), help="kinds of faults"
    )
    options.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the config's fields")
    args = options.parse_args()
    if not args.minutes and not args.steps:
        options.error("set --minutes or --steps (or --quick)")
    args.config = args.config.absolute()
    if args.write_baseline and args.steps:
        raise SystemExit("--write-baseline cannot be combined with --steps, which is a single run; use --minutes")
    if args.steps:
        args.rounds = 1
    prepare(args)
    if args.minutes:
        under_fire(args)
    else:
        undisturbed(args)


if __name__ == "__main__":
    main()
