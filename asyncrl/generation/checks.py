"""What engines check before they take anything: requests against the model's limits, weight versions against its tensors.

Torch-free: everything is read from config.json, generation_config.json and the headers of safetensors files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from asyncrl.generation.engine import EngineRequest, RequestRefused, WeightsRefused
from asyncrl.protocol.messages import SamplingParams, TensorSpecs, WeightVersion
from asyncrl.weights import versions as weights

_FLOATING = frozenset({"F32", "F16", "BF16", "float32", "float16", "bfloat16"})  # in files, and as torch calls them
_SHOWN = 5  # problems of a version that are named


# ------------------------------------------------------------------------------------------------------------- requests


def check_params(params: SamplingParams) -> None:
    """Raises RequestRefused where they make no sense."""
    if params.max_new_tokens < 1:
        raise RequestRefused(f"max_new_tokens is {params.max_new_tokens}; it must be at least 1")
    if not (params.temperature >= 0.0 and math.isfinite(params.temperature)):
        raise RequestRefused(f"temperature is {params.temperature}; it must be 0 (greedy) or more")
    if not 0.0 < params.top_p <= 1.0:
        raise RequestRefused(f"top_p is {params.top_p}; it must be in (0, 1]")
    if params.top_k < 1 and params.top_k != -1:
        raise RequestRefused(f"top_k is {params.top_k}; it must be at least 1, or -1 for all")


def check_tokens(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestRefused where one of them is not in the vocabulary: some engines die of it."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestRefused(f"{name} holds {wrong}; the vocabulary has {vocab_size} tokens")


def check_prompt(request: EngineRequest, *, vocab_size: int, max_prompt: int, max_length: int, why: str) -> None:
    """Raises RequestRefused where the prompt, or prompt and response, cannot be held. why: what max_length comes from."""
    ids, wanted = request.input_ids, request.params.max_new_tokens
    if not ids:
        raise RequestRefused("input_ids is empty")
    check_tokens("input_ids", ids, vocab_size)
    check_tokens("stop_token_ids", request.params.stop_token_ids, vocab_size)
    if len(ids) > max_prompt or len(ids) + wanted > max_length:
        raise RequestRefused(
            f"{len(ids)} prompt tokens and {wanted} new ones do not fit: this server holds {max_length} tokens a request ({why})"
        )


# -------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of the model must look like in a file."""

    shape: tuple[int, ...]
    floating: bool = True


def check_tensors(
    expected: Mapping[str, TensorSpec], aliases: Sequence[Sequence[str]], files: Sequence[Path]
) -> dict[str, Path]:
    """Do the files hold exactly this model? Returns the file of each tensor; reads headers only.

    aliases: the names of each tensor, several where it is tied; one of them is enough. Raises WeightsRefused naming what differs.
    """
    found = [(name, dtype, shape, file.name) for file in files for name, (shape, dtype) in read_header(file).items()]
    check_found(expected, aliases, found, source=str(files[0].parent) if files else "?")
    by_name = {file.name: file for file in files}
    return {name: by_name[file] for name, _, _, file in found}


def check_sent(
    expected: Mapping[str, TensorSpec], aliases: Sequence[Sequence[str]], specs: TensorSpecs, *, complete: bool
) -> None:
    """The same of tensors that come over the network. complete: these are all of them."""
    tensors = zip(specs.names, specs.dtypes, specs.shapes, strict=True)
    found = [(name, dtype, tuple(shape), "") for name, dtype, shape in tensors]
    check_found(expected, aliases if complete else (), found, source="what is sent")


def check_found(
    expected: Mapping[str, TensorSpec],
    aliases: Sequence[Sequence[str]],
    found: Sequence[tuple[str, str, tuple[int, ...], str]],
    *,
    source: str,
) -> None:
    """found: name, dtype, shape and file of each tensor. Raises WeightsRefused naming what differs."""
    where: dict[str, str] = {}
    problems: list[str] = []
    for name, dtype, shape, file in found:
        if name in where:
            problems.append(f"{name} is in {where[name]} and in {file}")
        where[name] = file
        spec = expected.get(name)
        if spec is None:
            problems.append(f"{name} does not belong to this model")
            continue
        if shape != spec.shape:
            problems.append(f"{name} has shape {shape}, expected {spec.shape}")
        if spec.floating and dtype not in _FLOATING:
            problems.append(f"{name} has dtype {dtype}, expected floating point")
    problems.extend(f"{names[0]} is missing" for names in aliases if not any(name in where for name in names))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightsRefused(f"the tensors in {source} do not fit the model: {'; '.join(problems[:_SHOWN])}{more}")


def read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name -> (shape, dtype as safetensors calls it). Raises SafetensorError, OSError."""
    with safe_open(str(file), framework="numpy") as tensors:
        entries = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        return {name: (tuple(entry.get_shape()), str(entry.get_dtype())) for name, entry in entries.items()}


class ModelTensors:
    """The tensors that every version of a model must hold: those of the model's own folder.

    A folder without safetensors (an older format) is not compared with: then the first version that comes is the measure.
    """

    def __init__(self, model_path: str | Path, *, tied: bool) -> None:
        self._tied = tied
        self._verified = weights.VerifiedVersion()
        self._expected = self._specs(weights.tensor_files(Path(model_path)))

    def verify(self, directory: Path, version: WeightVersion) -> None:
        """Manifest, checksums, names and shapes; raises WeightsRefused. Takes as long as reading the files, the first time."""
        try:
            self._verified.verify(directory, version)
            files = weights.tensor_files(directory)
            expected = self._expected or self._specs(files)
            check_tensors(expected, self._aliases(expected), files)
        except (weights.WeightsError, SafetensorError, OSError) as error:
            raise WeightsRefused(f"{directory}: {error}") from error
        self._expected = expected

    def check_sent(self, specs: TensorSpecs, *, complete: bool) -> None:
        """Names, dtypes and shapes of tensors that come over the network. Raises WeightsRefused."""
        if self._expected:
            check_sent(self._expected, self._aliases(self._expected), specs, complete=complete)

    def _specs(self, files: Sequence[Path]) -> dict[str, TensorSpec]:
        specs = {
            name: TensorSpec(shape, dtype in _FLOATING)
            for file in files
            for name, (shape, dtype) in read_header(file).items()
        }
        embedding, output = _tied_names(specs)
        if self._tied and embedding in specs:
            specs.setdefault(output, specs[embedding])
        elif self._tied and output in specs:
            specs.setdefault(embedding, specs[output])
        return specs

    def _aliases(self, expected: Mapping[str, TensorSpec]) -> list[list[str]]:
        embedding, output = _tied_names(expected)
        if not self._tied or embedding not in expected:
            return [[name] for name in expected]
        return [[embedding, output], *([name] for name in expected if name not in (embedding, output))]


def _tied_names(names: Mapping[str, object]) -> tuple[str, str]:
    """Of the embedding and the output layer, as Hugging Face calls them in every causal model."""
    embedding = next((name for name in names if name.endswith("embed_tokens.weight")), "model.embed_tokens.weight")
    return embedding, "lm_head.weight"
