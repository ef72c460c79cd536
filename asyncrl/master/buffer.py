"""The master's view of what the model workers hold: metadata only, never a tensor. Who holds what: tracker.py.

A trajectory enters once (`put`: the first of its prompt wins), is chosen into a batch, gains keys as MFCs write them
(`amend_batch`), and leaves when its train step is over. An MFC's call starts when the batch has all its input keys
(`get_batch_for_rpc`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.dataflow.graph import MFCDef
from asyncrl.master.progress import PromptProgress
from asyncrl.protocol.messages import Locator, StoreVerdict, TrajectoryMeta


@dataclass
class _Entry:
    meta: TrajectoryMeta
    keys: set[str]
    read_by: set[str] = field(default_factory=set)


class AsyncIOSequenceBuffer:
    """Bounded by construction: it holds at most `capacity` trajectories, and refuses more (a head would have to resend)."""

    def __init__(self, progress: PromptProgress, *, capacity: int, attempt: int) -> None:
        self._progress = progress
        self._capacity = capacity
        self._attempt = attempt
        self._entries: dict[str, _Entry] = {}
        self._by_prompt: dict[Locator, str] = {}
        self._batch: tuple[str, ...] = ()
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def stored(self) -> list[TrajectoryMeta]:
        """Accepted and in no batch yet."""
        batch = set(self._batch)
        return [entry.meta for ticket, entry in self._entries.items() if ticket not in batch]

    @property
    def stored_tickets(self) -> list[str]:
        """Accepted and not consumed, those of the current batch included."""
        return list(self._entries)

    def put(self, meta: TrajectoryMeta) -> StoreVerdict:
        """Accept a trajectory, once per prompt, or say why not. Telling again about an accepted one changes nothing."""
        if meta.attempt != self._attempt:
            return StoreVerdict(verdict="refused", reason=f"attempt {meta.attempt} is over, this is {self._attempt}")
        if not self._progress.contains(meta.locator):
            return StoreVerdict(verdict="refused", reason=f"no prompt at {meta.locator}")
        if meta.ticket_id in self._entries:
            return StoreVerdict(verdict="stored")
        if self._progress.is_done(meta.locator) or meta.locator in self._by_prompt:
            return StoreVerdict(verdict="duplicate", reason="another ticket of this prompt was first")
        if len(self._entries) >= self._capacity:
            return StoreVerdict(verdict="refused", reason=f"the buffer holds {self._capacity} trajectories already")
        self._entries[meta.ticket_id] = _Entry(meta, set(meta.keys))
        self._by_prompt[meta.locator] = meta.ticket_id
        return StoreVerdict(verdict="stored")

    def holds(self, locator: Locator) -> bool:
        """Whether a trajectory of this prompt is stored, in the current batch included."""
        return locator in self._by_prompt

    def drop(self, ticket_id: str) -> None:
        """Forget a trajectory that will not be trained."""
        entry = self._entries.pop(ticket_id)
        del self._by_prompt[entry.meta.locator]

    def metas(self, tickets: Iterable[str]) -> list[TrajectoryMeta]:
        return [self._entries[ticket].meta for ticket in tickets]

    def common_keys(self, tickets: Iterable[str]) -> frozenset[str]:
        """Keys that all of these trajectories have by now."""
        keys = [self._entries[ticket].keys for ticket in tickets]
        return frozenset.intersection(*map(frozenset, keys)) if keys else frozenset()

    async def begin_batch(self, tickets: Sequence[str]) -> None:
        """The batch of the next step, in canonical order."""
        if self._batch:
            raise RuntimeError("a batch is in its step already")
        missing = [ticket for ticket in tickets if ticket not in self._entries]
        if missing or not tickets:
            raise ValueError(f"cannot make a batch of {len(tickets)} tickets; not stored: {missing[:5]}")
        async with self._changed:
            self._batch = tuple(tickets)
            self._changed.notify_all()

    async def get_batch_for_rpc(self, mfc: MFCDef) -> tuple[str, ...]:
        """Ids of the batch, as soon as all of them have all input keys of the MFC. Bounded by the caller."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ready(mfc))
            for ticket in self._batch:
                self._entries[ticket].read_by.add(mfc.name)
            return self._batch

    async def amend_batch(self, tickets: Sequence[str], keys: Iterable[str]) -> None:
        """An MFC has written these keys for these ids."""
        new = set(keys)
        async with self._changed:
            for ticket in tickets:
                self._entries[ticket].keys |= new
            self._changed.notify_all()

    def missing_keys(self, mfc: MFCDef) -> dict[str, int]:
        """What an MFC still waits for: key -> number of ids without it."""
        return {
            key: count
            for key in mfc.input_keys
            if (count := sum(key not in self._entries[ticket].keys for ticket in self._batch))
        }

    def end_batch(self) -> None:
        """The step is over: its trajectories leave."""
        for ticket in self._batch:
            self.drop(ticket)
        self._batch = ()

    def _ready(self, mfc: MFCDef) -> bool:
        if not self._batch:
            return False
        needed = set(mfc.input_keys)
        return all(mfc.name not in self._entries[t].read_by and needed <= self._entries[t].keys for t in self._batch)
