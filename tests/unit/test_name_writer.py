"""The launcher's writes to name resolve."""

from __future__ import annotations

import threading
from typing import Any

from asyncrl.config.schema import ExperimentConfig, NameResolveConfig
from asyncrl.launch.hosts.watch_cache import READ_EVERY_S, WatchCache
from asyncrl.launch.name_service import NameService
from asyncrl.launch.name_writer import NameWriter
from asyncrl.protocol.names import Names
from asyncrl.runtime.names.interface import NameResolveError
from tests.support.clock import ManualClock
from tests.support.memory_names import MemoryNameResolver


class ReadOnlyResolver(MemoryNameResolver):
    """Answers reads only, as an etcd without space does. A write takes as long as the time between two reads."""

    def __init__(self, space: str, clock: ManualClock) -> None:
        super().__init__(space)
        self.clock = clock

    def add(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.now += READ_EVERY_S
        raise NameResolveError("no space")


def test_watches_are_compared_with_reads_while_no_write_succeeds() -> None:
    clock, seen = ManualClock(), threading.Event()
    with MemoryNameResolver("writer") as other, ReadOnlyResolver("writer", clock) as resolver:
        other.add("hosts/a", "1")
        writer = NameWriter(resolver, clock)
        cache = WatchCache(lambda event: seen.set())
        writer.compare("hosts", cache)
        cache.read(resolver.get_subtree("hosts"))  # the first of two reads that agree
        writer.put("status", "running")
        assert seen.wait(10.0), "the second read"
        writer.close()


def test_nothing_is_written_after_the_keys_of_a_run_are_deleted() -> None:
    config, others = ExperimentConfig(), set(threading.enumerate())
    names = Names(config.experiment, config.trial)
    writers: list[threading.Thread] = []

    class Cleared(MemoryNameResolver):
        def clear_subtree(self, *args: Any, **kwargs: Any) -> Any:
            writers.extend(set(threading.enumerate()) - others)
            return super().clear_subtree(*args, **kwargs)

    resolver = Cleared("cleared")
    resolver.add(names.owner(), "this launch")
    service = NameService(config, NameResolveConfig(endpoints=["h:1"]), resolver, print, owner="this launch")
    assert set(threading.enumerate()) - others
    service.close()
    assert not writers
    with MemoryNameResolver("cleared") as after:
        assert after.get_subtree(names.root) == {}
