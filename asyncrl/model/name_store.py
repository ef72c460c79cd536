"""torch.distributed's store on top of name resolve: ranks exchange their addresses through it.

torch's own TCPStore accepts any client that reaches its port, and write access to it controls which addresses gloo and NCCL
connect to. So in a run with authentication (runtime/security.py) the ranks meet in name resolve, which has access control. It is
slower, but only holds a few dozen small entries while process groups are made.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from asyncrl.runtime.names.interface import NameEntryNotFound, NameResolver


class NameStore(Store):
    """Keep a reference while process groups use it: torch keeps only the C++ part of the object.

    waits for: entries of other ranks, at most limit_s each.  unblocked by: those entries; closing the resolver."""

    def __init__(self, resolver: NameResolver, root: str, *, lease: int | None, limit_s: float) -> None:
        """root: prefix of the keys. Entries from `set` expire with the lease."""
        super().__init__()
        self._resolver, self._root, self._lease, self._limit_s = resolver, root, lease, limit_s

    def set(self, key: str, value: str | bytes) -> None:
        self._resolver.publish(self._name(key), _text(value), lease=self._lease, limit_s=self._limit_s)

    def get(self, key: str) -> bytes:
        return _bytes(self._resolver.wait(self._name(key), self._limit_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._limit_s if timeout is None else min(timeout.total_seconds(), self._limit_s)
        for key in keys:
            self._resolver.wait(self._name(key), limit_s)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._now(key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        while True:  # a failed swap means that another rank succeeded: the number of ranks bounds the retries
            before = self._now(key)
            count = amount + (int(_bytes(before)) if before is not None else 0)
            if self._resolver.compare_and_swap(self._name(key), before, _text(str(count))):
                return count

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]  # torch's stub says str
        """Set the key to `desired` if its value is `expected`; an empty `expected` also matches an absent key. Returns the key's
        value afterwards, or `expected` if the key is absent."""
        before = self._now(key)
        found = b"" if before is None else _bytes(before)
        if found == expected and self._resolver.compare_and_swap(self._name(key), before, _text(desired)):
            return desired
        now = self._now(key)
        return expected if now is None else _bytes(now)

    def deleteKey(self, key: str) -> bool:
        return self._resolver.delete(self._name(key))

    def getNumKeys(self) -> int:
        return len(self._resolver.get_subtree(self._root))

    def hasExtendedApi(self) -> bool:
        return False

    def clone(self) -> Store:
        return self

    def _now(self, key: str) -> str | None:
        try:
            return self._resolver.get(self._name(key))
        except NameEntryNotFound:
            return None

    def _name(self, key: str) -> str:
        return f"{self._root}/{key.encode().hex()}"  # hex, because torch's keys have empty parts


def _text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
