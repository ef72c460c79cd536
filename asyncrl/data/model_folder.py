"""Reads files of a model's folder that may be another person's: sizes are bounded, paths stay inside, JSON nests to any depth.

Torch-free. Errors are ValueError or OSError; callers add the config's field and the remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 100_000_000  # the largest index of a published model has 10 MB, the largest tokenizer.json 35 MB
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LENGTH_BYTES = 8  # size of the number at the start of a safetensors file, which is the length of the header
_HUB_FOLDERS = ("snapshots", "blobs")  # of a Hub cache: snapshots/<revision>/<file> is a link to ../../blobs/<hash>


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises OSError, or ValueError if the file is not JSON, too large or nested too deeply."""
    with file.open("rb") as stream:
        return parse_json(_bounded(stream.read(_MAX_JSON_BYTES + 1), _MAX_JSON_BYTES))


def parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_object(file: Path) -> dict[str, Any]:
    """As read_json, for a file that must hold a JSON object."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return content


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json about text: of a multimodal model a part of its own, otherwise the whole."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _bounded(content: bytes, most: int) -> bytes:
    if len(content) > most:
        raise ValueError(f"it has more than {most // 1_000_000} MB")
    return content


def weight_map(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor that the folder's index names. Raises ValueError for a file outside the folder, OSError."""
    files = read_object(folder / INDEX).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError("it has no weight_map")
    paths = {name: shard_path(folder, name) for name in set(map(str, files.values()))}
    return {tensor: paths[str(name)] for tensor, name in files.items()}


def shard_path(folder: Path, name: str) -> Path:
    """Return the path of a file that an index names. Raises ValueError if the name or a link leads outside the folder.

    A link may lead to the blobs of a Hub cache, where downloads keep their files.
    """
    if not is_plain_name(name):
        raise ValueError(f"it names the file {name!r}, which is not a name in this folder")
    path = folder / name
    if path.is_symlink():
        target = path.resolve()
        in_hub = target.parent.name == _HUB_FOLDERS[1] and (target.parent.parent / _HUB_FOLDERS[0]).is_dir()
        if not in_hub and not target.is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is a link to {target}, outside this folder and outside a Hub cache")
    return path


def check_shards(folder: Path) -> None:
    """Check that the files that libraries load from this folder lie in it, as `shard_path` says. Raises ValueError, OSError. A name
    of a model on a hub passes."""
    if (folder / INDEX).is_file():
        weight_map(folder)
    if (folder / SINGLE).is_file():
        shard_path(folder, SINGLE)


def is_plain_name(name: str) -> bool:
    """Whether a name names a file in a folder: no path, neither "." nor ".."."""
    return bool(name) and name not in (os.curdir, os.pardir) and os.sep not in name and "\0" not in name


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file, by its header. Raises OSError, or ValueError if the header is damaged
    or does not match the size of the file."""
    size = file.stat().st_size
    damaged = ValueError(f"({size} bytes) is not a safetensors file, or was cut short")
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise damaged
            header = parse_json(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = _LENGTH_BYTES + length + max(int(entry["data_offsets"][1]) for entry in tensors.values())
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise damaged from None
    if size != expected:
        raise ValueError(f"has {size} bytes, its header says {expected}: it was cut short")
    return shapes
