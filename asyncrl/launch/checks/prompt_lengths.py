"""Checks before a start that prompts and responses fit the model. The prompts that do not are counted with the run's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.modes import mode_of
from asyncrl.config.schema import ConfigError, ExperimentConfig, generating_sources
from asyncrl.data.model_folder import text_config
from asyncrl.data.model_limits import UNLIMITED
from asyncrl.data.prompts import PromptSource, load_tokenizer
from asyncrl.launch.checks.checklist import Finding
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock

_TIME_S = 5.0  # for one source


def judge_prompt_lengths(
    config: ExperimentConfig, model: Mapping[str, Any], tokenizer_path: str, clock: Clock = SYSTEM_CLOCK
) -> Iterator[ConfigError | Finding]:
    """Warn of prompts that the run would reject for their length. A ConfigError: it would reject all of them.

    model: config.json of model_path. A prompt is too long if it has more than max_prompt_length tokens, or if the model has too few
    positions for it and its response.
    """
    # Validation ensures that the KV cache is large enough
    positions = int(text_config(model).get("max_position_embeddings") or UNLIMITED)
    # The model workers cut a response that reaches the last position
    is_cut = mode_of(config.mode).workers_generate
    own_agents = any(task.agent for task in config.rollout.tasks.values())
    for field, prompts, limiting, asked in generating_sources(config):
        wanted = 1 if is_cut else asked
        limit = min(prompts.max_prompt_length, positions - wanted)
        try:
            if not PromptSource(prompts, None, config.seed).may_exceed(limit):
                continue
            source = PromptSource(prompts, load_tokenizer(tokenizer_path), config.seed)
        except (OSError, ValueError, ImportError):  # the check of that source has reported it, or will
            continue
        found = source.find_longest(limit, clock.monotonic() + _TIME_S, clock.monotonic)
        if not found.num_over:
            continue
        count = f"{'' if found.is_complete else 'at least '}{found.num_over} of {source.num_lines}"
        value = (
            f"{count} prompts are too long; the longest has {'' if found.is_exact else 'at least '}{found.longest} tokens "
            f"({source.place(found.index)}), and "
        )
        if limit == prompts.max_prompt_length:
            value += f"{field}.max_prompt_length is {limit}"
            how = "leave them out"
            how += f", or set {field}.max_prompt_length={found.longest}" if found.is_exact else ""
        else:
            value += f"{limiting}={wanted} leaves {limit} of the model's {positions} positions"
            fewer = positions - found.longest
            how = "leave them out, "
            how += f"set {limiting}={fewer}, " if found.is_exact and 0 < fewer < wanted else ""
            how += "or use a model with more positions"
        if found.num_over == source.num_lines and (limit == prompts.max_prompt_length or not own_agents):
            yield ConfigError(f"{field}.path={prompts.path!r}: {value}; {how}")
        else:
            yield Finding(f"length of {field}", "warn", f"{value}. The run rejects these prompts", how)
