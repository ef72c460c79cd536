"""What a person sees while a run goes on, and at its end. Reads statuses and what the master writes; knows nothing else."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

from asyncrl.messages import Wait, WorkerStatus
from asyncrl.runtime.metrics import METRICS_FILE
from asyncrl.runtime.worker import LONG_WAIT_S

_MAX_NAMED = 8  # processes of one kind of news named in a line


class RunView:
    """Everything that `asyncrl-launch run` prints between its start and its summary.

    A line per train step and evaluation; until the first of them, who is not running yet and why: on a terminal as one line
    that changes, otherwise as a line per change. At any time: who waits for whom for longer than 20 s.
    """

    def __init__(self, run_dir: Path, total_steps: int, console: Console) -> None:
        self._console = console
        self._tail = MetricsTail(run_dir, total_steps)
        self._long_waits = LongWaits()
        self._started = time.monotonic()
        self._starting = True
        self._not_running: tuple[str, ...] = ()
        self._live: Status | None = None

    def turn(self, statuses: Sequence[WorkerStatus]) -> None:
        lines = self._tail.new_lines()
        if lines:
            self._end_start()
        for line in lines:
            self._print(line)
        if self._starting and statuses:
            self._show_start(statuses)
        for text in self._long_waits.new(statuses):
            self._print(f"[yellow]{escape(text)}[/]")

    def notice(self, text: str) -> None:
        """Something that a person should know at once."""
        self._print(f"[yellow]warning: {escape(text)}[/]")

    def close(self) -> None:
        """Print what is left."""
        self.turn(())
        self._end_start()
        self._tail.close()

    def _show_start(self, statuses: Sequence[WorkerStatus]) -> None:
        text = f"{time.monotonic() - self._started:5.1f} s  {start_text(statuses)}"
        if self._console.is_terminal:
            line = Text(text, no_wrap=True, overflow="ellipsis")
            if self._live is None:
                self._live = self._console.status(line, refresh_per_second=4)
                self._live.start()
            self._live.update(line)
            return
        not_running = tuple(status.worker for status in statuses if status.state == "starting")
        if not_running != self._not_running:
            self._not_running = not_running
            self._print(escape(text))

    def _end_start(self) -> None:
        self._starting = False
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, markup: str) -> None:
        try:
            self._console.print(markup, highlight=False, soft_wrap=True)
        except OSError:  # the terminal is gone, or the disk under the file full: the run goes on without
            self._console.on_broken_pipe()


def start_text(statuses: Sequence[WorkerStatus]) -> str:
    """Who runs, who does not yet and what that one is at; once all run, what the master waits for."""
    late = [status for status in statuses if status.state == "starting"]
    if late:
        named = ", ".join(f"{status.worker} ({_occupation(status)})" for status in late[:_MAX_NAMED])
        more = f" and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
        return f"{len(statuses) - len(late)} of {len(statuses)} processes run; starting: {named}{more}"
    waits = [_wait_text(wait) for status in statuses if status.worker == "master/0" for wait in status.waits]
    return f"all {len(statuses)} processes run{'; master/0 waits: ' + waits[0] if waits else ''}"


def _occupation(status: WorkerStatus) -> str:
    return status.waits[0].what if status.waits else "setting up"


def _wait_text(wait: Wait) -> str:
    return f"{wait.what} from {wait.on}"


class LongWaits:
    """Chooses the waits that are worth a line: past 20 s, and again whenever one has become twice as long as was said.

    Waits that differ in their worker's index or in numbers only (a version, a count) are one.
    """

    def __init__(self, after_s: float = LONG_WAIT_S) -> None:
        self._after_s = after_s
        self._said: dict[tuple[str, str], float] = {}

    def new(self, statuses: Sequence[WorkerStatus]) -> list[str]:
        """What to say now."""
        waits: dict[tuple[str, str], list[tuple[float, WorkerStatus, Wait]]] = {}
        for status in statuses:
            for wait in status.waits:
                if wait.since_s > self._after_s:
                    key = (status.worker.partition("/")[0], re.sub(r"\d+", "#", _wait_text(wait)))
                    waits.setdefault(key, []).append((wait.since_s, status, wait))
        lines = []
        for key, entries in waits.items():
            since_s, status, wait = max(entries, key=lambda entry: entry[0])
            if since_s < 2 * self._said.get(key, 0.0):
                continue
            self._said[key] = since_s
            others = len({entry[1].worker for entry in entries}) - 1
            who = f"{status.worker} and {others} more like it" if others else status.worker
            for_what = wait.what if wait.on == status.worker else _wait_text(wait)
            lines.append(f"{who} waited {since_s:.0f} s so far for {for_what} (limit {wait.limit_s:g} s)")
        return lines


class MetricsTail:
    """The lines of metrics.jsonl that were added after its making, as text."""

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self._path = run_dir / METRICS_FILE
        self._position = self._path.stat().st_size if self._path.exists() else 0
        self._total_steps = total_steps
        self._file: TextIO | None = None

    def new_lines(self) -> list[str]:
        """What has come since the last call, with markup."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open(encoding="utf-8")
            self._file.seek(self._position)
        lines = []
        while line := self._file.readline():
            if not line.endswith("\n"):  # half a line: again when the rest is there
                self._file.seek(self._position)
                break
            self._position += len(line.encode())
            lines.append(format_record(msgspec.json.decode(line), self._total_steps))
        return lines

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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
    model = f"AutoModelForCausalLM.from_pretrained('{run_dir / 'checkpoints' / 'final'}')"
    for line in (f"Everything of this run is in {run_dir}", f"The trained model: {model}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


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
            f"{mode} {evaluation[key]:.3f}{_version_range(evaluation, mode)}"
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


class RunConsole(Console):
    """One that falls silent, and lets the run go on, when nobody reads its output any more."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def make_console() -> Console:
    """Wide enough for a step line where the output is no terminal."""
    return RunConsole() if sys.stdout.isatty() else RunConsole(width=200)


def _version_range(evaluation: Mapping[str, float], mode: str) -> str:
    """Training goes on beside an evaluation: which versions it saw, where that is more than the one of its step."""
    first, last = (evaluation.get(f"eval/{mode}_version_{end}", evaluation["step"]) for end in ("min", "max"))
    return "" if first == last == evaluation["step"] else f" (versions {first:.0f} to {last:.0f})"
