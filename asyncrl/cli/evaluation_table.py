"""The record of an evaluation as a table: a row for each set, mode and task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from asyncrl.algorithms.metrics import EvalName
from asyncrl.cli.run_files import number
from asyncrl.cli.tables import Column, FittedTable


def evaluation_table(title: str, evaluation: Mapping[str, Any]) -> FittedTable:
    """evaluation: its metrics, as in summary.json."""
    rows = []
    for name in _parts(evaluation):
        failed = number(evaluation, str(name._replace(value="num_failed")))
        rows.append(
            (
                escape(name.eval_set or "eval.prompts"),
                name.mode,
                escape(name.task),
                f"{number(evaluation, str(name._replace(value='num_prompts'))):.0f}"
                + (f" ({failed:.0f} failed)" if failed else ""),
                _estimate(evaluation, name),
                ", ".join(f"{one.value} {_estimate(evaluation, one)}" for one in _at_k(evaluation, name)),
                f"{number(evaluation, str(name._replace(value='length'))):.0f}",
            )
        )
    columns: list[Column | str] = ["set", "mode", "task", "prompts", "reward", Column("at k", "text"), "tokens"]
    return FittedTable(title, columns, rows)


def failed_parts(evaluation: Mapping[str, Any]) -> list[str]:
    """The sets and modes of which every prompt failed."""
    found = []
    for name in _parts(evaluation):
        failed, total = (evaluation.get(str(name._replace(value=value))) for value in ("num_failed", "num_prompts"))
        if failed == total and not name.task:
            found.append(f"{name.eval_set or 'eval.prompts'}, {name.mode}")
    return found


def _parts(evaluation: Mapping[str, Any]) -> list[EvalName]:
    return [name for name in filter(None, map(EvalName.parse, evaluation)) if name.value == "reward"]


def _at_k(evaluation: Mapping[str, Any], part: EvalName) -> list[EvalName]:
    names = filter(None, map(EvalName.parse, evaluation))
    beside = (name for name in names if name._replace(value=part.value) == part)
    return [name for name in beside if "@" in name.value and not name.value.endswith("_ci95")]


def _estimate(evaluation: Mapping[str, Any], name: EvalName) -> str:
    interval = evaluation.get(str(name._replace(value=f"{name.value}_ci95")))
    return f"{number(evaluation, str(name)):.3f}{f' ±{interval:.3f}' if interval is not None else ''}"
