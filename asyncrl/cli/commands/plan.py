"""`asyncrl-launch plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import msgspec
from rich.console import Console

from asyncrl.cli.commands.common import FAILED, Commands, add_config_command, print_json, say
from asyncrl.cli.hub import with_local_models
from asyncrl.cli.planning import choose_device
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import ConfigError
from asyncrl.dataflow.phases import phases
from asyncrl.launch.experiment import draft_experiment
from asyncrl.plan.bounds import TimeBound
from asyncrl.plan.capacity import GIB, RunPlan, gib, parts_text, plan_run
from asyncrl.plan.devices import DEFAULT, DEVICES
from asyncrl.plan.host import HostPlan, plan_host
from asyncrl.plan.layouts import Layout, better_split, search_layouts
from asyncrl.plan.ranks import plan_training
from asyncrl.plan.remedies import Remedy, find_remedies
from asyncrl.plan.result import KINDS, PlanError, RankPlan
from asyncrl.plan.speeds import LOAD_BYTES, LOAD_SOURCE, reached

_DESCRIPTION = f"""Compute memory, FLOPs and traffic of a run before it starts, without a GPU and without weights: the
training engine runs on tensors without values. Starts no run, writes nothing. Takes seconds to minutes.

The model's folder needs only config.json. Kinds of GPU for --gpu: {", ".join(DEVICES)}.
Without --gpu the plan is for this machine's GPU or, if it has none, for {DEFAULT}."""

_EPILOG = """

examples:
  asyncrl-launch plan my_run.yaml --gpu h100-80g
  asyncrl-launch plan my_run.yaml --gpu h100-80g allocation=sglang.d4+d4 train.max_tokens_per_mb=8192
  asyncrl-launch plan my_run.yaml --gpu h200-141g --gpus 16    the layouts of 16 GPUs that fit, the fastest first

exit codes: 0 every process fits its GPU; 1 some process does not, with --gpus: no layout does; 2 the config cannot work
or cannot be planned."""

_SHOWN_LAYOUTS = 12
_SHOWN_SHARE = 0.001  # of what a rank needs: smaller parts are left out
_WIDEST = 100  # columns of a table: what a page or a terminal beside an editor shows


class PlanReport(msgspec.Struct, frozen=True):
    """The output with --json. Bytes and seconds; times are lower bounds for responses of `response_tokens`, and mfu is an
    upper bound."""

    fits: bool
    plan: RunPlan | None = None  # null with --gpus
    remedies: list[Remedy] = []
    host: HostPlan | None = None  # null with --gpus
    split: Layout | None = None  # another division of the GPUs between servers and training, with a shorter step
    layouts: list[Layout] = []  # with --gpus


def add_to(commands: Commands) -> None:
    parser = add_config_command(commands, "plan", plan, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--gpu", metavar="KIND", default="", help="kind of GPU")
    parser.add_argument("--gpus", metavar="N", type=int, default=0, help="search the layouts of this number of GPUs")
    parser.add_argument(
        "--mean-response",
        metavar="TOKENS",
        type=int,
        default=0,
        help="length of the mean response, for the times; without it all responses have the maximum",
    )


def plan(arguments: argparse.Namespace, console: Console) -> int:
    """Compute memory, FLOPs and traffic of a run, and whether it fits a kind of GPU."""
    device = choose_device(arguments.gpu)
    config = with_local_models(draft_experiment(arguments.config, arguments.overrides), download=False).checked()
    of_run = phases(config)
    if len(of_run) > 1:
        each = ", or ".join(f"allocation='{phase.allocation.partition(' until ')[0]}'" for phase in of_run)
        raise ConfigError(f"allocation={config.allocation}: plan one phase at a time: {each}")
    config = resolve(config, Facts(on_gpu=True))
    mean, longest = arguments.mean_response, config.rollout.sampling.max_new_tokens
    if not 0 <= mean <= longest:
        raise ConfigError(
            f"--mean-response {mean}: must be from 1 to rollout.sampling.max_new_tokens={longest}, or be left out"
        )
    planner = partial(plan_run, device=device, plan_ranks=partial(plan_training, known={}), mean_response=mean)
    try:
        if arguments.gpus:
            layouts = search_layouts(config, arguments.gpus, device, planner, mean_response=mean)
            report = PlanReport(any(layout.planned and layout.fits for layout in layouts), layouts=layouts)
        else:
            found = planner(config)
            remedies = find_remedies(config, found, planner) if not found.fits else []
            split = better_split(config, found, device, planner, mean_response=mean) if found.fits else None
            report = PlanReport(found.fits, found, remedies, plan_host(config), split)
    except PlanError as error:
        raise ConfigError(str(error)) from error
    console.width = min(console.width, _WIDEST)
    if arguments.json:
        print_json(report)
    elif report.plan is not None:
        _print_plan(report.plan, report, console, assumed=_assumed(mean, longest))
    else:
        _print_layouts(report.layouts, console, assumed=_assumed(mean, longest))
    return 0 if report.fits else FAILED


def _assumed(mean: int, longest: int) -> str:
    """What the times assume about responses."""
    if mean:
        return f"with responses of {mean:,} tokens on average"
    return f"if every response has the maximum of {longest:,} tokens (--mean-response assumes fewer)"


def _print_plan(plan: RunPlan, report: PlanReport, console: Console, *, assumed: str) -> None:
    _say(console, f"{plan.allocation} on {plan.num_devices} GPUs, {plan.device} with {gib(plan.memory)} each")
    if plan.ranks:
        console.print(_memory_table(plan))
        console.print(_work_table(plan.ranks))
    if plan.server is not None:
        _print_server(plan, console)
    shares = reached(plan.device)
    if (host := report.host) is not None:
        _say(
            console,
            f"main memory of the fullest host of {host.num_hosts}: about {gib(host.memory)} ({parts_text([*host.parts.items()])})",
        )
        _say(
            console,
            f"loading at the start: a process reads at most {gib(host.read_by_process)}, expected "
            f"{_seconds(host.read_by_process / LOAD_BYTES)} at {LOAD_BYTES / 1e9:g} GB/s ({LOAD_SOURCE}); the processes "
            f"of the host read {gib(host.read)} in all",
        )
    time = plan.time
    generation = f", generation at least {_seconds(time.generation_s)}" if plan.server is not None else ""
    _say(
        console,
        f"estimate of a train step {assumed}: at least {_seconds(time.step_s)} (training at least {_seconds(time.training_s)}, "
        f"with {_seconds(time.receiving_s)} of receiving at the same time{generation}), at the peaks of the data "
        "sheet",
    )
    reaching = [f"training reaches {shares.training:.0%} ({shares.source})"] * bool(plan.ranks)
    reaching += [f"generation reaches {shares.generation:.0%} (assumed)"] * (plan.server is not None)
    _say(
        console,
        f"expected: {_expected(time, plan.server is not None)}, if {' and '.join(reaching)} of the peak",
    )
    if plan.server is not None and plan.ranks:
        _say(console, f"the bottleneck is {time.bottleneck}")
    if (split := report.split) is not None:
        _say(
            console,
            f"{split.allocation} would be better balanced: expected {_expected(split.time, True)}, "
            f"{gib(split.peak)} on the fullest GPU",
        )
    if (sharing := plan.sharing) is not None:
        saves = "train.share_prefix saves" if sharing.is_on else "train.share_prefix=on would save"
        _say(
            console,
            f"{saves} {sharing.tokens:.0%} of the tokens and {sharing.flops:.0%} of the FLOPs of "
            f"training: groups of {sharing.group_size} compute prompts of {sharing.prompt_tokens} tokens once",
        )
    if plan.ranks:
        say(console, f"upper bound of the MFU of training: {time.mfu:.0%}")
    for shortage in plan.shortages:
        word = "does not fit" if shortage.fails else "hardly fits"
        others = f" (and {len(shortage.stands_for) - 1} like it)" if len(shortage.stands_for) > 1 else ""
        _say(
            console,
            f"{shortage.process}{others} {word}: at least {gib(shortage.needed)} of {gib(shortage.memory)}: {shortage.text}",
        )
    for remedy in report.remedies:
        say(
            console,
            f"fits with {' '.join(remedy.overrides)}: {gib(remedy.peak)} on the fullest of {remedy.num_devices} GPUs",
        )
    if not plan.fits and not report.remedies:
        say(console, "no change of a few fields was found that fits: use GPUs with more memory, or a smaller model")
    if plan.fits:
        say(console, f"fits: the fullest GPU needs at least {gib(plan.peak)}")


def _expected(time: TimeBound, generates: bool) -> str:
    beside = f", generation {_seconds(time.expected_generation_s)}" if generates else ""
    return f"{_seconds(time.expected_step_s)} (training {_seconds(time.expected_training_s)}{beside})"


def _memory_table(plan: RunPlan) -> FittedTable:
    kinds = [kind for kind in KINDS if any(rank.at_peak.get(kind) for rank in plan.ranks)]
    numbers = ("needs", "peak", "load", "export")
    rows = []
    for rank in plan.ranks:
        sizes = (plan.needed(rank), rank.peak, rank.load_peak, rank.export_peak)
        found = [(kind, rank.at_peak.get(kind, 0)) for kind in kinds]
        found += [("libraries", plan.libraries), ("broadcast", rank.broadcast)]
        parts = ", ".join(
            f"{kind} {_number(size / GIB)}" for kind, size in found if size >= _SHOWN_SHARE * plan.needed(rank)
        )
        shown = [_number(size / GIB) for size in sizes]
        rows.append([_workers(rank.stands_for), ", ".join(rank.shards), *shown, rank.peak_in or "between MFCs", parts])
    right = [Column(name, justify="right") for name in numbers]
    texts = [Column(name, "text") for name in ("peak in", "parts of the peak, and libraries")]
    names = [Column(name, "text") for name in ("worker", "holds")]
    return FittedTable("model workers: memory in GiB", [*names, *right, *texts], rows)


def _work_table(ranks: Sequence[RankPlan]) -> FittedTable:
    rows = []
    for number, rank in enumerate(ranks):
        if number and rank.steps == ranks[number - 1].steps:  # a sender of weights, and its like
            continue
        for step in rank.steps:
            moved = ", ".join(
                f"{name} {calls.count:,}, {_number(calls.bytes / GIB)}" for name, calls in step.collectives.items()
            )
            tokens = f"{step.tokens:,}" + f" ({step.shared:,} shared)" * bool(step.shared)
            rows.append((str(rank.worker), step.mfc, tokens, _number(step.flops / 1e12), moved))
    right = [Column(name, justify="right") for name in ("tokens", "TFLOP")]
    moves = Column("collectives: calls, payload in GiB", "text")
    return FittedTable(
        "model workers: work in a train step of the longest responses", ["worker", "MFC", *right, moves], rows
    )


def _print_server(plan: RunPlan, console: Console) -> None:
    server = plan.server
    assert server is not None
    of_states = (
        f"states {gib(server.states)} ({server.request_state:,} bytes a request), " if server.request_state else ""
    )
    of_adapters = f"adapters {gib(server.adapters)}, " if server.adapters else ""
    each = "a GPU" if server.gpus == 1 else f"{server.gpus} GPUs"
    _say(
        console,
        f"{server.count} generation servers ({server.engine}) with {each} each; of a GPU: weights {gib(server.weights)}, KV cache "
        f"{gib(server.cache)} in {server.blocks:,} blocks of {server.block_tokens} tokens ({server.kv_token:,} bytes a token), "
        f"{of_adapters}{of_states}"
        f"{server.requests} requests of the longest length, {server.request_tokens:,} tokens; on average at most "
        f"{plan.time.running} requests run",
    )
    if server.remark:
        _say(console, server.remark)


def _print_layouts(layouts: Sequence[Layout], console: Console, *, assumed: str) -> None:
    rows = []
    for layout in layouts[:_SHOWN_LAYOUTS]:
        planned = "no" if not layout.fits else "hardly" if layout.tight else "yes"
        fits = planned if layout.planned else "not planned"
        time = layout.time
        times = (time.expected_step_s, time.step_s, time.training_s, time.receiving_s, time.generation_s)
        rows.append((layout.allocation, fits, *map(_three_digits, times), gib(layout.peak)))
    numbers = ("expected s", "step s", "training s", "receiving s", "generation s", "fullest GPU")
    right = [Column(name, "optional" if name == "receiving s" else "whole", "right") for name in numbers]
    console.print(
        FittedTable(
            f"layouts; times are estimates {assumed}, at the peaks of the data sheet but for the expected time of a step",
            ["allocation", "fits", *right],
            rows,
        )
    )
    if len(layouts) > _SHOWN_LAYOUTS:
        say(console, f"{len(layouts) - _SHOWN_LAYOUTS} others: see --json")


def _say(console: Console, text: str) -> None:
    """Print a text, wrapped at words."""
    console.print(text, markup=False, highlight=False)


def _workers(numbers: Sequence[int]) -> str:
    """`0`, `0-7`, or `0, 2, 4`."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _number(value: float) -> str:
    """A number with one digit behind the point, and a small number with its first digit."""
    return f"{value:,.1f}" if value >= 0.05 or not value else f"{value:.1g}"


def _seconds(time: float) -> str:
    return f"{_three_digits(time)} s"


def _three_digits(value: float) -> str:
    """Rounded, without an exponent: 2,620."""
    return f"{float(f'{value:.3g}'):,g}"
