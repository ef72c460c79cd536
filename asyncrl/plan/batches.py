"""The batches that a plan assumes. No torch.

A step has train.batch_size * rollout.group_size sequences. Each has as many tokens as a response may have and PROMPT_TOKENS more,
but at most train.max_tokens_per_mb. They are spread evenly over data ranks and minibatches. If the sequences of a rank fit into one
micro-batch, they are that micro-batch. Otherwise micro-batches are full: they have train.max_tokens_per_mb tokens, the last
sequence of each being shorter.

With train.share_prefix the sequences of a group share their prompt in a micro-batch, and differ from their first response token on.
A group that a full micro-batch has no room for is divided, and each part has the prompt. `auto` counts as the engine decides it
with such a batch.
"""

from __future__ import annotations

import math

import msgspec

from asyncrl.config.schema import ExperimentConfig
from asyncrl.config.sharing import is_worth_sharing, may_share
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.graph import TRAIN_MFC
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.minibatches import minibatches_of
from asyncrl.protocol.names import ACTOR

PROMPT_TOKENS = 512  # of a prompt, unless prompts.max_prompt_length is less


class Load(msgspec.Struct, frozen=True):
    """The part of a step's batch that one data rank gets in an MFC."""

    minibatches: int  # optimizer steps; inference: 1
    micro_batches: int  # of each minibatch
    lengths: list[int]  # of the sequences of each micro-batch
    # Whether every micro-batch has these lengths. False: `lengths` are those of the whole minibatch, which a pipeline splits
    full: bool = True
    prefix: int = 0  # tokens that the sequences of a group share; 0: none
    counts: list[int] = []  # sequences of each group, in the order of `lengths`; empty: no tokens are shared

    @property
    def repeats(self) -> int:
        """How often the sequences of `lengths` come in a step."""
        return self.minibatches * (self.micro_batches if self.full else 1)

    @property
    def copies(self) -> list[int]:
        """Tokens of each prefix that the rows of `lengths` do not repeat."""
        parts = len(self.counts) if self.full else max(len(self.counts), min(self.micro_batches, len(self.lengths)))
        return [self.prefix] * (len(self.lengths) - parts if self.counts else 0)

    @property
    def row_tokens(self) -> int:
        """Tokens of the rows of `lengths`."""
        return sum(self.lengths) - sum(self.copies)

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.repeats * sum(self.lengths)

    @property
    def shared(self) -> int:
        """Those of them that another sequence of their row has."""
        return self.repeats * sum(self.copies)


def prompt_tokens(config: ExperimentConfig) -> int:
    """Tokens of each prompt."""
    return min(config.prompts.max_prompt_length, PROMPT_TOKENS)


def sequence_tokens(config: ExperimentConfig, response: int) -> int:
    """Tokens of each sequence of a batch whose responses have so many."""
    return min(prompt_tokens(config) + response, config.train.max_tokens_per_mb)


def shared_tokens(config: ExperimentConfig) -> int:
    """Tokens of the prompt that the sequences of a group have in common; 0: none."""
    prompt = prompt_tokens(config)
    return prompt if config.rollout.group_size > 1 and prompt < config.train.max_tokens_per_mb else 0


def load_of(config: ExperimentConfig, mfc: MFCDef, grid: ParallelGrid) -> Load:
    """config: resolved (config/resolve.py)."""
    has_routes = config.train.routes != "off" and mfc.role == ACTOR
    prefix = shared_tokens(config) if may_share(config.train, has_routes=has_routes) else 0
    load = _load(config, mfc, grid, prefix)
    return load if is_worth_sharing(config.train, sum(load.copies), sum(load.lengths)) else _load(config, mfc, grid, 0)


def _load(config: ExperimentConfig, mfc: MFCDef, grid: ParallelGrid, prefix: int) -> Load:
    """prefix: tokens that the sequences of a group share; 0: none."""
    train, most = config.train, config.train.max_tokens_per_mb
    minibatches = passes = 1
    if mfc.kind == "train_step":
        passes = train.ppo.epochs
        minibatches = passes * minibatches_of(mfc, train)
    length = sequence_tokens(config, config.rollout.sampling.max_new_tokens)
    num_sequences = math.ceil(train.batch_size * config.rollout.group_size * passes / minibatches / grid.num_replicas)
    lengths = [length] * num_sequences
    group = config.rollout.group_size if prefix else 1
    counts = _groups(num_sequences, group)
    if train.ptx is not None and mfc.name == TRAIN_MFC:
        texts = math.ceil(train.ptx.batch_size / minibatches / grid.num_replicas)
        lengths += [min(train.ptx.max_length, most)] * texts
        counts += [1] * texts
    shared = {"prefix": prefix, "counts": counts} if group > 1 else {}
    whole = Load(minibatches, grid.num_stages, lengths, full=False, **shared)  # type: ignore[arg-type]
    if math.ceil(whole.row_tokens / most) <= grid.num_stages:
        return whole
    filled, counts = _filled(most, length, prefix, group)
    count = math.ceil(sum(lengths) / sum(filled))
    return Load(minibatches, count, filled, **(shared and {"prefix": prefix, "counts": counts}))  # type: ignore[arg-type]


def _groups(num_sequences: int, size: int) -> list[int]:
    whole, rest = divmod(num_sequences, size)
    return [size] * whole + [rest] * (rest > 0)


def _filled(most: int, length: int, prefix: int, group: int) -> tuple[list[int], list[int]]:
    """Lengths, and sequences of each group, of a micro-batch whose row has `most` tokens. group: sequences that share a prefix."""
    lengths, counts, left = list[int](), list[int](), most
    while left:
        others = min(group - 1, (left - length) // (length - prefix)) if left > length else 0
        lengths += [min(length, left)] + [length] * others
        counts.append(1 + others)
        left -= min(length, left) + others * (length - prefix)
        if left and others < group - 1:  # the next one of the group, as far as it fits
            lengths.append(prefix + left)
            counts[-1] += 1
            left = 0
    return lengths, counts
