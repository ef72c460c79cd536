"""Logprobs without logits: peak memory and time of forward and backward over a large vocabulary, beside the plain softmax.

Both sides compute the logprob of each target, its gradient to hidden states and to the output layer, and the entropy (without
gradient), in float32 on one thread. asyncrl: asyncrl/model/logprobs.py with the default train.logprob_chunk_tokens. plain: all
logits, log_softmax, gather. A round uses a fresh process for each side and case. Memory: the highest resident size of the process
minus the size before the call. Hidden states and weights exist before the call and do not count; gradients count. Time: CPU
seconds of the call, including page faults. Other load on the machine disturbs them less than the wall clock.

`ratio.memory` and `ratio.time` are those of the middle case; `cases` has all. Either side must return the gradient of the output
layer. Its share of the plain side's memory is `gradient_share`: no ratio can be lower.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

from common import (
    ChildFailed,
    Numbers,
    Parent,
    Rounds,
    alternate,
    children,
    finish,
    parser,
    peak_memory,
    reset_peak_memory,
    run_part,
    say,
    table,
)

HIDDEN = (256, 512, 896)
SIDES = ("asyncrl", "plain")
_LIMIT_S = 600.0


def part(parent: Parent, side: str, tokens: int, vocab: int, hidden: int) -> None:
    import torch
    from torch.nn.functional import linear

    from asyncrl.config.schema import TrainConfig
    from asyncrl.model.logprobs import token_logprobs

    def asyncrl(hidden_NH: Any, weight: Any, targets: Any) -> Any:
        chunk_tokens = int(TrainConfig().logprob_chunk_tokens)
        return token_logprobs(hidden_NH, weight, targets, temperature=1.0, chunk_tokens=chunk_tokens)

    def plain(hidden_NH: Any, weight: Any, targets: Any) -> Any:
        logprobs = linear(hidden_NH, weight).log_softmax(-1)
        with torch.no_grad():
            entropy = -logprobs.exp().mul_(logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    def inputs(num_tokens: int, num_words: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        hidden_NH = torch.empty(num_tokens, hidden).normal_(generator=generator).requires_grad_()
        weight = torch.empty(num_words, hidden).normal_(0, 0.05, generator=generator).requires_grad_()
        targets = torch.randint(0, num_words, (num_tokens,), generator=generator)
        return hidden_NH, weight, targets, torch.empty(num_tokens).normal_(generator=generator)

    def step(hidden_NH: Any, weight: Any, targets: Any, factors: Any) -> tuple[Any, Any]:
        logprobs, entropy = sides[side](hidden_NH, weight, targets)
        (logprobs @ factors).backward()
        return logprobs, entropy

    sides = {"asyncrl": asyncrl, "plain": plain}
    torch.set_num_threads(1)
    step(*inputs(64, 512))  # trigger the libraries' work at their first call
    given = inputs(tokens, vocab)
    before, start = reset_peak_memory(), time.process_time()
    logprobs, entropy = step(*given)
    seconds = time.process_time() - start
    parent.send(
        memory=peak_memory() - before,
        time=seconds,
        check=[float(t.detach().double().norm()) for t in (logprobs, entropy, given[0].grad, given[1].grad)],
    )


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.checks: dict[str, list[float]] = {}  # by case: results of the first side

    def measure(self, side: str) -> Numbers:
        numbers: dict[str, float] = {}
        for hidden in self.args.hidden:
            case = f"hidden {hidden}"
            settings = {"side": side, "tokens": self.args.tokens, "vocab": self.args.vocab, "hidden": hidden}
            with children(__file__, "part", **settings) as (child,):
                result = child.receive(_LIMIT_S)
            expected = self.checks.setdefault(case, result["check"])
            if not all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(result["check"], expected, strict=True)):
                raise ChildFailed(f"{case}: the sides compute different results: {result['check']}, {expected}")
            numbers |= {f"{case}: memory": result["memory"], f"{case}: time": result["time"]}
        return numbers


def main() -> None:
    options = parser(__doc__.split("\n")[0], quick={"tokens": 1024, "vocab": 20_000, "hidden": [256]})
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--vocab", type=int, default=150_000)
    options.add_argument("--hidden", type=int, nargs="+", default=list(HIDDEN), help="hidden sizes")
    args = options.parse_args()
    say(args, f"{args.tokens} tokens, {args.vocab} words; bytes and CPU seconds")
    bench = Bench(args)
    report(args, alternate(args, {side: lambda side=side: bench.measure(side) for side in SIDES}))


def report(args: argparse.Namespace, rounds: Rounds) -> None:
    cases, rows = {}, []
    for hidden in args.hidden:
        case = f"hidden {hidden}"
        memory, seconds = f"{case}: memory", f"{case}: time"
        cases[case] = {
            "memory": rounds.ratio("asyncrl", "plain", memory),
            "time": rounds.ratio("asyncrl", "plain", seconds),
            "gradient_share": round(4 * hidden * args.vocab / rounds.median("plain", memory), 4),
            **{f"{side}_mb": round(rounds.median(side, memory) / 1e6, 1) for side in SIDES},
            **{f"{side}_s": round(rounds.median(side, seconds), 3) for side in SIDES},
            **{f"{side}_s_iqr": round(rounds.spread(side, seconds), 3) for side in SIDES},
        }
        rows.append([case, *cases[case].values()])
    middle = f"hidden {args.hidden[len(args.hidden) // 2]}"
    table(args, f"{args.tokens} tokens, {args.vocab} words", ["", *cases[middle]], rows)
    finish(
        args,
        name="logprobs",
        value=cases[middle]["asyncrl_mb"],
        unit="MB",
        ratio={"memory": cases[middle]["memory"], "time": cases[middle]["time"]},
        spread=round(rounds.spread("asyncrl", f"{middle}: memory") / 1e6, 2),
        case=middle,
        cases=cases,
        tokens=args.tokens,
        vocab=args.vocab,
        peers_missing=[],
    )


if __name__ == "__main__":
    if not run_part({"part": part}):
        sys.exit(main())
