"""Models by their name on the Hugging Face Hub: `model_path: Qwen/Qwen2.5-1.5B-Instruct` instead of a folder. The paths of
reference, critic and reward model, and tokenizer_path, can be such names, too.

Only the process of the command accesses the Hub, once, before any other process starts, and replaces each name by a local folder.
`prepare`, `run` and `resume` download missing files; `check` only looks into the cache. Preflight, workers and SGLang get the
folder. `name@revision` pins a revision. The environment variables of huggingface_hub apply (HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT,
HF_TOKEN), and its limits bound each wait for the network (HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT: 10 s without a byte).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.fields import Wrong, with_leaves
from asyncrl.config.limits import rule_of
from asyncrl.config.schema import ConfigError
from asyncrl.launch.checks.model_files import count_parameters
from asyncrl.launch.experiment import Draft
from asyncrl.launch.redact import redact_urls

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_TOKENIZER = "tokenizer_path"
_MODEL_FILES = ["*.safetensors", "*.safetensors.index.json"]
_TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # these also match config.json and generation_config.json
_ELSEWHERE = ["*/*"]  # files in folders have other formats: original/, onnx/, gguf/


def is_hub_name(path: str) -> bool:
    """Whether the path is `owner/name` or `owner/name@revision`, and no local folder has that name."""
    return _NAME.fullmatch(path) is not None and not Path(path).expanduser().exists()


def with_local_models(draft: Draft, *, download: bool, say: Callable[[str], None] = lambda text: None) -> Draft:
    """Replace the names of models in a config by their local folders. Fields whose names have none are added to the wrong ones.

    download: fetch files that the cache does not have, with a progress bar on stderr; false: write nothing, and do not use the
    network. say: prints what is downloaded, and the target folder.
    """
    wrong = []

    def folder(field: str, path: str) -> str:
        patterns = _TOKENIZER_FILES if field == _TOKENIZER else _MODEL_FILES + _TOKENIZER_FILES
        try:
            return str(_snapshot(field, path, patterns, download=download, say=say)) if is_hub_name(path) else path
        except ConfigError as error:
            wrong.append(Wrong(field, str(error)))
            return path

    local = with_leaves(
        draft.config, lambda field, value, entry: folder(field, value) if rule_of(entry).file == "model" else value
    )
    return Draft(local, [*draft.wrong, *wrong])


def _snapshot(field: str, name: str, patterns: list[str], *, download: bool, say: Callable[[str], None]) -> Path:
    """The folder of a model in the Hub's cache. A folder that is complete is used without asking the Hub."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:  # transformers depends on it
        raise ConfigError(f"{field}={name!r}: {error}; pip install huggingface_hub, or use a folder") from error
    parsed = _NAME.fullmatch(name)
    assert parsed is not None

    def fetch(*, local_files_only: bool) -> Path:
        folder = snapshot_download(
            parsed["repo"],
            revision=parsed["revision"],
            allow_patterns=patterns,
            ignore_patterns=_ELSEWHERE,
            local_files_only=local_files_only,
        )
        _check_whole(folder, with_weights=field != _TOKENIZER)
        return Path(folder)

    cache = constants.HF_HUB_CACHE
    try:
        return fetch(local_files_only=True)
    except (OSError, ValueError) as error:
        lacking = _lacking(error, cache)
    here = f"there is no folder of that name, and {lacking}"
    if not download:
        raise ConfigError(
            f"{field}={name!r}: {here}; `asyncrl-launch prepare CONFIG` downloads it (`run` does too), or use the folder of a "
            f"local model: {field}=/path/to/model"
        )
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{field}={name!r}: {here}, and HF_HUB_OFFLINE forbids to download it; unset HF_HUB_OFFLINE, copy the cache of a "
            f"machine that has the model and set HF_HOME, or use a folder: {field}=/path/to/model"
        )
    say(f"{name}: {lacking}; downloading it from {redact_urls(constants.ENDPOINT)} to {cache}")
    hub_logger = logging.getLogger("huggingface_hub")
    level = hub_logger.level
    hub_logger.setLevel(logging.ERROR)  # its hints (a token, a faster client) would interrupt the progress bars
    try:
        return fetch(local_files_only=False)
    except Exception as error:  # includes errors of the HTTP client inside huggingface_hub
        raise ConfigError(f"{field}={name!r}: {here}, and {_why_not(error, parsed['repo'], field)}") from error
    finally:
        hub_logger.setLevel(level)


def _check_whole(folder: str, *, with_weights: bool) -> None:
    """Raise ValueError if files of a model are missing: an interrupted download leaves a folder with only some of them.
    with_weights: False for a tokenizer's folder, of which nothing is checked."""
    if with_weights and not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    if with_weights:
        count_parameters(folder)  # ConfigError is a ValueError


def _lacking(error: Exception, cache: str) -> str:
    """A text for an error: what the cache does not have."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and type(error) is LocalEntryNotFoundError:
        return f"the Hub's cache ({cache}) has no model of that name"
    return f"the Hub's cache ({cache}) has only part of it: {_first_line(error)}"


def _why_not(error: Exception, repo: str, field: str) -> str:
    """A text for an error: the cause of a failed download, and the remedy."""
    from huggingface_hub import constants, errors

    endpoint = redact_urls(constants.ENDPOINT)
    folder = f"or use a folder: {field}=/path/to/model"
    message = _first_line(error)
    unreached = _first_line(error.__cause__ or error)
    texts = {  # the first class that fits counts
        errors.GatedRepoError: f"its licence must be accepted on the Hub first: {endpoint}/{repo}; then `hf auth login`, {folder}",
        errors.RevisionNotFoundError: (
            f"the Hub has no such revision of it; name@revision takes a branch, a tag or a commit, {folder}"
        ),
        errors.RepositoryNotFoundError: (
            f"the Hub has no model of that name, or a private one; check the spelling, `hf auth login`, {folder}"
        ),
        errors.LocalEntryNotFoundError: (
            f"the Hub cannot be reached: {unreached}; check network and proxy (https_proxy, HF_ENDPOINT for a mirror), {folder}"
        ),
        ConfigError: f"the Hub's files are not a model with safetensors: {error}; choose another model, {folder}",
        Exception: f"the download failed: {message}; run the command again to continue it, {folder}",
    }
    return next(text for kind, text in texts.items() if isinstance(error, kind))


def _first_line(error: BaseException) -> str:
    return redact_urls((str(error).splitlines() or [""])[0]) or repr(error)
