"""Compares the state known from a watch with periodic reads. So if the watch stream goes silent without an error, changes still
arrive, some seconds late.

A difference counts after two consecutive reads have shown it, because a single read may be older than the latest watch events.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from asyncrl.runtime.names.interface import WatchCallback, WatchEvent

READ_EVERY_S = 5.0


class WatchCache:
    """consumes: events of a watch on a subtree (`observe`), reads of it (`read`). produces: the same events, and one for
    each change that only reads have shown."""

    def __init__(self, callback: WatchCallback) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._state: dict[str, str] = {}
        # key -> value that the last read showed and the watch did not; None: the read lacks the key. A second read that agrees
        # confirms the change
        self._suspect: dict[str, str | None] = {}

    def observe(self, event: WatchEvent) -> None:
        with self._lock:
            self._apply(event)

    def read(self, values: Mapping[str, str]) -> None:
        with self._lock:
            different: dict[str, str | None] = {
                key: value for key, value in values.items() if self._state.get(key) != value
            }
            different |= {key: None for key in self._state if key not in values}
            for key, value in different.items():
                if key in self._suspect and self._suspect[key] == value:
                    self._apply(WatchEvent("delete", key) if value is None else WatchEvent("put", key, value))
            self._suspect = different

    def _apply(self, event: WatchEvent) -> None:
        if event.kind == "delete":
            self._state.pop(event.key, None)
        else:
            self._state[event.key] = event.value
        self._callback(event)
