"""The self-check of a model: the texts that it computes, and how far two computations of the same logprobs may differ (pure).

A model passes if each token has the same logprob however its sequence is computed:

    alone, by plain transformers                        the reference, for a small copy
    alone, and in packed rows beside others             the trainer (model/self_check.py)
    decoded token by token from the cache, in batches   the embedded engine (generation/self_check.py)
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncrl.config.schema import ConfigError

Logprobs = npt.NDArray[np.float32]

# Nats in float32, where the model's own rounding is below that; otherwise _NOISE_SHARE times the rounding, and at most _MOST: code
# that is not repeatable, such as dropout, is no noise
BOUND = 1e-5
_NOISE_SHARE = 4.0
_MOST = {32: 1e-3, 16: 1.0}
# Of a parameter's gradient, in float32, in the same way: the norm of the difference, as a share of the gradient's norm
GRADIENT_BOUND, _MOST_OF_GRADIENT = 1e-4, 1e-2
# Nats in 16 bits, the limit of a single token as in the logprob check of a version. docs/lab-notebook.md measures 0.14
BOUND_16_BITS = 0.3

_SHORT, _MEDIUM, _LONG = 3, 11, 37  # tokens; the long text is longer than four windows of a small copy


def texts_of(vocab_size: int) -> list[list[int]]:
    """Texts of unequal lengths, the longest between shorter ones. Tokens are random; the same arguments give the same texts."""
    rng = np.random.default_rng(vocab_size)
    return [rng.integers(vocab_size, size=length).tolist() for length in (_MEDIUM, _LONG, _SHORT)]


def bound_of(bits: int, noise: float = 0.0) -> float:
    """bits: width of the floating-point numbers, 16 or 32. noise: the model's own rounding, as the difference between two
    computations that are equal but for it."""
    return min(max(BOUND_16_BITS if bits == 16 else BOUND, _NOISE_SHARE * noise), _MOST[bits])


def gradient_bound_of(noise: float) -> float:
    """noise: as in bound_of."""
    return min(max(GRADIENT_BOUND, _NOISE_SHARE * noise), _MOST_OF_GRADIENT)


@dataclass(frozen=True)
class Agreement:
    """How far a small copy in the trainer, in packed rows, is from plain transformers, each sequence alone."""

    nats: float  # the largest difference of a logprob
    gradients: float  # of the parameter where it is largest: the norm of the difference / that of the gradient


@dataclass(frozen=True)
class Difference:
    """The largest difference between two computations of the same texts."""

    nats: float
    text: int = 0
    token: int = 0

    @classmethod
    def between(cls, found: Sequence[Logprobs], expected: Sequence[Logprobs]) -> Difference:
        """Each item: a text's logprobs [tokens]. A value that is not finite on one side only differs infinitely."""
        worst = cls(0.0)
        for text, (a, b) in enumerate(zip(found, expected, strict=True)):
            if not len(a):
                continue
            with np.errstate(invalid="ignore"):
                gaps = np.where(a == b, 0.0, np.abs(a - b))
            gaps = np.where(np.isnan(gaps), np.inf, gaps)
            token = int(gaps.argmax())
            worst = max(worst, cls(float(gaps[token]), text, token), key=lambda one: one.nats)
        return worst


class SelfCheckError(ValueError):
    """The model's code does not keep a promise of asyncrl. The message gives the layer, the figure and the remedy."""


def not_repeatable(model: str, gap: float) -> str:
    return (
        f"{model} computes other logits each time: they differ by {gap:.3g}, for example because dropout stays on. Set it to 0 in "
        "config.json, or use another model"
    )


def no_small_copy(error: Exception) -> str:
    return (
        f"no small copy of it can be made: {error!r}, so nothing shows that the trainer computes texts as transformers does. Use "
        "another model"
    )


# Errors of a model's code that has no place for asyncrl's attention. Others, such as a lack of memory, keep their own message.
_CODE_ERRORS = (ValueError, KeyError, AttributeError, TypeError, IndexError, AssertionError, NotImplementedError)


@contextlib.contextmanager
def architecture_errors(path: str | Path, *, alone: bool = True) -> Iterator[None]:
    """Turn what the code of an architecture raises into a ConfigError that names the model. alone: the code runs on one rank, so a
    RuntimeError does not mean that another rank is lost."""
    try:
        yield
    except ConfigError:
        raise
    except SelfCheckError as error:
        raise ConfigError(f"model_path={str(path)!r}: {error}") from error
    except (*_CODE_ERRORS, RuntimeError) as error:
        is_of_code = isinstance(error, _CODE_ERRORS) or (alone and "memory" not in str(error).lower())
        if not is_of_code:
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).rstrip(".") if isinstance(error, ValueError) else repr(error)
        message = f"{text} ({Path(place.filename).name}:{place.lineno})"
        raise ConfigError(
            f"model_path={str(path)!r}: asyncrl cannot train this architecture: {message}. Use another model"
        ) from error
