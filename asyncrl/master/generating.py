"""Generation within a train step: a step function `async def step(models, prompts)` orders the prompts of its batch.

    prompts.next(k) -> models.actor.generate -> Order -> gserver manager -> tickets, trajectories -> BatchFormer -> the step's Batch

The order names the first prompt that is not part of it. All prompts before that one are done when the step ends, so the next step
and a resumed run begin with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any, Generic, TypeVar

from asyncrl.config.processes import MasterWorkerConfig
from asyncrl.config.schema import SamplingConfig, judges_by_group, ppo_by_task
from asyncrl.master.buffer import PromptProgress
from asyncrl.protocol.manager import Order
from asyncrl.protocol.trajectories import Locator

Result = TypeVar("Result")  # a Batch of handles.py


class NoBatch(BaseException):
    """The launcher stops the run before the step has its batch, no prompt is left, or all prompts that the step has ordered were
    rejected. It is not an Exception, so that a step function does not take it for an error of its own."""


@dataclass(frozen=True)
class NextPrompts:
    """The next prompts of the data, for `models.actor.generate`."""

    locators: tuple[Locator, ...]

    def __len__(self) -> int:
        return len(self.locators)


class Prompts:
    """The prompts that the run has not trained or rejected, in the order of the data: the second argument of a step function that
    generates. `step` and `version` are those of a batch (handles.py)."""

    def __init__(self, progress: PromptProgress, batch_size: int, version: int) -> None:
        self._progress, self._batch_size, self.version = progress, batch_size, version

    @property
    def step(self) -> int:
        """The number of the step, as in the metrics."""
        return self.version + 1

    @property
    def num_left(self) -> int:
        """Prompts that are left, over all epochs."""
        return self._progress.num_total - self._progress.num_done

    @property
    def epochs_done(self) -> float:
        """Number of done prompts, divided by the number of prompts of an epoch."""
        return self._progress.epochs_done()

    def next(self, k: int | None = None) -> NextPrompts:
        """The next k prompts; fewer at the end of the run. None: train.batch_size, which is also the most. Within a step it always
        begins with the same prompt."""
        k = self._batch_size if k is None else k
        if not 1 <= k <= self._batch_size:
            raise ValueError(f"prompts.next({k}): a step has 1 to train.batch_size={self._batch_size} prompts")
        return NextPrompts(tuple(islice(self._progress.left(), k)))


@dataclass(frozen=True)
class GeneratingStep:
    """What the step of a step function that generates is made from."""

    prompts: Prompts
    config: MasterWorkerConfig
    form: Callable[[Order], Awaitable[Sequence[str]]]  # returns the tickets of an order's batch; raises NoBatch


class Generate(Generic[Result]):
    """`models.actor.generate`: generates the responses of a step, once. The generation servers sample with the step's weights."""

    def __init__(self, config: MasterWorkerConfig, start: Callable[[Order], asyncio.Task[Result]]) -> None:
        """start: begins to form the batch of an order."""
        self._config, self._start = config, start
        self.task: asyncio.Task[Result] | None = None

    def __call__(
        self,
        prompts: NextPrompts,
        *,
        n: int | None = None,
        sampling: SamplingConfig | Mapping[str, Any] | None = None,
    ) -> asyncio.Task[Result]:
        """Await the result, which is the step's batch. prompts: of `prompts.next`. n: responses of each prompt; None:
        rollout.group_size, which is also the most. sampling: may have a smaller max_new_tokens than rollout.sampling."""
        if self.task is not None:
            raise ValueError(
                "actor.generate is called for the second time in this step; a step has one batch. Order all of its prompts at "
                "once, or train on the first batch and order the others in the next step"
            )
        if not isinstance(prompts, NextPrompts) or not prompts:
            raise ValueError(f"actor.generate takes prompts from prompts.next(k), and got {prompts!r}")
        last = prompts.locators[-1]
        order = Order(
            before=Locator(last.epoch, last.position + 1),
            group_size=self._group_size(n),
            max_new_tokens=self._max_new_tokens(sampling),
        )
        self.task = self._start(order)
        return self.task

    def check(self) -> None:
        """Called when the step is over. Raises ValueError if it has not generated."""
        if self.task is None or not self.task.done():
            raise ValueError("it ended without `await models.actor.generate(...)`, so the step has no batch")

    def _group_size(self, n: int | None) -> int:
        most = self._config.group_size
        n = most if n is None else n
        if not 1 <= n <= most:
            raise ValueError(
                f"actor.generate(n={n}): use 1 to rollout.group_size={most}, for which memory is planned, or raise that field"
            )
        train = self._config.train
        judged = any(map(judges_by_group, (train.ppo, *ppo_by_task(train.ppo, train.tasks).values())))
        if n == 1 and most > 1 and (judged or self._config.reject_equal_rewards):
            raise ValueError(
                "actor.generate(n=1): a group of one has no advantage, and rollout.reject_equal_rewards would reject it; use "
                "n > 1, or train.ppo.advantage_norm=batch (in train.tasks none), baseline=none and "
                "rollout.reject_equal_rewards=false"
            )
        return n

    def _max_new_tokens(self, sampling: SamplingConfig | Mapping[str, Any] | None) -> int:
        configured = self._config.sampling
        wanted: dict[str, Any] = asdict(sampling) if isinstance(sampling, SamplingConfig) else dict(sampling or {})
        for name, value in wanted.items():
            if name not in (known := [entry.name for entry in fields(SamplingConfig)]):
                raise ValueError(f"actor.generate(sampling={{{name!r}: ...}}): it has {', '.join(known)}")
            if name != "max_new_tokens" and value != getattr(configured, name):
                raise ValueError(
                    f"actor.generate(sampling={{{name!r}: {value!r}}}): the loss is that of rollout.sampling.{name}="
                    f"{getattr(configured, name)!r}; leave it out, or change the config"
                )
        longest: int = wanted.get("max_new_tokens", configured.max_new_tokens)
        if not 1 <= longest <= configured.max_new_tokens:
            raise ValueError(
                f"actor.generate(sampling={{'max_new_tokens': {longest!r}}}): use 1 to rollout.sampling.max_new_tokens="
                f"{configured.max_new_tokens}, for which memory is planned, or raise that field"
            )
        return longest
