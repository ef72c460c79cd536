"""The trainer's half of weights.verify_logprobs: a short text, and its logprobs under the exported weights.

All ranks of the model measure on their compute threads, in the call that takes the snapshot of the weights. The rank that commits
the version writes the result into its manifest. The servers' half is asyncrl/generation/checks.py.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.data.sequence import SequenceSample
from asyncrl.model.tensor_exchange import ShardedModel, exchange, workers_of
from asyncrl.weights.versions import ScoredText

_NUM_RANDOM = 8
_NUM_SAMPLED = 24
_NUM_CANDIDATES = 64  # per sampled token


class ScoringModel(ShardedModel, Protocol):
    """engine.TrainEngine."""

    @property
    def vocab_size(self) -> int: ...

    def logprobs(self, sample: SequenceSample | None, *, temperature: float) -> npt.NDArray[np.float32] | None:
        """Logprobs of each token, packed like packed_input_ids, on the ranks of the last stage. Collective."""


class TextScorer:
    """Scores one text, which is written at the first measurement and kept. After some random tokens, the model itself continues
    the text at temperature 1, so that its tokens resemble those of rollouts: for such tokens the error of each dtype is known. A
    text of random tokens only would have logprobs far from 0, where bfloat16 is coarse. A text of the likeliest tokens would have
    logprobs close to 0 under any weights.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._input_ids: list[int] | None = None

    def measure(self, engine: ScoringModel) -> ScoredText:
        """Measure under the engine's current weights. Collective over all ranks of the model; the result is the same on each."""
        if self._input_ids is None:
            self._input_ids = self._write_text(engine)
        (logprobs_T,) = _score(engine, [self._input_ids])
        return ScoredText(self._input_ids, logprobs_T[-_NUM_SAMPLED:].tolist())

    def _write_text(self, engine: ScoringModel) -> list[int]:
        """Write the text, once per process, in less time than a train step. An engine gives logprobs of given tokens only, because
        in some layouts no rank has all logits. So tokens come from importance sampling: draw candidates from a simple distribution,
        pick one by its weight p(model) / p(simple distribution).

        Candidates are log-uniform: tokenizers number tokens by frequency, most frequent first (Zipf's law).
        """
        rng = np.random.default_rng([self._seed, engine.vocab_size])
        input_ids: list[int] = rng.integers(engine.vocab_size, size=_NUM_RANDOM).tolist()
        log_prior_V = -np.log(np.arange(1, engine.vocab_size + 1))
        prior_V = np.exp(log_prior_V) / np.exp(log_prior_V).sum()
        for _ in range(_NUM_SAMPLED):
            candidates_C = rng.choice(engine.vocab_size, size=_NUM_CANDIDATES, p=prior_V)
            scores = _score(engine, [[*input_ids, int(candidate)] for candidate in candidates_C])
            log_weights_C = np.array([logprobs_T[-1] for logprobs_T in scores], np.float64) - log_prior_V[candidates_C]
            weights_C = np.exp(log_weights_C - log_weights_C.max())
            input_ids.append(int(rng.choice(candidates_C, p=weights_C / weights_C.sum())))
        return input_ids


def _score(engine: ScoringModel, texts: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """Logprobs of texts of the same length, at temperature 1, on all ranks of the model. Collective.

    Every data rank scores the texts, so that no rank is without groups; the first one's result is used.
    """
    groups = [{"packed_input_ids": [np.array(text)]} for text in texts]
    found = engine.logprobs(SequenceSample.from_groups([str(i) for i in range(len(texts))], groups), temperature=1.0)
    payload = found.astype("<f4").tobytes() if found is not None else b""
    told = exchange(workers_of(engine), payload) if len(workers_of(engine)) > 1 else {0: payload}
    (answer, *_) = [payload for _, payload in sorted(told.items()) if payload]
    return np.split(np.frombuffer(answer, "<f4"), len(texts))
