"""Results of evaluations by prompt, in <run>/evaluations/: a file of JSON lines for each evaluation. No torch.

The name of a file is the evaluation's id: the attempt, and the step of the weights, `end` or `ema`, such as a1-s20.jsonl. The
master writes it. A line has

    set, mode, position, line, task     the prompt: its place in the set's order, its line in the file, its task
    rewards, response_lengths           of its responses; empty if the prompt failed
    answers                             of the responses, null without one; empty if the reward gives none
    versions                            of each response, the oldest and the newest weight version of its tokens
    reason                              why the prompt failed; "": it did not
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncrl.runtime.disk import write_file

FOLDER = "evaluations"
_SUFFIX = ".jsonl"


class PromptResult(Struct, frozen=True, kw_only=True, rename={"eval_set": "set"}):
    """A line of a file."""

    eval_set: str  # "": that of eval.prompts
    mode: str
    position: int
    line: int
    task: str
    rewards: list[float] = []
    response_lengths: list[int] = []
    answers: list[str | None] = []
    versions: list[tuple[int, int]] = []
    reason: str = ""


def write_results(run_dir: Path, name: str, results: Iterable[PromptResult], keep: int) -> None:
    """Write the file of an evaluation, completely or not at all, and remove all but the newest `keep` files. 0: write none. Raises
    StorageError."""
    folder = run_dir / FOLDER
    if keep:
        folder.mkdir(exist_ok=True)
        write_file(folder / f"{name}{_SUFFIX}", b"".join(msgspec.json.encode(result) + b"\n" for result in results))
    for file in list_results(run_dir)[: -keep or None]:
        file.unlink(missing_ok=True)


def list_results(run_dir: Path) -> list[Path]:
    """The files of a run, oldest first."""
    return sorted((run_dir / FOLDER).glob(f"[!.]*{_SUFFIX}"), key=lambda file: (file.stat().st_mtime_ns, file.name))


def read_results(file: Path) -> Sequence[PromptResult]:
    """Raises ValueError with the place if a line is no result."""
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            found.append(msgspec.json.decode(line, type=PromptResult))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"{file}:{number} is no result of a prompt: {error}") from error
    return found
