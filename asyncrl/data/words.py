"""Words of trajectories (train.words): the values that the rollout worker adds, and the check of their bytes. No torch.

Any other key of train.words comes from the agent, in its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.data.prompts import Prompt
from asyncrl.data.sequence import SequenceSample, is_words


def add_words(sample: SequenceSample, keys: Sequence[str], prompt: Prompt, tokenizer: Any) -> SequenceSample:
    """Return the sample of one group with those of `keys` that the rollout worker makes (ADDED) and the agent has not set.

    Raises ValueError if a key is then missing, or if JSON cannot hold a value.
    """
    own = {
        key: make(sample, prompt, tokenizer) for key, make in ADDED.items() if key in keys and key not in sample.data
    }
    if lacking := [key for key in keys if key not in sample.data and key not in own]:
        raise ValueError(
            f"an agent's sample lacks the keys {lacking} of train.words, which an agent must set (the rollout worker adds only "
            f"{', '.join(ADDED)})"
        )
    return sample.update(SequenceSample.from_groups(sample.ids, [own])) if own else sample


def words_error(sample: SequenceSample, max_bytes: int) -> str:
    """Return the error of a sample's words: a group has more than max_bytes of them, or bytes that are no JSON. "": no error."""
    keys = [key for key in sample.keys if is_words(key)]
    for group_id, *lengths in zip(sample.ids, *(sample.seqlens[key] for key in keys), strict=True) if keys else ():
        if (num_bytes := sum(map(sum, lengths))) > max_bytes:
            return (
                f"group {group_id} has {num_bytes} bytes of words ({', '.join(keys)}), and train.max_words_bytes={max_bytes}; "
                "shorten them, or raise the limit"
            )
    try:
        for key in keys:
            sample.words(key)
    except ValueError as error:
        return str(error)
    return ""


def _completions(sample: SequenceSample, prompt: Prompt, tokenizer: Any) -> list[str]:
    """Per sequence, its sampled tokens as text without special tokens: what a reward function gets as `completion`."""
    runs = zip(sample.slices("packed_input_ids")[0], sample.slices("loss_mask")[0], strict=True)
    return [tokenizer.decode(tokens_T[mask_T].tolist(), skip_special_tokens=True) for tokens_T, mask_T in runs]


ADDED: Mapping[str, Callable[[SequenceSample, Prompt, Any], Any]] = {
    "words_completion": _completions,
    "prompt_words_prompt": lambda sample, prompt, tokenizer: prompt.plain_text,
    "prompt_words_answer": lambda sample, prompt, tokenizer: prompt.answer,
    "prompt_words_row": lambda sample, prompt, tokenizer: prompt.row,
}
