"""What a train step is written with: handles of the groups of a step and of the functions of its models.

    async def step(models: Models, batch: Batch) -> None:
        old, ref = models.actor.inf(batch), models.ref.inf(batch)   # both run now
        batch = batch.union(old, ref)
        batch = batch.union(models.actor.advantages(batch))
        await models.actor.train(batch)

A handle has ids, keys, lengths and rewards. The data itself stays on the model workers, until `read` asks for it. A call returns at
once, with a handle of its result. The result can be passed on, selected, chunked and concatenated before it exists: each call waits
for the keys that it reads.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.dataflow.mfc import MFCDef
from asyncrl.master.generating import Generate
from asyncrl.protocol.names import ACTOR
from asyncrl.protocol.trajectories import TrajectoryMeta

Reader = Callable[[Sequence[str], str], Awaitable[list[list[Any]]]]
MOST_READ = 1_000_000  # tokens whose values `Batch.read` returns: the master holds them as Python numbers


@dataclass(eq=False)
class Call:
    """One call of a function in a step."""

    mfc: MFCDef
    batches: tuple[Batch, ...]  # one, or with dispatch all_to_all one for each data rank
    ids: frozenset[str]
    where: str  # file:line of the call
    after: tuple[asyncio.Task[None], ...] = ()  # of earlier calls that must be over before this one is sent
    remakes: bool = False  # its output keys replace those of other calls, or those with which the groups came
    made: asyncio.Event = field(default_factory=asyncio.Event)  # the outputs exist, and their moves have been sent
    task: asyncio.Task[None] = field(init=False)
    is_used: bool = False  # another call reads its outputs, or the step has waited for it
    number: int = 0  # in the order of replies; 0: none yet, or the group of its workers is missing
    seconds: float | None = None  # at the slowest worker
    peak_s: float | None = None  # the seconds that the model FLOPs take at peak FLOP/s
    stats: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.mfc.role}.{self.mfc.function} ({self.where})"


class Batch:
    """Groups of responses, with the keys that they came with and those that calls make for them. Immutable.

    `await batch` waits until all of its calls are over. Raises the error of a call that failed.
    """

    def __init__(
        self,
        metas: Iterable[TrajectoryMeta],
        read: Reader,
        calls: Iterable[Call] = (),
        *,
        version: int = 0,
        dropped: Iterable[tuple[Call | None, str]] = (),
    ) -> None:
        """read: (ids, key) -> the values, by id and sequence, once a worker has them. version: the weights from which the step
        begins. dropped: keys that this batch does not have, though this call made them (None: though the groups came with them)."""
        self._metas, self._read, self.version, self._dropped = tuple(metas), read, version, frozenset(dropped)
        self.ids = tuple(meta.ticket_id for meta in self._metas)
        self._members = frozenset(self.ids)
        if len(self._members) != len(self.ids):
            raise ValueError("the same group is in a batch twice")
        self._calls = tuple(dict.fromkeys(calls))

    def __len__(self) -> int:
        return len(self.ids)

    def __await__(self) -> Generator[Any, None, Batch]:
        return self._over().__await__()

    async def _over(self) -> Batch:
        for call in self._calls:
            call.is_used = True
        if tasks := [call.task for call in self._calls]:
            await asyncio.wait(tasks)  # unlike gather, it does not cancel the calls if the caller is cancelled
        for task in tasks:
            task.result()
        return self

    @property
    def step(self) -> int:
        """The number of the step, as in the metrics: the step from version 0 is the first."""
        return self.version + 1

    async def read(self, key: str) -> list[list[Any]]:
        """The values of a key, by group and sequence, as lists of numbers; of a key with words the strings and objects.

        Waits for the calls that make them. Raises ValueError if a group lacks the key, or if the values are more than MOST_READ.
        """
        makers = self.makers(key)
        if (num_tokens := sum(map(sum, self.lengths))) > MOST_READ:
            raise ValueError(
                f"{key} of {num_tokens} tokens is too much to be read; select fewer groups ({MOST_READ} at most)"
            )
        for call in makers:
            call.is_used = True
            await call.made.wait()
        return await self._read(self.ids, key)

    @property
    def meta_info(self) -> dict[str, Any]:
        """Facts of the whole batch, as in verl's DataProto: `version`, `step`, `num_groups`, `num_sequences`, `num_tokens`."""
        lengths = self.lengths
        return {
            "version": self.version,
            "step": self.step,
            "num_groups": len(self),
            "num_sequences": sum(map(len, lengths)),
            "num_tokens": sum(map(sum, lengths)),
        }

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of each sequence, by group."""
        return [list(meta.seqlens) for meta in self._metas]

    @property
    def rewards(self) -> list[list[float]]:
        """Rewards of each response, by group."""
        return [list(meta.rewards) for meta in self._metas]

    @property
    def keys(self) -> frozenset[str]:
        """The keys that all groups have or will have."""
        made = {key for call in self._calls for key in self._made_by(call)}
        came = [set(meta.keys) for meta in self._metas]
        return frozenset(key for key in made.union(*came) if not self._without(key))

    @property
    def came_with(self) -> frozenset[str]:
        """The keys with which any of the groups came."""
        return frozenset(key for meta in self._metas for key in meta.keys)

    @property
    def stats(self) -> dict[str, float]:
        """The statistics of the calls of this batch that are over. Each is of all calls of its function in the step so far."""
        return {name: value for call in self._calls for name, value in call.stats.items()}

    def union(self, *others: Batch) -> Batch:
        """This batch with the keys of others, which have the same groups. Raises ValueError if two calls made the same key."""
        for other in others:
            if other._members != self._members:
                raise ValueError("union needs the same groups; use Batch.concat for different ones")
        return self._joined(self._metas, (self, *others))

    def select(self, ids: Collection[str]) -> Batch:
        """These groups of the batch, in the order of the batch. Raises ValueError if it lacks one."""
        wanted = set(ids)
        if unknown := wanted.difference(self.ids):
            raise ValueError(f"the batch lacks {len(unknown)} of the selected groups, e.g. {min(unknown)}")
        calls = [call for call in self._calls if not call.ids.isdisjoint(wanted)]
        return self._like((meta for meta in self._metas if meta.ticket_id in wanted), calls)

    def drop(self, *keys: str) -> Batch:
        """This batch without these keys, so that another call can make them again. Raises ValueError if it lacks one."""
        for key in keys:
            self.makers(key)
        dropped = {(call, key) for call in (None, *self._calls) for key in keys}
        return self._like(self._metas, self._calls, dropped | self._dropped)

    def chunk(self, n: int) -> list[Batch]:
        """n batches of neighbouring groups, whose sizes differ by at most one group."""
        if not 1 <= n <= len(self):
            raise ValueError(f"{len(self)} groups cannot be divided into {n} chunks")
        each, more = divmod(len(self), n)
        ends = [rank * each + min(rank, more) for rank in range(n + 1)]
        return [self.select(self.ids[start:end]) for start, end in itertools.pairwise(ends)]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """One batch of all of these groups. It has the keys that all parts have. Raises ValueError if two parts share a group."""
        if not batches:
            raise ValueError("concat needs at least one batch")
        return batches[0]._joined([meta for batch in batches for meta in batch._metas], batches)

    def makers(self, key: str) -> list[Call]:
        """The calls that make this key for some groups of the batch. Raises ValueError if a group neither has nor gets it."""
        if lacking := self._without(key):
            raise ValueError(
                f"{len(lacking)} of {len(self)} groups have no {key!r}; take the union with the result of the call that makes it"
            )
        return [call for call in self._calls if key in self._made_by(call)]

    def _made_by(self, call: Call) -> set[str]:
        return {key for key in call.mfc.output_keys if (call, key) not in self._dropped}

    def _like(
        self,
        metas: Iterable[TrajectoryMeta],
        calls: Iterable[Call],
        dropped: Iterable[tuple[Call | None, str]] | None = None,
    ) -> Batch:
        dropped = self._dropped if dropped is None else dropped
        return Batch(metas, self._read, calls, version=self.version, dropped=dropped)

    def _joined(self, metas: Iterable[TrajectoryMeta], batches: Sequence[Batch]) -> Batch:
        """Raises ValueError if two calls make the same key for the same group."""
        calls = [call for batch in batches for call in batch._calls]
        found = self._like(metas, calls, [entry for batch in batches for entry in batch._dropped])
        for number, call in enumerate(found._calls):
            for other in found._calls[:number]:
                twice = found._made_by(call) & found._made_by(other)
                if twice and call.ids & other.ids & found._members:
                    keys = ", ".join(sorted(twice))
                    raise ValueError(
                        f"{call} and {other} both make {keys} for the same groups; Batch.drop leaves out the one that is replaced"
                    )
        return found

    def _without(self, key: str) -> set[str]:
        made = [call.ids for call in self._calls if key in self._made_by(call)]
        if any(ids >= self._members for ids in made):
            return set()
        lacking = {meta.ticket_id for meta in self._metas if key not in meta.keys or (None, key) in self._dropped}
        return lacking.difference(*made)


class Function:
    """A function of a model. A call with a batch that has its input keys starts it. The result is a batch with its outputs."""

    def __init__(
        self,
        mfc: MFCDef,
        start: Callable[[Call, Batch], asyncio.Task[None]],
        *,
        num_ranks: int,
        is_left_out: bool,
        adds_up: bool = False,
    ) -> None:
        """start: begins the call. num_ranks: data ranks of the model. is_left_out: this step leaves the function out
        (train.num_critic_only_steps). adds_up: its gradients add up over the parts of a batch (train.streaming)."""
        self.mfc, self.num_ranks = mfc, num_ranks
        self._start, self._is_left_out, self._adds_up = start, is_left_out, adds_up
        self.calls: list[Call] = []

    def __call__(self, *batches: Batch, again: bool = False) -> Batch:
        """One batch, or with dispatch all_to_all one for each data rank. again: it may have groups that the function has trained in
        this step. Raises ValueError for another number of batches, if the batch lacks an input key, if the function trains a group
        for the second time in the step without `again`, or if it trains twice in a part of a batch (train.streaming)."""
        mfc = self.mfc
        if len(batches) != (expected := self.num_ranks if mfc.dispatch == "all_to_all" else 1):
            raise ValueError(
                f"{mfc.role}.{mfc.function} got {len(batches)} batches, and takes {expected} (dispatch {mfc.dispatch}, "
                f"{self.num_ranks} data ranks)"
            )
        batch = batches[0] if len(batches) == 1 else Batch.concat(batches)
        if self._is_left_out:
            return batch
        read = [call for key in mfc.input_keys for call in batch.makers(key)]
        call = Call(mfc, batches, frozenset(batch.ids), _caller())
        for earlier in self.calls if mfc.kind == "train_step" else ():
            if self._adds_up:
                raise ValueError(
                    f"{call} follows {earlier}: with train.streaming all of a part of a batch is one update"
                )
            if (twice := call.ids & earlier.ids) and not again:
                raise ValueError(
                    f"{call} trains {len(twice)} groups again that {earlier} has trained; pass again=True if that is meant"
                )
        for maker in read:
            maker.is_used = True
        call.task = self._start(call, batch)
        self.calls.append(call)
        return batch._like(batch._metas, [call], ())

    def check(self) -> None:
        """Called when the step is over. Raises ValueError if it forgot to train, or dropped the result of a call."""
        mfc = self.mfc
        if mfc.kind == "train_step" and not (self.calls or self._is_left_out):
            raise ValueError(f"it ended without a call of {mfc.role}.{mfc.function}, so the model was not trained")
        for call in self.calls:
            if not call.is_used:
                raise ValueError(f"the result of {call} was dropped; await it, pass it on, or do not call the function")


class Role:
    """The functions of a role's models, as attributes: `inf`, `train`, ..."""

    def __init__(self, name: str, functions: Iterable[Function], generate: Generate[Batch] | None) -> None:
        """generate: None: the role does not generate. Raises ValueError if a function has the same name."""
        self._name, self._functions = name, dict[str, Any]({function.mfc.function: function for function in functions})
        if generate is not None and self._functions.setdefault("generate", generate) is not generate:
            raise ValueError(f"train.mfcs has a function 'generate' of {name}; rename it, because the step generates")

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_functions", {}):
            return self._functions[name]
        hint = (
            "; only the actor generates, if the step is `async def step(models, prompts)`" if name == "generate" else ""
        )
        raise AttributeError(f"{self._name} has no function {name!r}; it has {', '.join(self._functions)}{hint}")


class Models:
    """The roles of a run, as attributes: `actor`, `ref`, `critic`, ... `functions`: all functions, in the order of their keys."""

    def __init__(self, functions: Sequence[Function], generate: Generate[Batch] | None = None) -> None:
        """generate: None: the step gets its batch."""
        self.functions, self._generate = list(functions), generate
        roles = dict.fromkeys(function.mfc.role for function in functions)
        self._roles = {
            name: Role(name, (f for f in functions if f.mfc.role == name), generate if name == ACTOR else None)
            for name in roles
        }

    @property
    def calls(self) -> list[Call]:
        """All calls of the step so far."""
        return [call for function in self.functions for call in function.calls]

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those of all calls, and of the generation of the batch. Each has a limit of its own."""
        generating = self._generate.task if self._generate is not None else None
        return [call.task for call in self.calls] + ([generating] if generating is not None else [])

    def check(self) -> None:
        """Called when the step is over. Raises ValueError if it forgot to generate or to train, or dropped the result of a call."""
        if self._generate is not None:
            self._generate.check()
        for function in self.functions:
            function.check()

    def __getattr__(self, name: str) -> Role:
        if name in self.__dict__.get("_roles", {}):
            return self._roles[name]
        raise AttributeError(f"the run has no role {name!r}; it has {', '.join(self._roles)}")


def _caller() -> str:
    """file:line of the call of a function: two frames up."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
