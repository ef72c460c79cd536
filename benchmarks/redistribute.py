"""Bytes that model workers send one another in a train step, over the minimum that its MFCs need on their workers.

    python benchmarks/redistribute.py [--rounds 5] [--prompts 32] [--group-size 4] [--longest 2000] [--write-baseline]

A live run: real model workers (gloo, real streams, a tiny model). The benchmark acts as the master with its executor. PPO with
critic and reference on disjoint meshes: the actor on d2p1m1, the critic on d1p1m2, the reference on d1p1m1. A round is a train
step on new groups, whose lengths have a long tail.

asyncrl: all bytes that the workers report as sent, including headers. minimum: computed here from the groups and from the calls
that the workers received. A worker that runs an MFC must be sent once each (id, key) that it reads and lacks; only the data
counts. unpruned: the bytes of sending every MFC's input to each of its workers, even if the worker already has it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from common import Rounds, finish, parser, say, table

from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import CriticConfig, PPOConfig, TrainConfig
from asyncrl.data.sequence import KEY_SPECS, SequenceSample
from asyncrl.dataflow.graph import DataflowGraph, build_dataflow
from asyncrl.dataflow.topology import ModelPlacement
from asyncrl.protocol.calls import ExecuteMFC
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.testing.tiny import make_tiny_model
from tests.support.training_side import TrainingSide, training_side

GRIDS = {"actor": ("d2p1m1", [0, 1]), "critic": ("d1p1m2", [2, 3]), "ref": ("d1p1m1", [4])}
_PROMPT = 16  # prompt tokens
_VOCAB = 64


def train_config() -> TrainConfig:
    ppo = PPOConfig(kl_coef=0.05, advantage_norm="batch", gae_lambda=0.95, minibatches=1, temperature=1.0)
    return TrainConfig(ppo=ppo, critic=CriticConfig(minibatches=1), max_tokens_per_mb=4096, call_timeout_s=300.0)


def models(path: Path) -> list[ModelConfig]:
    return [
        ModelConfig(
            name=name,
            path=str(path),
            grid=grid,
            workers=workers,
            kind="value" if name == "critic" else "lm",
            trainable=name != "ref",
        )
        for name, (grid, workers) in GRIDS.items()
    ]


def make_group(ticket: str, position: int, head: int, size: int, longest: int) -> tuple[TrajectoryMeta, SequenceSample]:
    """A trajectory of random tokens. Response lengths are log-uniform, at least 5."""
    rng = np.random.default_rng([position])
    lengths = (_PROMPT + np.exp(rng.uniform(np.log(5), np.log(longest), size)).astype(int)).tolist()
    sampled = [np.arange(n) >= _PROMPT for n in lengths]
    version = WeightVersion(1, 0).pack()
    group = {
        "packed_input_ids": [rng.integers(1, _VOCAB, n) for n in lengths],
        "packed_prompts": rng.integers(1, _VOCAB, _PROMPT),
        "packed_logprobs": [np.where(mask, -4.0, 0.0).astype(np.float32) for mask in sampled],
        "prompt_mask": [~mask for mask in sampled],
        "loss_mask": sampled,
        "seq_no_eos_mask": [False] * size,
        "rewards": rng.random(size).astype(np.float32),
        "task_ids": 0,
        "versions": [np.where(mask, version, -1) for mask in sampled],
        "version_start": np.full(size, version),
        "version_end": np.full(size, version),
        "birth_time": 1.0,
    }
    sample = SequenceSample.from_groups([ticket], [group])
    meta = TrajectoryMeta(
        ticket_id=ticket,
        locator=Locator(0, position),
        attempt=1,
        head=head,
        keys=list(sample.keys),
        seqlens=lengths,
        response_lengths=[n - _PROMPT for n in lengths],
        rewards=sample.data["rewards"].tolist(),
        version_start=[version] * size,
        version_end=[version] * size,
        birth_time=1.0,
    )
    return meta, sample


@dataclass
class Account:
    """Location of each datum, derived from the calls alone. Independent of the planner."""

    graph: DataflowGraph
    placements: Mapping[str, ModelPlacement]
    sizes: Mapping[str, SequenceSample]  # the trajectories, by id
    holds: set[tuple[int, str, str]] = field(default_factory=set)  # worker, id, key
    minimum: int = 0
    unpruned: int = 0

    def execute(self, call: ExecuteMFC) -> None:
        mfc = self.graph.mfcs[call.mfc]
        placement = self.placements[mfc.model]
        for rank, part in enumerate(call.parts):
            for worker in placement.replicas[rank]:
                for group, key in ((group, key) for group in part for key in mfc.input_keys):
                    num_bytes = self._num_bytes(group, key)
                    self.unpruned += num_bytes
                    if (worker, group, key) not in self.holds:
                        self.minimum += num_bytes
                        self.holds.add((worker, group, key))
            head = placement.heads[rank]
            self.holds |= {(head, group, key) for group in part for key in mfc.output_keys}

    def _num_bytes(self, group: str, key: str) -> int:
        sample = self.sizes[group]
        if key in sample.data:
            return sample.data[key].nbytes
        spec = KEY_SPECS[key]  # a key that an MFC outputs
        count = {"token": sample.total_tokens(), "sequence": sample.num_sequences(), "group": 1}[spec.layout]
        return count * spec.dtype.itemsize


async def measure(args: argparse.Namespace, folder: Path) -> tuple[Rounds, list[int]]:
    """Run a warm-up step, then one step per round. Returns the bytes, and the tokens of each step."""
    transformers.logging.disable_progress_bar()
    make_tiny_model(folder / "model", hidden_size=32, intermediate_size=64, max_positions=_PROMPT + args.longest)
    train, given = train_config(), models(folder / "model")
    graph = DataflowGraph([replace(mfc, model=mfc.role) for mfc in build_dataflow(train).mfcs.values()])
    mfcs = [mfc.placed(mfc.model) for mfc in graph.mfcs.values()]
    placements = {model.name: ModelPlacement.of(model) for model in given}
    values: dict[str, dict[str, list[float]]] = {
        "asyncrl": {"bytes": []},
        "minimum": {"bytes": []},
        "unpruned": {"bytes": []},
    }
    tokens = []
    async with training_side(given, mfcs, train, folder / "run", store_capacity=2 * args.prompts) as side:
        calls = _overhear(side)
        for number in range(-1, args.rounds):
            groups = [
                make_group(
                    f"ticket-{number + 1}-{i}", (number + 1) * args.prompts + i, i % 2, args.group_size, args.longest
                )
                for i in range(args.prompts)
            ]
            await asyncio.gather(*(side.push(meta, sample) for meta, sample in groups))
            account = Account(graph, placements, {meta.ticket_id: sample for meta, sample in groups})
            account.holds |= {
                (side.heads[meta.head], meta.ticket_id, key) for meta, sample in groups for key in sample.keys
            }
            calls.clear()
            result = await side.step([meta.ticket_id for meta, _ in groups], version=number + 1)
            for call in calls:
                account.execute(call)
            sent = result.stats["redistribution/bytes"]
            say(
                args,
                f"{'warm-up' if number < 0 else f'step {number + 1}':>8}  sent {sent:.0f}, minimum {account.minimum}",
            )
            if number >= 0:
                values["asyncrl"]["bytes"].append(sent)
                values["minimum"]["bytes"].append(account.minimum)
                values["unpruned"]["bytes"].append(account.unpruned)
                tokens.append(sum(sample.total_tokens() for _, sample in groups))
    return Rounds(values), tokens


def _overhear(side: TrainingSide) -> list[ExecuteMFC]:
    """A list to which each MFC call that the executor sends from now on is added once."""
    calls: list[ExecuteMFC] = []
    send = side.client.call_nowait

    def call_nowait(handlers: Sequence[Any], bodies: Sequence[Any]) -> Any:
        calls.extend(body for body in bodies[:1] if isinstance(body, ExecuteMFC))
        return send(handlers, bodies)

    side.client.call_nowait = call_nowait  # type: ignore[method-assign]
    return calls


def main() -> None:
    options = parser(__doc__ or "", quick={"prompts": 8})
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--prompts", type=int, default=32, help="groups per step (default 32)")
    options.add_argument("--group-size", type=int, default=4, help="sequences per group (default 4)")
    options.add_argument("--longest", type=int, default=2000, help="maximum tokens of a response (default 2000)")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-redistribute-") as folder:
        rounds, tokens = asyncio.run(measure(args, Path(folder)))
    sides = list(rounds.values)
    rows = [[side, rounds.median(side, "bytes"), rounds.ratio("asyncrl", side, "bytes")] for side in sides]
    table(args, "bytes per step", ["", "bytes", "asyncrl / this"], rows)
    finish(
        args,
        name="redistribute",
        value=sum(rounds.values["asyncrl"]["bytes"]) / sum(tokens),
        unit="bytes/token",
        ratio={peer: rounds.ratio("asyncrl", peer, "bytes") for peer in ("minimum", "unpruned")},
        sides=rounds.summary(),
        layout={name: f"{grid} on {workers}" for name, (grid, workers) in GRIDS.items()},
        peers_missing=[],
    )


if __name__ == "__main__":
    main()
