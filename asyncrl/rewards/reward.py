"""Rewards: a user's function (prompt, completion, answer) -> float (or Score), judged for a whole group at once.

The function may be sync or async, and may take any of the keyword arguments `finished`, `task`, `row`. It runs in judge processes
(judges.py). With rollout.reward_isolation=thread, or on a system other than Linux, a sync function runs in daemon threads, and an
async one on the event loop. A fast or async function judges a whole group in one process or thread. For a slow sync function, each
response gets its own process or thread. The rollout is rejected,
with the reason, if the function exceeds its time limit, raises, ends its process or returns anything but a finite number. If
processes are lost through no fault of the call, the rollout is released.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.config.schema import RolloutConfig
from asyncrl.data.prompts import Prompt
from asyncrl.rewards.judges import Call, Calls, CodeChangedError, JudgeDied, Judges, JudgesGone, JudgesLost
from asyncrl.rewards.outcome import REWARD_LOST, RolloutEnded, RolloutRejected, RolloutReleased
from asyncrl.rewards.reward_function import RewardFunction, as_reward, shown
from asyncrl.rewards.score import Score
from asyncrl.runtime.background import on_thread
from asyncrl.runtime.services import Services

_SLOW_CALL_S = 0.01
_MAX_THREADS = 16  # threads or judge processes of a sync function at the same time
_MAX_ABANDONED = 32  # threads that exceeded their time limit and still run; at this number no call is started
# Errors that do not leave a thread as they are. A future cannot carry StopIteration. asyncio turns the next three into its own
# errors, which mean the end of a limit or of the waiting task, and drops their tracebacks. The last two would end the worker, and
# generated code may call exit()
_CHANGED_ON_THE_WAY = (
    StopIteration,
    CancelledError,
    asyncio.CancelledError,
    TimeoutError,
    SystemExit,
    KeyboardInterrupt,
)


@dataclass(frozen=True, slots=True)
class Completion:
    """A response in the form that reward functions and environments receive."""

    text: str  # decoded without special tokens
    finished: bool  # True: ended by EOS; False: cut at max_new_tokens, or because the server's context was full
    token_ids: tuple[int, ...] = ()  # for environments: the response's tokens, with its EOS


def call_arguments(prompt: Prompt, completion: Completion, taken: Sequence[str]) -> Call:
    """Arguments of a reward function. taken: the optional arguments that it accepts."""
    known = {"finished": completion.finished, "task": prompt.task, "row": prompt.row}
    return (prompt.plain_text, completion.text, prompt.answer), {name: known[name] for name in taken}


class Reward:
    """A user's reward function. `await score(...)` returns one finite float per completion or raises RolloutEnded."""

    def __init__(
        self,
        spec: str,
        *,
        timeout_s: float,
        services: Services,
        judges: Judges | None = None,
        slow_call_s: float = _SLOW_CALL_S,
    ) -> None:
        """judges: the processes that run the function, ended by `close`; None: it runs in this process. slow_call_s: a sync
        function that takes this long or longer per response judges the responses of a group in parallel."""
        self.spec = spec
        self._timeout_s = timeout_s
        self._board, self._logger, self._clock = services.board, services.logger, services.clock
        self._slow_call_s = slow_call_s
        self._call_s = math.inf  # duration of the last call per response; unknown counts as slow
        self._logged: set[str] = set()
        self._judges = judges
        self._function: Callable[..., Any]
        if judges is None:
            function = RewardFunction.import_from(spec)
            self._function, self._is_async, self._arguments = function.call, function.is_async, function.arguments
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._abandoned: list[Future[Any]] = []

    @classmethod
    def of(cls, spec: str, rollout: RolloutConfig, services: Services, output: int | None = None) -> Reward:
        """Create a Reward with the settings of the config; `start` comes before `score`. output: see Judges."""
        judges = None
        if rollout.reward_isolation == "process" and sys.platform == "linux":
            judges = Judges(
                spec,
                memory_bytes=rollout.reward_memory_bytes,
                most=_MAX_THREADS,
                most_async=rollout.max_concurrent_per_worker,
                logger=services.logger,
                waits=False,
                output=output,
                clock=services.clock,
            )
        return cls(spec, timeout_s=rollout.reward_timeout_s, services=services, judges=judges)

    async def start(self) -> None:
        """Wait until the function is imported. Raises ConfigError if the import fails."""
        if self._judges is not None:
            await self._judges.started()

    def close(self) -> None:
        """End the judges, if there are any."""
        if self._judges is not None:
            self._judges.close()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Judge the completions of one prompt; Scores if the function returns Scores.

        Waits for a free judge or thread, then for the user's function: in each try at most timeout_s for each completion, or for
        all of them together if they are judged in one process or thread.
        """
        arguments = self._judges.arguments if self._judges is not None else self._arguments
        calls = [call_arguments(prompt, completion, arguments) for completion in completions]
        with self._board.showing("reward", on=self.spec):
            try:
                return await self._score(calls)
            except TimeoutError:
                raise self._rejected("reward_timeout", f"{self.spec} took more than {self._timeout_s:g} s") from None
            except (RolloutEnded, CodeChangedError):
                raise
            except JudgesLost as error:
                raise RolloutReleased(REWARD_LOST, f"{self.spec} cannot be called: {error}") from error
            except JudgesGone as error:
                raise self._rejected("reward_gone", f"{self.spec} cannot be called any more: {error}") from None
            except JudgeDied as error:
                raise self._rejected("reward_died", f"{self.spec} has ended its process: {error}") from None
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                raise self._rejected("reward_error", f"{self.spec} raised {shown(error)}", error) from error

    async def _score(self, calls: Calls) -> list[float]:
        fast = self._call_s < self._slow_call_s
        score: Callable[[Calls], Awaitable[list[float]]]
        if self._judges is not None:
            together = fast or self._judges.is_async
            score = partial(self._score_by_judge, self._judges)
        elif self._is_async:
            async with asyncio.timeout(self._timeout_s):
                return self._checked(await self._score_async(calls))
        else:
            together = fast
            score = self._score_in_thread
        if together:
            return await score(calls)
        parts = await asyncio.gather(*(score([call]) for call in calls))
        return [value for part in parts for value in part]

    # ---------------------------------------------------------------------------------------------------------- processes

    async def _score_by_judge(self, judges: Judges, calls: Calls) -> list[float]:
        answer = await judges.ask(calls, self._timeout_s)
        if "values" in answer:
            self._call_s = answer["seconds"] / max(1, len(calls))
            values, found = answer["values"], answer["answers"]
            return [Score(*pair) for pair in zip(values, found, strict=True)] if found else list(values)
        if "no_number" in answer:
            raise self._not_a_number(answer["no_number"])
        raise self._rejected(
            "reward_error", f"{self.spec} raised {answer['error']}", message=f"\n{answer['traceback'].rstrip()}"
        )

    # ------------------------------------------------------------------------------------------------------------ threads

    async def _score_async(self, calls: Calls) -> list[Any]:
        async def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return await self._function(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt) as error:  # these would end the worker
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

        return await asyncio.gather(*(call(args, kwargs) for args, kwargs in calls))

    async def _score_in_thread(self, calls: Calls) -> list[float]:
        """Run the calls one after another in a daemon thread. A call that hangs blocks neither the worker nor its shutdown.

        A slot is held for at most timeout_s, so the number of earlier calls that still wait bounds the wait for a slot.
        """

        def run() -> list[Any]:
            start = self._clock.monotonic()
            values = [self._function(*args, **kwargs) for args, kwargs in calls]
            self._call_s = (self._clock.monotonic() - start) / max(1, len(calls))
            return values

        async with self._threads:
            self._abandoned = [thread for thread in self._abandoned if not thread.done()]
            if len(self._abandoned) >= _MAX_ABANDONED:
                raise self._rejected("reward_timeout", f"{len(self._abandoned)} calls of {self.spec} still hang")
            thread = start_thread(run, f"reward {self.spec}")
            try:
                async with asyncio.timeout(self._timeout_s):
                    return self._checked(await asyncio.wrap_future(thread))
            finally:
                if not thread.done():
                    self._abandoned.append(thread)

    def _checked(self, values: Sequence[Any]) -> list[float]:
        numbers = []
        for value in values:
            number = as_reward(value)
            if number is None:
                raise self._not_a_number(shown(value))
            numbers.append(number)
        return numbers

    def _not_a_number(self, value: str) -> RolloutRejected:
        return self._rejected("reward_not_finite", f"{self.spec} returned {value}; it must be a finite number")

    def _rejected(
        self, reason: str, detail: str, error: BaseException | None = None, message: str = ""
    ) -> RolloutRejected:
        if reason not in self._logged:  # log the first rejection of each reason in full; metrics count all
            self._logged.add(reason)
            self._logger.warning(
                "rollout rejected, %s: %s (later ones are only counted)%s", reason, detail, message, exc_info=error
            )
        return RolloutRejected(reason, detail)


def start_thread(run: Callable[[], Any], name: str) -> Future[Any]:
    """Run users' code in a new daemon thread. Await the result with asyncio.wrap_future."""
    process = os.getpid()

    def body() -> Any:
        try:
            return run()
        except _CHANGED_ON_THE_WAY as raised:
            raise RuntimeError(f"{type(raised).__name__}: {raised}") from raised
        finally:
            if os.getpid() != process:  # the user's code forked, and its child returned into this code
                os._exit(0)

    return on_thread(body, name)
