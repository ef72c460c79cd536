"""Access to a protected etcd: TLS, a client certificate, a user's password, and the prefix of the permitted keys.

A config names the files of secrets, which no other user may read. The secrets themselves are never in a config, an
argument or a log.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime.names.etcd.api import Api
from asyncrl.runtime.names.interface import NameResolveError, normalize_name

_MAX_SECRET_BYTES = 1_000_000
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "revision in header is old")
_NO_USER = "user name is empty"
_WRONG_PASSWORD = "authentication failed"
_NO_AUTHENTICATION = "authentication is not enabled"


@dataclass(frozen=True)
class EtcdAccess:
    """Our identity and our keys: what `config` says of them. Its endpoints and limits are not used."""

    config: NameResolveConfig

    def __post_init__(self) -> None:
        """Raises ValueError for fields that cannot be combined."""
        config = self.config
        if config.prefix:
            normalize_name(config.prefix)
        if bool(config.user) != bool(config.password_file):
            raise ValueError(
                f"name_resolve.user={config.user!r} and name_resolve.password_file={config.password_file!r}: set both or neither"
            )
        if bool(config.cert_file) != bool(config.key_file):
            raise ValueError(
                f"name_resolve.cert_file={config.cert_file!r} and name_resolve.key_file={config.key_file!r}: a client certificate "
                "needs both"
            )
        if config.cert_file and not config.ca_file:
            raise ValueError(
                "name_resolve.cert_file is set without name_resolve.ca_file: set the latter to the certificate of the authority "
                "that signed the server's"
            )

    @property
    def key_prefix(self) -> bytes:
        return normalize_name(self.config.prefix).encode() + b"/" if self.config.prefix else b""

    def open_channel(self, api: Api, endpoint: str, options: Sequence[tuple[str, Any]]) -> Any:
        """Open a gRPC channel. Raises ValueError if a file cannot be used."""
        if not self.config.ca_file:
            return api.grpc.insecure_channel(endpoint, options=options)
        credentials = api.grpc.ssl_channel_credentials(
            read_file(self.config.ca_file, "ca_file"),
            read_secret(self.config.key_file, "key_file") if self.config.key_file else None,
            read_file(self.config.cert_file, "cert_file") if self.config.cert_file else None,
        )
        return api.grpc.secure_channel(endpoint, credentials, options=options)


UNRESTRICTED = EtcdAccess(NameResolveConfig())  # an etcd without access control


@dataclass
class Login:
    """A user's session with an etcd that requires passwords. Every call on every channel carries its token. If the
    server no longer knows the token (it forgets tokens when it restarts, and after minutes without use), the session
    gets a new one.
    """

    api: Api
    access: EtcdAccess
    token: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, channel: Any, limit_s: float) -> None:
        """Ensure that there is a token if a user is set. Raises gRPC's error in an outage, and NameResolveError if the server
        refuses the user.
        """
        with self._lock:
            if self.token or not self.access.config.user:
                return
            password = (
                read_secret(self.access.config.password_file, "password_file").decode(errors="replace").rstrip("\r\n")
            )
            request = self.api.rpc.AuthenticateRequest(name=self.access.config.user, password=password)
            try:
                self.token = self.api.rpc.AuthStub(channel).Authenticate(request, timeout=limit_s).token
            except self.api.grpc.RpcError as error:
                if remedy := self.remedy(error):
                    raise NameResolveError(f"etcd refuses the user {self.access.config.user!r}: {remedy}") from error
                raise

    def is_stale(self, error: Any, used: str) -> bool:
        """Return whether the call failed because its token was outdated, and discard that token."""
        if not (self.access.config.user and any(text in (error.details() or "") for text in _STALE_TOKEN)):
            return False
        with self._lock:
            if self.token == used:
                self.token = ""
        return True

    def remedy(self, error: Any) -> str:
        """Return the remedy if the refusal concerns our identity or rights, otherwise ""."""
        details = error.details() or ""
        if _WRONG_PASSWORD in details:
            return "wrong name or password; see name_resolve.user and the file name_resolve.password_file"
        if _NO_AUTHENTICATION in details:
            return (
                "it does not use passwords: run `etcdctl auth enable`, or remove name_resolve.user and "
                "name_resolve.password_file"
            )
        if _NO_USER in details:
            return "it requires a user; set name_resolve.user and name_resolve.password_file"
        if error.code() == self.api.grpc.StatusCode.PERMISSION_DENIED:
            where = self.access.key_prefix.decode() or "asyncrl"
            return (
                f"the user may not use the keys below {where!r}; set name_resolve.prefix to keys that the user may use, or "
                f"ask an administrator to run `etcdctl role grant-permission ROLE --prefix=true readwrite {where}`"
            )
        return ""

    def wrap(self, channel: Any) -> Any:
        return _TokenChannel(channel, self) if self.access.config.user else channel


class _TokenChannel:
    """A channel whose calls carry the token that is current when they begin. It has only the methods that etcd3's stubs use."""

    def __init__(self, channel: Any, login: Login) -> None:
        self._channel = channel
        self._login = login

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, method: Any) -> Callable[..., Any]:
        def call(request: Any, *, timeout: float | None = None, metadata: Sequence[tuple[str, str]] = ()) -> Any:
            return method(request, timeout=timeout, metadata=(*metadata, ("token", self._login.token)))

        return call


def read_file(path: str, what: str) -> bytes:
    """Return the file's content. Raises ValueError if it cannot be read or is empty."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_SECRET_BYTES)
    except OSError as error:
        raise ValueError(f"name_resolve.{what}={path!r} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise ValueError(f"name_resolve.{what}={path!r} is empty")
    return data


def read_secret(path: str, what: str) -> bytes:
    """Like read_file, but also raises ValueError if other users can access the file."""
    data = read_file(path, what)
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"name_resolve.{what}={path!r} is accessible to other users (mode {mode:04o}); run `chmod 600 {path}`"
        )
    return data
