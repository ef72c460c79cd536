"""Draws reward and off-policyness of a run: python docs/reward_curve.py RUN_DIR OUT.png (needs matplotlib)."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from asyncrl.runtime.metrics import METRICS_FILE, read_json_lines


def main(run_dir: Path, out: Path) -> None:
    records = read_json_lines(run_dir / METRICS_FILE)
    steps = [record for record in records if "reward/mean" in record]
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=(3, 1), layout="constrained")
    top.plot([r["step"] for r in steps], [r["reward/mean"] for r in steps], label="sampled, training batch")
    for mode, marker in (("sampled", "o"), ("greedy", "s")):
        found = [record for record in records if f"eval/{mode}_reward" in record]
        top.plot(
            [r["step"] for r in found], [r[f"eval/{mode}_reward"] for r in found], marker, label=f"{mode}, evaluation"
        )
    top.set(ylabel="reward", ylim=(0, 1.02))
    top.legend(loc="lower right")
    bottom.plot([r["step"] for r in steps], [r["offpolicy/head_max"] for r in steps], label="max")
    bottom.plot([r["step"] for r in steps], [r["offpolicy/head_mean"] for r in steps], label="mean")
    bottom.set(xlabel="train step", ylabel="versions old, head")
    bottom.legend(loc="lower right", ncols=2)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
