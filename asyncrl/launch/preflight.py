"""What can be checked of a run on this machine before anything starts: files, sizes, tokenizer."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import ConfigError, ExperimentConfig, PromptSourceConfig
from asyncrl.data.prompts import PromptSource, load_tokenizer


def preflight(config: ExperimentConfig) -> int:
    """Check files against config. Returns the number of training prompts; raises ConfigError naming field and remedy."""
    model = Path(config.model_path).expanduser()
    if not (model / "config.json").is_file():
        hint = f"make it with `{config.prepare}`" if config.prepare else "give a folder in Hugging Face format"
        raise ConfigError(f"model_path={config.model_path!r}: there is no config.json; {hint}")
    tokenizer_path = config.tokenizer_path or config.model_path
    try:
        tokenizer = load_tokenizer(tokenizer_path)
    except Exception as error:
        raise ConfigError(f"tokenizer_path={tokenizer_path!r}: no tokenizer can be loaded from it: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"tokenizer_path={tokenizer_path!r}: has no EOS token, so no response could ever end; set eos_token"
        )
    num_prompts = _count("prompts", config.prompts, config.seed)
    if num_prompts < config.train.batch_size:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size}: {config.prompts.path} has only {num_prompts} prompts, "
            "so a batch could never be full; use a smaller batch or more prompts"
        )
    if (
        config.eval.prompts is not None
        and _count("eval.prompts", config.eval.prompts, config.seed) < config.eval.num_prompts
    ):
        raise ConfigError(
            f"eval.num_prompts={config.eval.num_prompts}: {config.eval.prompts.path} has fewer prompts; use a smaller number"
        )
    return num_prompts


def _count(field: str, prompts: PromptSourceConfig, seed: int) -> int:
    try:
        return len(PromptSource(prompts, None, seed))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}.path={prompts.path!r}: {error}") from error
