"""A run that is struck again and again for half an hour, or one that is left alone for 2,000 steps: what is lost, and what grows.

    python benchmarks/soak.py --minutes 30 [--seed 1] [--every 5-15] [--write-baseline] [key=value ...]
    python benchmarks/soak.py --steps 2000 [--write-baseline] [key=value ...]

--minutes: the config (default: the quickstart without evaluations) trains undisturbed for a tenth of that time, then a fault comes
every 5 to 15 s, by a seed: SIGKILL or SIGSTOP to any worker. `lost`: the share of the undisturbed rate of steps that is missing,
counting only steps of the lineage that survives. It fails where the run ends, or the audit finds something.
--steps: nothing is done to it. Resident memory, file descriptors and threads of each process, and the run folder's bytes, are read
every few seconds; `slope` is what each grows by in 1,000 steps, by least squares over what comes after the first fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
from common import finish, parser, say, table
from startup import ROOT, prepare

from asyncrl.lineage import audit
from asyncrl.testing.faults import Injector, RunProcesses, schedule
from asyncrl.testing.runs import RunHandle, assert_nothing_left, launch, train_steps

TARGETS = ("rollout_worker", "generation_server", "gserver_manager", "model_worker", "master")
WEIGHTS = {
    "rollout_worker": 3.0,
    "generation_server": 3.0,
    "gserver_manager": 2.0,
}  # the gang loses steps: half as often as these
_LIMIT_S = 180.0
_SAMPLE_S = 5.0
_WARM_UP = 0.2  # of the samples: caches fill
_MB = 1e6


# ----------------------------------------------------------------------------------------------------------- under fire


def under_fire(args: argparse.Namespace) -> None:
    seconds = args.minutes * 60
    least, _, most = args.every.partition("-")
    faults = schedule(
        seed=args.seed, every=(float(least), float(most or least)), for_s=seconds, targets=TARGETS, weights=WEIGHTS
    )
    overrides = ["train.max_steps=0", "checkpoint.every_steps=10", "runtime.max_restarts=10000"]
    with scratch_run(args, overrides) as run:
        run.wait_for_step(5, _LIMIT_S)
        calm = rate(run, seconds / 10)
        began, first = time.monotonic(), newest_step(run)
        with Injector(run.run_dir, notice=lambda text: say(args, text)) as injector:
            injector.run(faults, until=lambda: run.popen.poll() is not None)
            struck = rate_since(run, first, began)
            minutes = (time.monotonic() - began) / 60
        ended = run.popen.poll()
        stop(run)
        found = audit(run.run_dir)
        if ended is not None or found.problems:
            raise SystemExit(f"the run ended ({ended}): {run.output()[-4000:]}\n" + "\n".join(found.problems))
    lost = 1 - struck / calm
    by = Counter(f"{strike.fault.kind} {strike.fault.target}" for strike in injector.strikes)
    back = list(injector.recovered_s.values())
    table(args, "faults", ["", "number"], sorted(by.items()))
    say(args, f"{calm:.3f} steps/s undisturbed, {struck:.3f} under fire: {lost:.0%} lost (goal: less than 15 %)")
    finish(
        args,
        name="soak_faults",
        value=lost,
        unit="share of throughput lost",
        ratio={"undisturbed": round(struck / calm, 4)},
        faults=dict(by),
        minutes=round(minutes, 1),
        back_s={"median": round(float(np.median(back)), 2), "max": round(max(back), 2)} if back else {},
        voided_steps=found.voided_steps,
        trained=found.trained,
        rejected=found.rejected,
        peers_missing=[],
    )


def rate(run: RunHandle, seconds: float) -> float:
    """Train steps a second, now."""
    began, first = time.monotonic(), newest_step(run)
    deadline = began + seconds
    run.wait_until(lambda: time.monotonic() > deadline, f"{seconds:.0f} s went by", seconds + _LIMIT_S)
    return rate_since(run, first, began)


def rate_since(run: RunHandle, first: int, began: float) -> float:
    return (newest_step(run) - first) / (time.monotonic() - began)


def newest_step(run: RunHandle) -> int:
    """Of the lineage that lives: after a restart it is lower than before."""
    return int(train_steps(run.run_dir)[-1]["step"])


# ------------------------------------------------------------------------------------------------------------ undisturbed


def undisturbed(args: argparse.Namespace) -> None:
    samples: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    with scratch_run(args, [f"train.max_steps={args.steps}"]) as run:
        run.wait_for_step(1, _LIMIT_S)
        while run.popen.poll() is None:
            step = float(newest_step(run))
            for name, figures in look(run.run_dir).items():
                samples[name].append((step, figures))
            with contextlib.suppress(psutil.TimeoutExpired):
                psutil.Process(run.popen.pid).wait(_SAMPLE_S)
        if run.wait(_LIMIT_S) != 0:
            raise SystemExit(run.output())
        found = audit(run.run_dir)
        if found.problems:
            raise SystemExit("\n".join(found.problems))
    slopes = {name: slopes_of(seen) for name, seen in sorted(samples.items()) if len(seen) > 4}
    figures = sorted({figure for slope in slopes.values() for figure in slope})
    rows = [[name, *(slope.get(figure, "") for figure in figures)] for name, slope in slopes.items()]
    table(args, "grows by, in 1,000 steps (at the end)", ["", *figures], rows)
    finish(
        args,
        name="soak_steps",
        value=max((slope.get("memory_mb", 0.0) for slope in slopes.values()), default=0.0),
        unit="MB of resident memory in 1,000 steps, of the process that grows most",
        ratio={},
        slopes=slopes,
        last={name: seen[-1][1] for name, seen in sorted(samples.items())},
        steps=args.steps,
        peers_missing=[],
    )


def look(run_dir: Path) -> dict[str, dict[str, float]]:
    """What each process has now, and what is on disk."""
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
        for folder, _, files in os.walk(part):  # which passes over what is pruned meanwhile
            for file in files:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(folder, file)).st_size
        found[f"{part.name}/"] = {"disk_mb": size / _MB}
    return found


def slopes_of(samples: Sequence[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """By figure, what it grows by in 1,000 steps."""
    later = samples[int(len(samples) * _WARM_UP) :]
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
    options = parser(__doc__ or "", rounds=1)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart_cpu.yaml")
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--minutes", type=float, help="faults for so long")
    what.add_argument("--steps", type=int, help="so many steps, undisturbed")
    options.add_argument("--seed", type=int, default=1, help="of the faults")
    options.add_argument("--every", metavar="A-B", default="5-15", help="seconds between two faults (default 5-15)")
    options.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the config's fields")
    args = options.parse_args()
    args.config = args.config.absolute()
    prepare(args)
    if args.minutes:
        under_fire(args)
    else:
        undisturbed(args)


if __name__ == "__main__":
    main()
