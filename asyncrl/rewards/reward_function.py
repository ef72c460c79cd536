"""Imports a user's reward function, and checks its signature and its answers. Imports nothing heavy, so that judges start fast."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.config.errors import ConfigError
from asyncrl.config.import_object import import_object
from asyncrl.rewards.score import Score

OPTIONAL_ARGUMENTS = ("finished", "task", "row")
_LARGEST = 3.4028234663852886e38  # the largest float32: rewards travel as float32, where larger ones become infinite
_MAX_SHOWN = 200  # characters of an invalid reward that a message shows


@dataclass(frozen=True)
class RewardFunction:
    """A function (prompt, completion, answer) -> number, and which of the keywords `finished`, `task`, `row` it accepts."""

    spec: str
    call: Callable[..., Any]
    is_async: bool
    arguments: tuple[str, ...]

    @classmethod
    def import_from(cls, spec: str) -> RewardFunction:
        """Import the function at this import path. Raises ConfigError if it does not exist, is not callable, or cannot be called as
        (prompt, completion, answer). Errors raised by the user's module pass through."""
        function = import_object(spec, "reward")
        if not callable(function):
            raise ConfigError(f"reward {spec!r} is {function!r}, which is not callable; name a function")
        _check_signature(spec, function)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return cls(spec, function, is_async, _optional_arguments(function))


def as_reward(value: Any) -> float | None:
    """The value as a float, a Score as it is; None if it is not a finite number within the range of float32, or is a string."""
    if isinstance(value, Score):
        return value if abs(value) <= _LARGEST else None
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # a user's object may raise any exception
        return None
    return number if abs(number) <= _LARGEST else None


def shown(value: Any) -> str:
    """Text of a value for error messages. Never raises."""
    try:
        return repr(value)[:_MAX_SHOWN]
    except BaseException as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def _check_signature(spec: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind("prompt", "completion", "answer", **dict.fromkeys(_optional_arguments(function)))
    except TypeError as error:
        raise ConfigError(
            f"reward {spec!r} has the signature {signature}: {error}; it is called as (prompt, completion, answer), and may also "
            f"accept the keywords {', '.join(OPTIONAL_ARGUMENTS)}"
        ) from None


def _optional_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The optional keyword arguments that the function accepts."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return ()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return OPTIONAL_ARGUMENTS
    return tuple(
        name
        for name in OPTIONAL_ARGUMENTS
        if name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    )
