"""One PPO step on sequences with a long tail of lengths: useful tokens per second and peak memory, packed, padded, and in TRL.

The same model, sequences, loss (clipped, mean over response tokens), AdamW, gradient clipping and token budget, float32 on one
thread:

    asyncrl   TrainEngine.train_step with PPOLoss: packed rows, balanced micro-batches, logprobs without logits
    padded    the common way: rows padded to the longest of the batch, transformers' model with sdpa, all logits, log_softmax
    trl       GRPOTrainer's loss (its fused output layer), with TRL's padding of prompts and responses to the longest of the batch

A side runs in its own process, a fresh one each round: one step that is not counted, then --steps steps. Tokens per second: tokens
of the sequences, without padding, per CPU second. Memory: the highest resident size minus the size before the first step;
gradients and the state of AdamW count. The gradient norms of all steps must agree to 1e-3, so all sides compute the same update.

With --prefixes it compares steps of asyncrl with and without train.share_prefix instead, and TRL's: one group for each size of
group, prompt and response. The bound is the ratio of the model FLOPs, attention included.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from common import (
    ChildFailed,
    Numbers,
    Parent,
    Rounds,
    alternate,
    children,
    finish,
    missing_peers,
    parser,
    peak_memory,
    reset_peak_memory,
    run_part,
    say,
    table,
)

SIDES = ("asyncrl", "padded", "trl")
PEERS = {"trl": "trl"}  # pip install -e '.[bench]'
EPS_CLIP = 0.2
_LIMIT_S = 900.0

Step = Callable[[], float]  # takes one optimizer step; returns the gradient norm before clipping


# ---------------------------------------------------------------------------------------------------------------- the batch


def long_tail(num_prompts: int) -> list[tuple[str, str]]:
    """Return (prompt, response) pairs of examples/long_tail: 280: -> 270;261;...;9;0, starts log-uniform in 5 to 300."""
    import numpy as np

    pairs = []
    for start in np.exp(np.random.default_rng(0).uniform(math.log(5), math.log(300), num_prompts)).astype(int):
        number, parts = int(start), []
        while number:
            number -= sum(map(int, str(number)))
            parts.append(str(number))
        pairs.append((f"{start}:", ";".join(parts)))
    return pairs


def make_batch(num_prompts: int, group_size: int) -> list[dict[str, Any]]:
    """One dict per sequence: prompt and response ids, one advantage of the response, old logprobs of its tokens."""
    import numpy as np

    from asyncrl.testing.tiny import make_char_tokenizer

    rng = np.random.default_rng(1)
    tokenizer = make_char_tokenizer(None, "0123456789:;")
    sequences = []
    for prompt, response in long_tail(num_prompts):
        prompt_ids, length = tokenizer(prompt)["input_ids"], len(tokenizer(response)["input_ids"])
        for _ in range(group_size):
            response_ids = rng.integers(1, len(tokenizer), length).tolist()  # responses of a group differ
            old = np.log(1 / 13) + rng.normal(0, 0.1, length + 1)
            sequences.append(
                {
                    "prompt": prompt_ids,
                    "response": [*response_ids, tokenizer.eos_token_id],
                    "advantage": float(rng.normal()),
                    "old": old.astype(np.float32),
                }
            )
    return sequences


def num_tokens(sequences: list[dict[str, Any]]) -> int:
    return sum(len(s["prompt"]) + len(s["response"]) for s in sequences)


def num_response_tokens(sequences: list[dict[str, Any]]) -> int:
    return sum(len(s["response"]) for s in sequences)


def rows_of(values: list[Any], width: int, *, left: bool = False) -> tuple[Any, Any]:
    """Return (values padded with 0 to width, mask of the values)."""
    import torch

    rows = torch.zeros(len(values), width, dtype=torch.as_tensor(values[0]).dtype)
    real = torch.zeros(len(values), width, dtype=torch.bool)
    for row, value in enumerate(values):
        where = slice(width - len(value), width) if left else slice(len(value))
        rows[row, where], real[row, where] = torch.as_tensor(value), True
    return rows, real


def parts_of(sequences: list[dict[str, Any]], num_rows: int) -> Iterator[list[dict[str, Any]]]:
    for at in range(0, len(sequences), max(1, num_rows)):
        yield sequences[at : at + max(1, num_rows)]


# ---------------------------------------------------------------------------------------------------------------- the sides


def asyncrl_step(
    model: str, sequences: list[dict[str, Any]], max_tokens: int, group_size: int, *, share: str = "auto"
) -> Step:
    import numpy as np

    from asyncrl.algorithms.ppo import PPOLoss
    from asyncrl.config.processes import ModelConfig
    from asyncrl.config.schema import OptimizerConfig, PPOConfig, TrainConfig
    from asyncrl.data.sequence import SequenceSample
    from asyncrl.model.engine import TrainEngine

    groups = []
    for members in parts_of(sequences, group_size):
        group: dict[str, list[Any]] = {
            key: [] for key in ("packed_input_ids", "loss_mask", "packed_logprobs", "advantages")
        }
        for s in members:
            before, after = len(s["prompt"]), len(s["response"])
            group["packed_input_ids"].append(np.array(s["prompt"] + s["response"]))
            group["loss_mask"].append(np.arange(before + after) >= before)
            group["packed_logprobs"].append(np.concatenate([np.zeros(before, np.float32), s["old"]]))
            group["advantages"].append(np.full(before + after, s["advantage"], np.float32))
        groups.append(group)
    sample = SequenceSample.from_groups([str(i) for i in range(len(groups))], groups)
    optimizer = OptimizerConfig(schedule="constant", warmup_steps=0)
    actor = ModelConfig("actor", model, "d1p1m1", [0], trainable=True, optimizer=optimizer)
    engine = TrainEngine(actor, TrainConfig(max_tokens_per_mb=max_tokens, share_prefix=share))
    ppo = PPOConfig(use_decoupled_loss=False, eps_clip=EPS_CLIP, loss_normalization="token")

    def step() -> float:
        loss = PPOLoss(ppo, float(num_response_tokens(sequences)))
        return engine.train_step(sample, loss, temperature=1.0, lr_step=0)["grad_norm"]

    return step


def optimizer_of(module: Any) -> Callable[[], float]:
    """A function that clips the gradient, steps, clears the gradients, and returns the gradient norm."""
    import torch

    from asyncrl.config.schema import OptimizerConfig

    config = OptimizerConfig()
    optimizer = torch.optim.AdamW(
        module.parameters(), config.lr, (config.beta1, config.beta2), config.eps, config.weight_decay
    )

    def step() -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), config.grad_clip))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def padded_step(model: str, sequences: list[dict[str, Any]], max_tokens: int, group_size: int) -> Step:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    update = optimizer_of(module)

    width = max(len(s["prompt"]) + len(s["response"]) for s in sequences)

    def step() -> float:
        for part in parts_of(sequences, max_tokens // width):
            # Pad on the right only, so that attention takes its causal path, the fastest one for rows
            ids, real = rows_of([s["prompt"] + s["response"] for s in part], width)
            old, _ = rows_of([np.concatenate([np.zeros(len(s["prompt"]), np.float32), s["old"]]) for s in part], width)
            starts = torch.tensor([len(s["prompt"]) for s in part])
            mask = (real & (torch.arange(width) >= starts[:, None]))[:, 1:]
            logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
            all_logprobs = logits.float().log_softmax(-1)
            with torch.no_grad():
                _entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
            logprobs = all_logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logprobs - old[:, 1:]).exp()
            advantages = torch.tensor([[s["advantage"]] for s in part])
            clipped = ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP)
            loss = -torch.min(ratio * advantages, clipped * advantages)[mask].sum()
            (loss / num_response_tokens(sequences)).backward()
        return update()

    return step


def trl_step(model: str, sequences: list[dict[str, Any]], max_tokens: int, group_size: int) -> Step:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from asyncrl.data.prompts import load_tokenizer

    warnings.simplefilter("ignore", FutureWarning)  # raised by TRL's own configuration
    widths = {key: max(len(s[key]) for s in sequences) for key in ("prompt", "response")}
    num_rows = max(1, max_tokens // sum(widths.values()))
    num_parts = math.ceil(len(sequences) / num_rows)
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=2 * num_rows,  # twice the rows, because it must be a multiple of num_generations
        gradient_accumulation_steps=num_parts,
        num_generations=2,
        loss_type="dapo",  # mean over response tokens of the batch
        epsilon=EPS_CLIP,
        beta=0.0,
        temperature=1.0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "5:"}]),
        processing_class=load_tokenizer(model),
    )
    module = trainer.model
    module.train()
    trainer.current_gradient_accumulation_steps = num_parts
    update = optimizer_of(module)

    def step() -> float:
        for part in parts_of(sequences, num_rows):
            prompts, prompt_mask = rows_of([s["prompt"] for s in part], widths["prompt"], left=True)
            responses, response_mask = rows_of([s["response"] for s in part], widths["response"])
            inputs = {
                "prompt_ids": prompts,
                "prompt_mask": prompt_mask.long(),
                "completion_ids": responses,
                "completion_mask": response_mask.long(),
                "advantages": torch.tensor([s["advantage"] for s in part]),
                "old_per_token_logps": rows_of([s["old"] for s in part], widths["response"])[0],
                "num_items_in_batch": torch.tensor(num_response_tokens(sequences)),
            }
            trainer.compute_loss(module, inputs).backward()
        return update()

    return step


# -------------------------------------------------------------------------------------------------------------- measuring


def part(parent: Parent, side: str, model: str, prompts: int, group_size: int, max_tokens: int, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    sequences = make_batch(prompts, group_size)
    makers = {"asyncrl": asyncrl_step, "padded": padded_step, "trl": trl_step}
    step = makers[side](model, sequences, max_tokens, group_size)
    # Measure from before the first step: memory that this step frees stays resident and would hide the use of later steps
    before = reset_peak_memory()
    norms = [step()]
    start = time.process_time()
    norms += [step() for _ in range(steps)]
    seconds = time.process_time() - start
    parent.send(tokens_per_s=steps * num_tokens(sequences) / seconds, memory=peak_memory() - before, norms=norms)


def prefix_part(
    parent: Parent, side: str, model: str, group_size: int, prompt: int, response: int, steps: int, num_threads: int
) -> None:
    """Steps on one group. side: train.share_prefix, or trl. Also sends the ratio of the FLOPs without and with a shared prompt."""
    import numpy as np
    import torch

    from asyncrl.model.flops import flops_of
    from asyncrl.model.sharding import Skeleton, load_config

    torch.set_num_threads(num_threads)
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(1, 13, prompt).tolist()
    sequences = [
        {
            "prompt": prompt_ids,
            "response": [1 + number % 12, *rng.integers(1, 13, response - 1).tolist()],
            "advantage": float(rng.normal()),
            "old": np.full(response, math.log(1 / 13), np.float32),
        }
        for number in range(group_size)
    ]
    max_tokens = group_size * (prompt + response)
    if side == "trl":
        step = trl_step(model, sequences, max_tokens, group_size)
    else:
        step = asyncrl_step(model, sequences, max_tokens, group_size, share=side)
    norms = [step()]
    start = time.process_time()
    norms += [step() for _ in range(steps)]
    seconds = (time.process_time() - start) / steps
    flops = flops_of(Skeleton.of(load_config(model, "lm"), "lm", torch.float32).model)
    whole = flops.of_batch([prompt + response] * group_size)
    parent.send(seconds=seconds, bound=whole / (whole - flops.of_batch([prompt] * (group_size - 1))), norm=norms[-1])


def compare_prefixes(args: argparse.Namespace, model: str) -> None:
    cases = list(itertools.product(args.group_sizes, args.prompt_tokens, args.response_tokens))
    bounds: dict[str, float] = {}
    norms: dict[str, float] = {}

    def measure(side: str) -> Numbers:
        found = {}
        for group_size, prompt, response in cases:
            name = f"{group_size} x ({prompt} + {response})"
            sizes = {"group_size": group_size, "prompt": prompt, "response": response, "num_threads": args.threads}
            with children(__file__, "prefix_part", side=side, model=model, steps=args.steps, **sizes) as (child,):
                result = child.receive(_LIMIT_S)
            found[name], bounds[name] = result["seconds"], result["bound"]
            if not math.isclose(result["norm"], norms.setdefault(name, result["norm"]), rel_tol=1e-3):
                raise ChildFailed(f"{name}: gradient norms {result['norm']} and {norms[name]}")
        return found

    peers = [peer for peer in args.peers if peer in PEERS and peer not in missing_peers(PEERS)]
    sides = ("off", "on", *peers)
    rounds = alternate(args, {side: (lambda side=side: measure(side)) for side in sides})
    gain = rounds.ratios("off", ["on"], list(bounds))["on"]
    rows = [
        [
            name,
            *(rounds.median(side, name) for side in sides),
            rounds.spread("on", name),
            gain[name],
            bound,
            gain[name] / bound,
        ]
        for name, bound in bounds.items()
    ]
    seconds = [f"{side}, CPU s" for side in sides]
    header = ["group x (prompt + response)", *seconds, "spread", "speed", "bound", "of bound"]
    table(args, "train.share_prefix", header, rows)
    worst = min(gain[name] / bound for name, bound in bounds.items())
    model_sizes = {"hidden": args.hidden, "layers": args.layers}
    finish(
        args,
        name="train_step_prefixes",
        value=worst,
        unit="of the bound by FLOPs",
        ratio=gain,
        spread=0.0,
        bounds=bounds,
        sides=rounds.summary(),
        model=model_sizes,
    )


class Bench:
    def __init__(self, args: argparse.Namespace, model: str) -> None:
        self.args = args
        self.model = model
        self.norms: list[float] = []  # from the first side measured

    def measure(self, side: str) -> Numbers:
        args = self.args
        settings = {"prompts": args.prompts, "group_size": args.group_size, "max_tokens": args.max_tokens}
        with children(__file__, "part", side=side, model=self.model, steps=args.steps, **settings) as (child,):
            result = child.receive(_LIMIT_S)
        self.norms = self.norms or result["norms"]
        if not all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(result["norms"], self.norms, strict=True)):
            raise ChildFailed(f"{side} computes a different update: gradient norms {result['norms']}, {self.norms}")
        return {"tokens_per_s": result["tokens_per_s"], "memory": result["memory"]}


def main() -> None:
    options = parser(
        __doc__.split("\n")[0],
        quick={"prompts": 8, "steps": 1, "group_sizes": [8], "prompt_tokens": [512], "response_tokens": [64]},
    )
    options.add_argument("--prompts", type=int, default=32)
    options.add_argument("--group-size", type=int, default=8)
    options.add_argument(
        "--max-tokens", type=int, default=4096, help="token budget of a micro-batch, including padding"
    )
    options.add_argument("--hidden", type=int, default=128)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--steps", type=int, default=1, help="counted steps per round")
    options.add_argument("--prefixes", action="store_true", help="compare steps with and without shared prefixes")
    options.add_argument("--group-sizes", nargs="*", type=int, default=[8, 16])
    options.add_argument("--prompt-tokens", nargs="*", type=int, default=[512, 1024])
    options.add_argument("--threads", type=int, default=1, help="of a step with --prefixes")
    options.add_argument("--response-tokens", nargs="*", type=int, default=[64, 512])
    options.add_argument("--peers", nargs="*", default=SIDES[1:], choices=SIDES[1:])
    args = options.parse_args()
    os.environ["TQDM_DISABLE"] = "1"  # no progress bars of loading, here and in the sides
    missing = [peer for peer in missing_peers(PEERS) if peer in args.peers]
    if missing:
        say(args, f"not installed, left out: {', '.join(missing)} (pip install -e '.[bench]')")
    with tempfile.TemporaryDirectory() as folder:
        from asyncrl.testing.tiny import make_char_tokenizer, make_tiny_model

        make_tiny_model(
            folder,
            tokenizer=make_char_tokenizer(None, "0123456789:;"),
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_layers=args.layers,
        )
        if args.prefixes:
            compare_prefixes(args, folder)
            return
        bench = Bench(args, folder)
        sides = ["asyncrl", *(peer for peer in args.peers if peer not in missing)]
        rounds = alternate(args, {side: lambda side=side: bench.measure(side) for side in sides})
    report(args, rounds, sides, missing)


def report(args: argparse.Namespace, rounds: Rounds, sides: list[str], missing: list[str]) -> None:
    lengths = [len(s["prompt"]) + len(s["response"]) for s in make_batch(args.prompts, 1)]
    batch = {
        "sequences": args.prompts * args.group_size,
        "mean_length": round(sum(lengths) / len(lengths), 1),
        "max_length": max(lengths),
    }
    rows = []
    for side in sides:
        speed = rounds.ratio("asyncrl", side, "tokens_per_s")
        memory = rounds.ratio("asyncrl", side, "memory")
        rows.append([side, rounds.median(side, "tokens_per_s"), rounds.median(side, "memory") / 1e6, speed, memory])
    title = f"{batch['sequences']} sequences, mean {batch['mean_length']}, longest {batch['max_length']} tokens"
    table(args, title, ["", "tokens/s", "peak MB", "asyncrl / it: speed", "memory"], rows)
    finish(
        args,
        name="train_step",
        value=rounds.median("asyncrl", "tokens_per_s"),
        unit="tokens/s",
        ratio={side: rounds.ratio("asyncrl", side, "tokens_per_s") for side in sides[1:]},
        spread=rounds.spread("asyncrl", "tokens_per_s"),
        memory_ratio={side: rounds.ratio("asyncrl", side, "memory") for side in sides[1:]},
        sides=rounds.summary(),
        batch=batch,
        model={"hidden": args.hidden, "layers": args.layers},
        max_tokens=args.max_tokens,
        peers_missing=missing,
    )


if __name__ == "__main__":
    if not run_part({"part": part, "prefix_part": prefix_part}):
        sys.exit(main())
