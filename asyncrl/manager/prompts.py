"""Which prompt is handed out next (pure).

The ledger only counts: a prompt is a Locator (epoch, position); which line of the data set that is, the rollout workers'
prompt source knows. Prompts go out in order of their locators, those handed out before (their ticket was lost) first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from asyncrl.protocol.messages import Locator

_FIRST = Locator(0, 0)


class PromptCursor:
    """Every prompt of every epoch once, in order; what comes back goes first.

    A prompt before the cursor is out (live), back (in `again`) or finished; so nothing needs to be remembered of finished
    prompts. `_skipped` holds prompts from the cursor on that must not be handed out: finished before this manager began, or
    live by a ticket of the manager before it.
    """

    def __init__(
        self, num_prompts: int, num_epochs: int, *, start: Locator = _FIRST, done: Iterable[Locator] = ()
    ) -> None:
        if num_prompts < 1 or num_epochs < 1:
            raise ValueError(f"num_prompts is {num_prompts} and num_epochs is {num_epochs}; both must be at least 1")
        self.num_prompts = num_prompts
        self.num_epochs = num_epochs
        # A cursor may point one past an epoch's last prompt.
        self._next = start if start.position < num_prompts else Locator(start.epoch + 1, 0)
        self._skipped = {locator for locator in done if locator >= self._next}
        self._again: list[tuple[Locator, int]] = []  # heap of (prompt, which issue the next one is)
        self._advance()

    @property
    def exhausted(self) -> bool:
        """Nothing is left to hand out, unless a ticket is lost."""
        return not self._again and self._next.epoch >= self.num_epochs

    @property
    def next(self) -> Locator:
        return self._next

    @property
    def num_again(self) -> int:
        return len(self._again)

    def take(self) -> tuple[Locator, int]:
        """The next prompt and which issue of it this is (from 1). There must be one."""
        assert not self.exhausted
        if self._again:
            return heapq.heappop(self._again)
        taken = self._next
        self._next = self._successor(taken)
        self._advance()
        return taken, 1

    def put_back(self, locator: Locator, issue: int) -> None:
        """Its ticket is lost: hand it out again, before new ones, as issue number `issue`."""
        assert not self.is_waiting(locator), locator
        heapq.heappush(self._again, (locator, issue))

    def is_waiting(self, locator: Locator) -> bool:
        """Still to be handed out (or handed out again)."""
        if locator >= self._next:
            return self._in_range(locator) and locator not in self._skipped
        return any(waiting == locator for waiting, _ in self._again)

    def withdraw(self, locator: Locator) -> bool:
        """Do not hand it out: it is live by another ticket. False where it was not waiting."""
        if not self.is_waiting(locator):
            return False
        if locator >= self._next:
            self._skipped.add(locator)
            self._advance()
        else:
            self._again = [entry for entry in self._again if entry[0] != locator]
            heapq.heapify(self._again)
        return True

    def _in_range(self, locator: Locator) -> bool:
        return locator.epoch < self.num_epochs and 0 <= locator.position < self.num_prompts

    def _successor(self, locator: Locator) -> Locator:
        if locator.position + 1 < self.num_prompts:
            return Locator(locator.epoch, locator.position + 1)
        return Locator(locator.epoch + 1, 0)

    def _advance(self) -> None:
        while self._next in self._skipped:
            self._skipped.discard(self._next)
            self._next = self._successor(self._next)
