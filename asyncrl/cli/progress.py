"""Terminal output during a run and at its end. Its only inputs are worker statuses and the master's files.

Also the progress line of scripts that make a model or data.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from asyncrl.algorithms.metrics import EvalName, at_most_k
from asyncrl.cli.advice import AdviceNews, advise
from asyncrl.cli.evaluation_table import evaluation_table
from asyncrl.cli.run_files import is_evaluation, number, read_runs, read_summary
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.config.modes import mode_of
from asyncrl.config.schema import TRACKERS
from asyncrl.data.auto_classes import auto_class_of
from asyncrl.data.trajectories import recording_dir
from asyncrl.protocol.errors import same_cause
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.board import LONG_WAIT_S
from asyncrl.runtime.metrics import METRICS_FILE, JsonLinesReader
from asyncrl.weights.adapter import ABOUT

WINDOW = 20  # newest steps from which the remaining time is estimated
_LINE_EVERY_S = 5.0


def seconds_left(durations: Collection[float], steps_left: int) -> float | None:
    """Mean duration of the newest steps times the steps left; None before the first step has ended."""
    return fmean(durations) * max(steps_left, 0) if durations else None


def step_text(step: int, total: int, durations: Collection[float]) -> str:
    """`120/300, 40 %, 0:08 left`."""
    share = f", {100 * min(step / total, 1.0):.0f} %" if total else ""
    left_s = seconds_left(durations, total - step)
    return f"{step}/{total or '?'}{share}{f', {duration_text(left_s)} left' if left_s else ''}"


def duration_text(seconds: float) -> str:
    """`0:05`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def bottom_line(text: str, console: Console) -> Text:
    """The text as a line; on a terminal it is cut to the terminal's width, less the room for a spinner before it."""
    line = Text(text)
    if console.is_terminal:
        line.truncate(console.width - 3, overflow="ellipsis")
    return line


class StepProgress:
    """Shows step, percent and remaining time of a script's work, and its duration at the end.

    On a terminal it is one line that changes, otherwise a new line at most every five seconds:

        with StepProgress("warm start", 300) as progress:
            for _ in range(300):
                ...
                progress.advance(note=f"loss {loss:.3f}")

    Without a total it prints only the beginning and the end.
    """

    def __init__(
        self,
        what: str,
        total: int = 0,
        *,
        unit: str = "steps",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._console = console or Console()
        self._clock = clock
        self._began = self._newest = self._printed = clock()
        self._done = 0
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._note = ""
        self._live: Status | None = None

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._live = self._console.status(self._line(), refresh_per_second=8)
            self._live.start()
        elif not self._total:
            self._print(f"{self._what} ...")
        return self

    def advance(self, steps: int = 1, *, note: str = "") -> None:
        """Count `steps` more finished steps. note: text to show after them."""
        now = self._clock()
        self._done += steps
        self._durations.append((now - self._newest) / steps)
        self._newest = now
        self._note = note
        if self._live is not None:
            self._live.update(self._line())
        elif self._done < self._total and now - self._printed >= _LINE_EVERY_S:
            self._printed = now
            self._print(self._line().plain)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if error is None:
            took = duration_text(self._clock() - self._began)
            done = f"{self._done} {self._unit} in {took}" if self._total else took
            self._print(f"{self._what}: {done}{self._noted()}")

    def _line(self) -> Text:
        progress = f": {step_text(self._done, self._total, self._durations)}" if self._total else ""
        return bottom_line(f"{self._what}{progress}{self._noted()}", self._console)

    def _noted(self) -> str:
        return f", {self._note}" if self._note else ""

    def _print(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)


def recording_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary of a rollout_only run as rows of label and text."""
    seconds = max(summary["training_s"], 1e-9)
    tokens, responses = summary["generated_tokens"], summary["sequences"]
    rows = [
        ("recorded", f"{summary['groups']} groups, {responses} responses, in {summary['steps']:.0f} batches"),
        ("generated tokens", f"{tokens}, {tokens / max(responses, 1):.1f} a response"),
        (
            "reward",
            f"mean {summary['mean_reward']:.3f}; {summary['first_reward']:.3f} in the first batch, "
            f"{summary['last_reward']:.3f} in the last",
        ),
        (
            "throughput",
            f"{tokens / seconds:.0f} tokens/s, {summary['groups'] / seconds:.2f} groups/s, in {seconds:.1f} s of rollouts",
        ),
        ("wall time", f"{summary['wall_s']:.1f} s since the master started"),
    ]
    for evaluation in summary["evaluations"]:  # all of version 0, whatever their step
        rows.append(("evaluation of the weights", ", ".join(_scores(evaluation, with_versions=False))))
    return [*rows, _rejected_row(summary)]


def recording_lines(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """The folder of the trajectories, and the commands that use them."""
    folder = recording_dir(run_dir, summary["attempt"])
    return [
        f"The trajectories: {folder}",
        f"Look at them:     asyncrl-launch inspect {run_dir}",
        f"Train on them:    asyncrl-launch run CONFIG mode=train_only replay.path={folder} trial=... eval.prompts=null "
        f"manager.max_head_offpolicyness={max(summary['steps'] - 1, 0)}",
    ]


_MAX_NAMED = 8  # one line names at most this many processes
_QUIET_S = 2.0  # if no step has ended for this long, the bottom line shows what the master waits for


class RunView:
    """Everything that `asyncrl-launch run` prints between its start and its summary.

    It prints one line per train step and evaluation. On a terminal, a step's line leaves out fields that do not fit, and a line at
    the bottom changes: it shows the processes that are starting, then step, remaining time, reward and evaluations. Otherwise each
    change during start-up has a line, and a step's line has all fields and ends with the remaining time. Waits longer than 20 s
    have their own line.
    """

    def __init__(
        self, run_dir: Path, total_steps: int, console: Console, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._metrics = JsonLinesReader(run_dir / METRICS_FILE, broken=self.notice, newest_bytes=0)
        self._began = clock()
        self._training = TrainingProgress(total_steps)
        self._long_waits, self._notes = LongWaits(), Notes()
        self._advice = AdviceNews()
        self._skipped = SkippedSteps(run_dir)
        self._starting = True
        self._said_done = False
        self._not_running: tuple[str, ...] = ()
        self._live: Status | None = None

    def turn(self, statuses: Sequence[WorkerStatus]) -> None:
        now = self._clock()
        for record in self._metrics.new_records():
            self._starting = False
            self._training.add(record, now)
            news = [] if is_evaluation(record) else self._advice.new(record)
            briefs = self._advice.briefs()
            if is_evaluation(record):
                self._print(evaluation_line(record) + escape(self._training.note(record)))
            elif self._console.is_terminal:
                self._print(step_line(record, self._training.total_steps, self._console.width, briefs=briefs))
            else:
                line = step_line(record, self._training.total_steps, briefs=briefs)
                self._print(line + self._training.left_text())
            for text in news:
                self.notice(text)
            if (skipped := self._skipped.news(record)) is not None:
                self.notice(skipped)
        if statuses:
            self._show(statuses, now)
        for text in self._notes.new(statuses):
            self.notice(text)
        for text in self._long_waits.new(statuses):
            self._print(f"[yellow]{escape(text)}[/]")

    def notice(self, text: str) -> None:
        """Print a warning."""
        self._print(f"[yellow]warning: {escape(text)}[/]")

    def say(self, text: str) -> None:
        """Print information."""
        self._print(escape(text))

    def close(self) -> None:
        """Print the remaining records."""
        self.turn(())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, statuses: Sequence[WorkerStatus], now: float) -> None:
        """Show the current state: in the bottom line of a terminal, otherwise as a line for each change."""
        start = f"{now - self._began:5.1f} s  {start_text(statuses)}"
        if self._console.is_terminal:
            text = start if self._starting else self._training.bottom_text(statuses, now)
            line = bottom_line(text, self._console)
            if self._live is None:
                self._live = self._console.status(line, refresh_per_second=4)
                self._live.start()
            self._live.update(line)
        elif self._starting:
            not_running = tuple(status.worker for status in statuses if status.state == "starting")
            if not_running != self._not_running:
                self._not_running = not_running
                self._print(escape(start))
        elif self._training.lingers(now) and not self._said_done:
            self._said_done = True
            self._print(escape(self._training.bottom_text(statuses, now)))

    def _print(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)


class TrainingProgress:
    """Training progress and remaining time, from the records of metrics.jsonl (pure)."""

    def __init__(self, total_steps: int) -> None:
        """total_steps: 0 if unknown."""
        self.total_steps = total_steps
        self.step = 0
        self.reward = math.nan  # of the newest step
        self._newest = -math.inf  # time when the record of `step` was added
        self._durations: deque[float] = deque(maxlen=WINDOW)

    def add(self, record: Mapping[str, Any], now: float) -> None:
        """Add a record; evaluations are ignored. If steps are trained again from a checkpoint, `step` goes back to their
        numbers."""
        if is_evaluation(record):
            return
        self.step, self.reward, self._newest = int(number(record, "step")), number(record, "reward/mean"), now
        if math.isfinite(seconds := number(record, "time/step_s")):
            self._durations.append(seconds)

    @property
    def left_s(self) -> float | None:
        return seconds_left(self._durations, self.total_steps - self.step) if self.total_steps else None

    def left_text(self) -> str:
        """`  0:40 left`, for the end of a step's line."""
        return f"  {duration_text(self.left_s)} left" if self.left_s else ""

    def text(self) -> str:
        """`step 12/60, 20 %, 0:40 left, reward 0.350`."""
        steps = (
            f"all {self.total_steps} steps done"
            if self._is_done()
            else f"step {step_text(self.step, self.total_steps, self._durations)}"
        )
        return f"{steps}, reward {self.reward:.3f}" if math.isfinite(self.reward) else steps

    def bottom_text(self, statuses: Sequence[WorkerStatus], now: float) -> str:
        """The bottom line of a terminal: the same as `text`, then the number of running evaluations and, if no step has ended for
        _QUIET_S, what the master waits for."""
        parts = [self.text()]
        running = sum(status.queues.get("evaluations", 0) for status in statuses)
        if running:
            parts.append(f"{running} evaluation{'s' if running > 1 else ''} running")
        wait = _master_wait(statuses)
        if wait and now - self._newest > _QUIET_S:
            parts.append(f"master/0 waits: {wait}")
        return "  ".join(parts)

    def note(self, record: Mapping[str, Any]) -> str:
        """`  (of step 10, 2 steps ago)`, for the end of an evaluation's line; "" if no later step was printed before it. Training
        continues during evaluations, so later steps may have ended."""
        later = self.step - int(number(record, "step"))
        return f"  (of step {record['step']}, {later} step{'s' if later > 1 else ''} ago)" if later > 0 else ""

    def lingers(self, now: float) -> bool:
        """Whether all steps have been done for a while, but the run has not ended."""
        return self._is_done() and now - self._newest > _QUIET_S

    def _is_done(self) -> bool:
        return 0 < self.total_steps <= self.step


def start_text(statuses: Sequence[WorkerStatus]) -> str:
    """How many processes run, and what each starting process is doing; once all run, what the master waits for."""
    late = [status for status in statuses if status.state == "starting"]
    if late:
        named = ", ".join(
            f"{status.worker} ({status.waits[0].what if status.waits else 'setting up'})"
            for status in late[:_MAX_NAMED]
        )
        more = f" and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
        return f"{len(statuses) - len(late)} of {len(statuses)} processes run; starting: {named}{more}"
    wait = _master_wait(statuses)
    return f"all {len(statuses)} processes run{f'; master/0 waits: {wait}' if wait else ''}"


def _master_wait(statuses: Sequence[WorkerStatus]) -> str:
    """The first wait of the master that holds up training, as text; "": there is none. The master's requests to the manager, such
    as /evaluate, do not hold up training."""
    waits = [wait for status in statuses if status.worker == "master/0" for wait in status.waits]
    return next((_wait_text(wait) for wait in waits if not wait.what.startswith("/")), "")


def _wait_text(wait: Wait) -> str:
    return f"{wait.what} from {wait.on}"


class LongWaits:
    """Selects the waits to report: after 20 s, and again each time that the wait has doubled since the last report.

    Waits that differ only in the worker's index or in numbers (a version, a count) count as one.
    """

    def __init__(self, after_s: float = LONG_WAIT_S) -> None:
        self._after_s = after_s
        self._said: dict[tuple[str, str], float] = {}

    def new(self, statuses: Sequence[WorkerStatus]) -> list[str]:
        """The lines to print now."""
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
            limit = "no limit" if wait.limit_s is None else f"limit {wait.limit_s:g} s"
            lines.append(f"{who} waited {since_s:.0f} s so far for {for_what} ({limit})")
        return lines


class Notes:
    """Selects the notes of workers to report: each once, however its numbers change."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def new(self, statuses: Sequence[WorkerStatus]) -> list[str]:
        """The lines to print now."""
        lines = []
        for note in (note for status in statuses for note in status.notes):
            if (cause := same_cause(note)) not in self._said:
                self._said.add(cause)
                lines.append(note)
        return lines


class SkippedSteps:
    """Reports train steps with a loss or gradient that was not finite: the first three, then every tenth."""

    ALL_UNTIL, THEN_EVERY = 3, 10

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._num_steps = 0

    def news(self, record: Mapping[str, Any]) -> str | None:
        """The warning for a record of metrics.jsonl; None if there is nothing to report."""
        parts = [
            f"{number(record, name):.0f} of {number(record, f'{role}/optimizer_steps'):.0f} optimizer steps of the {role}"
            for name in record
            if name.endswith("/skipped_steps") and number(record, name) > 0
            for role in [name.partition("/")[0]]
        ]
        if not parts:
            return None
        self._num_steps += 1
        if self._num_steps > self.ALL_UNTIL and self._num_steps % self.THEN_EVERY:
            return None
        so_far = f" ({self._num_steps} such train steps so far)" if self._num_steps > 1 else ""
        step = record["step"]
        return (
            f"step {step}: {' and '.join(parts)} skipped, because loss or gradient was not finite{so_far}. To find the "
            f"sequences that caused it: python examples/bad_batch/examine.py {self._run_dir} {step}"
        )


def evaluation_line(record: Mapping[str, Any]) -> str:
    """An evaluation as one line, with markup."""
    return f"[bold cyan]eval  step {record['step']:>4}  reward {'  '.join(_scores(record))}[/]"


def _scores(evaluation: Mapping[str, Any], *, with_versions: bool = True) -> list[str]:
    """The reward of each mode, with the half width of its 95 % interval. with_versions: ` (versions 10 to 12)` follows if the
    evaluation used other weight versions than that of its step: training continues during evaluations."""
    scores = []
    for name in filter(None, map(EvalName.parse, evaluation)):
        if name.value != "reward" or name.task:
            continue
        key = str(name)
        first, last = (
            evaluation.get(str(name._replace(value=f"version_{end}")), evaluation["step"]) for end in ("min", "max")
        )
        shown = with_versions and not first == last == evaluation["step"]
        versions = f" (versions {first:.0f} to {last:.0f})" if shown else ""
        interval = f" ±{number(evaluation, f'{key}_ci95'):.3f}" if f"{key}_ci95" in evaluation else ""
        label = f"{name.eval_set} {name.mode}".lstrip()
        most = [f" {best.value} {number(evaluation, str(best)):.3f}" for best in at_most_k(evaluation, name)]
        scores.append(f"{label} {number(evaluation, key):.3f}{interval}{''.join(most)}{versions}")
    return scores


def step_line(
    record: Mapping[str, Any], total_steps: int, width: int | None = None, *, briefs: Sequence[str] = ()
) -> str:
    """A train step as one line, with markup. Fields that the record does not have are left out.

    width: of a terminal; the least important fields are left out until the line fits. briefs: why the run does not learn.
    """
    parts = {0: f"[bold]step {record['step']:>4}/{total_steps}[/]"}
    for rank, text, keys in _STEP_PARTS:
        if all(key in record for key in keys):
            parts[rank] = text.format(*(number(record, key) for key in keys))
        if rank == _REWARD and briefs:
            parts[_BRIEFS] = f"[yellow]{escape('  '.join(briefs))}[/]"
    while len(parts) > 1 and width is not None and Text.from_markup("  ".join(parts.values())).cell_len > width:
        del parts[max(parts)]
    return "  ".join(parts.values())


# (rank, text, the record's keys that the text needs), in the order in which a line shows them. If a terminal is too narrow, the
# parts with the highest ranks are left out
_REWARD, _BRIEFS = 1, 2
_STEP_PARTS = (
    (8, "version {:>4.0f}", ("version",)),
    (_REWARD, "[green]reward {:.3f}[/]", ("reward/mean",)),
    (
        6,
        "off-policy head {:.2f} (max {:.0f}) tail {:.2f}",
        ("offpolicy/head_mean", "offpolicy/head_max", "offpolicy/tail_mean"),
    ),
    (4, "{:>6.0f} tokens/s", ("throughput/tokens_per_s",)),
    (5, "waited data {:.2f} s", ("time/wait_data_s",)),
    (3, "train {:.2f} s", ("time/train_s",)),
    (7, "weights {:.2f} s", ("time/wait_weights_s",)),
)


def print_summary(run_dir: Path, console: Console) -> None:
    """Print the summary of a complete run."""
    summary = read_summary(run_dir)
    mode = mode_of(str(summary.get("mode")))
    if not mode.forms_batches:
        for evaluation in summary["evaluations"]:
            console.print(evaluation_table("Evaluation of the weights", evaluation))
        console.print(f"Everything of this run is in {run_dir}", markup=False, highlight=False, soft_wrap=True)
        return
    recorded = not mode.trains
    advice = [found.line for run in read_runs([run_dir], lambda _: False)[-1:] for found in advise(run)]
    rows = recording_rows(summary) if recorded else _summary_rows(summary, advice)
    cells = [(label, escape(text)) for label, text in rows]
    console.print(FittedTable("Summary", ["", Column("", "text")], cells, show_header=False))
    final = run_dir / "checkpoints" / "final"
    model = f"The trained model: {auto_class_of(final)}.from_pretrained('{final}')"
    if (final / ABOUT).is_file():
        model = f"The trained adapter, which peft loads: {final}"
    made = recording_lines(summary, run_dir) if recorded else [model]
    for line in (f"Everything of this run is in {run_dir}", *made):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _summary_rows(summary: Mapping[str, Any], advice: Sequence[str]) -> list[tuple[str, str]]:
    rows = [
        ("train steps", f"{summary['steps']:.0f} (version {summary['version']:.0f})"),
        ("trained on", f"{summary['sequences']:.0f} responses, {summary['generated_tokens']:.0f} generated tokens"),
        (
            "wall time",
            f"{summary['wall_s']:.1f} s since the master started, of which {summary['training_s']:.1f} s training",
        ),
        (
            "reward of a batch",
            f"{summary['first_reward']:.3f} in the first step, {summary['last_reward']:.3f} in the last",
        ),
    ]
    for evaluation in sorted(summary["evaluations"], key=lambda entry: entry["step"]):
        rows.append((f"evaluation at step {evaluation['step']}", ", ".join(_scores(evaluation))))
    if mode_of(str(summary.get("mode"))).workers_generate:
        rows.append(("generation", f"{summary['trainer_waits_data_share']:.0%} of the time, alternating with training"))
    else:
        idle, mixed = summary["generation_idle_share"], summary.get("sequences_of_two_versions_share")
        rows += [
            (
                "trainer idle",
                f"{summary['trainer_idle_share']:.0%} of the time (waiting for data "
                f"{summary['trainer_waits_data_share']:.0%}, for weights {summary['trainer_waits_weights_share']:.0%})",
            ),
            ("generation idle", "unknown" if idle is None else f"{idle:.0%} of the time"),
            (
                "off-policyness, head",
                f"mean {summary['head_offpolicyness_mean']:.2f}, max {summary['head_offpolicyness_max']:.0f}; "
                f"{summary['sequences_of_two_versions']:.0f} responses sampled by more than one version"
                f"{f' ({mixed:.1%})' if mixed is not None else ''}",
            ),
            *_age_rows(summary.get("offpolicyness")),
        ]
    rows += [(label, str(summary[name])) for name, label in TRACKERS.items() if name in summary]
    if skipped := summary.get("skipped_steps"):
        rows.append(
            ("skipped", f"{skipped} optimizer steps whose loss or gradient was not finite (see examples/bad_batch)")
        )
    if without := summary.get("steps_without"):
        rows.append(("trained without", ", ".join(f"{mfc} in {count} steps" for mfc, count in without.items())))
    return [*rows, _rejected_row(summary), *(("advice", text) for text in advice)]


def _rejected_row(summary: Mapping[str, Any]) -> tuple[str, str]:
    rejected = ", ".join(f"{why}: {count}" for why, count in summary["rejected"].items())
    return "rejected prompts", rejected or "none"


_MOST_AGES = 8  # ages with a share of their own; older ones are summed


def _age_rows(ages: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Rows of the distributions in summary.json under `offpolicyness`; no row if the run trained no response."""
    if ages is None or not ages["head"]:
        return []
    by_length = [
        f"up to {bin_['tokens_max']} tokens: {bin_['head_mean']:.2f} ({bin_['head_max']})" for bin_ in ages["by_length"]
    ]
    return [
        ("first tokens, versions behind", _shares(ages["head"])),
        ("last tokens, versions behind", _shares(ages["tail"])),
        ("first tokens, mean (max) by length", ", ".join(by_length)),
    ]


def _shares(counts: Mapping[str, int]) -> str:
    """A distribution of ages as text. counts: age -> number of responses, by age ascending."""
    total = sum(counts.values())
    ages = list(counts)
    parts = [f"{age}: {counts[age] / total:.1%}" for age in ages[:_MOST_AGES]]
    if older := ages[_MOST_AGES:]:
        parts.append(f"{older[0]} or more: {sum(counts[age] for age in older) / total:.1%}")
    return ", ".join(parts)


class RunConsole(Console):
    """A console whose writer decides what happens when the reader of its output has ended (cli/output.py)."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """A console. If the output is not a terminal, the console is wide enough for a step line. stderr: print there, because stdout
    is for JSON."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return RunConsole(stderr=stderr) if is_terminal else RunConsole(stderr=stderr, width=200)
