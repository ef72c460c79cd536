"""The admission rule, which bounds staleness (pure).

The gate admits a train ticket while

    live + B * (trained_version - served_version) < (1 + eta) * B        (else refused: `staleness`)
    running < max_concurrent                                             (else refused: `capacity`)

with B the train batch in prompts and live = running, in transit, stored, or in the current train step. The rule for when a step
may start is the other half of the bound: asyncrl/master/batch.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """See the module's docstring."""

    batch_size: int
    eta: int
    max_concurrent: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; use at least 1 prompt a step")
        if self.eta < 0:
            raise ValueError(f"max_head_offpolicyness is {self.eta}; use 0 (synchronous) or more")
        if self.max_concurrent < 1:
            raise ValueError(f"max_concurrent_rollouts is {self.max_concurrent}; less than 1 would admit nothing")

    def room(self, *, live: int, running: int, trained: int, served: int) -> tuple[int, str]:
        """How many more tickets are admitted; if none, why."""
        behind = max(0, trained - served)
        fresh = (1 + self.eta - behind) * self.batch_size - live
        if fresh <= 0:
            return 0, "staleness"
        idle = self.max_concurrent - running
        if idle <= 0:
            return 0, "capacity"
        return min(fresh, idle), ""

    def refusal(self, *, live: int, running: int, trained: int, served: int) -> str:
        """Why one more ticket is not admitted; "" if it is."""
        return self.room(live=live, running=running, trained=trained, served=served)[1]
