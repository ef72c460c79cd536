"""The session with name resolve that a config asks for."""

from __future__ import annotations

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.runtime.names.memory import MEMORY, MemoryNameResolver


def open_name_resolver(config: NameResolveConfig, limit_s: float | None = None) -> NameResolver:
    """The resolver a config asks for. The first endpoint that answers is used; later ones on its failure. limit_s: how long to try
    to reach one (default: config.timeout_s).

    The endpoint `memory://SPACE` is for tests: resolvers of one process that name the same space share their entries.
    """
    if config.endpoints and config.endpoints[0].startswith(MEMORY):
        return MemoryNameResolver(config.endpoints[0].removeprefix(MEMORY))
    from asyncrl.runtime.names.etcd.access import EtcdAccess
    from asyncrl.runtime.names.etcd.resolver import (
        EtcdNameResolver,  # loads gRPC: only where it is used, never before a fork
    )

    return EtcdNameResolver(config.endpoints, config.timeout_s, limit_s, EtcdAccess.of(config))
