"""Rewards: a user's function (prompt, completion, answer) -> float, judged for a whole group at once.

The function may be sync or async, and may take any of the keyword arguments `finished`, `task`, `row`. Sync functions run in
daemon threads, away from the event loop: a fast one judges a group in one thread, a slow one gets a thread a response. What
does not come in time, raises, or is no finite number rejects the rollout, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config import ConfigError
from asyncrl.data.prompts import Prompt
from asyncrl.groups.loading import load_object
from asyncrl.groups.outcome import RolloutRejected
from asyncrl.runtime.worker import StatusBoard

_OPTIONAL_ARGUMENTS = ("finished", "task", "row")
_SLOW_CALL_S = 0.01  # functions slower than this judge the responses of a group side by side
_MAX_THREADS = 16
_MAX_ABANDONED = 32  # threads that outlived their limit; past it nothing more is started


@dataclass(frozen=True, slots=True)
class Completion:
    """A response as a reward or an environment sees it."""

    text: str  # decoded without special tokens
    finished: bool  # ended by EOS; False: cut at max_new_tokens


class Reward:
    """A user's reward function. `await score(...)` gives one finite float a completion or raises RolloutRejected."""

    def __init__(self, spec: str, *, timeout_s: float, board: StatusBoard, logger: logging.Logger) -> None:
        self.spec = spec
        function = load_object(spec, "reward")
        if not callable(function):
            raise ConfigError(f"reward {spec!r} is {function!r}, which cannot be called; name a function")
        _check_signature(spec, function)
        self._function: Callable[..., Any] = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._arguments = _optional_arguments(function)
        self._timeout_s = timeout_s
        self._board = board
        self._logger = logger
        self._call_s = math.inf  # how long a call took last; unknown counts as slow
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._abandoned: list[threading.Thread] = []
        self._logged: set[str] = set()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Judge the completions of one prompt. Waits for the user's function, at most timeout_s each (a fast one: all together)."""
        calls = [self._call_arguments(prompt, completion) for completion in completions]
        with self._board.waiting("reward", on=self.spec, limit_s=self._timeout_s):
            try:
                if self._is_async:
                    values = await asyncio.wait_for(self._score_async(calls), self._timeout_s)
                elif self._call_s < _SLOW_CALL_S:
                    values = await self._score_in_thread(calls)
                else:
                    parts = await asyncio.gather(*(self._score_in_thread([call]) for call in calls))
                    values = [value for part in parts for value in part]
            except asyncio.TimeoutError:
                raise self._rejected("reward_timeout", f"{self.spec} took more than {self._timeout_s:g} s") from None
            except RolloutRejected:
                raise
            except Exception as error:
                raise self._rejected("reward_error", f"{self.spec} raised {error!r}", error) from error
        return [self._checked(value) for value in values]

    def _call_arguments(self, prompt: Prompt, completion: Completion) -> tuple[tuple[Any, ...], dict[str, Any]]:
        known = {"finished": completion.finished, "task": prompt.task, "row": prompt.row}
        return (prompt.text, completion.text, prompt.answer), {name: known[name] for name in self._arguments}

    async def _score_async(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        async def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return await self._function(*args, **kwargs)
            except SystemExit as error:  # it would end the worker
                raise RuntimeError(f"SystemExit: {error}") from error

        return await asyncio.gather(*(call(args, kwargs) for args, kwargs in calls))

    async def _score_in_thread(self, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Run the calls one after another in a daemon thread: one that hangs holds up neither the worker nor its end.

        A slot is held for timeout_s at most, so the wait for one is bounded by the rollouts ahead.
        """

        def run() -> list[Any]:
            start = time.perf_counter()
            values = [self._function(*args, **kwargs) for args, kwargs in calls]
            self._call_s = (time.perf_counter() - start) / max(1, len(calls))
            return values

        async with self._threads:
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= _MAX_ABANDONED:
                raise self._rejected("reward_timeout", f"{len(self._abandoned)} calls of {self.spec} still hang")
            thread, future = start_thread(run, f"reward {self.spec}")
            try:
                return await asyncio.wait_for(future, self._timeout_s)
            finally:
                if thread.is_alive():
                    self._abandoned.append(thread)

    def _checked(self, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self._rejected("reward_not_finite", f"{self.spec} returned {value!r}; it must be a finite number")
        return number

    def _rejected(self, reason: str, detail: str, error: BaseException | None = None) -> RolloutRejected:
        if reason not in self._logged:  # the first of its kind, in full; all are counted by reason
            self._logged.add(reason)
            self._logger.warning(
                "rollout rejected, %s: %s (later ones are only counted)", reason, detail, exc_info=error
            )
        return RolloutRejected(reason, detail)


def _check_signature(spec: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return
    try:
        signature.bind("prompt", "completion", "answer", **dict.fromkeys(_optional_arguments(function)))
    except TypeError as error:
        raise ConfigError(
            f"reward {spec!r} has the signature {signature}: {error}; it is called as (prompt, completion, answer), and may take "
            f"the keywords {', '.join(_OPTIONAL_ARGUMENTS)} besides"
        ) from None


def _optional_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Which of the optional keyword arguments the function takes."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return ()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return _OPTIONAL_ARGUMENTS
    return tuple(
        name
        for name in _OPTIONAL_ARGUMENTS
        if name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    )


def start_thread(run: Callable[[], Any], name: str) -> tuple[threading.Thread, asyncio.Future[Any]]:
    """Run in a new daemon thread; the future gets what it returns or raises, unless nobody waits any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def body() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = run()
        except (StopIteration, SystemExit, KeyboardInterrupt) as raised:
            # A future cannot carry the first; the others, as of generated code that calls exit(), would end the worker.
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
            loop.call_soon_threadsafe(settle, value, error)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread, future
