"""Checks a model's folder before the run starts: config, architecture, weights, tokenizer. Needs neither torch nor transformers.

The headers of the safetensors files reveal truncated files and missing shards. Some errors appear only on loading, such as tensors
that the architecture needs and the files lack; the trainer reports those when it loads the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.fields import leaf_values
from asyncrl.config.limits import rule_of
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.data.auto_classes import auto_class_of, auto_classes
from asyncrl.data.model_folder import (
    INDEX,
    SINGLE,
    read_json,
    read_object,
    read_shapes,
    shard_path,
    text_config,
    weight_map,
)
from asyncrl.runtime.loading import bytes_of_weights

_OLD_FORMATS = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # pickles: loading a pickle runs code from it
_LAYER = re.compile(r"(?<=\.)(\d+)\.")  # the first number in the name of a tensor
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings)\.weight$")
_SHOWN_CHARS = 40
_MAX_TOKENIZER_BYTES = 500_000_000
# How the names of these parts begin: towers, projections of their outputs, heads that predict several tokens
_BESIDE_TEXT = ("audio", "connector", "mtp", "multi_modal_projector", "vision", "visual")


def bytes_of_models(config: ExperimentConfig) -> int:
    """The bytes of the weights in the folders of all models that a config names. A folder without weights has none: other checks
    tell it."""
    folders = [value for _, value, entry in leaf_values(config) if rule_of(entry).file == "model" and value]
    return sum(bytes_of_weights(folder) for folder in folders)


def read_config(model_path: str, hint: str, *, field: str = "model_path") -> dict[str, Any]:
    """Return the model's config.json. Raises ConfigError with the field. hint: the remedy if there is no config.json."""
    file = Path(model_path).expanduser() / "config.json"
    if not file.is_file():
        raise ConfigError(f"{field}={model_path!r}: there is no config.json; {hint}")
    try:
        config = read_json(file)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{field}={model_path!r}: config.json cannot be read: {error}; copy the model again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{field}={model_path!r}: config.json is not a JSON object; copy the model again")
    _check_architecture(f"{field}={model_path!r}", config.get("model_type"))
    return config


def _check_architecture(where: str, model_type: object) -> None:
    known = auto_classes()
    if known and model_type not in known:
        raise ConfigError(
            f"{where}: config.json has model_type={model_type!r}, which is no language model of the "
            f"installed transformers; upgrade transformers, or use another model, such as qwen3 or llama"
        )


def count_parameters(model_path: str, *, field: str = "model_path") -> int:
    """Return the number of the language model's parameters in the safetensors files. Raises ConfigError if a file is missing or
    damaged, lies outside the folder, or does not have the sizes that config.json gives."""
    folder, where = Path(model_path).expanduser(), f"{field}={model_path!r}"
    if (folder / SINGLE).is_file():
        files = {folder / SINGLE}
    elif (folder / INDEX).is_file():
        try:
            files = set(weight_map(folder).values())
        except (ValueError, OSError) as error:
            raise ConfigError(f"{where}: {INDEX} cannot be read: {error}; copy it again") from error
    elif any((folder / name).is_file() for name in _OLD_FORMATS):
        raise ConfigError(
            f"{where}: its weights are in a pickle ({_OLD_FORMATS[0]}), and loading a pickle runs code from it; if you trust it, "
            f"convert it once with {auto_class_of(folder)}.from_pretrained(...).save_pretrained(...), which writes safetensors"
        )
    else:
        raise ConfigError(
            f"{where}: there are no weights, neither {SINGLE} nor {INDEX}; copy the model's weights there"
        )
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise ConfigError(
            f"{where}: {INDEX} names {len(files)} files, and {', '.join(missing[:5])} "
            f"{'is' if len(missing) == 1 else 'are'} missing; copy the missing files again"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            shapes |= read_shapes(shard_path(folder, file.name))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{where}: {file.name} {error}; copy it again") from error
    if problem := _contradiction(folder, shapes):
        raise ConfigError(f"{where}: config.json {problem}; they do not belong together: copy the model again")
    return sum(math.prod(shape) for name, shape in shapes.items() if not _is_beside_text(name))


def _is_beside_text(name: str) -> bool:
    """Whether a tensor belongs to a part that a run does not load into its models (architectures/towers.py)."""
    return any(part.startswith(_BESIDE_TEXT) for part in name.split("."))


def _contradiction(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what config.json says against the shapes of the weights; "": nothing, as far as names and shapes tell.

    The rules hold for every architecture: the weights have a tensor for each layer, a row of an embedding for each token, and the
    hidden size is a dimension. More layers in the files are allowed: some models have layers that transformers does not load.
    """
    try:
        config = read_object(folder / "config.json")
    except (ValueError, OSError):
        return ""  # read_config reports it
    text = text_config(config)
    layers, vocabulary, hidden = (
        _first(text, names)
        for names in (
            ("num_hidden_layers", "n_layer", "num_layers"),
            ("vocab_size",),
            ("hidden_size", "n_embd", "d_model"),
        )
    )
    for name, value in (*layers.items(), *vocabulary.items(), *hidden.items()):
        if not isinstance(value, int) or value < 1:
            return f"has {name}={_shown(value)}, which is no number above 0"
    stacks: dict[str, set[int]] = {}  # by the name before the number of a layer
    for name in shapes:
        if found := _LAYER.search(name):
            stacks.setdefault(name[: found.start()], set()).add(int(found[1]))
    in_files = max(map(len, stacks.values()), default=0)
    for name, value in layers.items():
        if stacks and value > in_files:
            return f"has {name}={_shown(value)}, but the weights have {in_files} layers"
    embeddings = [shape for name, shape in shapes.items() if _EMBEDDING.search(name) and len(shape) == 2]
    for name, value in vocabulary.items():
        if embeddings and all(shape[0] != value for shape in embeddings):
            return f"has {name}={_shown(value)}, but the embedding has {embeddings[0][0]} rows"
    for name, value in hidden.items():
        if embeddings and not any(value in shape for shape in shapes.values()):
            return f"has {name}={_shown(value)}, which is no dimension of the weights"
    return _head_contradiction(text, shapes)


def _head_contradiction(text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Compare the numbers of heads with the projections of queries and keys, where these have their usual names."""
    for name, projection in (("num_attention_heads", "q_proj.weight"), ("num_key_value_heads", "k_proj.weight")):
        heads, rows = (
            text.get(name),
            [shape[0] for key, shape in shapes.items() if key.endswith(projection) and len(shape) == 2],
        )
        if isinstance(heads, int) and rows and (heads < 1 or all(count % heads for count in rows)):
            return f"has {name}={_shown(heads)}, which does not divide the {rows[0]} rows of {projection}"
    return ""


def _first(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The first of these fields that the config has, or nothing: architectures name them differently."""
    return next(({name: config[name]} for name in names if config.get(name) is not None), {})


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]


def check_vocabulary(tokenizer_path: str, config: Mapping[str, Any]) -> None:
    """Check that the model's vocabulary contains the token ids of the tokenizer's vocabulary, and that of EOS. Raises ConfigError.

    Tokens that were added to the tokenizer, other than EOS, are not checked: some models have an added token for images beyond
    their vocabulary, which does not occur in text. A prompt that contains such a token is rejected (`generation_refused`).
    """
    folder = Path(tokenizer_path).expanduser()
    vocab_size = config.get("vocab_size") or text_config(config).get("vocab_size")
    if not isinstance(vocab_size, int) or not (folder / "tokenizer.json").is_file():
        return
    if (size := (folder / "tokenizer.json").stat().st_size) > _MAX_TOKENIZER_BYTES:
        raise ConfigError(
            f"tokenizer_path={tokenizer_path!r}: its tokenizer.json has {size} bytes; copy the tokenizer again"
        )
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if vocabulary and (largest := max(vocabulary.values())) >= vocab_size:
        raise ConfigError(
            f"tokenizer_path={tokenizer_path!r}: its largest token id is {largest}, but the model's vocabulary has {vocab_size} "
            "tokens (config.json, vocab_size): they do not belong together; use the model's own tokenizer"
        )
    eos = tokenizer_config(folder).get("eos_token") or ""
    eos = str(eos.get("content") or "") if isinstance(eos, dict) else str(eos)
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


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; an empty object if it cannot be read."""
    try:
        return read_object(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return {}


def check_end_tokens(model_path: str, config: Mapping[str, Any], *, field: str = "model_path") -> None:
    """Check the ids of the tokens that end a response, in config.json and generation_config.json. Raises ConfigError."""
    files = {"config.json": config}
    path = Path(model_path).expanduser() / "generation_config.json"
    try:
        if path.is_file():
            files[path.name] = read_object(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{field}={model_path!r}: {path.name} cannot be read: {error}; copy the model again"
        ) from error
    vocab_size = config.get("vocab_size") or text_config(config).get("vocab_size")
    for name, content in files.items():
        eos = content.get("eos_token_id", text_config(content).get("eos_token_id"))
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        wrong = [token for token in ids if not isinstance(token, int) or token < 0]
        if isinstance(vocab_size, int) and ids and not wrong and min(ids) >= vocab_size:
            wrong = ids
        if wrong:
            raise ConfigError(
                f"{field}={model_path!r}: {name} has eos_token_id={_shown(eos)}, which is no token of the vocabulary, so no "
                "response could end as the model was trained to; correct it there"
            )
