"""Sessions with a name-resolve store, and a watch's callback that remembers: for the tests of name resolve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from asyncrl.config import NameResolveConfig
from asyncrl.runtime.name_resolve import NameResolver, WatchEvent, open_name_resolver

LIMIT_S = 30.0  # of waits for what should come within a second or two, on a busy machine
OpenSession = Callable[..., NameResolver]


class Recorder:
    """A watch's callback that remembers, and can be waited for."""

    def __init__(self) -> None:
        self.events: list[WatchEvent] = []
        self._condition = threading.Condition()

    def __call__(self, event: WatchEvent) -> None:
        with self._condition:
            self.events.append(event)
            self._condition.notify_all()

    @property
    def state(self) -> dict[str, str]:
        """What somebody who follows the events believes."""
        state: dict[str, str] = {}
        for event in list(self.events):
            if event.kind == "put":
                state[event.key] = event.value
            else:
                state.pop(event.key, None)
        return state

    def wait_for(self, *expected: WatchEvent) -> None:
        """Until exactly these events have come, in this order."""
        self._wait(lambda: len(self.events) >= len(expected))
        assert self.events == list(expected)

    def wait_for_state(self, expected: dict[str, str]) -> None:
        self._wait(lambda: self.state == expected)
        assert self.state == expected, self.events

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._condition:
            self._condition.wait_for(condition, timeout=LIMIT_S)


def put(key: str, value: str) -> WatchEvent:
    return WatchEvent("put", key, value)


def gone(key: str) -> WatchEvent:
    return WatchEvent("delete", key)


def sessions(config: NameResolveConfig) -> Iterator[OpenSession]:
    opened: list[NameResolver] = []

    def open_one() -> NameResolver:
        opened.append(open_name_resolver(config))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()
