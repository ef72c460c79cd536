"""Prompts: from a JSONL file, a Parquet file or a Hub dataset, in an order determined by a seed.

A ticket carries a Locator (epoch, position). Every rollout worker opens the same source with the same seed and finds the same
prompt at a Locator. So Locators are the whole state of the iteration: the master tracks which of them are done, and no process
sends or saves a shuffled list. The whole source is read and checked when it is opened: a broken line stops the run before it
starts.

No torch: `load_tokenizer` loads tokenizers without importing it, unlike AutoTokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl.config.schema import PromptSourceConfig
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.messages import Locator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_TASK = "default"  # the task of a line if the config has neither task_key nor default_task

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One dataset item, ready for a rollout."""

    prompt_id: str  # e{epoch}-p{position}
    text: str  # the model's input: rendered, if there is a chat template
    input_ids: list[int]  # empty if the source was opened without a tokenizer
    answer: Any  # the line's unchanged value under answer_key; "" if the config names none
    task: str
    row: Row  # the whole line
    too_long: bool  # the prompt has more than max_prompt_length tokens; the caller must reject it


class PromptError(ValueError):
    """The model cannot use this prompt. Other prompts of the source may be usable."""

    error_class = ErrorClass.PERMANENT
    outlives_restart = True


class PromptSource:
    """All prompts of one source. Opening it raises ValueError (FileNotFoundError, ImportError) with location and remedy.

    Without a tokenizer it counts and locates prompts, and returns prompts as text unless they need a chat template. That is enough
    for the master.
    """

    def __init__(
        self, config: PromptSourceConfig, tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 1
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must not be negative")
        if config.chat_template and tokenizer is not None and not tokenizer.chat_template:
            raise ValueError(
                "prompts.chat_template is true, but the tokenizer has none; set it to false, or use the tokenizer of a chat model"
            )
        self.config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._rows: list[Row] = []
        for place, row in _read_rows(config):
            _check_row(config, place, row)
            self._rows.append(row)
        if not self._rows:
            raise ValueError(f"{config.path} holds no prompts")
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Number of prompts per epoch."""
        return len(self._rows)

    @property
    def seed(self) -> int:
        return self._seed

    def fingerprint(self) -> str:
        """Hash of the raw prompts in the source's order. With the same fingerprint, seed and `shuffle`, two sources have the same
        prompt at every position."""
        digest = xxhash.xxh3_128()
        for row in self._rows:
            digest.update(msgspec.json.encode(row[self.config.prompt_key]) + b"\n")
        return digest.hexdigest()

    @property
    def tasks(self) -> set[str]:
        """Names of the tasks of all prompts."""
        return {self._task_of(row) for row in self._rows}

    def locate(self, epoch: int, position: int) -> int:
        """Index of the line at this position of this epoch's order."""
        if epoch < 0 or not 0 <= position < len(self):
            raise ValueError(
                f"there is no prompt at epoch {epoch}, position {position}: an epoch has {len(self)} prompts"
            )
        return int(self._order(epoch)[position]) if self.config.shuffle else position

    def get(self, locator: Locator) -> Prompt:
        """Return the prompt at a locator. It is the same in every process with this source and seed.

        Raises PromptError if the chat template refuses the prompt, or if the tokenizer cannot encode it.
        """
        row = self._rows[self.locate(locator.epoch, locator.position)]
        text, input_ids = self._render(row[self.config.prompt_key])
        return Prompt(
            prompt_id=f"e{locator.epoch}-p{locator.position}",
            text=text,
            input_ids=input_ids,
            answer=row[self.config.answer_key] if self.config.answer_key else "",
            task=self._task_of(row),
            row=row,
            too_long=len(input_ids) > self.config.max_prompt_length,
        )

    def _task_of(self, row: Row) -> str:
        key = self.config.task_key
        task: str = row[key] if key and key in row else self.config.default_task or DEFAULT_TASK
        return task

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """A permutation of the lines, drawn from (seed, epoch). Two epochs are cached, because consecutive epochs overlap."""
        if epoch not in self._orders:
            while len(self._orders) >= 2:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return self._orders[epoch]

    def _render(self, prompt: str | list[dict[str, Any]]) -> tuple[str, list[int]]:
        tokenizer = self._tokenizer
        if not self.config.chat_template:
            assert isinstance(prompt, str)  # ensured by _check_row
            return prompt, [] if tokenizer is None else _encode(tokenizer, prompt, special_tokens=True)
        if tokenizer is None:
            raise ValueError("a prompt with a chat template cannot be rendered without a tokenizer")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.config.chat_template_args
            )
        except Exception as error:  # a template is a program: it may require alternating roles, for example
            raise PromptError(f"the chat template refuses {messages!r}: {error}") from error
        assert isinstance(text, str)
        return text, _encode(tokenizer, text, special_tokens=False)  # the template adds its own special tokens


def is_file_name(path: str) -> bool:
    """Return whether the path ends like a prompt file (.jsonl, .parquet). Any other path must be the name of a Hub dataset."""
    return Path(path).suffix in {".jsonl", ".parquet"}


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model directory (or Hub name) without importing torch. It needs a tokenizer.json."""
    from transformers import PreTrainedTokenizerFast  # the import takes 0.5 s

    directory = Path(path)
    if directory.is_dir() and not (directory / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{directory} has no tokenizer.json; save the tokenizer with save_pretrained of a fast tokenizer"
        )
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(path)
    return tokenizer


def _encode(tokenizer: PreTrainedTokenizerFast, text: str, *, special_tokens: bool) -> list[int]:
    try:
        input_ids = [int(token) for token in tokenizer.encode(text, add_special_tokens=special_tokens)]
    except Exception as error:  # tokenizers raises no narrower type
        raise PromptError(f"the tokenizer cannot encode the prompt {text!r}: {error}") from error
    if not input_ids:
        raise PromptError(f"the prompt {text!r} has no tokens: the tokenizer knows none of its characters")
    return input_ids


# --------------------------------------------------------------------------------------------------- reading and checking


def _read_rows(config: PromptSourceConfig) -> Iterator[tuple[str, Any]]:
    """Yield each line of the source with its location."""
    path = Path(config.path)
    if not config.path:
        raise ValueError("prompts.path is empty; name a .jsonl file, a .parquet file or a Hub dataset")
    if is_file_name(config.path):
        if not path.is_file():
            raise FileNotFoundError(f"there is no prompt file {path}")
        yield from _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    elif path.exists():
        raise ValueError(f"prompts.path {path}: a prompt file ends in .jsonl or .parquet")
    else:
        yield from _read_hub(config.path, config.subset, config.split)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not a line of JSON: {error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(f"{path}: Parquet files need pyarrow; pip install 'asyncrl[parquet]'") from error
    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", row


def _read_hub(name: str, subset: str, split: str) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"there is no file {name}; to read it as a Hub dataset, pip install 'asyncrl[hub]' (files end in .jsonl or .parquet)"
        ) from error
    for number, row in enumerate(load_dataset(name, subset or None, split=split)):
        yield f"{name}[{split}], row {number}", row


def _check_row(config: PromptSourceConfig, place: str, row: Any) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: expected an object with the key {config.prompt_key!r}, found {type(row).__name__}")
    for option in ("prompt_key", "answer_key", "task_key"):
        key = getattr(config, option)
        if key and key not in row and not (option == "task_key" and config.default_task):
            remedy = "" if option == "prompt_key" else ' (or to "" if there is none)'
            raise ValueError(
                f"{place}: no key {key!r}, only {sorted(row)}; set prompts.{option} to the right one{remedy}"
            )
    task = row.get(config.task_key, config.default_task) if config.task_key else DEFAULT_TASK
    if not isinstance(task, str):
        raise ValueError(f"{place}: the task under {config.task_key!r} must be a string, found {task!r}")
    prompt = row[config.prompt_key]
    if isinstance(prompt, list) and not config.chat_template:
        raise ValueError(
            f"{place}: {config.prompt_key!r} is a list of messages; set prompts.chat_template=true to render them"
        )
    if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ValueError(
            f"{place}: {config.prompt_key!r} must be a non-empty string or a list of messages (role, content), found {prompt!r}"
        )


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in prompt)
