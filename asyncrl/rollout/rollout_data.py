"""The files that a rollout worker reads and writes: tokenizer, prompts, journal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.processes import RolloutWorkerConfig
from asyncrl.config.schema import ConfigError
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample, encode_sample
from asyncrl.rewards.trajectory import complete_sample, session_summary, summary_of
from asyncrl.runtime.journal import BackgroundJournal


class RolloutData:
    """The files of one worker. The constructor reads tokenizer and prompts."""

    sample_type: type[Any] = SequenceSample
    summary = staticmethod(summary_of)
    session_summary = staticmethod(session_summary)
    encode = staticmethod(encode_sample)

    def __init__(self, config: RolloutWorkerConfig) -> None:
        """Raises ConfigError if the tokenizer has no EOS token."""
        seed = config.worker.seed
        self.complete = partial(complete_sample, dense_rewards=config.dense_rewards, branches=config.branches)
        self.tokenizer: Any = load_tokenizer(config.tokenizer_path)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer_path={config.tokenizer_path!r}: the tokenizer has no EOS token, so no response could end; set eos_token"
            )
        self.eos_token_id = int(self.tokenizer.eos_token_id)
        self.prompts = PromptSource(config.prompts, self.tokenizer, seed)
        self.eval_prompts = PromptSource(config.eval_prompts, self.tokenizer, seed) if config.eval_prompts else None
        self._journal = Path(config.worker.run_dir) / "journal" / f"rollout_worker_{config.worker.index}.jsonl"

    def journal(self) -> BackgroundJournal:
        return BackgroundJournal(self._journal)
