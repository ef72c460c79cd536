"""Test double of name resolve: etcd's guarantees, in memory, with the world's delays and outages.

The store holds entries, leases and watches, and outlives processes. A SimNameResolver is one process's session. The base classes
are the memory store that tests of one process use. `asyncio.to_thread(resolver.add, ...)` arrives here through
SimulatedWorld.on_thread, which simulates the round trip, and waits through an outage for as long as a real resolver retries.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from asyncrl.runtime.names.interface import (
    Lease,
    LeaseExists,
    LeaseNotFound,
    NameResolveTimeout,
    Watch,
    WatchCallback,
    WatchEvent,
)
from tests.support.memory_names import MemoryNameResolver, MemoryStore, covers

if TYPE_CHECKING:
    from tests.simulation.world import Process, SimulatedWorld

_TRIES_S = 5.0  # NameResolveConfig.timeout_s


class SimWatch(Watch):
    """A watch of a process. Events arrive in order, each after a delay."""

    def __init__(self, store: NameStore, process: Process, key: str, subtree: bool, callback: WatchCallback) -> None:
        self.what = key + "/" if subtree else key
        self.callback = callback
        self.process = process
        self.last_at = 0.0
        self._store = store
        self._over = False

    def deliver(self, event: WatchEvent) -> None:
        if not self._over:
            self.callback(event)

    def cancel(self) -> None:
        self._over = True
        self._store.watches.pop(id(self), None)


class NameStore(MemoryStore):
    """The simulated etcd."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__()
        self._world = world
        self.watches: dict[int, SimWatch] = {}
        self.down_until = 0.0
        self._next_lease = 1

    @property
    def down(self) -> bool:
        return self._world.now < self.down_until

    def put(self, key: str, value: str, lease: int | None) -> None:
        super().put(key, value, lease)
        self._world.on_put(key, value)

    def grant_kept(self, ttl_s: float, lease_id: int | None = None) -> int:
        """Grant a lease that lasts until it is revoked."""
        if lease_id is None:
            lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        if lease_id in self.leases:
            raise LeaseExists(f"lease {lease_id:#x} already exists")
        self.grant(lease_id, ttl_s, math.inf)
        return lease_id

    def forget(self) -> None:
        """Drop all data, as after a restart without the data folder, and end an outage."""
        self.entries.clear()
        self.leases.clear()
        self.watches.clear()
        self.down_until = 0.0

    def _tell(self, event: WatchEvent) -> None:
        for watch in list(self.watches.values()):
            if covers(watch, event.key):
                at = max(watch.last_at, self.down_until, self._world.now + self._world.draw_delay())
                watch.last_at = at
                self._world.scheduler.at(at, watch.deliver, event, loop=watch.process.loop)


class SimNameResolver(MemoryNameResolver):
    """A process's session."""

    def __init__(self, store: NameStore, process: Process) -> None:
        super().__init__(store)
        self._store, self._process = store, process

    def _read(self, key: str, *, subtree: bool) -> dict[str, str]:
        if not subtree:
            self.check_up()
        return super()._read(key, subtree=subtree)

    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        watch = SimWatch(self._store, self._process, key, subtree, callback)
        for name, entry in sorted(self._store.entries.items()):
            if covers(watch, name):
                callback(WatchEvent("put", name, entry.value))
        self._store.watches[id(watch)] = watch
        self._process.watches.append(watch)
        return watch

    def _grant_lease(self, ttl_s: float, lease_id: int | None) -> Lease:
        return Lease(self, self._store.grant_kept(ttl_s, lease_id), ttl_s)

    def _close(self) -> None:
        for watch in self._process.watches:
            watch.cancel()

    # ------------------------------------------------------------------------------------------------- on a thread

    async def on_thread(self, world: SimulatedWorld, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Simulate a call of the resolver on a thread."""
        if call.__name__ == "wait":
            return await self._wait_until(world, *args, **kwargs)
        if call.__name__ == "publish":
            return await self._publish(world, *args, **kwargs)
        if call.__name__ != "close":
            await self._reach(world, kwargs.get("limit_s") or _TRIES_S)
        result = call(*args, **kwargs)
        await asyncio.sleep(world.draw_delay())
        return result

    async def _reach(self, world: SimulatedWorld, limit_s: float) -> None:
        await asyncio.sleep(world.draw_delay())
        if self._store.down:
            await asyncio.sleep(min(self._store.down_until - world.now, limit_s))
            self.check_up()

    def check_up(self) -> None:
        if self._store.down:
            raise NameResolveTimeout(f"name resolve did not answer within {_TRIES_S:g} s")

    async def _publish(
        self, world: SimulatedWorld, name: str, value: str, *, lease: int | None = None, limit_s: float
    ) -> None:
        """Like NameResolver.publish, which sleeps on a thread."""
        deadline = world.now + limit_s
        while True:
            try:
                await self._reach(world, _TRIES_S)
                self.add(name, value, replace=True, lease=lease)
                await asyncio.sleep(world.draw_delay())
                return
            except (NameResolveTimeout, LeaseNotFound):
                if world.now >= deadline:
                    raise
            await asyncio.sleep(0.2)

    async def _wait_until(self, world: SimulatedWorld, name: str, timeout_s: float) -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(event: WatchEvent) -> None:
            if event.kind == "put" and not found.done():
                found.set_result(event.value)

        deadline = world.now + timeout_s
        if self._store.down:
            await asyncio.sleep(min(self._store.down_until, deadline) - world.now)
        watch = self.watch(name, tell)
        try:
            await asyncio.wait({found}, timeout=max(0.0, deadline - world.now))
        finally:
            watch.cancel()
        if found.done():
            return found.result()
        raise NameResolveTimeout(f"name {name!r} did not appear within {timeout_s:g} s")
