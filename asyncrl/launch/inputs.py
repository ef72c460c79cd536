"""The user's files that processes of a run read: which they are, and how they differ from an earlier moment.

A process reads these files when it starts, so a process that restarts reads them again. The launcher notes their state before it
starts the first process, and compares it before and after every later start (launch/local.py). `resume` compares it with that of
the launch before (launch/recovery.py).

A file of at most _WHOLE_BYTES is compared by its content. A larger one is compared by its size and modification time, because it
takes minutes to read the weights of a large model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from asyncrl.config.fields import elements
from asyncrl.config.limits import rule_of
from asyncrl.config.resolve import with_absolute_paths
from asyncrl.config.schema import ExperimentConfig
from asyncrl.config.sources import sources_of
from asyncrl.data.prompts import is_file_name
from asyncrl.data.trajectories import tokenizer_fingerprint
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.runtime.disk import write_file
from asyncrl.weights.versions import model_files

INPUTS_FILE = "inputs.json"  # beside experiment.yaml
_WHOLE_BYTES = 64_000_000
_SHOWN = 6


class FileState(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    xxh3: str = ""  # of the content; "" for a large file
    mtime_ns: int = 0  # of a large file


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The states of the files at one moment, by the field that names them, then by path."""

    files: dict[str, dict[str, FileState]]
    tokenizer: str  # fingerprint of its vocabulary; "": unknown


def read_inputs(config: ExperimentConfig) -> Inputs:
    """Return the present states. A file that does not exist, or that this user may not read, has none. Raises OSError if a file
    system does not answer."""
    config = with_absolute_paths(config)
    files = {
        field: {str(path): state for path in paths if (state := _state_of(path)) is not None}
        for field, paths in _paths_of(config)
    }
    return Inputs(files=files, tokenizer=tokenizer_fingerprint(config.tokenizer_path or config.model_path))


def changes(before: Inputs, now: Inputs) -> list[str]:
    """Return a text for each file that was removed, added or changed; the first few. Files of fields that name other files than
    before are left out: the field itself has changed."""
    found: list[str] = []
    for field in before.files.keys() & now.files.keys():
        then, here = before.files[field], now.files[field]
        if then and here and not then.keys() & here.keys():
            continue
        found += [
            f"{field}: {path} {_difference(path, then.get(path), here.get(path))}"
            for path in sorted(then.keys() | here.keys())
            if then.get(path) != here.get(path)
        ]
    found.sort()
    return [*found[:_SHOWN], *([f"and {len(found) - _SHOWN} more files"] if found[_SHOWN:] else [])]


def save_inputs(inputs: Inputs, folder: Path) -> None:
    write_file(folder / INPUTS_FILE, msgspec.json.encode(inputs))


def saved_inputs(folder: Path) -> Inputs | None:
    """Return the inputs of an earlier launch. None if its release saved none, or if the file is damaged."""
    try:
        return msgspec.json.decode((folder / INPUTS_FILE).read_bytes(), type=Inputs)
    except (OSError, *DECODE_ERRORS):
        return None


def _paths_of(config: ExperimentConfig) -> Iterator[tuple[str, list[Path]]]:
    for field, value, entry in elements(config):
        file = rule_of(entry).file
        if not value:
            continue
        if file == "model":
            yield field, model_files(Path(value))
        elif file == "code":
            yield field, sources_of(value)
        elif file == "data" and is_file_name(value):
            yield field, [Path(value)]


def _state_of(path: Path) -> FileState | None:
    try:
        about = path.stat()
        if about.st_size > _WHOLE_BYTES:
            return FileState(bytes=about.st_size, mtime_ns=about.st_mtime_ns)
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return FileState(bytes=len(content), xxh3=xxhash.xxh3_64_hexdigest(content))


def _difference(path: str, then: FileState | None, now: FileState | None) -> str:
    if now is None:
        return "was removed, or cannot be read"
    try:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(Path(path).stat().st_mtime))
    except OSError:
        return "was removed, or cannot be read"
    if then is None:
        return f"was added (modified {at})"
    if then.bytes == now.bytes and not now.xxh3:
        return f"may have changed: it has another modification time ({at}), and is too large to be compared"
    sizes = f"{then.bytes} bytes" if then.bytes == now.bytes else f"{then.bytes} bytes before, {now.bytes} now"
    return f"was changed ({sizes}; modified {at})"
