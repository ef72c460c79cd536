"""A check in one file: the config names no owner of its experiments. test_checks.py adds its row to the table."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import ConfigError
from asyncrl.launch.checks.checklist import FIELDS, Case, Check, Finding, judge

OWNER = "the owner"


def examine(case: Case) -> Iterator[ConfigError | Finding]:
    experiment = case.config.experiment
    if experiment == "nameless":
        raise ConfigError(f"experiment={experiment!r}: names no owner; use another name")
    owner = experiment.partition("-")[0]
    yield judge("owner", owner, (owner == "root", "warn", "set experiment=<your name>-..."))


ROW = Check("owner", examine, reads=("experiment",), needs=(FIELDS,), gives=OWNER)
