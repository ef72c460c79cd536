"""The trainer's half of weights.verify_logprobs: a short text, and its logprobs under the exported weights.

All ranks of the model measure on their compute threads, in the call that takes the snapshot of the weights. The rank that commits
the version writes the result into its manifest. The servers' half is asyncrl/generation/checks.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asyncrl.data.sequence import SequenceSample
from asyncrl.model.engine import TrainEngine
from asyncrl.model.tensor_exchange import exchange, workers_of
from asyncrl.weights.versions import ScoredText

_NUM_RANDOM = 8
_NUM_SAMPLED = 32
_NUM_OTHER = 24  # tokens of the text that shares a packed row with the scored one
_NUM_CANDIDATES = 16  # per sampled token
EXACT = 1e-2  # a smaller tolerance is for float32
_ROOM = 8  # tokens that a server decodes after the text: they must fit into the model's positions, too


class TextScorer:
    """Scores one text, which is written at the first measurement and kept. After some random tokens, the model itself continues
    the text at temperature 1, so that its tokens resemble those of rollouts: for such tokens the error of each dtype is known. A
    text of random tokens only would have logprobs far from 0, where bfloat16 is coarse. A text of the likeliest tokens would have
    logprobs close to 0 under any weights. In float32 random tokens are exact enough, and cost no forward passes (sampled=False).

    The text is scored in a packed row, after another text: so the servers also check that the trainer keeps the sequences of a row
    apart.
    """

    def __init__(self, seed: int, *, sampled: bool = True) -> None:
        self._seed, self._sampled = seed, sampled
        self._texts: list[list[int]] | None = None  # the other text, and the scored one

    def measure(self, engine: TrainEngine) -> ScoredText:
        """Measure under the engine's current weights. Collective over all ranks of the model; the result is the same on each."""
        if self._texts is None:
            other = np.random.default_rng([self._seed, engine.vocab_size, 1])
            self._texts = [other.integers(engine.vocab_size, size=_NUM_OTHER).tolist(), self._write_text(engine)]
        _, logprobs_T = _score(engine, self._texts)
        text = self._texts[1]
        return ScoredText(text, logprobs_T[min(_NUM_RANDOM, len(text) - 1) :].tolist())

    def _write_text(self, engine: TrainEngine) -> list[int]:
        """Write the text, once per process, in less time than a train step. An engine gives logprobs of given tokens only, because
        in some layouts no rank has all logits. So tokens come from importance sampling: draw candidates from a simple distribution,
        pick one by its weight p(model) / p(simple distribution).

        Candidates are log-uniform: tokenizers number tokens by frequency, most frequent first (Zipf's law).
        """
        rng = np.random.default_rng([self._seed, engine.vocab_size])
        most = int(getattr(engine.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)
        length = max(2, min(_NUM_RANDOM + _NUM_SAMPLED, most - _ROOM))
        num_random = min(_NUM_RANDOM, length - 1) if self._sampled else length
        input_ids: list[int] = rng.integers(engine.vocab_size, size=num_random).tolist()
        log_prior_V = -np.log(np.arange(1, engine.vocab_size + 1))
        prior_V = np.exp(log_prior_V) / np.exp(log_prior_V).sum()
        while len(input_ids) < length:
            candidates_C = rng.choice(engine.vocab_size, size=_NUM_CANDIDATES, p=prior_V)
            scores = _score(engine, [[*input_ids, int(candidate)] for candidate in candidates_C])
            log_weights_C = np.array([logprobs_T[-1] for logprobs_T in scores], np.float64) - log_prior_V[candidates_C]
            weights_C = np.exp(log_weights_C - log_weights_C.max())
            input_ids.append(int(rng.choice(candidates_C, p=weights_C / weights_C.sum())))
        return input_ids


def _score(engine: TrainEngine, texts: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """Logprobs of texts, at temperature 1, on all ranks of the model. Collective.

    Every data rank scores the texts, so that no rank is without groups; the first one's result is used.
    """
    groups = [{"packed_input_ids": [np.array(text)]} for text in texts]  # a row has them in this order
    found = engine.logprobs(SequenceSample.from_groups([str(i) for i in range(len(texts))], groups), temperature=1.0)
    payload = found.astype("<f4").tobytes() if found is not None else b""
    payloads = exchange(workers_of(engine), payload) if len(workers_of(engine)) > 1 else {0: payload}
    (answer, *_) = [payload for _, payload in sorted(payloads.items()) if payload]
    return np.split(np.frombuffer(answer, "<f4"), np.cumsum([len(text) for text in texts])[:-1])
