"""Plans the model workers of a run. Imports no torch: one process a distinct rank computes with it (rank_main.py)."""

from __future__ import annotations

from typing import Literal

from asyncrl.config.schema import ExperimentConfig
from asyncrl.plan.result import PlanError, RankPlan


def plan_training(config: ExperimentConfig, *, device_type: Literal["cpu", "cuda"] = "cuda") -> list[RankPlan]:
    """Plan each distinct model worker of a run. Raises PlanError."""
    raise PlanError("planning is not complete yet")
