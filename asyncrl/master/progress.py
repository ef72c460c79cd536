"""Which prompts are done: the master's part of exactly once. Pure.

Every prompt of every epoch ends trained once or rejected with a reason. What is done is a cursor (all before it are done) and
the few done ones after it; that pair is what a checkpoint holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from asyncrl.protocol.messages import Locator


class PromptProgress:
    """`mark` each prompt once; `is_done` tells a late or doubled trajectory from a new one."""

    def __init__(self, num_prompts: int, num_epochs: int) -> None:
        if num_prompts < 1 or num_epochs < 1:
            raise ValueError(f"{num_prompts} prompts and {num_epochs} epochs: nothing to train on")
        self.num_prompts = num_prompts
        self.num_epochs = num_epochs
        self.num_trained = 0
        self.rejected: Counter[str] = Counter()
        self._cursor = 0  # flat index: epoch * num_prompts + position
        self._beyond: set[int] = set()

    @property
    def num_done(self) -> int:
        return self._cursor + len(self._beyond)

    @property
    def num_total(self) -> int:
        return self.num_prompts * self.num_epochs

    @property
    def cursor(self) -> Locator:
        """Every prompt before it is done."""
        return Locator(*divmod(self._cursor, self.num_prompts))

    @property
    def beyond_cursor(self) -> list[Locator]:
        """Done prompts after the cursor."""
        return [Locator(*divmod(flat, self.num_prompts)) for flat in sorted(self._beyond)]

    def epochs_done(self) -> float:
        """In epochs, with fraction."""
        return self.num_done / self.num_prompts

    def contains(self, locator: Locator) -> bool:
        """Whether there is such a prompt."""
        return 0 <= locator.epoch < self.num_epochs and 0 <= locator.position < self.num_prompts

    def is_done(self, locator: Locator) -> bool:
        flat = self._flat(locator)
        return flat < self._cursor or flat in self._beyond

    def mark_trained(self, locators: Iterable[Locator]) -> None:
        """Raises ValueError for a prompt that is done already: it would have been trained twice."""
        for locator in locators:
            self._mark(locator)
            self.num_trained += 1

    def mark_rejected(self, locator: Locator, reason: str) -> None:
        self._mark(locator)
        self.rejected[reason] += 1

    def restore(
        self, cursor: Locator, beyond: Iterable[Locator], num_trained: int, rejected: Mapping[str, int]
    ) -> None:
        """Go on from what a checkpoint holds."""
        self._cursor = cursor.epoch * self.num_prompts + cursor.position
        self._beyond = {self._flat(locator) for locator in beyond}
        self.num_trained = num_trained
        self.rejected = Counter(rejected)

    def _mark(self, locator: Locator) -> None:
        flat = self._flat(locator)
        if flat < self._cursor or flat in self._beyond:
            raise ValueError(f"prompt {locator} is done already")
        self._beyond.add(flat)
        while self._cursor in self._beyond:
            self._beyond.remove(self._cursor)
            self._cursor += 1

    def _flat(self, locator: Locator) -> int:
        if not self.contains(locator):
            raise ValueError(f"{locator} is outside {self.num_epochs} epochs of {self.num_prompts} prompts")
        return locator.epoch * self.num_prompts + locator.position
