"""asyncrl.runtime.clock: waiting for a condition."""

from asyncrl.runtime.clock import wait_until
from tests.support.clock import ManualClock


def test_waiting_ends_when_the_condition_is_met_or_its_limit_has_passed() -> None:
    clock = ManualClock(now=0.0)
    assert wait_until(lambda: clock.now >= 2.0, limit_s=5.0, every_s=1.0, clock=clock)
    assert clock.now == 2.0
    assert not wait_until(lambda: False, limit_s=5.0, every_s=1.0, clock=clock)
    assert clock.now == 8.0  # the first check after the limit
