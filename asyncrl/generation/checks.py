"""The checks of a generation server: requests, weight versions, tensors, and the logprobs that the engine computes after a load.

Requests are checked against the model's limits, versions against the newest loaded and the newest published one, and tensors
against the model's tensors. This module does not import torch: it reads names, shapes and dtypes from the headers of safetensors
files.

The server refuses a version that is older than the newest one it has loaded; a version of an earlier attempt is always older. A
gserver manager or trainer that was frozen may send a version after its successor has sent a newer one, and must not move a server
back. The server also refuses a version that the trainer has not published, unless it loads the version from the run's folder, which
only the trainer writes. If it accepted a version far ahead of the run, it would refuse all the real versions that follow.

The logprob check is the servers' half of weights.verify_logprobs; the trainer's is model/logprob_check.py.

    manifest.json of the version (`probe`: tokens, the trainer's logprobs) --+
    engine: load the version, score the same tokens -------------------------+--> LogprobCheck --> the version is served, or refused
    engine: decode after the text, score the decoded tokens -----------------+

Checksums prove that the files are intact. They do not prove that the engine computes with them: a load may report success and
leave some or all of the old weights in place, or its cache may have keys of the old weights. A version that fails the logprob check
is not served: the server has no version until a later load passes the check.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.generation.engine import (
    EngineFailed,
    EngineRequest,
    EngineUnavailable,
    Generated,
    GenerationEngine,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.protocol.errors import ErrorClass, classify
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.generation import SamplingParams
from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import TensorSpecs
from asyncrl.weights import versions as weights
from asyncrl.weights.fetch import WeightFetcher
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import ScoredText, read_manifest

_FLOATING = frozenset({"F32", "F16", "BF16", "float32", "float16", "bfloat16"})  # safetensors' names, then torch's
_SHOWN = 5  # an error lists at most this many problems
# verify_tolerance is the limit of a single token's difference (bfloat16: 0.3). The limit of the mean difference is a sixth of it
# (bfloat16: 0.05)
_MEAN_SHARE = 6.0
# If the trainer's logprobs of two versions differ by more than this on average, the server's logprobs must differ, too
_LEAST_CHANGE = 1e-5
_SHORT_PROMPT = 28

Published = Callable[[], Awaitable[WeightVersion | None]]


# ------------------------------------------------------------------------------------------------------------- requests


def check_params(params: SamplingParams) -> None:
    """Raises RequestRefused if a parameter is out of range."""
    if params.max_new_tokens < 1:
        raise RequestRefused(f"max_new_tokens is {params.max_new_tokens}; it must be at least 1")
    if not (params.temperature >= 0.0 and math.isfinite(params.temperature)):
        raise RequestRefused(f"temperature is {params.temperature}; it must be a finite number, 0 (greedy) or more")
    if not 0.0 < params.top_p <= 1.0:
        raise RequestRefused(f"top_p is {params.top_p}; it must be in (0, 1]")
    if params.top_k < 1 and params.top_k != -1:
        raise RequestRefused(f"top_k is {params.top_k}; it must be at least 1, or -1 for all")


def check_tokens(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestRefused if an id is not in the vocabulary. Some engines crash on such an id."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestRefused(f"{name} contains {wrong}; the vocabulary has {vocab_size} tokens")


def check_prompt(request: EngineRequest, *, vocab_size: int, max_prompt: int, max_length: int, why: str) -> None:
    """Raises RequestRefused if the prompt is empty or too long, if prompt and max_new_tokens together are too long, or if an id (of
    the prompt or of stop_token_ids) is not in the vocabulary. why: the source of max_length."""
    ids, wanted = request.input_ids, request.params.max_new_tokens
    if not ids:
        raise RequestRefused("input_ids is empty")
    check_tokens("input_ids", ids, vocab_size)
    check_tokens("stop_token_ids", request.params.stop_token_ids, vocab_size)
    if len(ids) > max_prompt or len(ids) + wanted > max_length:
        raise RequestRefused(
            f"{len(ids)} prompt tokens and {wanted} new ones do not fit: this server allows {max_length} tokens per request ({why})"
        )


# ------------------------------------------------------------------------------------------------------------- versions


class VersionFence:
    """Remembers the newest version that was loaded.

    Loading that version again is allowed: the manager may not have received the answer to the first load.
    """

    def __init__(self, published: Published | None = None) -> None:
        """published: returns the newest version that the trainer has published. None: versions have no upper bound."""
        self._loaded = Fence[WeightVersion | None](None)
        self._published = published
        self._highest: WeightVersion | None = None  # the last answer of `published`

    def check(self, version: WeightVersion) -> None:
        """Call this before a load. Raises WeightsRefused if the version is older than the newest loaded one."""
        newest = self._loaded.newest
        if newest is not None and self._loaded.is_over(version):
            over = f"; attempt {version.attempt} is over" if version.attempt < newest.attempt else ""
            raise WeightsRefused(
                f"version {version} is older than {newest}, which was loaded here{over}", ErrorClass.PERMANENT
            )

    async def check_published(self, version: WeightVersion) -> None:
        """Call this before weights are taken from a source other than the run's folder, which only the trainer writes.

        Raises WeightsRefused if the trainer has not published the version. Calls `published` only if the version is newer than the
        last answer of `published`, and passes on its errors.
        """
        if self._published is None or (self._highest is not None and version <= self._highest):
            return
        self._highest = await self._published()
        if self._highest is None or version > self._highest:
            newest = f"the newest is {self._highest}" if self._highest is not None else "there is none yet"
            raise WeightsRefused(
                f"weight_version is {version}, which the trainer has not published; {newest}", ErrorClass.PASSING
            )

    def loaded(self, version: WeightVersion) -> None:
        self._loaded.adopt(version)


# -------------------------------------------------------------------------------------------------------------- tensors


@dataclass(frozen=True)
class TensorSpec:
    """The shape that a tensor must have in a file, and whether its dtype must be a floating-point type (any of them)."""

    shape: tuple[int, ...]
    floating: bool = True


Found = tuple[str, str, tuple[int, ...], str]  # name, dtype, shape and file of a tensor


def check_tensors(
    expected: Mapping[str, TensorSpec],
    aliases: Sequence[Sequence[str]],
    files: Sequence[Path],
    changed: Sequence[Found] = (),
) -> dict[str, Path]:
    """Check that the files hold exactly this model's tensors, by their headers only. Returns tensor name -> file.

    changed: tensors of which other files beside these hold the changes.

    aliases: for each tensor the list of its names. A tied tensor has several names, and the files need only one of them. Raises
    WeightsRefused with the differences.
    """
    found = [(name, dtype, shape, file.name) for file in files for name, (shape, dtype) in read_header(file).items()]
    source = str(files[0].parent) if files else "a version without whole tensors"
    check_found(expected, aliases, [*found, *changed], source=source)
    by_name = {file.name: file for file in files}
    return {name: by_name[file] for name, _, _, file in found}


def check_sent(
    expected: Mapping[str, TensorSpec], aliases: Sequence[Sequence[str]], specs: TensorSpecs, *, complete: bool
) -> None:
    """Like check_tensors, for tensors that arrive over the network. complete: no tensor of the model may be missing; otherwise
    the tensors may be a part of the model's."""
    tensors = zip(specs.names, specs.dtypes, specs.shapes, strict=True)
    found = [(name, dtype, tuple(shape), "") for name, dtype, shape in tensors]
    check_found(expected, aliases if complete else (), found, source="the sent weights")


def check_found(
    expected: Mapping[str, TensorSpec],
    aliases: Sequence[Sequence[str]],
    found: Sequence[Found],
    *,
    source: str,
) -> None:
    """found: name, dtype, shape and file of each tensor; file "": it was sent. Raises WeightsRefused with the differences."""
    where: dict[str, str] = {}
    problems: list[str] = []
    for name, dtype, shape, file in found:
        if name in where:
            problems.append(f"{name} is in {where[name]} and in {file}" if file else f"{name} was sent twice")
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
        raise WeightsRefused(
            f"the tensors in {source} do not fit the model: {'; '.join(problems[:_SHOWN])}{more}",
            ErrorClass.PERMANENT,
        )


def read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns name -> (shape, safetensors' name of the dtype). Raises SafetensorError, OSError."""
    with safe_open(str(file), framework="numpy") as tensors:
        entries = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        return {name: (tuple(entry.get_shape()), str(entry.get_dtype())) for name, entry in entries.items()}


def specs_of(files: Sequence[Path]) -> dict[str, TensorSpec]:
    """Of the tensors in these files, by name. Raises SafetensorError, OSError."""
    return {
        name: TensorSpec(shape, dtype in _FLOATING)
        for file in files
        for name, (shape, dtype) in read_header(file).items()
    }


class ModelTensors:
    """The tensors that every version of a model must have: those in the model's own folder.

    If that folder has no safetensors files (an older format), the first version that `verified` accepts defines the tensors. Until
    then `check_sent` checks nothing.
    """

    def __init__(self, model_path: str | Path, *, tied: bool, local: WeightFetcher | None = None) -> None:
        """local: writes versions in full; None: only full versions are accepted."""
        self._tied, self._local = tied, local
        self._verified = weights.VerifiedVersion()
        self._expected = self._specs(weights.tensor_files(Path(model_path)))

    @contextlib.contextmanager
    def verified(self, directory: Path, version: WeightVersion, limit_s: float) -> Iterator[Path]:
        """Check a version's manifest and checksums, and its tensors' names, shapes and dtypes. Yield the folder that has them all:
        `directory`, or for a version with a base a folder on this host, which is not removed inside the `with` block. Raises
        WeightsRefused.

        The first check of a version reads its files completely, for the checksums. limit_s: of the wait for another process of this
        host that writes the same version.
        """
        with contextlib.ExitStack() as stack:
            try:
                folder, chain = directory, self._verified.verify(directory, version)
                if len(chain) > 1:
                    if self._local is None:
                        raise WeightsError(
                            f"this is a {chain[-1][1].kind}, which this server cannot load; set weights.full_every=1",
                            ErrorClass.PERMANENT,
                        )
                    folder = stack.enter_context(self._local.in_full(chain, limit_s))
                self._check(folder)
            except (WeightsError, SafetensorError, OSError) as error:
                raise WeightsRefused(f"{directory}: {error}", classify(error)) from error
            yield folder

    def _check(self, folder: Path) -> None:
        """Check the tensors of a verified version. Raises WeightsRefused, WeightsError, SafetensorError, OSError."""
        files = weights.tensor_files(folder)
        expected = self._expected or self._specs(files)
        check_tensors(expected, self._aliases(expected), files)
        self._expected = expected

    def check_sent(self, specs: TensorSpecs, *, complete: bool) -> None:
        """Check names, dtypes and shapes of tensors that arrive over the network. Raises WeightsRefused."""
        if self._expected:
            check_sent(self._expected, self._aliases(self._expected), specs, complete=complete)

    def _specs(self, files: Sequence[Path]) -> dict[str, TensorSpec]:
        specs = specs_of(files)
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
    """Names of the embedding and of the output layer, as in most of Hugging Face's causal models."""
    embedding = next((name for name in names if name.endswith("embed_tokens.weight")), "model.embed_tokens.weight")
    return embedding, "lm_head.weight"


# ------------------------------------------------------------------------------------------------------------- logprobs


class LogprobMismatch(WeightsRefused):
    """The engine computes with weights that are not the version's. Another load may go right; the manager counts mismatches."""


@dataclass(frozen=True)
class _Passed:
    version: WeightVersion
    fingerprint: str
    scored_text: ScoredText
    scores: list[float]


class LogprobCheck:
    """Compares a server's logprobs of the check's text with the trainer's (pure). Two rules:

    near: no logprob differs by more than `tolerance`, and the mean difference is at most a sixth of that. This finds wrong
        weights, and old weights if they differ by more than the tolerance.
    moved: if the tensors differ from those of the last version that passed, its text was the same, and the trainer's logprobs
        changed by more than _LEAST_CHANGE on average since then, the server's logprobs must not be bit-identical to those that it
        had for that version. This finds old weights even if the step was too small for the first rule, in any dtype. If the engine
        keeps several versions, the rule holds for each of them.
    """

    def __init__(self, tolerance: float, num_versions: int = 1) -> None:
        """num_versions: that the engine keeps."""
        self._tolerance, self._num_versions = tolerance, num_versions
        self._passed: dict[WeightVersion, _Passed] = {}  # the last num_versions, the newest check last

    def scored_text(self, version: WeightVersion) -> ScoredText:
        """The text of a version that has passed, and that the engine still keeps."""
        return self._passed[version].scored_text

    def check_again(self, version: WeightVersion, scores: Sequence[float]) -> float:
        """`check` for a version that has passed: a load of another one may have changed it."""
        passed = self._passed[version]
        return self.check(version, passed.scored_text, passed.fingerprint, scores)

    def check(
        self, version: WeightVersion, scored_text: ScoredText, fingerprint: str, scores: Sequence[float]
    ) -> float:
        """scores: the server's logprobs of the text, from GenerationEngine.score; fingerprint: of the tensors.

        Returns the largest difference. Raises LogprobMismatch with the measured differences.
        """
        mine = list(scores[-len(scored_text.logprobs) :])
        if len(mine) != len(scored_text.logprobs):
            raise LogprobMismatch(
                f"weights {version}: {len(mine)} logprobs for the text's {len(scored_text.logprobs)} tokens"
            )
        largest, mean = _difference(mine, scored_text.logprobs)
        origin, change = "", 0.0
        for last in self._passed.values():
            if (
                last.scored_text.input_ids == scored_text.input_ids
                and last.fingerprint != fingerprint
                and mine == last.scores
            ):
                origin = f"; they are bit-identical to those of {last.version}: the engine still computes with the old weights"
                change = max(change, _difference(scored_text.logprobs, last.scored_text.logprobs)[1])
        if not (largest <= self._tolerance and mean <= self._tolerance / _MEAN_SHARE):
            raise LogprobMismatch(
                f"weights {version} were loaded, but the server's logprobs of the check's text are not the trainer's: they"
                f" differ by at most {largest:.3g} and on average {mean:.3g} (allowed: {self._tolerance:g} and"
                f" {self._tolerance / _MEAN_SHARE:.3g}, weights.verify_tolerance){origin}"
            )
        if change > _LEAST_CHANGE:
            raise LogprobMismatch(
                f"weights {version} were loaded, but the server's logprobs of the check's text did not change, while the trainer's"
                f" did (by {change:.3g} on average){origin}"
            )
        self._passed.pop(version, None)
        self._passed[version] = _Passed(version, fingerprint, scored_text, mine)
        for old in list(self._passed)[: -self._num_versions]:
            del self._passed[old]
        return largest

    def check_decoded(self, version: WeightVersion, reported: Sequence[float], scored: Sequence[float]) -> float:
        """reported: logprobs of tokens that the engine decoded, as it reports them; scored: those of a forward pass of the same
        engine over the same tokens. Returns the largest difference. Raises LogprobMismatch."""
        if not reported:
            return 0.0
        largest, mean = _difference(reported, scored)
        if not (largest <= self._tolerance and mean <= self._tolerance / _MEAN_SHARE):
            raise LogprobMismatch(
                f"weights {version} were loaded, but the server's logprobs of tokens that it decodes are not those of its own"
                f" forward pass: they differ by at most {largest:.3g} and on average {mean:.3g} (allowed: {self._tolerance:g} and"
                f" {self._tolerance / _MEAN_SHARE:.3g}, weights.verify_tolerance); likely causes: its cache has keys of other"
                " weights, or its engine decodes this model wrongly (try generation.prefix_sharing=false or"
                " generation.attention=sdpa)"
            )
        return largest


def _difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Largest and mean absolute difference. A NaN counts as an infinite difference."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    differences = [math.inf if math.isnan(value) else value for value in differences]
    return max(differences), math.fsum(differences) / len(differences)


@dataclass(frozen=True)
class _Sample:
    """Tokens that the check decodes: after the whole text, which fills a page of 32 tokens that earlier versions have cached, too,
    and after its first tokens, so that decoding begins a new page. Beside them, after the text of each older version under which
    requests run: a load leaves these versions as they are."""

    prompt: list[int]
    count: int
    version: WeightVersion | None = None  # None: the newest


class VerifiedLoads:
    """Loads versions into an engine, and checks each: a version is served only if the engine computes the trainer's logprobs.

    The check is over when the load is answered, but generation does not wait for it. The engine continues right after the load, and
    the check's requests are the first in its queue. So the check takes the path of every response: the cache, its pages, and
    batches with other requests. `confirmed` holds back answers with tokens of a version until the verdict about it.
    """

    def __init__(
        self, engine: GenerationEngine[Any], *, tolerance: float, limit_s: float, logger: logging.Logger
    ) -> None:
        """limit_s: time limit of one check."""
        self._engine, self._limit_s, self._logger = engine, limit_s, logger
        self._check = LogprobCheck(tolerance, engine.num_versions)
        self._unverified = ""  # the version that is loaded or checked now
        self._settled = asyncio.Event()  # there is none
        self._settled.set()
        self._refused, self._num_refused = "", 0  # the last version that failed the check; the number of failed checks

    async def confirmed(self, future: asyncio.Future[Generated]) -> Generated:
        """Wait for a request's result, and for the verdict about its tokens. Raises EngineUnavailable if the version that sampled
        some of them failed the check. waits for: a check, at most limit_s after the load."""
        before = self._num_refused
        generated = await future
        versions = {span.version for span in generated.spans}
        while self._unverified in versions:
            await self._settled.wait()
        if self._num_refused != before and self._refused in versions:
            raise EngineUnavailable(
                f"weights {self._refused} failed the logprob check, and sampled a part of this response"
            )
        return generated

    async def load(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        """Call GenerationEngine.load_weights, then check the version by the text in its manifest. Raises WeightsRefused."""
        with self._held_back(version):
            num_ended = await self._engine.load_weights(path, version, abort_running=abort_running)
            try:
                manifest = await asyncio.to_thread(read_manifest, path)
            except ValueError as error:
                await self._refuse(version)
                raise WeightsRefused(str(error), classify(error)) from error
            await self._judge(version, manifest.scored_text, manifest.fingerprint)
        return num_ended

    async def verify(self, version: WeightVersion, scored_text: ScoredText | None, fingerprint: str) -> None:
        """Check the weights that were just loaded over the network. Raises WeightsRefused; the engine then serves nothing."""
        with self._held_back(version):
            await self._judge(version, scored_text, fingerprint)

    @contextlib.contextmanager
    def _held_back(self, version: WeightVersion) -> Iterator[None]:
        self._unverified = str(version)
        self._settled.clear()
        try:
            yield
        finally:
            self._unverified = ""
            self._settled.set()

    async def _refuse(self, version: WeightVersion) -> None:
        """Serve nothing, and end the requests that run on these weights, while their tokens still get this version's label;
        `confirmed` then fails them."""
        self._refused, self._num_refused = str(version), self._num_refused + 1
        try:
            with contextlib.suppress(EngineFailed, EngineUnavailable):
                await self._engine.pause("abort")
        finally:
            self._engine.forget_version()

    async def _judge(self, version: WeightVersion, scored_text: ScoredText | None, fingerprint: str) -> None:
        try:
            if scored_text is None:
                raise WeightsRefused(
                    f"weights {version} have no text to score in their manifest, but weights.verify_logprobs is on for this"
                    " server",
                    ErrorClass.PERMANENT,
                )
            async with asyncio.timeout(self._limit_s):
                largest, num_decoded = await self._measure(version, scored_text, fingerprint)
        except WeightsRefused as refusal:
            await self._refuse(version)
            self._logger.error("%s", refusal)
            raise
        except (TimeoutError, EngineFailed, EngineUnavailable, RequestRefused) as error:
            await self._refuse(version)
            why = f"not within {self._limit_s:g} s" if isinstance(error, asyncio.TimeoutError) else str(error)
            refused = isinstance(error, RequestRefused)
            raise WeightsRefused(
                f"weights {version}: the check's text could not be scored: {why}",
                ErrorClass.PERMANENT if refused else ErrorClass.PASSING,
            ) from error
        except BaseException:
            self._refused, self._num_refused = str(version), self._num_refused + 1
            self._engine.forget_version()
            raise
        self._logger.info(
            "weights %s verified: logprobs of the check's text and of %d decoded tokens differ by at most %.2g",
            version,
            num_decoded,
            largest,
        )

    async def _measure(self, version: WeightVersion, scored_text: ScoredText, fingerprint: str) -> tuple[float, int]:
        """Score the text and decode. Returns the largest difference and the number of decoded tokens. Raises LogprobMismatch.

        Requests that a pause in place has stopped hold their slots and pages. So then nothing is decoded.
        """
        engine, ids, stats = self._engine, scored_text.input_ids, self._engine.stats()
        scores = await engine.score(ids) if engine.scores_before_resume else None
        older = engine.older_versions_in_use
        samples = [] if stats.paused and stats.running else [_Sample(ids, 4), _Sample(ids[:_SHORT_PROMPT], 8)]
        samples += [_Sample(self._check.scored_text(one).input_ids, 4, one) for one in older]
        decoding = self._decode(samples)
        if stats.paused:
            await engine.resume()
        try:
            for tries_left in (1, 0):  # noise of 16 bits may exceed the tolerance once; a fault does so again
                decoded = await asyncio.gather(*decoding)
                texts = [one.prompt + found.token_ids for one, found in zip(samples, decoded, strict=True)] or [ids]
                under = [one.version for one in samples] or [None]
                scored = [await engine.score(*text) for text in zip(texts, under, strict=True)]
                if scores is None:
                    scores = scored[0][: len(ids)]
                for one, row in zip(samples, scored, strict=False):
                    if one.version is not None:
                        self._check.check_again(one.version, row[: len(one.prompt)])
                largest = self._check.check(version, scored_text, fingerprint, scores)
                logprobs = [logprob for found in decoded for logprob in found.logprobs]
                own = [logprob for one, row in zip(samples, scored, strict=False) for logprob in row[len(one.prompt) :]]
                try:
                    return max(largest, self._check.check_decoded(version, logprobs, own)), len(logprobs)
                except LogprobMismatch:
                    if not tries_left:
                        raise
                decoding = self._decode(samples)
        finally:
            for future in decoding:
                future.cancel()
        raise AssertionError("not reached")

    def _decode(self, samples: Sequence[_Sample]) -> list[asyncio.Future[Generated]]:
        """Submit them as ordinary requests, before all others."""
        return [
            self._engine.submit(
                EngineRequest(
                    f"check-{uuid.uuid4().hex}",
                    one.prompt,
                    SamplingParams(max_new_tokens=one.count, ignore_eos=True),
                    priority=1,
                    is_check=True,
                    version=one.version,
                )
            )
            for one in samples
        ]
