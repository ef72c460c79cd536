"""The function that is the train step: the shipped one, or the user's (train.step). It makes the step's calls."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, cast

from asyncrl.config.errors import ConfigError
from asyncrl.config.import_object import import_object
from asyncrl.master.generating import Prompts
from asyncrl.master.handles import Batch, Models
from asyncrl.protocol.errors import RunEndedError


async def shipped_step(models: Models, batch: Batch) -> None:
    """The train step of every run without train.step.

    A call begins once its input keys exist. So inference, advantages and training follow one another, and calls that do not need
    each other's keys run at the same time.
    """
    for function in models.functions:  # e.g. actor.inf, ref.inf, actor.advantages, actor.train
        batch = batch.union(function(batch))
    await batch


class StepFunctionError(RunEndedError):
    """train.step raised, hung, forgot to train, trained a group twice, or dropped a result."""


class StepFunction:
    """Runs the step function, and checks what it did."""

    def __init__(
        self, spec: str, limit_s: float, *, remedy: Callable[[], str] = lambda: "correct the function"
    ) -> None:
        """spec: train.step; "": the shipped function. limit_s: time for which the function may wait for something other than its
        calls. remedy: returns how to continue after a failure. Raises ConfigError."""
        self._spec, self._limit_s, self._remedy = spec, limit_s, remedy
        self._function: Callable[[Models, Any], Awaitable[None]] = shipped_step
        self.generates = False  # its second argument is `prompts` instead of a batch
        if spec:
            found = import_object(spec, "train.step")
            if not inspect.iscoroutinefunction(found):
                raise ConfigError(
                    f"train.step={spec}: it is {found!r}; name a function `async def step(models, batch)`"
                )
            try:
                taken = inspect.signature(found).bind(None, None)
            except TypeError as error:
                raise ConfigError(
                    f"train.step={spec}: {error}; it is called as step(models, batch), or step(models, prompts)"
                ) from None
            self._function = found
            self.generates = [*taken.arguments][-1] == "prompts"

    async def run(self, models: Models, data: Batch | Prompts) -> None:
        """Run the function to its end. Raises the error of a call that fails, and StepFunctionError."""
        body = asyncio.ensure_future(self._function(models, data))
        try:
            await self._until_done(body, models)
            body.result()
            models.check()
        except StepFunctionError:
            raise
        except Exception as error:
            if not self._spec or any(_error_of(task) is error for task in models.tasks):
                raise
            where = self._where(error)
            raise StepFunctionError(
                f"train.step failed at {where}: {type(error).__name__}: {error}; {self._remedy()}"
            ) from error
        finally:
            body.cancel()

    async def _until_done(self, body: asyncio.Future[None], models: Models) -> None:
        while not body.done():
            tasks = models.tasks
            running = [task for task in tasks if not task.done()]  # each has a limit of its own
            limit_s = None if running else self._limit_s
            done, _ = await asyncio.wait({body, *running}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and len(models.tasks) == len(tasks):
                (frame,) = cast("asyncio.Task[None]", body).get_stack(limit=1)
                where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise StepFunctionError(
                    f"train.step hangs at {where}: no call runs, and it has waited for {self._limit_s:g} s "
                    f"(train.call_timeout_s); {self._remedy()}"
                )

    def _where(self, error: BaseException) -> str:
        """file:line in the function's file at which the error was raised."""
        code: Any = inspect.unwrap(self._function).__code__
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == code.co_filename]
        return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
