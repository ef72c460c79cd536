"""Checks a model's folder before the run starts: config, architecture, weights, tokenizer. Needs neither torch nor transformers.

The headers of the safetensors files reveal truncated files and missing shards. Some errors appear only on loading, such as tensors
that the architecture needs and the files lack; the trainer reports those when it loads the model.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OLD_FORMATS = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # pickles: loading a pickle runs code from it
_LENGTH_BYTES = 8  # size of the number at the start of a safetensors file, which is the length of the header
_CAUSAL_MAPPING = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = .*?^\)", re.MULTILINE | re.DOTALL)


def read_config(model_path: str, hint: str, *, field: str = "model_path") -> dict[str, Any]:
    """Return the model's config.json. Raises ConfigError with the field. hint: the remedy if there is no config.json."""
    file = Path(model_path).expanduser() / "config.json"
    if not file.is_file():
        raise ConfigError(f"{field}={model_path!r}: there is no config.json; {hint}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{field}={model_path!r}: config.json cannot be read: {error}; copy the model again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{field}={model_path!r}: config.json is not a JSON object; copy the model again")
    _check_architecture(f"{field}={model_path!r}", config.get("model_type"))
    return config


def _check_architecture(where: str, model_type: object) -> None:
    known = causal_architectures()
    if known and model_type not in known:
        raise ConfigError(
            f"{where}: config.json has model_type={model_type!r}, which is not a causal language model of the "
            f"installed transformers; upgrade transformers, or use another model, such as qwen3 or llama"
        )


def causal_architectures() -> set[str]:
    """Return the model types that AutoModelForCausalLM loads; an empty set if they are unknown. Parses the source of transformers'
    table, because an import takes seconds."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return set()
    try:
        source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except OSError:
        return set()
    table = _CAUSAL_MAPPING.search(source)
    return set(re.findall(r'\("([\w.-]+)",', table[0])) if table else set()


def count_parameters(model_path: str, *, field: str = "model_path") -> int:
    """Return the number of parameters in the model's safetensors files. Raises ConfigError if a file is missing or damaged."""
    folder, where = Path(model_path).expanduser(), f"{field}={model_path!r}"
    if (folder / _SINGLE).is_file():
        files = {_SINGLE}
    elif (folder / _INDEX).is_file():
        files = _indexed_files(where, folder / _INDEX)
    elif any((folder / name).is_file() for name in _OLD_FORMATS):
        raise ConfigError(
            f"{where}: its weights are in a pickle ({_OLD_FORMATS[0]}), and loading a pickle runs code from it; if you trust it, "
            "convert it once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...), which writes safetensors"
        )
    else:
        raise ConfigError(
            f"{where}: there are no weights, neither {_SINGLE} nor {_INDEX}; copy the model's weights there"
        )
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"{where}: {_INDEX} names {len(files)} files, and {', '.join(missing[:5])} "
            f"{'is' if len(missing) == 1 else 'are'} missing; copy the missing files again"
        )
    return sum(_parameters_of(where, folder / name) for name in files)


def _indexed_files(where: str, index: Path) -> set[str]:
    try:
        return set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {_INDEX} cannot be read: {error!r}; copy it again") from error


def _parameters_of(where: str, file: Path) -> int:
    """Return the number of parameters in a safetensors file, by its header. Raises ConfigError if the header does not match the
    size of the file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = json.loads(stream.read(length)) if 0 < length <= size - _LENGTH_BYTES else None
        assert header is not None
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max(int(entry["data_offsets"][1]) for entry in tensors)
        parameters = sum(math.prod(map(int, entry["shape"])) for entry in tensors)
    except (AssertionError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ConfigError(
            f"{where}: {file.name} ({size} bytes) is not a safetensors file, or was cut short; copy it again"
        ) from None
    if size != expected:
        raise ConfigError(
            f"{where}: {file.name} has {size} bytes, its header says {expected}: it was cut short; copy it again"
        )
    return parameters


def check_vocabulary(tokenizer_path: str, config: Mapping[str, Any]) -> None:
    """Check that the model's vocabulary contains the token ids of the tokenizer's vocabulary, and that of EOS. Raises ConfigError.

    Tokens that were added to the tokenizer, other than EOS, are not checked: some models have an added token for images beyond
    their vocabulary, which does not occur in text. A prompt that contains such a token is rejected (`generation_refused`).
    """
    folder = Path(tokenizer_path).expanduser()
    nested = config.get("text_config")
    vocab_size = config.get("vocab_size") or (nested.get("vocab_size") if isinstance(nested, dict) else None)
    if not isinstance(vocab_size, int) or not (folder / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if vocabulary and (largest := max(vocabulary.values())) >= vocab_size:
        raise ConfigError(
            f"tokenizer_path={tokenizer_path!r}: its largest token id is {largest}, but the model's vocabulary has {vocab_size} "
            "tokens (config.json, vocab_size): they do not belong together; use the model's own tokenizer"
        )
    eos = _eos_token(folder)
    eos_id = tokenizer.token_to_id(eos) if eos else None
    if eos and (eos_id is None or eos_id >= vocab_size):
        where = (
            "is not in its vocabulary"
            if eos_id is None
            else f"has id {eos_id}, but the model's vocabulary has {vocab_size} tokens"
        )
        raise ConfigError(
            f"tokenizer_path={tokenizer_path!r}: its EOS token {eos!r} {where}, so no response could ever end; set eos_token in "
            "tokenizer_config.json to a token of the model's vocabulary"
        )


def _eos_token(folder: Path) -> str:
    """Return eos_token of tokenizer_config.json, which is a string or an object with `content`. "": the file has none."""
    try:
        eos = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(eos.get("content") or "") if isinstance(eos, dict) else str(eos or "")
