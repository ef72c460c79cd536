"""Trajectories (rollout worker -> head -> master): metadata, and the acknowledgement that comes back."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Locator(Struct, frozen=True, order=True, array_like=True):
    """Identifies a prompt: its position in the seeded order of an epoch of the prompt source."""

    epoch: int
    position: int


class GroupSummary(Struct, frozen=True, kw_only=True):
    """Lengths, rewards and versions of a group of responses, with one entry for each sequence. rewards/trajectory.py makes it."""

    seqlens: list[int]  # prompt + response
    response_lengths: list[int]  # sampled tokens
    rewards: list[float]
    version_start: list[int]  # packed WeightVersion of the oldest sampled token
    version_end: list[int]  # of the newest one
    # In evaluations: the answers of the responses, null without one; empty if the rewards give none (rewards/score.py)
    answers: list[str | None] = []
    num_seats: int = 1  # in evaluations: the responses are of so many seats, one seat after another


class TrajectoryMeta(GroupSummary, frozen=True, kw_only=True):
    """A trajectory without its tensors. The rollout worker sends it with them to a head; the head sends only it to the master."""

    ticket_id: str
    locator: Locator
    attempt: int
    head: int
    keys: list[str]
    birth_time: float  # start of the rollout, in seconds since the epoch; see data/sequence.py
    task_id: int = 0


class StoreVerdict(Struct, frozen=True, kw_only=True):
    """The acknowledgement of a trajectory, from the master through the head to the rollout worker."""

    verdict: Literal["stored", "duplicate", "refused"]
    reason: str = ""
