"""Whole train steps of the training engine on one rank, beside what asyncrl.plan predicts for exactly these steps."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.config.processes import ModelConfig
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import AUTO, ExperimentConfig, PPOConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.dataflow.graph import TRAIN_MFC, training_mfcs
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.model.engine import TrainEngine
from asyncrl.model.flops import flops_of
from asyncrl.model.interfaces import make_interface
from asyncrl.model.sharding import Skeleton, load_config
from asyncrl.plan.batches import Load
from asyncrl.plan.devices import library_bytes
from asyncrl.plan.ranks import ShardTask, run_tasks
from asyncrl.plan.shard import sample_of

from .bench import GIB, Bench, random_weights, write_config
from .sheet import Row

MICRO_BATCHES = 2  # of a step: the second one finds the gradients of the first
MEASURED_STEPS = 3
PLANS = "plans.json"
_TINY_TOKENS = 128  # the length of a tiny case is this part of the real one


@dataclass(frozen=True)
class Case:
    """A train step of a model on one rank, with micro-batches of one sequence."""

    model: str
    tokens: int  # of a micro-batch
    checkpointing: bool = True
    num_layers: int = 0  # 0: as many as the model has

    def __str__(self) -> str:
        layers = f", {self.num_layers} layers" if self.num_layers else ""
        return f"{self.model}{layers}, {self.tokens // 1024}k{', checkpointing' if self.checkpointing else ''}"

    def task(self, folder: Path, *, tiny: bool) -> ShardTask:
        """What asyncrl.plan and the engine both get."""
        tokens = self.tokens // _TINY_TOKENS if tiny else self.tokens
        wanted = TrainConfig(
            dtype=AUTO,
            tf32=AUTO,
            max_tokens_per_mb=tokens,
            ppo=PPOConfig(use_decoupled_loss=False, minibatches=1, temperature=1.0),
        )
        resolved = resolve(ExperimentConfig(train=wanted), Facts(on_gpu=True)).train
        train = replace(resolved, gradient_checkpointing=self.checkpointing)
        (mfc,) = [mfc.placed("actor") for mfc in training_mfcs(train) if mfc.name == TRAIN_MFC]
        path = write_config(folder, self.model, self.num_layers, tiny=tiny)
        model = ModelConfig("actor", path, "d1", [0], trainable=True)
        return ShardTask(model, 0, [mfc], {mfc.name: Load(1, MICRO_BATCHES, [tokens])}, train, "cuda")


_BY_LAYERS = [Case("8B", 16384, num_layers=2), Case("8B", 16384, num_layers=4)]
_WHOLE = Case("8B", 16384)  # planned only
_PROFILED = Case("1.7B", 16384)
CASES = [
    _PROFILED,
    Case("0.6B", 16384),
    *_BY_LAYERS,
    Case("0.6B", 8192),
    Case("1.7B", 8192),
    Case("0.6B", 8192, checkpointing=False),
    Case("1.7B", 8192, checkpointing=False),
    Case("0.6B", 16384, checkpointing=False),
    Case("1.7B", 16384, checkpointing=False),
]


def write_plans(path: Path, folder: Path, commit: str, *, tiny: bool) -> None:
    """Plan all cases. Needs no GPU, and processes of its own."""
    cases = [*CASES, _WHOLE]
    plans = run_tasks([case.task(folder, tiny=tiny) for case in cases])
    found = {}
    for case, plan in zip(cases, plans, strict=True):
        (step,) = plan.steps
        found[str(case)] = {
            "peak": step.peak,
            "at_peak": step.at_peak,
            "load_peak": plan.load_peak,
            "flops": step.flops,
            "model_flops": step.model_flops,
            "tokens": step.tokens,
        }
    path.write_text(json.dumps({"commit": commit, "tiny": tiny, "plans": found}, indent=1) + "\n", encoding="utf-8")


def _plan(bench: Bench, case: Case) -> dict[str, Any]:
    return dict(bench.found.get(PLANS, {}).get(str(case), {}))


def _bound(bench: Bench, case: Case) -> float | None:
    """Seconds that the card needs at least, at its peak, for all FLOPs of the step."""
    plan, kind = _plan(bench, case), bench.kind
    return plan["flops"] / kind.flops if plan and kind else None


# ------------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Whole:
    """A step that is only calculated."""

    lengths: list[int]
    flops: int  # model FLOPs


class Step:
    """An engine with random weights, and its batch."""

    def __init__(self, bench: Bench, case: Case) -> None:
        task = case.task(bench.out / "models", tiny=bench.tiny)
        mfc, train = MFCDef.of(task.mfcs[0]), task.train
        torch.backends.cuda.matmul.allow_tf32 = bool(train.tf32)
        torch.manual_seed(1)
        self.engine = TrainEngine(task.model, train, device=bench.device, weights=random_weights(bench.device))
        self._interface = make_interface(mfc, train)
        self.lengths = task.loads[mfc.name].lengths * MICRO_BATCHES
        self.sample = random_sample(self.lengths, mfc.input_keys, self.engine.vocab_size)
        self._done = 0

    @property
    def flops(self) -> int:
        """Model FLOPs of a step (asyncrl/protocol/model_flops.py)."""
        return self.engine.flops.of_batch(self.lengths, trains=True)

    def __call__(self) -> None:
        """Take one step. Raises RuntimeError if it had no gradient: then backward has computed nothing."""
        step = self._interface.begin(self._done)
        _, stats = self._interface.run(self.engine, self.sample, batch_ids=self.sample.ids, step=step)
        self._done += 1
        norms = [float(value) for key, value in stats.items() if "grad_norm" in key]
        if not norms or not all(norm > 0 and math.isfinite(norm) for norm in norms):
            raise RuntimeError(f"the step's gradient norms are {norms}")


def random_sample(lengths: list[int], keys: Any, vocab_size: int) -> SequenceSample:
    """Random tokens, sampled by a policy near that of random weights: else the loss is clipped, and its gradient vanishes."""
    sample = sample_of([lengths], keys)
    ids = sample.data["packed_input_ids"]
    ids[:] = np.random.default_rng(0).integers(0, vocab_size, len(ids))
    sample.data["packed_logprobs"][:] = -math.log(vocab_size)
    return sample


def train_case(case: Case, bench: Bench) -> Iterator[Row]:
    plan, kind = _plan(bench, case), bench.kind
    needed = plan["peak"] + library_bytes(communicates=False) if plan else 0
    if kind and needed > kind.memory:
        text = f"not measured: planned with {needed / GIB:.1f} GiB, the card has {kind.memory / GIB:.1f}"
        yield Row(f"{case}: step", None, "s", _bound(bench, case), text)
        return
    step = Step(bench, case)
    first = bench.clock(step)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = statistics.median(bench.clock(step) for _ in range(bench.size(MEASURED_STEPS, 1)))
    yield from _speeds(bench, str(case), _bound(bench, case), seconds, step, f"first step {first:.1f} s")
    allocated, reserved = (
        (torch.cuda.max_memory_allocated(bench.device), torch.cuda.max_memory_reserved(bench.device))
        if bench.on_gpu
        else (0, 0)
    )
    yield Row(f"{case}: allocated", allocated / GIB, "GiB", plan["peak"] / GIB if plan else None)
    yield Row(f"{case}: reserved", reserved / GIB, "GiB", allocated / GIB or None, "ratio: to allocated")
    if case.checkpointing:  # as in a run on a GPU (train.compile)
        step.engine.compile_layers("inductor" if bench.on_gpu else "eager")
        first = bench.clock(step)
        seconds = statistics.median(bench.clock(step) for _ in range(bench.size(MEASURED_STEPS, 1)))
        yield from _speeds(bench, f"{case}, compiled", _bound(bench, case), seconds, step, f"first step {first:.1f} s")
    bench.found[str(case)] = seconds, step.flops


def _speeds(
    bench: Bench, case: str, bound: float | None, seconds: float, step: Step | Whole, note: str = ""
) -> Iterator[Row]:
    flops, tokens, peak = step.flops, sum(step.lengths), bench.kind.flops if bench.kind else 0.0
    yield Row(f"{case}: step", seconds, "s", bound, note)
    yield Row(f"{case}: speed", tokens / seconds, "tokens/s", tokens / bound if bound else None)
    mfu = 100 * flops / seconds / peak if peak else 0.0
    yield Row(f"{case}: MFU", mfu, "%", 100 * flops / bound / peak if bound and peak else None)


def all_layers(bench: Bench) -> Iterator[Row]:
    """A step of the whole 8B model, from those of two numbers of layers: time = a + b * layers."""
    (first, few), (second, more) = ((bench.found[str(case)][0], case.num_layers) for case in _BY_LAYERS)
    task = _WHOLE.task(bench.out / "models", tiny=bench.tiny)
    config = load_config(task.model.path, "lm")
    each = (second - first) / (more - few)
    seconds = first + each * (config.num_hidden_layers - few)
    flops = flops_of(Skeleton.of(config, "lm", torch.float32).model)
    lengths = task.loads[TRAIN_MFC].lengths * MICRO_BATCHES
    whole = Whole(lengths, flops.of_batch(lengths, trains=True))
    note = f"a {first - few * each:.2f} s, b {each:.3f} s"
    yield from _speeds(bench, f"{_WHOLE}, compiled", _bound(bench, _WHOLE), seconds, whole, note)


def profile(bench: Bench) -> Iterator[Row]:
    """Where the time of a step goes. The table of kernels is in profile.txt."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    step = Step(bench, _PROFILED)
    step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.on_gpu else [])]
    with profiling(activities=activities) as profiled:
        wall = bench.clock(step)
    averages = profiled.key_averages()
    by = "self_device_time_total" if bench.on_gpu else "self_cpu_time_total"
    text = averages.table(sort_by=by, row_limit=40, max_name_column_width=80)
    (bench.out / "profile.txt").write_text(text, encoding="utf-8")
    on_device = [event for event in averages if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in on_device if not event.is_user_annotation]
    spent = {"gemm": 0.0, "flash": 0.0, "all": 0.0}
    for event in kernels:
        name, seconds = event.key.lower(), event.self_device_time_total / 1e6
        spent["all"] += seconds
        kind = "flash" if "flash" in name else "gemm" if "gemm" in name or "nvjet" in name else ""
        if kind:
            spent[kind] += seconds
    yield Row(f"{_PROFILED}: time in matrix products", 100 * spent["gemm"] / wall, "%")
    yield Row(f"{_PROFILED}: time in attention", 100 * spent["flash"] / wall, "%")
    yield Row(f"{_PROFILED}: time in other kernels", 100 * (spent["all"] - spent["gemm"] - spent["flash"]) / wall, "%")
    yield Row(f"{_PROFILED}: time without a kernel", 100 * (1 - spent["all"] / wall), "%", note="see profile.txt")


def offload(bench: Bench) -> Iterator[Row]:
    """Weights and optimizer state to the host's memory and back, twice: the second time may reuse memory."""
    step = Step(bench, _PROFILED)
    step()
    num_bytes = 12 * sum(parameter.numel() for parameter in step.engine.named_parameters().values())
    for time in ("first", "second"):
        for name, move in (("offload", step.engine.offload), ("onload", step.engine.onload)):
            seconds = bench.clock(move)
            rate = f"{num_bytes / seconds / 1e9:.1f} GB/s"
            yield Row(f"{name} of 1.7B with Adam, {time}", seconds, "s", num_bytes / 64e9, rate)
    step()


def plans(bench: Bench) -> Iterator[Row]:
    path = bench.out / PLANS
    if not path.exists():
        raise FileNotFoundError(f"{path}: write it with `one_gpu.py plans --out {bench.out}`, on any machine")
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["tiny"] != bench.tiny:
        raise ValueError(f"{path} has the plans of {'tiny' if content['tiny'] else 'full'} models: write it again")
    bench.found[PLANS] = content["plans"]
    yield Row("plans", note=f"of commit {content['commit'][:12]}", anywhere=True)


MEASUREMENTS = (
    ("plans", plans),
    *((str(case), partial(train_case, case)) for case in CASES[:4]),
    ("8B, all layers", all_layers),
    ("profile", profile),
    ("offload", offload),
    *((str(case), partial(train_case, case)) for case in CASES[4:]),
)
