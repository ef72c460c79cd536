"""How far something has come, and how long it will still take: all by times that the test passes in."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from asyncrl.launch.pace import LineTimer, Pace, StepProgress, duration_text


class Clock:
    """One that the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (360000, "100:00:00")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_steps_that_wait_now_and_then_count():
    """Two quick ones and one that waits, again and again: the median would promise a third of the time."""
    pace = Pace(100, 0.0)
    now = 0.0
    for step_s in [1.0, 1.0, 7.0] * 10:
        now += step_s
        pace.advance(now)
    assert pace.left_s(now) == pytest.approx(70 * 3.0, rel=0.15)


def test_one_slow_step_does_not_spoil_the_time_left():
    pace = Pace(100, 0.0)
    assert pace.left_s(5.0) is None
    pace.advance(10.0)  # a slow first one
    for i in range(1, 5):
        pace.advance(10.0 + 2 * i)
    assert pace.left_s(18.0) == 95 * 2.0
    assert pace.left_s(19.0) == 95 * 2.0 - 1.0
    assert pace.left_s(60.0) == 94 * 2.0  # a step that takes long is one step
    assert pace.text(18.0) == "5/100, 5 %, 0:18 elapsed, 3:10 left"


def test_the_pace_follows_a_change():
    pace = Pace(1000, 0.0)
    now = 0.0
    for step_s in [1.0] * 60 + [3.0] * 40:
        now += step_s
        pace.advance(now)
    assert pace.left_s(now) == 900 * 3.0


def test_several_steps_at_once_and_given_durations():
    pace = Pace(10, 0.0)
    pace.advance(4.0, steps=2)
    assert pace.left_s(4.0) == 8 * 2.0
    pace.advance(4.0, steps=0)  # none
    assert pace.done == 2
    pace = Pace(10, 0.0)
    pace.advance(20.0, step_s=0.5)  # it began when the processes ran
    assert pace.left_s(20.0) == 4.5


def test_after_the_last_step_nothing_is_left():
    pace = Pace(1, 0.0)
    pace.advance(3.0)
    assert pace.left_s(9.0) == 0.0
    assert pace.text(3.0) == "1/1, 100 %, 0:03 elapsed"
    pace.advance(6.0)  # more than was foreseen
    assert pace.text(6.0) == "2/1, 100 %, 0:06 elapsed"


def test_lines_come_after_two_seconds_and_then_less_and_less_often():
    timer = LineTimer(0.0)
    assert [now for now in range(20) if timer.due(float(now))] == [2, 7, 12, 17]
    timer = LineTimer(0.0)
    assert 50 < sum(timer.due(float(now)) for now in range(3600)) < 100


def run_steps(progress, clock, num_steps):
    with progress:
        for step in range(num_steps):
            clock.now += 1.0
            progress.advance(note=f"loss {step:.1f}")


def test_without_a_terminal_a_line_every_few_seconds():
    clock, console = Clock(), Console(file=io.StringIO(), width=100)
    run_steps(StepProgress("sorter: [warm] start", 10, console=console, clock=clock), clock, 10)
    assert console.file.getvalue().splitlines() == [
        "sorter: [warm] start: 2/10, 20 %, 0:02 elapsed, 0:08 left, loss 1.0",
        "sorter: [warm] start: 7/10, 70 %, 0:07 elapsed, 0:03 left, loss 6.0",
        "sorter: [warm] start: 10 steps in 0:10, loss 9.0",
    ]


def test_what_is_over_at_once_is_one_line():
    clock, console = Clock(), Console(file=io.StringIO(), width=100)
    run_steps(StepProgress("quick", 1, unit="prompts", console=console, clock=clock), clock, 1)
    assert console.file.getvalue() == "quick: 1 prompts in 0:01, loss 0.0\n"


def test_on_a_terminal_one_line_that_changes():
    clock, console = Clock(), Console(file=io.StringIO(), width=100, force_terminal=True)
    run_steps(StepProgress("warm start", 3, console=console, clock=clock), clock, 3)
    text = Text.from_ansi(console.file.getvalue()).plain
    assert "warm start: 3/3, 100 %, 0:03 elapsed, loss 2.0" in text
    assert text.rstrip().endswith("warm start: 3 steps in 0:03, loss 2.0")


def test_what_cannot_be_counted():
    clock, console = Clock(), Console(file=io.StringIO(), width=100)
    with StepProgress("importing torch", console=console, clock=clock):
        clock.now = 3.0
    assert console.file.getvalue() == "importing torch ...\nimporting torch: 0:03\n"


def test_a_failure_claims_no_end():
    console = Console(file=io.StringIO(), width=100)
    with pytest.raises(KeyboardInterrupt), StepProgress("warm start", 3, console=console):
        raise KeyboardInterrupt
    assert console.file.getvalue() == ""
