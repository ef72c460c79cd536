"""Opens the name-resolve session that a config describes."""

from __future__ import annotations

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names.interface import NameResolver


def open_name_resolver(config: NameResolveConfig, limit_s: float | None = None) -> NameResolver:
    """Open the resolver for a config. It uses the first endpoint that answers, and another one if that endpoint fails.
    limit_s: limit for reaching an endpoint (default: config.timeout_s).
    """
    from asyncrl.runtime.names.etcd.access import EtcdAccess
    from asyncrl.runtime.names.etcd.resolver import (
        EtcdNameResolver,  # loads gRPC: only when used, never before a fork
    )

    return EtcdNameResolver(config.endpoints, config.timeout_s, limit_s, EtcdAccess.of(config))
