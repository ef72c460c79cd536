"""Tests and short runs on a new GPU node, and a table of planned and measured figures. `first_day_gpu.sh` starts it."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.dataflow.topology import Allocation
from asyncrl.runtime.devices import visible_devices
from asyncrl.testing.runs import make_tiny_run, train_steps

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/gpu", "tests/processes/test_same_update.py")  # CI runs the same ones, under gloo
SAME_UPDATE_GPUS = 8  # the ranks of the second test; NCCL refuses two ranks on one GPU
TEST_LIMIT_S, RUN_LIMIT_S, PLAN_LIMIT_S = 1800.0, 900.0, 120.0
NOT_MEASURED, NOT_PLANNED = "not measured", "not planned"
FIRST_STEPS = 2  # compile kernels and fill caches, so they are not measured


BROADCAST = "broadcast"
_REPLAY = "train.routes=replay"


@dataclass(frozen=True)
class Run:
    """A short run."""

    name: str
    num_gpus: int
    overrides: tuple[str, ...]
    has_experts: bool = False  # it trains a mixture of experts with random weights


RUNS = (
    Run("disjoint", 2, ("allocation=transformers.d1+d1",)),
    Run("shared devices", 1, ("allocation=transformers.d1@0+d1@0", "manager.max_head_offpolicyness=0")),
    Run("sglang", 2, ("allocation=sglang.d1+d1",)),
    Run("tensor ranks", 3, ("allocation=transformers.d1+m2",)),
    Run("context ranks", 3, ("allocation=transformers.d1+c2",)),
    Run("experts", 5, ("allocation=transformers.d1+d4e2", _REPLAY), has_experts=True),
    Run("experts and context ranks", 5, ("allocation=transformers.d1+d2c2e2", _REPLAY), has_experts=True),
    # Synchronous, so that each step needs the version that was broadcast before it
    Run(
        BROADCAST,
        2,
        ("allocation=transformers.d1+d1", "weights.transport=broadcast", "manager.max_head_offpolicyness=0"),
    ),
)

# A model of 0.3 billion parameters with random weights
GPU_MODEL = {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 20, "num_heads": 16, "num_kv_heads": 8}
GPU_OVERRIDES = ["rollout.group_size=8", "rollout.sampling.max_new_tokens=256", "train.batch_size=64"]
GPU_OVERRIDES += ["generation.num_blocks=4096"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="folder or name on the Hub (default: random weights)")
    parser.add_argument("--out", type=Path, default=Path("runs/first_day"), help="folder of runs, logs and the table")
    parser.add_argument("--quick", action="store_true", help="no tests and no plans, and two steps in each run")
    arguments = parser.parse_args()
    out, gpus = arguments.out.absolute(), visible_devices()
    config, overrides = make_config(out, arguments.model, on_gpu=bool(gpus))
    experts = make_experts(out / "task" / "experts", on_gpu=bool(gpus))
    failed = [] if arguments.quick else [path for path in TESTS if not passes(path, out, len(gpus))]
    steps = FIRST_STEPS if arguments.quick else FIRST_STEPS + (8 if gpus else 2)
    rows = []
    for run in RUNS:
        given = [*overrides, *run.overrides, f"train.max_steps={steps}", f"fileroot={out}", "experiment=run"]
        given.append(f"trial={run.name.replace(' ', '_')}")
        given += [f"model_path={experts}"] if run.has_experts else []
        planned = {} if arguments.quick else plan(config, given)
        measured, why = measure(run, config, given, out, gpus)
        if why.startswith("failed"):
            failed.append(f"{run.name}: {why}")
        rows.append(row(run, planned, measured, why))
    table = "\n".join(map(as_line, [HEADER, ["---"] * len(HEADER), *rows]))
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(
        f"\n{table}\n\n{out}/table.md has this table. Planned step times are lower bounds, planned rates upper bounds."
    )
    for text in failed:
        print(f"FAILED {text}")
    return 1 if failed else 0


def make_config(folder: Path, model: str, *, on_gpu: bool) -> tuple[Path, list[str]]:
    """Write the config that all runs share. Returns it and the overrides for this machine."""
    config = make_tiny_run(folder / "task")
    overrides = [*GPU_OVERRIDES] if on_gpu else []
    if model:
        overrides.append(f"model_path={model}")
    elif on_gpu:
        from asyncrl.testing.tiny import make_tiny_model

        make_tiny_model(folder / "task" / "model", **GPU_MODEL)
    if python := os.environ.get("ASYNCRL_SGLANG_PYTHON"):
        overrides.append(f"generation.python={python}")
    return config, overrides


def make_experts(folder: Path, *, on_gpu: bool) -> Path:
    """A mixture of eight experts with random weights."""
    from asyncrl.testing.tiny import make_tiny_model

    make_tiny_model(folder, "qwen3_moe", **(GPU_MODEL if on_gpu else {}))
    return folder


def passes(path: str, out: Path, num_gpus: int) -> bool:
    """Run a test file or folder. Its output goes to a file. Tests of several ranks run under gloo if there are too few GPUs."""
    under_gloo = path != TESTS[0] and num_gpus < SAME_UPDATE_GPUS
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if under_gloo else {})
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not full", path]
    print(f"== {path}{' under gloo' if under_gloo else ''}", flush=True)
    return logged(command, out / f"{Path(path).stem}.log", TEST_LIMIT_S, cwd=ROOT, env=environment) in (0, 5)


def measure(
    run: Run, config: Path, overrides: Sequence[str], out: Path, gpus: Sequence[str]
) -> tuple[dict[str, float], str]:
    """Run it. Returns the measured figures, by name, and the reason if there are none."""
    if gpus and len(gpus) < run.num_gpus:
        return {}, f"{NOT_MEASURED}: needs {run.num_gpus} GPUs"
    if run.name == "sglang" and "ASYNCRL_SGLANG_PYTHON" not in os.environ:
        return {}, f"{NOT_MEASURED}: set ASYNCRL_SGLANG_PYTHON (launcher/setup_sglang.sh)"
    log = out / f"{run.name.replace(' ', '_')}.log"
    print(f"== run {run.name}", flush=True)
    command = [sys.executable, "-m", "asyncrl.cli.main", "run", str(config), "recover=off", *overrides]
    if code := logged(command, log, RUN_LIMIT_S):
        return {}, f"failed with exit code {code}: {log}"
    run_dir = out / "run" / run.name.replace(" ", "_")
    if wrong := shortfalls(run_dir, broadcast=run.name == BROADCAST, on_gpu=bool(gpus)):
        return {}, f"failed: {'; '.join(wrong)}"
    records = train_steps(run_dir)
    last = max(record["attempt"] for record in records)
    records = [record for record in records if record["attempt"] == last]
    return figures(records[FIRST_STEPS:] or records[-1:], on_gpu=bool(gpus)), ""


def shortfalls(run_dir: Path, *, broadcast: bool, on_gpu: bool) -> list[str]:
    """What a run that ended well did not do although its row stands for it, by the logs of its processes: broadcast its weights
    (otherwise they come from disk), compute on GPUs, and compute attention with a kernel for packed sequences."""
    logs = {log.stem: log.read_text() for log in sorted((run_dir / "logs" / "latest").glob("*.log"))}
    found = []
    if broadcast:
        fallen = [
            line for log in logs.values() for line in log.splitlines() if "load this version and the next" in line
        ]
        if not any(re.search(r"weights \S+ broadcast to ", log) for log in logs.values()):
            found.append("no weights were broadcast")
        found += [f"weights came from disk: {line}" for line in fallen[:1]]
    if on_gpu:
        for process, log in logs.items():
            if re.fullmatch(r"model_worker_\d+", process):
                used, kernels = " on cuda:" in log, re.findall(r"attention of (\S+: rectangles .*)", log)
                found += [f"{process} computes the attention of {text}" for text in kernels]
            elif re.fullmatch(r"generation_server_\d+", process):
                of_sglang = logs.get(f"{process}_sglang", "")
                used = "--device cpu" not in of_sglang if of_sglang else " on cuda:" in log
            else:
                continue
            found += [] if used else [f"{process} used no GPU"]
    return found


def figures(records: Sequence[dict[str, Any]], *, on_gpu: bool) -> dict[str, float]:
    names = {"step_s": "time/step_s", "tokens_per_s": "throughput/train_tokens_per_s", "mfu": "mfu/actor_train"}
    found = {name: fmean(record[key] for record in records) for name, key in names.items() if key in records[-1]}
    peaks = [value for record in records for key, value in record.items() if key.startswith("memory/")]
    return found | ({"memory": max(peaks)} if on_gpu and peaks else {})


def plan(config: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Return the figures that `asyncrl-launch plan` predicts; none if it cannot."""
    command = [sys.executable, "-m", "asyncrl.cli.main", "plan", str(config), "--json", *overrides]
    allocation = next(text.partition("=")[2] for text in overrides if text.startswith("allocation="))
    num_replicas = Allocation.parse(allocation).training[0].grids[0][1].num_replicas
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PLAN_LIMIT_S, check=False)
        found = json.loads(done.stdout)["plan"]
        time, ranks = found["time"], found["ranks"]
        trains = next(step for rank in ranks for step in rank["steps"] if step["mfc"] == "actor_train")
    except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError, StopIteration):
        return {}
    return {
        "step_s": time["step_s"],
        "tokens_per_s": num_replicas * trains["tokens"] / time["training_s"],
        "mfu": time["mfu"],
        "memory": max(max(rank["peak"], rank["load_peak"], rank["export_peak"]) for rank in ranks),
    }


HEADER = ["run", "step, planned", "step", "trained tokens/s, planned", "trained tokens/s", "MFU, planned", "MFU"]
HEADER += ["peak memory, planned", "peak memory"]
FORMATS: dict[str, Callable[[float], str]] = {
    "step_s": lambda value: f"{value:.3g} s",
    "tokens_per_s": lambda value: f"{value:,.0f}",
    "mfu": lambda value: f"{value:.1%}",
    "memory": lambda value: f"{value / 2**30:.1f} GiB",
}


def row(run: Run, planned: dict[str, float], measured: dict[str, float], why: str) -> list[str]:
    cells = [run.name]
    for name, text_of in FORMATS.items():
        cells.append(text_of(planned[name]) if name in planned else NOT_PLANNED)
        cells.append(text_of(measured[name]) if name in measured else why.partition(":")[0] or NOT_MEASURED)
    return [*cells[:-1], why] if why else cells


def as_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def logged(
    command: Sequence[str], log: Path, limit_s: float, *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> int:
    """Run a command with its output in a file. Returns its exit code; after the limit 124, and the command is killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=output, timeout=limit_s, cwd=cwd, env=env, check=False)
            return done.returncode
        except subprocess.TimeoutExpired:
            return 124


if __name__ == "__main__":
    sys.exit(main())
