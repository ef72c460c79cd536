"""The files that a rollout worker reads and writes: tokenizer, prompts, journal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.processes import RolloutWorkerConfig
from asyncrl.config.schema import ConfigError, evaluation_sets
from asyncrl.data.prompts import Prompt, PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample, encode_sample
from asyncrl.data.words import add_words, words_error
from asyncrl.rewards.trajectory import complete_sample, rewards_by_seat, sample_answers, session_summary, summary_of
from asyncrl.runtime.journal import BackgroundJournal


class RolloutData:
    """The files of one worker. The constructor reads tokenizer and prompts."""

    sample_type: type[Any] = SequenceSample
    summary = staticmethod(summary_of)
    session_summary = staticmethod(session_summary)
    rewards_by_seat = staticmethod(rewards_by_seat)
    answers = staticmethod(sample_answers)
    encode = staticmethod(encode_sample)

    def __init__(self, config: RolloutWorkerConfig) -> None:
        """Raises ConfigError if the tokenizer has no EOS token."""
        seed = config.worker.seed
        self._words, self._max_words_bytes = config.words, config.max_words_bytes
        self.complete = partial(
            complete_sample,
            dense_rewards=config.dense_rewards,
            branches=config.branches,
            routes=config.with_routes,
            words=config.words,
        )
        self.tokenizer: Any = load_tokenizer(config.tokenizer_path)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer_path={config.tokenizer_path!r}: the tokenizer has no EOS token, so no response could end; set eos_token"
            )
        self.eos_token_id = int(self.tokenizer.eos_token_id)
        self.prompts = PromptSource(config.prompts, self.tokenizer, seed)
        self.eval_prompts = {
            name: PromptSource(chosen.prompts, self.tokenizer, seed)
            for name, chosen in evaluation_sets(config.eval).items()
            if chosen.prompts is not None
        }
        self._journal = Path(config.worker.run_dir) / "journal" / f"rollout_worker_{config.worker.index}.jsonl"

    def add_words(self, sample: SequenceSample, prompt: Prompt) -> SequenceSample:
        """Return the sample with all words of train.words. Raises ValueError if some are missing, too large or no JSON."""
        if not self._words:
            return sample
        sample = add_words(sample, self._words, prompt, self.tokenizer)
        if error := words_error(sample, self._max_words_bytes):
            raise ValueError(error)
        return sample

    def journal(self) -> BackgroundJournal:
        return BackgroundJournal(self._journal)
