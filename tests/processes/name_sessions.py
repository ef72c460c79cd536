"""Tools for the tests of name resolve: sessions with a store, and a watch callback that records events."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names.etcd.resolver import EtcdNameResolver, open_name_resolver
from asyncrl.runtime.names.etcd.store import EtcdStore
from asyncrl.runtime.names.interface import Lease, NameResolver, WatchEvent
from tests.support.memory_names import MemoryNameResolver

LIMIT_S = 30.0  # for waits that should take a second or two, on a busy machine
OpenSession = Callable[..., NameResolver]


class Recorder:
    """A watch callback that records events. Tests can wait for them."""

    def __init__(self) -> None:
        self.events: list[WatchEvent] = []
        self._condition = threading.Condition()

    def __call__(self, event: WatchEvent) -> None:
        with self._condition:
            self.events.append(event)
            self._condition.notify_all()

    @property
    def state(self) -> dict[str, str]:
        """The values by key that remain after the recorded events."""
        state: dict[str, str] = {}
        for event in list(self.events):
            if event.kind == "put":
                state[event.key] = event.value
            else:
                state.pop(event.key, None)
        return state

    def wait_for(self, *expected: WatchEvent) -> None:
        """Wait until exactly these events have come, in this order."""
        self._wait(lambda: len(self.events) >= len(expected))
        assert self.events == list(expected)

    def wait_for_turns(self, key: str, value: str, turns: int) -> None:
        """Wait for at least `turns` events, alternately put and deletion of the key, while its holder alternates between running
        and frozen.

        After an odd number of events the key exists. There may be more events (an even number more), because a busy machine may
        delay the holder too.
        """
        assert self._wait(lambda: len(self.events) >= turns and len(self.events) % 2 == turns % 2), self.events
        events = list(self.events)
        assert events == ([put(key, value), gone(key)] * len(events))[: len(events)]

    def wait_for_state(self, expected: dict[str, str]) -> None:
        assert self._wait(lambda: self.state == expected), self.events

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._condition:
            return self._condition.wait_for(condition, timeout=LIMIT_S)


class Refreshes:
    """Counts etcd's answers to lease refreshes.

    It is for tests in which leases must not end because a process is delayed, and which therefore use long leases.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._answers: Counter[int] = Counter()
        self._condition = threading.Condition()
        refresh = EtcdStore.refresh

        def counted(store: EtcdStore, lease_ids: Sequence[int]) -> dict[int, int]:
            ttls = refresh(store, lease_ids)
            with self._condition:
                self._answers.update(lease_id for lease_id, ttl_s in ttls.items() if ttl_s > 0)
                self._condition.notify_all()
            return ttls

        monkeypatch.setattr(EtcdStore, "refresh", counted)

    def wait_for_another(self, lease_id: int) -> None:
        """Wait for two answers: the first may belong to an earlier refresh."""
        with self._condition:
            least = self._answers[lease_id] + 2
            assert self._condition.wait_for(lambda: self._answers[lease_id] >= least, timeout=LIMIT_S)


def lives(names: NameResolver, lease: Lease) -> bool:
    """Whether the store has the lease now."""
    if isinstance(names, MemoryNameResolver):
        return names.lease_is_there(lease.id)
    assert isinstance(names, EtcdNameResolver)
    return names._store.lease_keys(lease.id) is not None


def grant_left(names: NameResolver, ttl_s: int) -> Lease:
    """Grant a lease that no session refreshes, as after the death of the session that has granted it."""
    lease_id = secrets.randbelow(2**63 - 1) + 1
    if isinstance(names, MemoryNameResolver):
        names.grant_left(lease_id, ttl_s)
    else:
        assert isinstance(names, EtcdNameResolver)
        names._store.grant(lease_id, ttl_s, again=False)
    return Lease(names, lease_id, ttl_s)


def put(key: str, value: str) -> WatchEvent:
    return WatchEvent("put", key, value)


def gone(key: str) -> WatchEvent:
    return WatchEvent("delete", key)


def patient(config: NameResolveConfig) -> NameResolveConfig:
    """A config with a long session timeout, for tests of something else: a restarted store may be slow on a busy machine."""
    return replace(config, timeout_s=LIMIT_S)


def sessions(
    config: NameResolveConfig, open_names: Callable[[NameResolveConfig], NameResolver] = open_name_resolver
) -> Iterator[OpenSession]:
    opened: list[NameResolver] = []

    def open_one() -> NameResolver:
        opened.append(open_names(patient(config)))
        return opened[-1]

    yield open_one
    for session in opened:
        session.close()
