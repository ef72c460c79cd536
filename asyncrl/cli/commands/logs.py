"""`asyncrl-launch logs`."""

from __future__ import annotations

import argparse
import re
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from asyncrl.cli.commands.common import Commands, add_command, print_json, run_dir_of
from asyncrl.cli.logs import LEVELS, Entry, LogFiles, select_workers, stream_logs, worker_of
from asyncrl.launch.rundir import EXPERIMENT_FILE, LaunchError, configs_dir, is_running, logs_dir

_DESCRIPTION = """Show what the processes of a run said, in one stream, in the order of time.

The first error stands out, and is told again at the end with its traceback: it is most often the cause of the others.
Lines without a time, such as those of a traceback, stay with the line before them."""

_EPILOG = """examples:
  asyncrl-launch logs runs/sloppy-sorter/t0                       everything of the newest attempt
  asyncrl-launch logs runs/sloppy-sorter/t0 -f                    and what comes, until the run ends or Ctrl-C
  asyncrl-launch logs runs/sloppy-sorter/t0 master rollout_worker/1 --level WARNING
  asyncrl-launch logs runs/sloppy-sorter/t0 --tail 50 --attempt 2
  asyncrl-launch logs runs/sloppy-sorter/t0 --json | jq -r 'select(.level == "ERROR") | .worker'

WORKER is a kind (rollout_worker: all of them), one (rollout_worker/1 or rollout_worker_1), or etcd.
--json prints one object a line: event log (time, level, worker, text, first_error), and end (first_error, counts).

exit codes: 0 all was shown; 1 there are no such logs, those that exist are named; 130 Ctrl-C."""

_COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
_LEVEL_STYLES = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "logs", logs, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN", help="folder of the run, or the CONFIG it was started from")
    parser.add_argument(
        "words", metavar="WORKER", nargs="*", help="only these workers (after a CONFIG also key=value overrides)"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="show what comes too, also of further attempts, until the run ends"
    )
    parser.add_argument("--level", choices=LEVELS, default="DEBUG", type=str.upper, help="this level and worse")
    parser.add_argument("--attempt", type=_positive, metavar="N", help="of this attempt (default: the newest)")
    parser.add_argument("--tail", type=_positive, metavar="N", help="of what is there only the last N entries")


def logs(arguments: argparse.Namespace, console: Console) -> int:
    """Show the logs of a run's processes in one stream, in the order of time; the first error stands out."""
    run_dir = run_dir_of(arguments.run, [word for word in arguments.words if "=" in word])
    attempt = arguments.attempt or _newest_attempt(run_dir)
    folder = logs_dir(run_dir, attempt)
    if not folder.is_dir():
        there = ", ".join(map(str, _attempts(run_dir))) or "none"
        raise LaunchError(f"{run_dir}: there are no logs of attempt {attempt}; attempts with logs: {there}")
    known = _known_workers(run_dir, attempt)
    asked = [word for word in arguments.words if "=" not in word]
    try:
        selected = select_workers(asked, known)
    except ValueError as error:
        raise LaunchError(f"attempt {attempt} in {run_dir}: {error}") from None

    files = LogFiles(folder, lambda worker: not asked or worker in selected)
    printer = _JsonPrinter(attempt) if arguments.json else _Printer(console, selected or known)

    def goes_on() -> bool:
        if arguments.follow and not arguments.attempt:  # the next attempt has the logs of those that go on, too
            files.folder = logs_dir(run_dir, _newest_attempt(run_dir))
        return arguments.follow and is_running(run_dir) and files.folder == logs_dir(run_dir, _newest_attempt(run_dir))

    last: deque[Entry] | None = deque(maxlen=arguments.tail) if arguments.tail else None
    try:
        for entry in stream_logs(files, goes_on=goes_on):
            if entry is None:
                _show_all(last, printer)
                last = None
            else:
                printer.count(entry)
                if not entry.at_least(arguments.level):
                    continue
                if last is None:
                    printer.show(entry)
                else:
                    last.append(entry)
        _show_all(last, printer)
    finally:
        printer.close()
        files.close()
    return 0


def _show_all(last: deque[Entry] | None, printer: _Printer | _JsonPrinter) -> None:
    for entry in last or ():
        printer.show(entry)


class _Printer:
    """For people."""

    def __init__(self, console: Console, workers: set[str]) -> None:
        names = sorted(workers)
        self._console = console
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._date = ""
        self._num_errors = 0
        self._first_error: Entry | None = None
        self._shown_after = False  # something was shown after the first error

    def count(self, entry: Entry) -> None:
        """Every entry, also those that are not shown."""
        self._num_errors += entry.is_error
        if self._first_error is None and entry.is_error:
            self._first_error = entry

    def show(self, entry: Entry) -> None:
        if entry is self._first_error:
            self._print(Rule("first error", style="bold red"))
        elif self._first_error is not None:
            self._shown_after = True
        self._print(self._text(entry))

    def close(self) -> None:
        if self._first_error is not None and self._shown_after:
            others = f" (of {self._num_errors})" if self._num_errors > 1 else ""
            self._print(Rule(f"the first error again{others}", style="bold red"))
            self._print(self._text(self._first_error))

    def _text(self, entry: Entry) -> Text:
        """time LEVEL worker: text, and the further lines below it."""
        date, _, at = entry.time.partition(" ")
        text = Text()
        if date != self._date:
            self._date = date
            text.append(f"{date}\n", style="dim")
        style = _LEVEL_STYLES.get(entry.level, "")
        first, newline, rest = entry.text.partition("\n")
        text.append(f"{at:12} ", style="dim")
        text.append(f"{entry.level or '-':8}", style=style or "dim")
        text.append(f"{entry.worker + ':':{self._width + 2}}", style=self._colours.get(entry.worker, ""))
        text.append(first, style=style)
        if newline:
            text.append(newline)
            text.append(re.sub("^", "    ", rest, flags=re.MULTILINE), style=style)
        return text

    def _print(self, what: Text | Rule) -> None:
        if isinstance(what, Text) and not self._console.is_terminal:  # ten times as fast as by way of rich
            self._console.file.write(f"{what.plain}\n")
            self._console.file.flush()
        else:
            self._console.print(what, highlight=False, soft_wrap=True)


class _JsonPrinter:
    """For machines."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._counts = dict.fromkeys(LEVELS, 0)
        self._first_error: Entry | None = None

    def count(self, entry: Entry) -> None:
        if entry.level:
            self._counts[entry.level] += 1
        if self._first_error is None and entry.is_error:
            self._first_error = entry

    def show(self, entry: Entry) -> None:
        print_json({"event": "log", **_object(entry), "first_error": entry is self._first_error})

    def close(self) -> None:
        first = _object(self._first_error) if self._first_error else None
        print_json({"event": "end", "attempt": self._attempt, "first_error": first, "counts": self._counts})


def _object(entry: Entry) -> dict[str, Any]:
    return asdict(entry)


def _known_workers(run_dir: Path, attempt: int) -> set[str]:
    """Workers that have a log, or will have one: their config is written first."""
    files = [*logs_dir(run_dir, attempt).glob("*.log"), *configs_dir(run_dir, attempt).glob("*.yaml")]
    return {worker_of(file.stem) for file in files if file.name != EXPERIMENT_FILE}


def _attempts(run_dir: Path) -> list[int]:
    numbers = (re.fullmatch(r"attempt_(\d+)", path.name) for path in (run_dir / "logs").glob("attempt_*"))
    return sorted(int(match[1]) for match in numbers if match)


def _newest_attempt(run_dir: Path) -> int:
    attempts = _attempts(run_dir)
    if not attempts:
        raise LaunchError(f"{run_dir}: there are no logs here; no run has been started in this folder")
    return attempts[-1]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number
