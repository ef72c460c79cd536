"""What generation servers check: requests against the model's limits; versions against those that were loaded; their tensors
against the model's; and after a load, what the engine computes.

Torch-free: everything is read from config.json, generation_config.json and the headers of safetensors files.

A version is refused from any sender where it is of a lower attempt than was loaded, older, or one that the run has not reached.
A gserver manager that was frozen, or a trainer, may speak after its successor: it must not take a server back. After a version
that is far ahead the server would refuse all versions that follow.

The logprob check is the servers' half of weights.verify_logprobs; the trainer's is model/logprob_check.py.

    manifest.json of the version (`probe`: tokens, the trainer's logprobs) --+
    engine: load the version, score the same tokens -------------------------+--> LogprobCheck --> the version is echoed, or refused

Checksums say that the files are sound. They cannot say that an engine has put them where it computes: a load may report success
and leave the old weights, in whole or in part. What was refused is not served: the server has no version until a load passes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from asyncrl.generation.engine import (
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    GenerationEngine,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.messages import SamplingParams, TensorSpecs, WeightVersion
from asyncrl.weights import versions as weights
from asyncrl.weights.versions import ScoredText, read_manifest

_FLOATING = frozenset({"F32", "F16", "BF16", "float32", "float16", "bfloat16"})  # in files, and as torch calls them
_SHOWN = 5  # problems of a version that are named
_MEAN_SHARE = 6.0  # the mean may differ by a sixth of what a single token may: bfloat16 gave 0.05 and 0.3
_LEAST_CHANGE = 1e-5  # of the trainer's mean logprob between two versions, for the servers' to have to change, too

Published = Callable[[], Awaitable[WeightVersion | None]]


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


# ------------------------------------------------------------------------------------------------------------- versions


class VersionFence:
    """Remembers the newest version that was loaded. The same again is fine: the load may have failed half-way."""

    def __init__(self, published: Published | None = None) -> None:
        """published: asks for the newest version that the trainer has published. None: versions have no upper bound."""
        self._loaded = Fence[WeightVersion | None](None)
        self._published = published
        self._highest: WeightVersion | None = None  # that `published` has named so far

    def check(self, version: WeightVersion) -> None:
        """Before a load. Raises WeightsRefused."""
        newest = self._loaded.newest
        if newest is not None and self._loaded.is_over(version):
            over = f"; attempt {version.attempt} is over" if version.attempt < newest.attempt else ""
            raise WeightsRefused(f"version {version} is older than {newest}, which was loaded here{over}")

    async def check_published(self, version: WeightVersion) -> None:
        """Before weights come from elsewhere than the run's folder, which holds what the trainer has made.

        Raises WeightsRefused, and what `published` raises. Asks once a version.
        """
        if self._published is None or (self._highest is not None and version <= self._highest):
            return
        self._highest = await self._published()
        if self._highest is None or version > self._highest:
            newest = f"{self._highest} is the newest" if self._highest is not None else "there is none yet"
            raise WeightsRefused(f"weight_version is {version}, which the trainer has not published; {newest}")

    def loaded(self, version: WeightVersion) -> None:
        self._loaded.adopt(version)


# -------------------------------------------------------------------------------------------------------------- tensors


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


# ------------------------------------------------------------------------------------------------------------- logprobs


class LogprobMismatch(WeightsRefused):
    """The engine computes with other weights than the version's."""


@dataclass(frozen=True)
class _Passed:
    version: WeightVersion
    fingerprint: str
    scored_text: ScoredText
    scores: list[float]


class LogprobCheck:
    """Compares a server's logprobs of the check's text with the trainer's (pure). Two rules:

    near: none differs by more than `tolerance`, and on average none by more than a sixth of that. Finds weights that are wrong,
        or old by more than the tolerance shows.
    moved: where the tensors are others than those of the last version that passed, and the trainer's logprobs moved, the server's
        are not what they were to the last bit. Finds old weights however small a step was and however coarse the dtype is.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._last: _Passed | None = None

    def check(
        self, version: WeightVersion, scored_text: ScoredText, fingerprint: str, scores: Sequence[float]
    ) -> float:
        """scores: the server's logprobs of the text, as GenerationEngine.score gives them; fingerprint: of the tensors.

        Returns the largest difference. Raises LogprobMismatch with the figures.
        """
        mine = list(scores[-len(scored_text.logprobs) :])
        if len(mine) != len(scored_text.logprobs):
            raise LogprobMismatch(
                f"weights {version}: {len(mine)} logprobs for the text's {len(scored_text.logprobs)} tokens"
            )
        last = self._last
        largest, mean = _difference(mine, scored_text.logprobs)
        comparable = (
            last is not None and last.scored_text.input_ids == scored_text.input_ids and last.fingerprint != fingerprint
        )
        kept = comparable and last is not None and mine == last.scores
        origin = (
            f"; to the last bit they are those of {last.version}: the old weights are still there"
            if kept and last
            else ""
        )
        if not (largest <= self._tolerance and mean <= self._tolerance / _MEAN_SHARE):
            raise LogprobMismatch(
                f"weights {version} were loaded, but the server's logprobs of the check's text are not the trainer's: they"
                f" differ by {largest:.3g} at most and {mean:.3g} on average (allowed: {self._tolerance:g} and"
                f" {self._tolerance / _MEAN_SHARE:.3g}, weights.verify_tolerance){origin}"
            )
        if (
            kept
            and last is not None
            and _difference(scored_text.logprobs, last.scored_text.logprobs)[1] > _LEAST_CHANGE
        ):
            raise LogprobMismatch(
                f"weights {version} were loaded, but the server's logprobs of the check's text did not move, while the trainer's"
                f" did (by {_difference(scored_text.logprobs, last.scored_text.logprobs)[1]:.3g} on average){origin}"
            )
        self._last = _Passed(version, fingerprint, scored_text, mine)
        return largest


def _difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Largest and mean absolute difference; NaN counts as infinitely far."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    differences = [math.inf if math.isnan(value) else value for value in differences]
    return max(differences), math.fsum(differences) / len(differences)


class VerifiedLoads:
    """Loads versions into an engine and lets them pass only if the logprob check does."""

    def __init__(self, engine: GenerationEngine, *, tolerance: float, limit_s: float, logger: logging.Logger) -> None:
        """limit_s: for scoring the text."""
        self._engine, self._limit_s, self._logger = engine, limit_s, logger
        self._check = LogprobCheck(tolerance)

    async def load(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        """GenerationEngine.load_weights, and the logprob check with the version's manifest. Raises WeightsRefused."""
        self.require_pause()
        num_ended = await self._engine.load_weights(path, version, abort_running=abort_running)
        try:
            manifest = await asyncio.to_thread(read_manifest, path)
        except ValueError as error:
            self._engine.forget_version()
            raise WeightsRefused(str(error)) from error
        await self.verify(version, manifest.scored_text, manifest.fingerprint)
        return num_ended

    def require_pause(self) -> None:
        """Before a load: requests must not run on weights that are not verified yet."""
        if not self._engine.stats().paused:
            raise WeightsRefused(
                "weights.verify_logprobs is on: pause generation before an update, and continue after it"
            )

    async def verify(self, version: WeightVersion, scored_text: ScoredText | None, fingerprint: str) -> None:
        """What was just loaded, by whatever way: let it pass, or have the engine serve nothing and raise WeightsRefused."""
        try:
            if scored_text is None:
                raise WeightsRefused(
                    f"weights {version} have no text to score in their manifest, and weights.verify_logprobs is on for this"
                    " server"
                )
            async with asyncio.timeout(self._limit_s):
                scores = await self._engine.score(scored_text.input_ids)
            largest = self._check.check(version, scored_text, fingerprint, scores)
        except WeightsRefused as refusal:
            self._engine.forget_version()
            self._logger.error("%s", refusal)
            raise
        except (asyncio.TimeoutError, EngineFailed, EngineUnavailable, RequestRefused) as error:
            self._engine.forget_version()
            why = f"not within {self._limit_s:g} s" if isinstance(error, asyncio.TimeoutError) else str(error)
            raise WeightsRefused(f"weights {version}: the check's text could not be scored: {why}") from error
        except BaseException:
            self._engine.forget_version()
            raise
        self._logger.info("weights %s verified: logprobs of the check's text differ by at most %.2g", version, largest)
