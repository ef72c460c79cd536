"""Plans beside measurements: memory and traffic of train steps and inference, as predicted by asyncrl/plan and as measured on CPUs.

Real ranks, connected by gloo, run each MFC of a model once and then --rounds times. The latter are measured: the largest peak of
tensor memory by torch.profiler, the payload of each collective by wrappers of the process group. The prediction has the same config
and lengths, no weights, and one process. Its peak must be within 5 % of the measured one, and its traffic equal, or the benchmark
fails.

    python benchmarks/plan_accuracy.py                  # all cases
    python benchmarks/plan_accuracy.py --accumulation   # no measurement: what train.accumulate_unsharded costs
    python benchmarks/plan_accuracy.py --published      # no measurement: bounds of time beside prime-rl's published MFU

`value` is the largest error of a peak in %. `ratio.measured` has for each case the predicted peak over the measured one, of the MFC
with the largest error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import finish, parser, say

LAYOUTS = ("d1", "d2", "d4", "m2", "p2", "d2m2", "d2p2", "p2m2", "d2p2m2")
LARGE_LAYOUTS = ("d1", "d2", "m2", "p2")
OTHER_ROLES = ("d1", "d2m2", "p2")  # layouts in which the critic and the reference are measured, too
LIMIT = 0.05  # largest error of a peak
MODELS = {
    "tiny": {},
    "0.1B": {"hidden_size": 768, "intermediate_size": 3072, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4},
}
GIB = 2**30
# Qwen2.5's config.json
SHAPES = {  # hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads
    "7B": (3584, 18944, 28, 28, 4),
    "14B": (5120, 13824, 48, 40, 8),
    "32B": (5120, 27648, 64, 40, 8),
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}

# Qwen3's config.json
QWEN3 = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
SHAPES_QWEN3 = {"Qwen3-0.6B": (1024, 3072, 28, 16, 8), "Qwen3-4B": (2560, 9728, 36, 32, 8)}
# prime-rl's baselines: model, H100s, tokens of a sequence, MFU
PUBLISHED = (("Qwen3-0.6B", 1, 16384, 0.237), ("Qwen3-0.6B", 1, 65536, 0.268), ("Qwen3-4B", 8, 65536, 0.354))


def cases(quick: bool) -> list[Any]:
    from tests.support.plan_accuracy import Case

    tiny = Case("tiny", "d2", "actor", True, 2, 3, (192, 192, 128))
    if quick:
        return [tiny]
    found = [
        replace(tiny, grid=grid, checkpointing=checkpointing)
        for grid, checkpointing in itertools.product(LAYOUTS, (False, True))
    ]
    found += [replace(tiny, grid=grid, role=role) for grid, role in itertools.product(OTHER_ROLES, ("critic", "ref"))]
    large = Case("0.1B", "d1", "actor", True, 1, 2, (96, 96))
    return found + [replace(large, grid=grid) for grid in LARGE_LAYOUTS]


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def compare_all(args: argparse.Namespace) -> None:
    from asyncrl.dataflow.axes import ParallelGrid
    from asyncrl.testing.tiny import make_tiny_model
    from tests.support.plan_accuracy import compare
    from tests.support.rank_processes import RankProcesses

    chosen = cases(args.quick)
    rows, ratios, problems = [], {}, []
    most = max(ParallelGrid.parse(case.grid).size for case in chosen)
    with tempfile.TemporaryDirectory() as folder, RankProcesses(most, limit_s=600.0) as ranks:
        for case in chosen:
            path = Path(folder) / case.model
            if not path.exists():
                make_tiny_model(path, **MODELS[case.model])
            start = time.monotonic()
            found = compare(case, path, ranks, rounds=args.rounds)
            worst = max(found, key=lambda one: abs(one.error))
            ratios[str(case)] = round(1 + worst.error, 5)
            say(args, f"{case}: {time.monotonic() - start:.0f} s, {100 * worst.error:+.2f} % ({worst.mfc})")
            for one in found:
                rows.append(_row(case, one))
                what = f"{case}, {one.mfc}, stage {one.stage}"
                if one.predicted_traffic != one.measured_traffic:
                    problems.append(f"{what}: traffic {one.predicted_traffic}, measured {one.measured_traffic}")
                if abs(one.error) > LIMIT:
                    problems.append(f"{what}: the peak is off by {100 * one.error:.1f} %")
    say(args, markdown(_HEADER, rows))
    if problems:
        raise SystemExit("\n".join(problems))
    finish(
        args,
        name="plan_accuracy",
        value=100 * max(abs(ratio - 1) for ratio in ratios.values()),
        unit="% largest error of a peak",
        ratio={"measured": ratios},
        cases=len(chosen),
    )


_HEADER = ("model", "layout", "checkpointing", "MFC", "stage")
_HEADER += ("predicted MB", "measured MB", "error", "collectives", "payload MB", "equal")


def _row(case: Any, found: Any) -> tuple[Any, ...]:
    traffic = found.measured_traffic.values()
    peaks = (f"{found.predicted / 1e6:.2f}", f"{found.measured / 1e6:.2f}", f"{100 * found.error:+.2f} %")
    payload = f"{sum(collective.bytes for collective in traffic) / 1e6:.3f}"
    equal = "yes" if found.predicted_traffic == found.measured_traffic else "no"
    settings = (case.model, case.grid, "on" if case.checkpointing else "off", found.mfc, found.stage)
    return (*settings, *peaks, sum(collective.count for collective in traffic), payload, equal)


def accumulation(args: argparse.Namespace) -> None:
    """Peak and traffic of eight data ranks and two micro-batches of 8,192 tokens, without and with train.accumulate_unsharded."""
    from asyncrl.config.processes import ModelConfig
    from asyncrl.config.schema import TrainConfig
    from asyncrl.dataflow.graph import training_mfcs
    from asyncrl.plan.batches import Load
    from asyncrl.plan.ranks import ShardTask, run_tasks

    tasks = []
    with tempfile.TemporaryDirectory() as folder:
        for (name, shape), unsharded in itertools.product(SHAPES.items(), (False, True)):
            path = Path(folder) / name
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(COMMON | dict(zip(_SIZES, shape, strict=True))))
            train = TrainConfig(
                dtype="bfloat16", gradient_checkpointing=True, max_tokens_per_mb=8192, accumulate_unsharded=unsharded
            )
            (mfc,) = [mfc.placed("actor") for mfc in training_mfcs(train) if mfc.name == "actor_train"]
            model = ModelConfig("actor", str(path), "d8", list(range(8)), trainable=True)
            tasks.append(ShardTask(model, 0, [mfc], {mfc.name: Load(1, 2, [2048] * 4)}, train, "cuda"))
        plans = run_tasks(tasks)
    rows = []
    for task, plan in zip(tasks, plans, strict=True):
        (step,) = plan.steps
        sizes = (step.peak, step.at_peak.get("gradients", 0), step.collectives["data reduce_scatter"].bytes)
        rows.append(
            (Path(task.model.path).name, task.train.accumulate_unsharded, *(f"{size / GIB:.1f}" for size in sizes))
        )
    header = ("model", "accumulate_unsharded", "peak GiB", "of which gradients", "reduce_scatter GiB a step")
    say(args, markdown(header, rows))
    finish(args, name="plan_accuracy", variant="accumulation", value=None, unit="GiB", ratio={}, rows=rows)


def published(args: argparse.Namespace) -> None:
    """The lower bound of a train step's time over the time that prime-rl's MFU implies."""
    from asyncrl.config.resolve import Facts, resolve
    from asyncrl.config.schema import (
        ExperimentConfig,
        PPOConfig,
        PromptSourceConfig,
        RolloutConfig,
        SamplingConfig,
        TrainConfig,
    )
    from asyncrl.plan.capacity import plan_run
    from asyncrl.plan.devices import DEVICES
    from asyncrl.plan.ranks import plan_training

    device, rows, ratios = DEVICES["h100-80g"], [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, gpus, length, mfu in PUBLISHED:
            path = Path(folder) / name
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(QWEN3 | dict(zip(_SIZES, SHAPES_QWEN3[name], strict=True))))
            config = ExperimentConfig(
                mode="train_only",
                model_path=str(path),
                allocation=f"sglang.d1+d{gpus}",
                prompts=PromptSourceConfig(path="-"),
                rollout=RolloutConfig(group_size=1, sampling=SamplingConfig(max_new_tokens=length - 512)),
                train=TrainConfig(
                    dtype="bfloat16",
                    gradient_checkpointing=True,
                    batch_size=2 * gpus,
                    max_tokens_per_mb=length,
                    ppo=PPOConfig(use_decoupled_loss=False, minibatches=1),
                ),
            )
            plan = plan_run(resolve(config, Facts(on_gpu=True)), device, plan_training)
            (step,) = [step for step in plan.ranks[0].steps if step.mfc == "actor_train"]
            ratio = plan.time.training_s * mfu * device.flops / step.model_flops
            ratios[f"{name} d{gpus} {length}"] = round(ratio, 4)
            needed = f"{plan.peak / GIB:.1f}"
            rows.append(
                (name, gpus, length, f"{step.model_flops / step.tokens:.3g}", f"{ratio:.2f}", needed, plan.fits)
            )
    header = ("model", "GPUs", "tokens", "model FLOPs a token", "bound over measured", "GiB at least", "fits")
    say(args, markdown(header, rows))
    finish(args, name="plan_accuracy", variant="published", value=None, unit="", ratio={"prime_rl": ratios}, rows=rows)


def main() -> None:
    options = parser(__doc__ or "", rounds=5)
    options.add_argument("--accumulation", action="store_true", help="the table of train.accumulate_unsharded instead")
    options.add_argument("--published", action="store_true", help="the table of published speeds instead")
    args = options.parse_args()
    (accumulation if args.accumulation else published if args.published else compare_all)(args)


if __name__ == "__main__":
    main()
