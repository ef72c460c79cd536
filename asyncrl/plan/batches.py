"""The batches that a plan assumes. No torch.

A step has train.batch_size * rollout.group_size sequences. Each has as many tokens as a response may have and PROMPT_TOKENS more,
but at most train.max_tokens_per_mb. They are spread evenly over data ranks and minibatches. If the sequences of a rank fit into one
micro-batch, they are that micro-batch. Otherwise micro-batches are full: they have train.max_tokens_per_mb tokens, the last
sequence of each being shorter.
"""

from __future__ import annotations

import math

import msgspec

from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.axes import ParallelGrid
from asyncrl.dataflow.graph import TRAIN_MFC
from asyncrl.dataflow.mfc import MFCDef
from asyncrl.dataflow.minibatches import minibatches_of

PROMPT_TOKENS = 512  # of a prompt, unless prompts.max_prompt_length is less


class Load(msgspec.Struct, frozen=True):
    """The part of a step's batch that one data rank gets in an MFC."""

    minibatches: int  # optimizer steps; inference: 1
    micro_batches: int  # of each minibatch
    lengths: list[int]  # of the sequences of each micro-batch
    # Whether every micro-batch has these lengths. False: `lengths` are those of the whole minibatch, which a pipeline splits
    full: bool = True

    @property
    def repeats(self) -> int:
        """How often the sequences of `lengths` come in a step."""
        return self.minibatches * (self.micro_batches if self.full else 1)

    @property
    def tokens(self) -> int:
        return self.repeats * sum(self.lengths)


def prompt_tokens(config: ExperimentConfig) -> int:
    """Tokens of each prompt."""
    return min(config.prompts.max_prompt_length, PROMPT_TOKENS)


def sequence_tokens(config: ExperimentConfig, response: int) -> int:
    """Tokens of each sequence of a batch whose responses have so many."""
    return min(prompt_tokens(config) + response, config.train.max_tokens_per_mb)


def load_of(config: ExperimentConfig, mfc: MFCDef, grid: ParallelGrid) -> Load:
    """config: resolved (config/resolve.py)."""
    train, most = config.train, config.train.max_tokens_per_mb
    minibatches = passes = 1
    if mfc.kind == "train_step":
        passes = train.ppo.epochs
        minibatches = passes * minibatches_of(mfc, train)
    length = sequence_tokens(config, config.rollout.sampling.max_new_tokens)
    num_sequences = math.ceil(train.batch_size * config.rollout.group_size * passes / minibatches / grid.num_replicas)
    lengths = [length] * num_sequences
    if train.ptx is not None and mfc.name == TRAIN_MFC:
        texts = math.ceil(train.ptx.batch_size / minibatches / grid.num_replicas)
        lengths += [min(train.ptx.max_length, most)] * texts
    count = math.ceil(sum(lengths) / most)
    if count <= grid.num_stages:
        return Load(minibatches, grid.num_stages, lengths, full=False)
    whole, rest = divmod(most, length)
    return Load(minibatches, count, [length] * whole + ([rest] if rest else []))
