"""The remaining time and the progress line of scripts, with a clock that the test sets."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from asyncrl.cli.progress import WINDOW, StepProgress, duration_text, seconds_left, step_text


class Clock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (360000, "100:00:00")]
)
def test_durations_as_text(seconds, text):
    assert duration_text(seconds) == text


def test_the_remaining_time_is_the_mean_of_the_newest_steps_times_the_steps_left():
    assert seconds_left([], 10) is None
    assert seconds_left([1.0, 1.0, 7.0] * 6, 70) == 70 * 3.0  # steps that waited for data count too
    assert seconds_left([2.0], 0) == 0.0
    assert seconds_left([2.0], -1) == 0.0  # more steps than planned


@pytest.mark.parametrize(
    ("step", "total", "durations", "text"),
    [
        (0, 60, [], "0/60, 0 %"),
        (5, 100, [4.0, 1.0, 1.0], "5/100, 5 %, 3:10 left"),
        (1, 1, [3.0], "1/1, 100 %"),
        (2, 1, [3.0], "2/1, 100 %"),
        (3, 0, [3.0], "3/?"),  # the total is not known
    ],
)
def test_step_percent_and_remaining_time(step, total, durations, text):
    assert step_text(step, total, durations) == text


def run_steps(progress, clock, num_steps):
    with progress:
        for step in range(num_steps):
            clock.now += 1.0
            progress.advance(note=f"loss {step:.1f}")


def test_without_a_terminal_a_line_is_printed_every_few_seconds():
    clock, console = Clock(), Console(file=io.StringIO(), width=100)
    run_steps(StepProgress("sorter: [warm] start", 12, console=console, clock=clock), clock, 12)
    assert console.file.getvalue().splitlines() == [
        "sorter: [warm] start: 5/12, 42 %, 0:07 left, loss 4.0",
        "sorter: [warm] start: 10/12, 83 %, 0:02 left, loss 9.0",
        "sorter: [warm] start: 12 steps in 0:12, loss 11.0",
    ]


def test_the_remaining_time_follows_a_change_of_pace():
    clock, console = Clock(), Console(file=io.StringIO(), width=100)
    with StepProgress("sorter", 1000, console=console, clock=clock) as progress:
        clock.now = 8.0
        progress.advance(4)
        for _ in range(WINDOW):
            clock.now += 3.0
            progress.advance()
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "sorter: 4/1000, 0 %, 33:12 left"  # 2 s per step
    assert lines[-2] == "sorter: 24/1000, 2 %, 48:48 left"  # 3 s per step


def test_a_short_task_prints_one_line():
    clock, console = Clock(), Console(file=io.StringIO(), width=100)
    run_steps(StepProgress("quick", 1, unit="prompts", console=console, clock=clock), clock, 1)
    assert console.file.getvalue() == "quick: 1 prompts in 0:01, loss 0.0\n"


def test_on_a_terminal_one_line_is_updated():
    clock, console = Clock(), Console(file=io.StringIO(), width=100, force_terminal=True)
    run_steps(StepProgress("warm start", 3, console=console, clock=clock), clock, 3)
    text = Text.from_ansi(console.file.getvalue()).plain
    assert "warm start: 3/3, 100 %, loss 2.0" in text
    assert text.rstrip().endswith("warm start: 3 steps in 0:03, loss 2.0")


def test_a_task_without_a_number_of_steps_prints_its_duration():
    clock, console = Clock(), Console(file=io.StringIO(), width=100)
    with StepProgress("importing torch", console=console, clock=clock):
        clock.now = 3.0
    assert console.file.getvalue() == "importing torch ...\nimporting torch: 0:03\n"


def test_a_failed_task_prints_no_final_line():
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(KeyboardInterrupt), StepProgress("warm start", 3, console=console):
        raise KeyboardInterrupt
    assert console.file.getvalue() == ""
