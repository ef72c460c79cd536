"""How a rollout ends early: rejected (the prompt is done with) or released (the prompt is handed out again)."""

from __future__ import annotations

from typing import Literal


class RolloutEnded(Exception):
    """A rollout that gives no trajectory. `reason` is short and of low cardinality: it becomes a metric label."""

    outcome: Literal["rejected", "released"]

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class RolloutRejected(RolloutEnded):
    """The prompt itself will not do (too long, a reward that fails, ...): it is not tried again in this epoch."""

    outcome = "rejected"


class RolloutReleased(RolloutEnded):
    """Not the prompt's fault (a lost server, a stop, ...): its ticket goes back and the prompt is handed out again."""

    outcome = "released"
