"""What a rollout worker reads and writes besides messages: tokenizer, prompts, its journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config.schema import ConfigError, RolloutWorkerConfig
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.data.sequence import SequenceSample, encode_sample
from asyncrl.rewards.trajectory import SampleSummary, complete_sample
from asyncrl.runtime.journal import BackgroundJournal


class RolloutData:
    """Of one worker. Reads tokenizer and prompts when it is made."""

    sample_type: type[Any] = SequenceSample
    complete = staticmethod(complete_sample)
    summary = staticmethod(SampleSummary.of)
    encode = staticmethod(encode_sample)

    def __init__(self, config: RolloutWorkerConfig) -> None:
        """Raises ConfigError."""
        seed = config.worker.seed
        self.tokenizer: Any = load_tokenizer(config.tokenizer_path)
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer_path={config.tokenizer_path!r}: has no EOS token, so no response could ever end; set eos_token"
            )
        self.eos_token_id = int(self.tokenizer.eos_token_id)
        self.prompts = PromptSource(config.prompts, self.tokenizer, seed)
        self.eval_prompts = PromptSource(config.eval_prompts, self.tokenizer, seed) if config.eval_prompts else None
        self._journal = Path(config.worker.run_dir) / "journal" / f"rollout_worker_{config.worker.index}.jsonl"

    def journal(self) -> BackgroundJournal:
        return BackgroundJournal(self._journal)
