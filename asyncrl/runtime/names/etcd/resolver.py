"""Name resolve over etcd: between processes and hosts.

A session survives failures of its servers. Calls go to a server that answers (store.py), and broken watches are
reopened (watch.py). Leases are refreshed, and lost leases are restored with their entries (leases.py). gRPC is loaded
when the first resolver is opened, not with this module, because it must not be loaded before a fork.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names.etcd.access import UNRESTRICTED, EtcdAccess
from asyncrl.runtime.names.etcd.leases import USUAL, LeaseIntervals, LeaseKeeper
from asyncrl.runtime.names.etcd.store import EtcdStore, below, one_key
from asyncrl.runtime.names.etcd.watch import EtcdWatch
from asyncrl.runtime.names.interface import Lease, LeaseNotFound, NameEntryExists, NameResolver, Watch, WatchCallback

_CLOSE_LIMIT_S = 2.0


class EtcdNameResolver(NameResolver):
    """Name resolve over etcd. Endpoints are `host:port` or `unix:/path`. One that answers is used, and the next one if it fails."""

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: float = 5.0,
        open_limit_s: float | None = None,
        access: EtcdAccess = UNRESTRICTED,
        intervals: LeaseIntervals = USUAL,
    ) -> None:
        """open_limit_s: limit for reaching a server initially; default: timeout_s."""
        super().__init__()
        if isinstance(endpoints, str) or not endpoints:
            raise ValueError(f"name_resolve.endpoints is {endpoints!r}; etcd needs a list of host:port")
        self._store = EtcdStore(endpoints, timeout_s, self._closed, access)
        try:
            store_id, _ = self._store.read_store_id(open_limit_s)  # fail here, not at the first use
        except BaseException:
            self._closed.set()
            self._store.close()
            raise
        self._keeper = LeaseKeeper(self._store, self._closed, store_id, intervals)

    # entries

    def _add(self, key: str, value: str, replace: bool, lease: int | None) -> None:
        losses = self._keeper.losses
        put = self._store.put if replace else self._store.create
        try:
            put(key, value, lease)
        except LeaseNotFound:
            if lease is None or not self._keeper.keeps(lease):
                raise
            self._keeper.restore(lease)  # the server lost its data and the keeper has not noticed yet
            put(key, value, lease)
        self._keeper.record(key, value, lease, losses)

    def _compare_and_swap(self, key: str, expected: str | None, value: str) -> bool:
        if expected is None:
            losses = self._keeper.losses
            try:
                self._store.create(key, value, None)
            except NameEntryExists:
                return False
            self._keeper.record(key, value, None, losses)
            return True
        swapped = self._store.swap(key, expected, value)
        if swapped:
            self._keeper.swapped(key, value)
        return swapped

    def _adopt(self, key: str, value: str) -> None:
        self._keeper.record(key, value, None, self._keeper.losses)

    def _read(self, key: str, *, subtree: bool) -> dict[str, str]:
        keys, what = (below(key), "get_subtree") if subtree else (one_key(key), "get")
        return self._store.read(keys, f"{what} {key!r}")[0]

    def _delete(self, key: str, *, subtree: bool) -> int:
        self._keeper.forget(key, subtree)
        keys, what = (below(key), "clear_subtree") if subtree else (one_key(key), "delete")
        return self._store.delete(keys, f"{what} {key!r}")

    # watches

    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool, limit_s: float | None) -> Watch:
        watch = EtcdWatch(self._store, key, subtree, callback)
        self._keep(watch)
        try:
            watch.start(limit_s)
        except BaseException:
            watch.cancel()
            raise
        return watch

    # leases

    def _grant_lease(self, ttl_s: float, lease_id: int | None) -> Lease:
        chosen = secrets.randbelow(2**63 - 1) + 1 if lease_id is None else lease_id
        ttl = self._store.grant(chosen, math.ceil(ttl_s), again=False)
        self._keeper.hold(chosen, ttl)
        return Lease(self, chosen, ttl)

    def _revoke_lease(self, lease_id: int) -> None:
        self._keeper.release(lease_id)
        self._store.revoke(lease_id)

    def _close(self) -> None:
        self._keeper.join()
        self._store.revoke_last(self._keeper.kept, _CLOSE_LIMIT_S)
        self._store.close()
        for watch in self._watches:
            assert isinstance(watch, EtcdWatch)
            watch.join(_CLOSE_LIMIT_S)


def open_name_resolver(config: NameResolveConfig, limit_s: float | None = None) -> EtcdNameResolver:
    """Open the resolver for a config. It uses the first endpoint that answers, and another one if that endpoint fails.
    limit_s: limit for reaching an endpoint (default: config.timeout_s).
    """
    return EtcdNameResolver(config.endpoints, config.timeout_s, limit_s, EtcdAccess(config))
