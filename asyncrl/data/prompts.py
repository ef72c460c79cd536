"""Prompts: from a JSONL file, a Parquet file or a Hub dataset, in an order determined by a seed.

A ticket carries a Locator (epoch, position). Every rollout worker opens the same source with the same seed and finds the same
prompt at a Locator. So Locators are the whole state of the iteration: the master tracks which of them are done, and no process
sends or saves a shuffled list. The whole source is read and checked when it is opened: a broken line stops the run before it
starts.

No torch: `load_tokenizer` loads tokenizers without importing it, unlike AutoTokenizer.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncrl.config.schema import PromptSourceConfig
from asyncrl.data.chat import (
    ChatTemplate,
    Message,
    SpecialTokens,
    encode,
    encode_prompt,
    messages_for_template,
    shortened,
    tools_for_template,
)
from asyncrl.data.records import read_record
from asyncrl.protocol.errors import ErrorClass
from asyncrl.protocol.trajectories import Locator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_TASK = "default"  # the task of a line if the config has neither task_key nor default_task
TOOLS_KEY = "tools"  # field of a line with the tools that the chat template shows
_MOST_ADDED = 4  # tokens that a tokenizer adds to a text
_MOST_CHARACTERS = 1024  # for each token of max_prompt_length: a text with more is enormous
_MAX_LINE_BYTES = 256 << 20
_ROWS_AT_ONCE = 1024  # of a Parquet file
_BOM = b"\xef\xbb\xbf"
_UNSEEN_KEYS = ("images", "videos")  # columns of other systems' data for models that read images

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One dataset item, ready for a rollout."""

    prompt_id: str  # e{epoch}-p{position}
    text: str  # the model's input: rendered, if there is a chat template. Rewards and environments receive `plain_text`
    input_ids: list[int]  # empty if the source was opened without a tokenizer
    answer: Any  # the line's unchanged value under answer_key; "" if the config names none
    task: str
    row: Row  # the whole line
    too_long: bool  # the prompt has more than max_prompt_length tokens; the caller must reject it
    # The template that has rendered the prompt, for later turns. None: the prompt is read as it is
    template: ChatTemplate | None = field(default=None, compare=False, repr=False)
    without_special_tokens: str | None = field(default=None, repr=False)  # `text` so; None: it has none

    @property
    def plain_text(self) -> str:
        """The text without special tokens."""
        return self.text if self.without_special_tokens is None else self.without_special_tokens


@dataclass
class Lengths:
    """Lengths of a source's prompts, in tokens."""

    num_over: int = 0  # prompts with more tokens than the limit
    longest: int = 0
    index: int = 0  # of the longest prompt
    is_complete: bool = True  # False: time was over before all that may be too long were measured
    is_exact: bool = True  # False: of an enormous prompt only the beginning was measured


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
        self.config = config
        self._tokenizer = tokenizer
        self._special_tokens: SpecialTokens | None = None  # made for the first prompt
        self._template: ChatTemplate | None = None
        if config.chat_template and tokenizer is not None:
            if not tokenizer.chat_template:
                raise ValueError(
                    "prompts.chat_template is true, but the tokenizer has none; set it to false, or use the tokenizer of a "
                    "chat model"
                )
            self._template = ChatTemplate(tokenizer, config.chat_template_args, config.system_prompt)
        self._seed = seed
        self._rows: list[Row] = []
        self._numbers = array("q")  # of the rows in the file or dataset
        for number, row in _read_rows(config):
            try:
                if config.records and isinstance(row, Mapping):
                    row = read_record(config.records, row)
                _check_row(config, row)
            except ValueError as error:
                raise ValueError(f"{_place(config, number)}: {error}") from None
            self._rows.append(row)
            self._numbers.append(number)
        if not self._rows:
            raise ValueError(f"{config.path} holds no prompts")
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        # Of each task: its lines, how often all of them are in an epoch, and how many of them once more. None: all once
        self._parts: list[tuple[npt.NDArray[np.int64], int, int]] | None = None
        if config.task_weights:
            self._parts = [self._part_of(task, config.task_weights.get(task, 1.0)) for task in sorted(self.all_tasks)]
            if not len(self):
                raise ValueError(f"{config.path} holds no prompts of a task with a weight; see prompts.task_weights")

    def _part_of(self, task: str, weight: float) -> tuple[npt.NDArray[np.int64], int, int]:
        lines = np.array([at for at, row in enumerate(self._rows) if self._task_of(row) == task], np.int64)
        times, share = divmod(weight, 1.0)
        return lines, int(times), max(1, round(share * len(lines))) if share else 0

    def __len__(self) -> int:
        """Number of prompts per epoch."""
        if self._parts is None:
            return len(self._rows)
        return sum(times * len(lines) + more for lines, times, more in self._parts)

    @property
    def num_lines(self) -> int:
        """Number of different prompts."""
        return len(self._rows)

    @property
    def seed(self) -> int:
        return self._seed

    def fingerprint(self) -> str:
        """Hash of the raw prompts in the source's order. With the same fingerprint, seed and `shuffle`, two sources have the same
        prompt at every position."""
        digest = xxhash.xxh3_128()
        if self.config.task_weights:
            digest.update(msgspec.json.encode(sorted(self.config.task_weights.items())))
        for row in self._rows:
            digest.update(msgspec.json.encode(row[self.config.prompt_key]) + b"\n")
            if self.config.task_weights:  # the order depends on them
                digest.update(msgspec.json.encode(self._task_of(row)) + b"\n")
            if self.config.chat_template and row.get(TOOLS_KEY):
                digest.update(msgspec.json.encode(row[TOOLS_KEY]) + b"\n")
        return digest.hexdigest()

    @property
    def tasks(self) -> set[str]:
        """Names of the tasks of all prompts that an epoch has."""
        return {task for task in self.all_tasks if self.config.task_weights.get(task, 1.0) > 0}

    @property
    def all_tasks(self) -> set[str]:
        """Names of the tasks of all lines."""
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
        if self.config.chat_template and self._template is None:
            raise ValueError("a prompt with a chat template cannot be rendered without a tokenizer")
        index = self.locate(locator.epoch, locator.position)
        row = self._rows[index]
        try:
            text, input_ids = self._render(row)
        except ValueError as error:
            raise PromptError(f"{self.place(index)}: {error}") from error
        return Prompt(
            prompt_id=f"e{locator.epoch}-p{locator.position}",
            text=text,
            input_ids=input_ids,
            answer=row[self.config.answer_key] if self.config.answer_key else "",
            task=self._task_of(row),
            row=row,
            too_long=len(input_ids) > self.config.max_prompt_length,
            template=self._template,
            without_special_tokens=self._without_special_tokens(text),
        )

    def task_of(self, locator: Locator) -> str:
        """Name of the task of the prompt at a locator."""
        return self._task_of(self._rows[self.locate(locator.epoch, locator.position)])

    def number_of(self, locator: Locator) -> int:
        """Number of the line (Parquet and Hub: of the row) of the prompt at a locator."""
        return self._numbers[self.locate(locator.epoch, locator.position)]

    def check_answers(self) -> None:
        """Raise ValueError with the line if an answer is neither text nor a number."""
        for index, row in enumerate(self._rows):
            answer = row[self.config.answer_key] if self.config.answer_key else ""
            if not isinstance(answer, str | int | float):
                raise ValueError(f"{self.place(index)}: the answer is {shortened(answer)}; it must be text or a number")

    def may_exceed(self, limit: int) -> bool:
        """Whether a prompt may have more than `limit` tokens, told from bytes alone. True with a chat template."""
        return self.config.chat_template or max(map(self._num_bytes, self._rows)) + _MOST_ADDED > limit

    def _num_bytes(self, row: Row) -> int:
        prompt = row[self.config.prompt_key]
        if isinstance(prompt, str) and not row.get(TOOLS_KEY):
            return len(prompt.encode(errors="replace"))
        return len(msgspec.json.encode([prompt, row.get(TOOLS_KEY)]))

    def find_longest(self, limit: int, deadline: float, now: Callable[[], float]) -> Lengths:
        """Measure prompts with the tokenizer, those with the most bytes first, until no other can have more than `limit` tokens, or
        until the deadline. A prompt that cannot be rendered is left out: the run names it."""
        sizes = [self._num_bytes(row) for row in self._rows]
        found, added = Lengths(), 0  # added: the most bytes that a template has added
        for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            if found.longest and sizes[index] + added <= limit:  # a token is at least one byte
                break
            if now() > deadline:
                found.is_complete = False
                break
            try:
                text, input_ids = self._render(self._rows[index])
            except ValueError:
                continue
            added = max(added, len(text.encode(errors="replace")) - sizes[index])
            found.num_over += len(input_ids) > limit
            found.is_exact &= len(text) <= self._most_characters
            if len(input_ids) > found.longest:
                found.longest, found.index = len(input_ids), index
        return found

    def place(self, index: int) -> str:
        """File and line of a prompt, or dataset and row; index: as `locate` returns it."""
        return _place(self.config, self._numbers[index])

    def _task_of(self, row: Row) -> str:
        key = self.config.task_key
        task: str = row[key] if key and key in row else self.config.default_task or DEFAULT_TASK
        return task

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The lines of an epoch in order, drawn from (seed, epoch). Two epochs are cached, because consecutive epochs overlap."""
        if epoch not in self._orders:
            while len(self._orders) >= 2:
                del self._orders[next(iter(self._orders))]
            random = np.random.default_rng([self._seed, epoch])
            self._orders[epoch] = random.permutation(len(self) if self._parts is None else self._drawn(random))
        return self._orders[epoch]

    def _drawn(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """The lines of an epoch, by task."""
        parts = [
            part
            for lines, times, more in self._parts or ()
            for part in (np.tile(lines, times), random.choice(lines, more, replace=False))
        ]
        return np.concatenate(parts)

    def _without_special_tokens(self, text: str) -> str | None:
        if self._tokenizer is None:
            return None
        self._special_tokens = self._special_tokens or SpecialTokens(self._tokenizer)
        return self._special_tokens.removed_from(text)

    def _render(self, row: Row) -> tuple[str, list[int]]:
        """Text and tokens of a prompt; of an enormous one that is too long, the tokens of its beginning."""
        prompt, tokenizer = row[self.config.prompt_key], self._tokenizer
        if self._template is None:
            assert isinstance(prompt, str)  # ensured by _check_row
            return prompt, [] if tokenizer is None else encode_prompt(tokenizer, self._tokenized_part(prompt))
        # A template is a program: it may require alternating roles, for example
        messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else messages_for_template(prompt)
        )
        text = self._template.prompt_text(messages, tools_for_template(row.get(TOOLS_KEY)))
        input_ids = encode(tokenizer, self._tokenized_part(text))
        if not input_ids:
            raise ValueError(f"the prompt {shortened(text)} has no tokens: the tokenizer knows none of its characters")
        return text, input_ids

    def _tokenized_part(self, text: str) -> str:
        """The text; of an enormous one its beginning, if that is too long already. A tokenizer takes 300 bytes of memory for each
        character. A tokenizer that joins or drops characters may make few tokens of the beginning: then the whole text counts."""
        beginning = text[: self._most_characters]
        if len(beginning) < len(text) and len(encode(self._tokenizer, beginning)) > self.config.max_prompt_length:
            return beginning
        return text

    @property
    def _most_characters(self) -> int:
        return _MOST_CHARACTERS * (self.config.max_prompt_length + 1)


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


# --------------------------------------------------------------------------------------------------- reading and checking


def _place(config: PromptSourceConfig, number: int) -> str:
    """File and line of a prompt, or dataset and row."""
    if not is_file_name(config.path):
        return f"{config.path}[{config.split}], row {number}"
    return f"{config.path}:{number}" if config.path.endswith(".jsonl") else f"{config.path}, row {number}"


def _read_rows(config: PromptSourceConfig) -> Iterator[tuple[int, Any]]:
    """Yield each row of the source with its number: of the line from 1, or of the row from 0."""
    path = Path(config.path)
    if not config.path:
        raise ValueError("prompts.path is empty; name a .jsonl file, a .parquet file or a Hub dataset")
    if is_file_name(config.path):
        if not path.is_file():
            raise FileNotFoundError(f"there is no prompt file {path}")
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path)
            return
        rows = _read_parquet(path)
    elif path.exists():
        raise ValueError(f"prompts.path {path}: a prompt file ends in .jsonl or .parquet")
    else:
        rows = _read_hub(config.path, config.subset, config.split)
    for number, row in enumerate(rows):
        yield number, _without_absent(config, row)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the lines that are not blank. A byte order mark is skipped at the start of any line: files may have been joined."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(_MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}:{number}: the line has more than {_MAX_LINE_BYTES >> 20} MiB; is a newline missing?"
                )
            line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            try:
                yield number, msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                hint = "; the file is UTF-16, save it as UTF-8" if line.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
                raise ValueError(f"{path}:{number}: not a line of JSON: {error}{hint}") from error


def _read_parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(f"{path}: Parquet files need pyarrow; pip install 'asyncrl[parquet]'") from error
    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    first = 0
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            yield from _row_by_row(path, first, batch)
        first += len(batch)


def _row_by_row(path: Path, first: int, batch: Any) -> Iterator[Any]:
    """The rows of a batch, of which one is no UTF-8."""
    for number in range(len(batch)):
        try:
            yield from batch.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, row {first + number}: not UTF-8: {error}") from error


def _read_hub(name: str, subset: str, split: str) -> Iterator[Any]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"there is no file {name}; to read it as a Hub dataset, pip install 'asyncrl[hub]' (files end in .jsonl or .parquet)"
        ) from error
    yield from load_dataset(name, subset or None, split=split)


def _without_absent(config: PromptSourceConfig, row: Any) -> Any:
    """A row of a columnar format without the keys that only its columns have: these formats write null for an absent key.

    Keys of objects in a column are removed, and the row's task; other columns that are null stay.
    """
    if not isinstance(row, Mapping):
        return row
    return {key: _filled(value) for key, value in row.items() if value is not None or key != config.task_key}


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(inner) for key, inner in value.items() if inner is not None}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value


def _check_row(config: PromptSourceConfig, row: Any) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object with the key {config.prompt_key!r}, found {type(row).__name__}")
    for option in ("prompt_key", "answer_key", "task_key"):
        key = getattr(config, option)
        if key and key not in row and not (option == "task_key" and config.default_task):
            remedy = "" if option == "prompt_key" else ' (or to "" if there is none)'
            raise ValueError(
                f"no key {key!r}, only {shortened(sorted(row))}; set prompts.{option} to the right one{remedy}"
            )
    task = row.get(config.task_key, config.default_task) if config.task_key else DEFAULT_TASK
    if not isinstance(task, str):
        raise ValueError(f"the task under {config.task_key!r} must be a string, found {shortened(task)}")
    if seen := [key for key in _UNSEEN_KEYS if isinstance(row.get(key), list) and row[key]]:
        raise ValueError(
            f"the prompt has {seen[0]}, which no model would see; only text is supported. Remove the prompt"
        )
    prompt = row[config.prompt_key]
    if isinstance(prompt, list) and not config.chat_template:
        raise ValueError(f"{config.prompt_key!r} is a list of messages; set prompts.chat_template=true to render them")
    if not prompt or not isinstance(prompt, str | list):
        raise ValueError(
            f"{config.prompt_key!r} must be a non-empty string or a list of messages (role, content), found "
            f"{shortened(prompt)}"
        )
    if config.chat_template:
        try:
            if isinstance(prompt, list):
                messages_for_template(prompt)
        except ValueError as error:
            raise ValueError(
                f"{config.prompt_key!r} must be a non-empty string or a list of messages (role, content): {error}"
            ) from None
        try:
            tools_for_template(row.get(TOOLS_KEY))
        except ValueError as error:
            raise ValueError(f"the chat template shows the line's tools: {error}") from None
