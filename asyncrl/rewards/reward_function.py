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

_LARGEST = 3.4028234663852886e38  # the largest float32: rewards travel as float32, where larger ones become infinite
_MAX_SHOWN = 200  # characters of an invalid reward that a message shows


@dataclass(frozen=True)
class Form:
    """How a user's function is called, and what messages call it."""

    what: str
    arguments: tuple[str, ...]  # by position
    optional: tuple[str, ...] = ()  # by keyword, if the function accepts them
    seats: bool = False  # whether it may return the rewards of several seats


REWARD = Form("reward", ("prompt", "completion", "answer"), ("finished", "task", "row"))


@dataclass(frozen=True)
class RewardFunction:
    """A function (prompt, completion, answer) -> number, and which of the keywords `finished`, `task`, `row` it accepts."""

    spec: str
    call: Callable[..., Any]
    is_async: bool
    arguments: tuple[str, ...]
    returned: Callable[[Any], Any]  # the checked return value; None: it is no reward

    @classmethod
    def import_from(cls, spec: str, form: Form = REWARD) -> RewardFunction:
        """Import the function at this import path. Raises ConfigError if it does not exist, is not callable, or cannot be called in
        this form. Errors raised by the user's module pass through."""
        function = import_object(spec, form.what)
        if not callable(function):
            raise ConfigError(f"{form.what} {spec!r} is {function!r}, which is not callable; name a function")
        _check_signature(spec, function, form)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        returned = as_seats if form.seats else as_reward
        return cls(spec, function, is_async, _optional_arguments(function, form), returned)


def as_reward(value: Any) -> float | None:
    """The value as a float, a Score as it is; None if it is not a finite number within the range of float32, or is a string."""
    if isinstance(value, Score):
        return value if abs(value) <= _LARGEST else None
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # a user's object may raise any exception
        return None
    return number if abs(number) <= _LARGEST else None


def as_seats(value: Any) -> float | list[tuple[str, float, str]] | None:
    """The value of `as_reward`, or a list of (seat, reward, speaker), as SeatReward has them; None if it is neither."""
    if not isinstance(value, (list, tuple)):
        return as_reward(value)
    try:
        seats = [(seat, as_reward(reward), speaker) for seat, reward, speaker in value]
    except (TypeError, ValueError):
        return None
    fit = all(isinstance(seat, str) and isinstance(speaker, str) for seat, _, speaker in seats)
    found = [(seat, reward, speaker) for seat, reward, speaker in seats if reward is not None]
    return found if fit and len(found) == len(seats) else None


def shown(value: Any) -> str:
    """Text of a value for error messages. Never raises."""
    try:
        return repr(value)[:_MAX_SHOWN]
    except BaseException as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def _check_signature(spec: str, function: Callable[..., Any], form: Form) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(*form.arguments, **dict.fromkeys(_optional_arguments(function, form)))
    except TypeError as error:
        optional = f", and may also accept the keywords {', '.join(form.optional)}" if form.optional else ""
        raise ConfigError(
            f"{form.what} {spec!r} has the signature {signature}: {error}; it is called as ({', '.join(form.arguments)}){optional}"
        ) from None


def _optional_arguments(function: Callable[..., Any], form: Form) -> tuple[str, ...]:
    """The optional keyword arguments that the function accepts."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return ()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return form.optional
    return tuple(
        name
        for name in form.optional
        if name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    )
