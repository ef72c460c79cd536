"""The checks of a config's files, as `asyncrl-launch run` makes them before it starts."""

from __future__ import annotations

from asyncrl.config.schema import ExperimentConfig
from asyncrl.launch.checks.checklist import Case, make_checks
from asyncrl.launch.checks.preflight import CHECKS


def preflight(config: ExperimentConfig) -> int:
    """Returns the number of prompts. Raises ConfigError with every problem."""
    report = make_checks(CHECKS, Case(config))
    report.refuse()
    return report.case.num_prompts
