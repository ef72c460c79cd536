"""The check of the first train step (train.mismatch): the trainer must compute the logprobs that the servers reported.

The first data of an attempt was sampled by the very weights that the trainer holds. So the behaviour logprobs (of the servers) and
the trainer's own must agree, up to rounding. If they do not, the servers sample from another model than the one in training, and
the loss corrects with wrong ratios from then on.

    master/executor.py: the batch is on-policy --> Calls: `FirstStep.check`, before the first optimizer step --> `verdict`

Only tokens that are trained count: those of environments and prompts have no behaviour logprob. The comparison is at the
temperature of sampling; servers report logprobs before top-p and top-k, as the trainer computes them.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.config.processes import MismatchConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model.engine import TrainEngine
from asyncrl.model.tensor_exchange import exchange, workers_of
from asyncrl.protocol.errors import RunEndedError

_SHOWN = 3  # sequences that the message names

Stats = dict[str, float]


class MismatchError(RunEndedError):
    """The servers' logprobs are not the trainer's, although both have the same weights."""


class Worst(msgspec.Struct, frozen=True, array_like=True):
    """A sequence and its worst token."""

    largest: float  # |behaviour - trainer| of the token; inf: one of the logprobs is not finite
    group: str  # ticket id
    sequence: int  # of the group, from 0
    token: int  # of the sequence with its prompt, from 0
    length: int  # tokens of the sequence, with its prompt
    behaviour: float | None  # null: not finite
    trainer: float | None


class Compared(msgspec.Struct, frozen=True):
    """The comparison of some sequences. The comparisons of all ranks and of all parts of a batch add up."""

    num_tokens: int = 0
    total: float = 0.0  # of behaviour - trainer; nan if a logprob is not finite
    num_beyond: int = 0  # tokens with a difference beyond the bound
    worst: tuple[Worst, ...] = ()  # the largest first

    def __add__(self, other: Compared) -> Compared:
        return Compared(
            self.num_tokens + other.num_tokens,
            self.total + other.total,
            self.num_beyond + other.num_beyond,
            tuple(sorted(self.worst + other.worst, key=lambda worst: -worst.largest)[:_SHOWN]),
        )

    @property
    def approx_kl(self) -> float:
        """Mean of behaviour - trainer, as actor/behav_approx_kl."""
        return self.total / max(self.num_tokens, 1)

    @property
    def share(self) -> float:
        return self.num_beyond / max(self.num_tokens, 1)

    @property
    def largest(self) -> float:
        return self.worst[0].largest if self.worst else 0.0


def compare(sample: SequenceSample, trainer_T: npt.NDArray[np.float32], bound: float) -> Compared:
    """Compare the trained tokens. trainer_T: the trainer's logprobs, packed like packed_input_ids."""
    mask_T = sample.data["trained_mask"]
    behaviour_T = sample.data["packed_logprobs"].astype(np.float64)
    difference_T = np.where(mask_T, behaviour_T - trainer_T, 0.0)
    size_T = np.abs(np.where(np.isfinite(difference_T), difference_T, np.inf))
    bounds = sample.cu_seqlens("packed_input_ids")
    names = [
        (group, sequence)
        for group, lengths in zip(sample.ids, sample.seqlens["packed_input_ids"], strict=True)
        for sequence in range(len(lengths))
    ]
    worst = []
    for (group, sequence), begin, end in zip(names, bounds[:-1], bounds[1:], strict=True):
        at = int(begin) + int(size_T[begin:end].argmax()) if end > begin else int(begin)
        if end > begin and size_T[at] > 0:
            pair = [float(value) if math.isfinite(value) else None for value in (behaviour_T[at], trainer_T[at])]
            worst.append(Worst(float(size_T[at]), group, sequence, at - int(begin), int(end - begin), *pair))
    finite = bool(np.isfinite(size_T).all())
    return Compared(
        int(mask_T.sum()),
        float(difference_T.sum()) if finite else math.nan,
        int((size_T > bound).sum()),
    ) + Compared(worst=tuple(worst))


def verdict(found: Compared, config: MismatchConfig) -> str:
    """Return the text of the error or the warning; "": the logprobs agree."""
    if abs(found.approx_kl) <= config.kl and found.share <= config.share:
        return ""
    worst = [
        f"  {one.group}, response {one.sequence}: token {one.token} of {one.length}, servers {_number(one.behaviour)}, trainer"
        f" {_number(one.trainer)}"
        for one in found.worst
    ]
    return "\n".join(
        [
            "the generation servers' logprobs are not the trainer's in the first train step, although the same weights sampled and"
            " train this data:",
            f"  behav_approx_kl is {found.approx_kl:.3g} nats per token (allowed: {config.kl:g}); {found.share:.2%} of"
            f" {found.num_tokens} tokens differ by more than {config.bound:g} (allowed: {config.share:.2%}), the largest by"
            f" {found.largest:.3g}",
            "the worst sequences, with the worst token of each, counted from 0 with the prompt:",
            *worst,
            "likely causes:",
            "  the engine computes this model differently: try generation.attention=sdpa, and float32 as generation.dtype and"
            " train.dtype",
            "  the servers have other weights: see weights.verify_logprobs",
            "  an agent samples at another temperature than rollout.sampling.temperature, or returns logprobs of its own",
            "train.mismatch=warn trains nevertheless; with record.trajectories=true `asyncrl-launch inspect` then shows both"
            " logprobs of every token",
        ]
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


@dataclass
class FirstStep:
    """Compares the first batch, in one or several parts, before the optimizer step. Collective over the ranks of the actor; all
    come to the same verdict."""

    config: MismatchConfig
    logger: logging.Logger
    _found: Compared = field(default_factory=Compared)
    _is_over: bool = False  # the verdict has been given, and the weights may have been trained

    def check(
        self, engine: TrainEngine, sample: SequenceSample | None, *, proximal_at: float | None, last: bool
    ) -> Stats:
        """Add a part of the batch; after the last one return the statistics, or raise MismatchError. sample: the groups of this
        rank's replica with the input keys of actor_train; None: it has none. proximal_at: the temperature at which the trainer has
        computed their proximal_logprobs; None: they have none."""
        if self._is_over:
            return {}
        self._is_over = last
        trainer_T = self._logprobs(engine, sample, proximal_at)
        if sample is not None and trainer_T is not None and engine.is_head:
            self._found += compare(sample, trainer_T, self.config.bound)
        if not last:
            return {}
        workers = workers_of(engine)
        payloads = [msgspec.msgpack.encode(self._found)]
        if len(workers) > 1:
            payloads = [payload for _, payload in sorted(exchange(workers, payloads[0]).items())]
        found = sum((msgspec.msgpack.decode(payload, type=Compared) for payload in payloads), Compared())
        if problem := verdict(found, self.config):
            if self.config.action == "stop":
                raise MismatchError(problem)
            self.logger.warning("%s", problem)
        elif found.num_tokens:
            self.logger.info(
                "first step: servers' and trainer's logprobs of %d tokens differ by at most %.2g",
                found.num_tokens,
                found.largest,
            )
        return {
            "mismatch/approx_kl": found.approx_kl,
            "mismatch/share": found.share,
            "mismatch/max": found.largest,
        }

    def _logprobs(
        self, engine: TrainEngine, sample: SequenceSample | None, proximal_at: float | None
    ) -> npt.NDArray[np.float32] | None:
        """The trainer's logprobs at the temperature of sampling: those that actor_inf has computed, else those of a forward pass.
        Collective."""
        if proximal_at != self.config.temperature:
            return engine.logprobs(sample, temperature=self.config.temperature)
        proximal_T: npt.NDArray[np.float32] | None = sample.data["proximal_logprobs"] if sample is not None else None
        return proximal_T
