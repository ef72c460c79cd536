"""Reproduces AReaL's staleness ablation (arXiv 2505.24298, section 5) on the real asynchronous system.

    python run.py [--out runs/staleness] [--etas 0 1 4 8 16] [--seeds 1 2 3] [--steps 60]

Runs the quickstart's task for a fixed number of train steps, for every eta, loss and seed. The losses are naive PPO, whose ratio is
to the policy that sampled, and decoupled PPO, whose ratio is to the policy at the start of the train step. eta is only a bound: if
generation is slower than training, the data is fresher. So with train.wait_for_full_lag every step waits until generation is eta
versions ahead. Whole runs follow one another, a minute each on two free cores. Finished runs are not repeated. Writes results.jsonl
(one line per run), table.md and staleness.png to --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLE, CONFIG = "sloppy_sorter", "config.yaml"  # the quickstart's task, which is copied into --out
EVAL_REPEATS = 4  # samples of each held-out prompt: 2048 samples, a standard error of 0.007
LOSSES = {"naive": False, "decoupled": True}  # train.ppo.use_decoupled_loss
RUN_LIMIT_S = 1200.0
Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 4, 8, 16])
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-prompts", type=Path, help="evaluation prompts; default: the example's")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further overrides of the config")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    task = out / "task"
    if not task.exists():
        launch("init", str(task), "--example", EXAMPLE, folder=out)
    launch("prepare", CONFIG, *arguments.overrides, folder=task)
    eval_prompts = out / "eval.jsonl"
    eval_prompts.write_text((arguments.eval_prompts or task / "data" / "eval.jsonl").read_text() * EVAL_REPEATS)
    num_eval = len(eval_prompts.read_text().splitlines())
    grid = [(eta, loss, seed) for seed in arguments.seeds for eta in arguments.etas for loss in arguments.losses]
    began, num_run = time.monotonic(), 0
    results = []
    for number, (eta, loss, seed) in enumerate(grid):
        run_dir = out / f"{loss}-eta{eta}" / f"seed{seed}"
        if not (run_dir / "summary.json").exists():
            left = (
                ""
                if not num_run
                else f"; about {(time.monotonic() - began) / num_run * (len(grid) - number):.0f} s left"
            )
            print(f"run {number + 1} of {len(grid)}: eta = {eta}, {loss}, seed {seed}{left}", flush=True)
            train(
                task,
                run_dir,
                f"manager.max_head_offpolicyness={eta}",
                f"train.ppo.use_decoupled_loss={str(LOSSES[loss]).lower()}",
                f"seed={seed}",
                f"train.max_steps={arguments.steps}",
                f"eval.prompts.path={eval_prompts}",
                f"eval.num_prompts={num_eval}",
                *arguments.overrides,
            )
            num_run += 1
        results.append(read_result(run_dir, eta, loss, seed))
    (out / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    (out / "table.md").write_text(table(results))
    print(table(results))
    draw(results, out / "staleness.png")
    return 0


def train(task: Path, run_dir: Path, *overrides: str) -> None:
    """Launch one whole run in the task's folder: a launcher and its processes, train steps, and an evaluation at the end."""
    launch(
        "run",
        CONFIG,
        f"fileroot={run_dir.parents[1]}",
        f"experiment={run_dir.parent.name}",
        f"trial={run_dir.name}",
        "allocation=transformers.d1p1m1+d1p1m1",  # generation and training alternate, so one process each is cheapest
        "rollout.num_workers=1",
        "train.wait_for_full_lag=true",
        "eval.every_steps=0",
        "eval.at_start=false",
        "tensorboard=false",
        *overrides,
        folder=task,
        log=run_dir.parent / f"{run_dir.name}.log",
    )


def launch(command: str, *arguments: str, folder: Path, log: Path | None = None) -> None:
    words = [sys.executable, "-m", "asyncrl.cli.main", command, *arguments]
    with contextlib.ExitStack() as stack:
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("w"))
        code = subprocess.run(
            words, cwd=folder, stdout=output, stderr=output, timeout=RUN_LIMIT_S, check=False
        ).returncode
    if code:
        raise SystemExit(f"`asyncrl-launch {command}` ended with exit code {code}{f'; see {log}' if log else ''}")


def read_result(run_dir: Path, eta: int, loss: str, seed: int) -> Result:
    """Results of a finished run: accuracy at its end, and the measured off-policyness of its trained groups."""
    summary = json.loads((run_dir / "summary.json").read_text())
    evaluation = summary["evaluations"][-1]
    return {
        "eta": eta,
        "loss": loss,
        "seed": seed,
        "sampled": evaluation["eval/sampled_reward"],
        "greedy": evaluation["eval/greedy_reward"],
        "head_mean": summary["head_offpolicyness_mean"],
        "head_max": summary["head_offpolicyness_max"],
        "steps": summary["steps"],
        "training_s": summary["training_s"],
        "rejected": sum(summary["rejected"].values()),
    }


def table(results: Sequence[Result]) -> str:
    """A Markdown table with a row per eta: accuracy by loss, as mean +- standard deviation over the seeds."""
    losses = [loss for loss in LOSSES if any(result["loss"] == loss for result in results)]
    cells = [f"{loss}, {kind}" for kind in ("sampled", "greedy") for loss in losses]
    lines = [
        "| eta | off-policyness reached: mean (max) | " + " | ".join(cells) + " |",
        "|---" * (2 + len(cells)) + "|",
    ]
    for eta in sorted({result["eta"] for result in results}):
        rows = [result for result in results if result["eta"] == eta]
        reached = (
            f"{statistics.mean(row['head_mean'] for row in rows):.1f} ({max(row['head_max'] for row in rows):.0f})"
        )
        values = [
            spread([row[kind] for row in rows if row["loss"] == loss])
            for kind in ("sampled", "greedy")
            for loss in losses
        ]
        lines.append(f"| {eta} | {reached} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


def draw(results: Sequence[Result], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is missing; `pip install matplotlib`")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, kind in zip(axes, ("sampled", "greedy"), strict=True):
        for loss, colour in zip(LOSSES, ("tab:red", "tab:blue"), strict=True):
            rows = [result for result in results if result["loss"] == loss]
            etas = sorted({row["eta"] for row in rows})
            by_eta = [[row for row in rows if row["eta"] == eta] for eta in etas]
            reached = [statistics.mean(row["head_mean"] for row in group) for group in by_eta]
            means = [statistics.mean(row[kind] for row in group) for group in by_eta]
            axis.plot(reached, means, "-o", color=colour, label=f"{loss} PPO", markersize=4)
            axis.scatter([row["head_mean"] for row in rows], [row[kind] for row in rows], s=10, color=colour, alpha=0.5)
        axis.set_xlabel("off-policyness reached, versions (mean)")
        axis.set_ylabel(f"{kind} accuracy after {results[0]['steps']} steps")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


if __name__ == "__main__":
    sys.exit(main())
