"""The trainer's half of weights.verify_logprobs: a short text, and its logprobs under the weights that are handed out.

Rank 0 measures on its compute thread, in the same call that takes a snapshot of the weights, and writes the result into the
version's manifest. The servers' half is asyncrl/generation/verify.py.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.data.sequence import SequenceSample
from asyncrl.model.engine import TrainEngine
from asyncrl.weights import Probe

_NUM_RANDOM = 8
_NUM_SAMPLED = 24


class LogprobProbe:
    """One text a run, fixed from the first measurement on. After some random tokens the model itself has continued it, at
    temperature 1: tokens like those of rollouts are where the precision of a dtype is known. A text of random tokens only has
    logprobs far from 0, where bfloat16 is coarse; one of its likeliest tokens has logprobs close to 0 under any weights.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._input_ids: list[int] | None = None

    def measure(self, engine: TrainEngine) -> Probe:
        """Under the weights that the engine has now. On its compute thread."""
        if self._input_ids is None:
            self._input_ids = self._write_text(engine)
        sample = SequenceSample.from_groups(["probe"], [{"packed_input_ids": [np.array(self._input_ids)]}])
        logprobs_T = engine.logprobs(sample, temperature=1.0)
        return Probe(self._input_ids, [float(logprob) for logprob in logprobs_T[-_NUM_SAMPLED:]])

    def _write_text(self, engine: TrainEngine) -> list[int]:
        """Once a run, without a KV cache: short as it is, that takes less than a train step."""
        rng = np.random.default_rng([self._seed, engine.vocab_size])
        input_ids: list[int] = rng.integers(engine.vocab_size, size=_NUM_RANDOM).tolist()
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(_NUM_SAMPLED):
            probs_V = engine.next_token_logits(input_ids).softmax(-1)
            input_ids.append(int(torch.multinomial(probs_V, 1, generator=generator)))
        return input_ids
