"""A watch over etcd that survives outages of the server.

After a broken stream, the watch reads the state again and reports the differences. A server that was unavailable for
long, or came back without its data, has lost leases and their entries, and the owners restore them within a second.
Therefore, for some seconds after an outage, the watch holds a deletion back and reports it only if the key has not come
back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Literal

from asyncrl.runtime.names.etcd.store import STREAM_RETRY_S, EtcdStore, WatchStream, below, one_key, text
from asyncrl.runtime.names.interface import NameResolverClosed, NameResolveTimeout, Watch, WatchCallback, WatchEvent

logger = logging.getLogger(__name__)

SETTLE_S = 5.0  # after an outage, lost keys may come back within this time
_EVENT_DELETE = 1


class EtcdWatch(Watch):
    """A watch with its own stream and thread."""

    def __init__(self, store: EtcdStore, key: str, subtree: bool, callback: WatchCallback) -> None:
        super().__init__(key, subtree, callback)
        self._store = store
        self._range = below(key) if subtree else one_key(key)
        self._state: dict[str, str] = {}  # as reported
        self._held: set[str] = set()  # keys of the state whose deletion is held back
        self._settled = -math.inf  # time.monotonic(): when held deletions are reported
        self._revision = 0  # the last revision read or received; 0: read the state again
        self._lock = threading.Lock()
        self._stream: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {self.what}", daemon=True)

    def start(self, limit_s: float | None) -> None:
        """Deliver the current state, then continue in the thread."""
        self._reload(limit_s, settle_s=0.0)
        self._thread.start()

    def join(self, limit_s: float) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _run(self) -> None:
        """Consumes the server's stream of changes; produces callbacks.

        Waits for: a change (no limit: gRPC's keepalive detects a frozen server), or 0.1 s before it reopens a broken
        stream. Unblocked by: a change, an outage, the time to report held deletions, cancel.
        """
        while not self.cancelled:
            try:
                if self._revision == 0:
                    self._reload(None, SETTLE_S)
                if self._follow():
                    continue
            except NameResolverClosed:
                return
            except NameResolveTimeout as error:
                logger.debug("watch on %s: %s", self.what, error)  # the connection has logged it
            except Exception:
                if not self.cancelled:
                    logger.exception("watch on %s failed; reopening it", self.what)
                    self._cancelled.wait(1.0)
            self._revision = 0
            self._cancelled.wait(STREAM_RETRY_S)

    def _reload(self, limit_s: float | None, settle_s: float) -> None:
        """Read the state and report its differences from the last reported state."""
        state, self._revision = self._store.read(self._range, f"get {self.what!r}", limit_s)
        self._settled = time.monotonic() + settle_s  # measured from when the server answers
        gone = [WatchEvent("delete", key) for key in self._state if key not in state]
        there = [WatchEvent("put", key, value) for key, value in state.items() if self._state.get(key) != value]
        self._held -= state.keys()  # these keys are back, with the old or another value
        self._report([*gone, *there])

    def _follow(self) -> bool:
        """Report changes after the revision. Returns whether the watch can continue from there: False once the stream
        is broken.
        """
        limit_s = max(self._settled - time.monotonic(), 0.01) if self._held else None
        with self._lock:
            if self.cancelled:
                return False
            self._stream = self._store.open_watch([self._range], self._revision, limit_s)
        for response in self._stream:
            events = []
            for event in response.events:
                self._revision = max(self._revision, int(event.kv.mod_revision))
                kind: Literal["put", "delete"] = "delete" if event.type == _EVENT_DELETE else "put"
                events.append(WatchEvent(kind, text(event.kv.key), text(event.kv.value)))
            self._report(events)
            if self._held and limit_s is None:
                break
        self._stream.cancel()
        if self._held and time.monotonic() >= self._settled:
            gone, self._held = sorted(self._held), set()
            self._report([WatchEvent("delete", key) for key in gone])
        return not self._stream.broken

    def _report(self, events: list[WatchEvent]) -> None:
        for event in events:
            if event.kind == "delete":
                if time.monotonic() < self._settled:
                    self._held |= {event.key} & self._state.keys()
                    continue
                self._state.pop(event.key, None)
            else:
                is_back = event.key in self._held
                self._held.discard(event.key)
                if is_back and self._state[event.key] == event.value:
                    continue
                self._state[event.key] = event.value
            self._tell(event)

    def _stop(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
