"""What a person sees while a run goes on, and at its end. Reads what the master writes; knows nothing else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.runtime.metrics import METRICS_FILE


class MetricsTail:
    """Prints one line per record that is added to metrics.jsonl after its making."""

    def __init__(self, run_dir: Path, total_steps: int, console: Console) -> None:
        self._path = run_dir / METRICS_FILE
        self._position = self._path.stat().st_size if self._path.exists() else 0
        self._total_steps = total_steps
        self._console = console
        self._file: TextIO | None = None

    def turn(self) -> None:
        """Print what has come since the last turn."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open(encoding="utf-8")
            self._file.seek(self._position)
        while line := self._file.readline():
            if not line.endswith("\n"):  # half a line: again when the rest is there
                self._file.seek(self._position)
                return
            self._position += len(line.encode())
            self._console.print(format_record(msgspec.json.decode(line), self._total_steps), highlight=False)


def format_record(record: Mapping[str, float], total_steps: int) -> str:
    """A train step or an evaluation as one line."""
    if "eval/sampled_reward" in record or "eval/greedy_reward" in record:
        scores = "  ".join(
            f"{mode} {record[f'eval/{mode}_reward']:.3f}"
            for mode in ("sampled", "greedy")
            if f"eval/{mode}_reward" in record
        )
        return f"[bold cyan]eval  step {record['step']:>4}  reward {scores}[/]"
    return (
        f"[bold]step {record['step']:>4}/{total_steps}[/]  version {record['version']:>4}  "
        f"[green]reward {record['reward/mean']:.3f}[/]  "
        f"off-policy head {record['offpolicy/head_mean']:.2f} (max {record['offpolicy/head_max']:.0f}) "
        f"tail {record['offpolicy/tail_mean']:.2f}  "
        f"{record['throughput/tokens_per_s']:>6.0f} tokens/s  "
        f"waited data {record['time/wait_data_s']:.2f} s  train {record['time/train_s']:.2f} s  "
        f"weights {record['time/wait_weights_s']:.2f} s"
    )


def print_summary(run_dir: Path, console: Console) -> None:
    """The summary of a run that came to its end."""
    summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=dict)
    table = Table(title="Summary", show_header=False, title_justify="left")
    for label, text in _summary_rows(summary):
        table.add_row(label, text)
    console.print(table)
    console.print(f"Everything of this run is in {run_dir}")
    console.print(f"The trained model: AutoModelForCausalLM.from_pretrained('{run_dir / 'checkpoints' / 'final'}')")


def _summary_rows(summary: Mapping[str, object]) -> list[tuple[str, str]]:
    def number(key: str) -> float:
        value = summary[key]
        assert isinstance(value, int | float), key
        return float(value)

    rows = [
        ("train steps", f"{number('steps'):.0f} (version {number('version'):.0f})"),
        ("trained on", f"{number('sequences'):.0f} responses, {number('generated_tokens'):.0f} generated tokens"),
        (
            "wall time",
            f"{number('wall_s'):.1f} s since the master started, {number('training_s'):.1f} s of it training",
        ),
        (
            "reward of a batch",
            f"{number('first_reward'):.3f} in the first step, {number('last_reward'):.3f} in the last",
        ),
    ]
    evaluations = summary["evaluations"]
    assert isinstance(evaluations, list)
    for evaluation in sorted(evaluations, key=lambda entry: entry["step"]):
        scores = [
            f"{mode} {evaluation[key]:.3f}"
            for mode in ("sampled", "greedy")
            if (key := f"eval/{mode}_reward") in evaluation
        ]
        rows.append((f"evaluation at step {evaluation['step']}", ", ".join(scores)))
    idle = summary["generation_idle_share"]
    rows += [
        (
            "trainer idle",
            f"{number('trainer_idle_share'):.0%} of the time (waiting for data {number('trainer_waits_data_share'):.0%}, "
            f"for weights {number('trainer_waits_weights_share'):.0%})",
        ),
        ("generation idle", "unknown" if idle is None else f"{float(str(idle)):.0%} of the time"),
        (
            "off-policyness, head",
            f"mean {number('head_offpolicyness_mean'):.2f}, max {number('head_offpolicyness_max'):.0f}; "
            f"{number('sequences_of_two_versions'):.0f} responses sampled by more than one version",
        ),
    ]
    rejected = summary["rejected"]
    assert isinstance(rejected, dict)
    rows.append(("rejected prompts", ", ".join(f"{why}: {count}" for why, count in rejected.items()) or "none"))
    return rows


def make_console() -> Console:
    """Wide enough for a step line where the output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)
