"""Does a server serve what the trainer made? The servers' half of weights.verify_logprobs; the trainer's is model/probe.py.

    manifest.json of the version (`probe`: tokens, the trainer's logprobs) --+
    engine: load the version, score the same tokens -------------------------+--> LogprobCheck --> the version is echoed, or refused

Checksums say that the files are sound. They cannot say that an engine has put them where it computes: a load may report success
and leave the old weights, in whole or in part. What was refused is not served: the server has no version until a load passes.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.generation.engine import (
    EngineFailed,
    EngineUnavailable,
    GenerationEngine,
    RequestRefused,
    WeightsRefused,
)
from asyncrl.protocol.messages import WeightVersion
from asyncrl.weights.versions import Probe, read_manifest

_MEAN_SHARE = 6.0  # the mean may differ by a sixth of what a single token may: bfloat16 gave 0.05 and 0.3
_LEAST_CHANGE = 1e-5  # of the trainer's mean logprob between two versions, for the servers' to have to change, too


class LogprobMismatch(WeightsRefused):
    """The engine computes with other weights than the version's."""


@dataclass(frozen=True)
class _Passed:
    version: WeightVersion
    fingerprint: str
    probe: Probe
    scores: list[float]


class LogprobCheck:
    """Compares a server's logprobs of the probe with the trainer's (pure). Two rules:

    near: none differs by more than `tolerance`, and on average none by more than a sixth of that. Finds weights that are wrong,
        or old by more than the tolerance shows.
    moved: where the tensors are others than those of the last version that passed, and the trainer's logprobs moved, the server's
        are not what they were to the last bit. Finds old weights however small a step was and however coarse the dtype is.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._last: _Passed | None = None

    def check(self, version: WeightVersion, probe: Probe, fingerprint: str, scores: Sequence[float]) -> float:
        """scores: the server's logprobs of probe.input_ids, as GenerationEngine.score gives them; fingerprint: of the tensors.

        Returns the largest difference. Raises LogprobMismatch with the figures.
        """
        mine = list(scores[-len(probe.logprobs) :])
        if len(mine) != len(probe.logprobs):
            raise LogprobMismatch(
                f"weights {version}: {len(mine)} logprobs for the probe's {len(probe.logprobs)} tokens"
            )
        last = self._last
        largest, mean = _difference(mine, probe.logprobs)
        comparable = last is not None and last.probe.input_ids == probe.input_ids and last.fingerprint != fingerprint
        kept = comparable and last is not None and mine == last.scores
        origin = (
            f"; to the last bit they are those of {last.version}: the old weights are still there"
            if kept and last
            else ""
        )
        if not (largest <= self._tolerance and mean <= self._tolerance / _MEAN_SHARE):
            raise LogprobMismatch(
                f"weights {version} were loaded, but the server's logprobs of the probe are not the trainer's: they differ by"
                f" {largest:.3g} at most and {mean:.3g} on average (allowed: {self._tolerance:g} and"
                f" {self._tolerance / _MEAN_SHARE:.3g}, weights.verify_tolerance){origin}"
            )
        if kept and last is not None and _difference(probe.logprobs, last.probe.logprobs)[1] > _LEAST_CHANGE:
            raise LogprobMismatch(
                f"weights {version} were loaded, but the server's logprobs of the probe did not move, while the trainer's did"
                f" (by {_difference(probe.logprobs, last.probe.logprobs)[1]:.3g} on average){origin}"
            )
        self._last = _Passed(version, fingerprint, probe, mine)
        return largest


def _difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Largest and mean absolute difference; NaN counts as infinitely far."""
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    differences = [math.inf if math.isnan(value) else value for value in differences]
    return max(differences), math.fsum(differences) / len(differences)


class VerifiedLoads:
    """Loads versions into an engine and lets them pass only if the probe says so."""

    def __init__(self, engine: GenerationEngine, *, tolerance: float, limit_s: float, logger: logging.Logger) -> None:
        """limit_s: for scoring the probe."""
        self._engine, self._limit_s, self._logger = engine, limit_s, logger
        self._check = LogprobCheck(tolerance)

    async def load(self, path: Path, version: WeightVersion, *, abort_running: bool = False) -> int:
        """GenerationEngine.load_weights, and the probe of the version's manifest. Raises WeightsRefused."""
        self.require_pause()
        num_ended = await self._engine.load_weights(path, version, abort_running=abort_running)
        try:
            manifest = await asyncio.to_thread(read_manifest, path)
        except ValueError as error:
            self._engine.forget_version()
            raise WeightsRefused(str(error)) from error
        await self.verify(version, manifest.probe, manifest.fingerprint)
        return num_ended

    def require_pause(self) -> None:
        """Before a load: requests must not run on weights that are not verified yet."""
        if not self._engine.stats().paused:
            raise WeightsRefused(
                "weights.verify_logprobs is on: pause generation before an update, and continue after it"
            )

    async def verify(self, version: WeightVersion, probe: Probe | None, fingerprint: str) -> None:
        """What was just loaded, by whatever way: let it pass, or have the engine serve nothing and raise WeightsRefused."""
        try:
            if probe is None:
                raise WeightsRefused(
                    f"weights {version} have no probe in their manifest, and weights.verify_logprobs is on for this server"
                )
            async with asyncio.timeout(self._limit_s):
                scores = await self._engine.score(probe.input_ids)
            largest = self._check.check(version, probe, fingerprint, scores)
        except WeightsRefused as refusal:
            self._engine.forget_version()
            self._logger.error("%s", refusal)
            raise
        except (asyncio.TimeoutError, EngineFailed, EngineUnavailable, RequestRefused) as error:
            self._engine.forget_version()
            why = f"not within {self._limit_s:g} s" if isinstance(error, asyncio.TimeoutError) else str(error)
            raise WeightsRefused(f"weights {version}: the probe could not be scored: {why}") from error
        except BaseException:
            self._engine.forget_version()
            raise
        self._logger.info("weights %s verified: logprobs of the probe differ by at most %.2g", version, largest)
