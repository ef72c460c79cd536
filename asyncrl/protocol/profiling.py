"""`asyncrl-launch profile` and the master, through name resolve."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Struct

MOST_PROFILED_STEPS = 10  # the events of all steps are in the workers' memory until they are written


class ProfileRequest(Struct, frozen=True, kw_only=True):
    """A request of `asyncrl-launch profile`, in name resolve. The master removes it when it is answered, the command when it
    ends."""

    id: str  # unique
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROFILED_STEPS)]  # number of train steps to record


class ProfileAnswer(Struct, frozen=True, kw_only=True):
    """The master's answer to a ProfileRequest, in name resolve: when the recording begins, and again when it is complete."""

    id: str  # of the request
    first_step: int
    last_step: int
    folder: str  # name of the folder in the run that has a file of each worker
    num_workers: int
    is_complete: bool = False
    failed: list[str] = []  # workers without a file
