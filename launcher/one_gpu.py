"""Every figure that one GPU can give, in stages with limits of their own. Needs no network, and no model: weights are random.

    python launcher/one_gpu.py plans --out DIR     # on any machine, before: what asyncrl.plan predicts, DIR/plans.json
    python launcher/one_gpu.py all --out DIR       # all stages, one after another, then the table
    python launcher/one_gpu.py step --out DIR      # one stage
    python launcher/one_gpu.py table --out DIR     # planned, measured, ratio

Each stage writes DIR/STAGE.json after every measurement. A measurement that fails is a row that says why, and the exit code is 1.
Without a GPU every stage runs to its end with tiny models, and its rows say `not measured`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from gpu_stages.sheet import FAILED, Row, Sheet, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for tests/support; asyncrl itself may be installed, or on PYTHONPATH
# Seconds of each stage, in the order in which they run
LIMITS_S = {"facts": 40.0, "kernels": 90.0, "step": 180.0, "nccl": 40.0, "generate": 90.0}
# The allocator as in a run (asyncrl/launch/program.py). CUDA is found without a context, which a forked process could not use
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["plans", *LIMITS_S, "all", "table"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--limit", type=float, help="seconds after which a stage ends (default: each has its own)")
    parser.add_argument("--commit", default="", help="of the code, where there is no git")
    parser.add_argument("--tiny", action="store_true", help="tiny models, as always without a GPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.commit = args.commit or _commit()
    os.environ.update(ENVIRONMENT | os.environ)
    if args.stage == "all":
        return run_all(args)
    return show_table(args.out) if args.stage == "table" else run(args)


def run_all(args: argparse.Namespace) -> int:
    """Run each stage in a process of its own: one that hangs or breaks its CUDA context ends alone. They are forked, so that torch
    is imported once."""
    for stage in LIMITS_S:
        import_module(f"gpu_stages.{stage}")
    for stage in [*([] if (args.out / "plans.json").exists() else ["plans"]), *LIMITS_S]:
        print(f"== {stage}", flush=True)
        args.stage, child = stage, os.fork()
        if not child:
            os._exit(run(args))
        os.waitpid(child, 0)
    return show_table(args.out)


def run(args: argparse.Namespace) -> int:
    """Run one stage. The process ends at the stage's limit, with the stack of what it did."""
    faulthandler.dump_traceback_later(args.limit or LIMITS_S.get(args.stage, 900.0), exit=True)
    if args.stage != "plans":
        return run_stage(args)
    from gpu_stages.step import PLANS, write_plans

    write_plans(args.out / PLANS, args.out / "models", args.commit, tiny=args.tiny)
    return 0


def show_table(folder: Path) -> int:
    lines, failed = table(folder, list(LIMITS_S))
    text = "\n".join(lines) + "\n"
    (folder / "table.txt").write_text(text, encoding="utf-8")
    print(text)
    return 1 if failed else 0


def run_stage(args: argparse.Namespace) -> int:
    import torch
    import transformers
    from gpu_stages.bench import Bench

    on_gpu = torch.cuda.is_available()
    bench = Bench(args.out, args.tiny or not on_gpu, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))
    facts = {"commit": args.commit, "card": bench.card, "torch": torch.__version__}
    facts["transformers"] = transformers.__version__
    sheet = Sheet(args.out / f"{args.stage}.json", facts, on_gpu=on_gpu)
    for name, measure in import_module(f"gpu_stages.{args.stage}").MEASUREMENTS:
        bench.free()
        try:
            for row in measure(bench):
                sheet.add(row)
        except Exception as error:
            sheet.add(Row(name, note=f"{FAILED}{type(error).__name__}: {error}"))
    sheet.end()
    return 1 if sheet.failed else 0


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without the destructors of process groups, which may wait for a broken CUDA context
