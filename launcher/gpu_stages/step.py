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
from asyncrl.model.interfaces import make_interface
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


CASES = [
    *(
        Case(model, tokens, checkpointing)
        for checkpointing in (True, False)
        for tokens in (16384, 8192)
        for model in ("1.7B", "0.6B")
    ),
    *(Case("8B", 16384, num_layers=layers) for layers in (2, 4)),
]


def write_plans(path: Path, folder: Path, commit: str, *, tiny: bool) -> None:
    """Plan all cases. Needs no GPU, and processes of its own."""
    steps = [plan.steps[0] for plan in run_tasks([case.task(folder, tiny=tiny) for case in CASES])]
    plans = {str(case): {"peak": step.peak, "flops": step.flops} for case, step in zip(CASES, steps, strict=True)}
    path.write_text(json.dumps({"commit": commit, "tiny": tiny, "plans": plans}, indent=1) + "\n", encoding="utf-8")


def _plan(bench: Bench, case: Case) -> dict[str, int]:
    if not (bench.out / PLANS).exists():
        raise FileNotFoundError(f"write {PLANS} with `one_gpu.py plans --out {bench.out}`, on any machine")
    content = json.loads((bench.out / PLANS).read_text(encoding="utf-8"))
    if content["tiny"] != bench.tiny:
        raise ValueError(f"{PLANS} has the plans of {'tiny' if content['tiny'] else 'full'} models: write it again")
    return dict(content["plans"][str(case)])


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
    sample = sample_of(Load(1, 1, lengths), 1, 1, keys)
    ids = sample.data["packed_input_ids"]
    ids[:] = np.random.default_rng(0).integers(0, vocab_size, len(ids))
    sample.data["packed_logprobs"][:] = -math.log(vocab_size)
    return sample


def train_case(case: Case, bench: Bench) -> Iterator[Row]:
    """planned: of seconds the card's peak for all FLOPs, of memory the plan."""
    plan, kind = _plan(bench, case), bench.kind
    needed, bound = plan["peak"] + library_bytes(communicates=False), plan["flops"] / kind.flops if kind else None
    if kind and needed > kind.memory:
        text = f"not measured: planned with {needed / GIB:.1f} GiB, the card has {kind.memory / GIB:.1f}"
        yield Row(f"{case}: step", None, "s", bound, text)
        return
    step = Step(bench, case)
    first = bench.clock(step)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = statistics.median(bench.clock(step) for _ in range(bench.size(MEASURED_STEPS, 1)))
    flops, tokens = step.engine.flops.of_batch(step.lengths, trains=True), sum(step.lengths)  # without recomputation
    yield Row(f"{case}: step", seconds, "s", bound, f"first step {first:.1f} s")
    yield Row(f"{case}: speed", tokens / seconds, "tokens/s", tokens / bound if bound else None)
    mfu = 100 * flops / seconds / kind.flops if kind else None
    yield Row(f"{case}: MFU", mfu, "%", 100 * flops / plan["flops"])
    allocated, reserved = bench.peaks()
    yield Row(f"{case}: allocated", allocated / GIB, "GiB", plan["peak"] / GIB)
    yield Row(f"{case}: reserved", reserved / GIB, "GiB", allocated / GIB, "ratio: to allocated")


MEASUREMENTS = tuple((str(case), partial(train_case, case)) for case in CASES)
