"""How a session gets into an etcd that not everybody may use: TLS, a client certificate, a user's password; below which keys.

Secrets are named by their files, which nobody else may read: they are never in a config, an argument or a log.
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
    """What of name_resolve says who we are."""

    prefix: str = ""
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot work together."""
        if self.prefix:
            normalize_name(self.prefix)
        if bool(self.user) != bool(self.password_file):
            raise ValueError(
                f"name_resolve.user={self.user!r} and name_resolve.password_file={self.password_file!r}: give both, or neither"
            )
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError(
                f"name_resolve.cert_file={self.cert_file!r} and name_resolve.key_file={self.key_file!r}: a client certificate "
                "needs both"
            )
        if self.cert_file and not self.ca_file:
            raise ValueError(
                "name_resolve.cert_file is given without name_resolve.ca_file: name the certificate of the authority that signed "
                "the server's"
            )

    @classmethod
    def of(cls, config: NameResolveConfig) -> EtcdAccess:
        return cls(config.prefix, config.user, config.password_file, config.ca_file, config.cert_file, config.key_file)

    @property
    def key_prefix(self) -> bytes:
        return normalize_name(self.prefix).encode() + b"/" if self.prefix else b""

    def open_channel(self, api: Api, endpoint: str, options: Sequence[tuple[str, Any]]) -> Any:
        """Raises ValueError where a file cannot be used."""
        if not self.ca_file:
            return api.grpc.insecure_channel(endpoint, options=options)
        credentials = api.grpc.ssl_channel_credentials(
            read_file(self.ca_file, "ca_file"),
            read_secret(self.key_file, "key_file") if self.key_file else None,
            read_file(self.cert_file, "cert_file") if self.cert_file else None,
        )
        return api.grpc.secure_channel(endpoint, credentials, options=options)


EVERYBODY = EtcdAccess()  # an etcd that lets everybody in


@dataclass
class Login:
    """A user's session with an etcd that asks for passwords. Its token goes with every call of every channel; one that the server
    knows no longer (it forgets them when it restarts, and after minutes without use) is followed by another."""

    api: Api
    access: EtcdAccess
    token: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, channel: Any, limit_s: float) -> None:
        """Have a token. Raises gRPC's error in an outage, NameResolveError where the server refuses."""
        with self._lock:
            if self.token or not self.access.user:
                return
            password = read_secret(self.access.password_file, "password_file").decode(errors="replace").rstrip("\r\n")
            request = self.api.rpc.AuthenticateRequest(name=self.access.user, password=password)
            try:
                self.token = self.api.rpc.AuthStub(channel).Authenticate(request, timeout=limit_s).token
            except self.api.grpc.RpcError as error:
                if remedy := self.remedy(error):
                    raise NameResolveError(f"etcd refuses the user {self.access.user!r}: {remedy}") from error
                raise

    def is_stale(self, error: Any, used: str) -> bool:
        """Whether the call failed for want of a newer token than the one it used, which is then forgotten."""
        if not (self.access.user and any(text in (error.details() or "") for text in _STALE_TOKEN)):
            return False
        with self._lock:
            if self.token == used:
                self.token = ""
        return True

    def remedy(self, error: Any) -> str:
        """What to do about a refusal that has to do with who we are; "" if it has not."""
        details = error.details() or ""
        if _WRONG_PASSWORD in details:
            return "wrong name or password; see name_resolve.user and the file name_resolve.password_file"
        if _NO_AUTHENTICATION in details:
            return (
                "it lets in everybody, without passwords: run `etcdctl auth enable`, or leave out name_resolve.user and "
                "name_resolve.password_file"
            )
        if _NO_USER in details:
            return "it asks for a user; set name_resolve.user and name_resolve.password_file"
        if error.code() == self.api.grpc.StatusCode.PERMISSION_DENIED:
            where = self.access.key_prefix.decode() or "asyncrl"
            return (
                f"the user may not use the keys below {where!r}; set name_resolve.prefix to what the user may use, or let an "
                f"administrator run `etcdctl role grant-permission ROLE --prefix=true readwrite {where}`"
            )
        return ""

    def wrap(self, channel: Any) -> Any:
        return _TokenChannel(channel, self) if self.access.user else channel


class _TokenChannel:
    """A channel whose calls carry the token that is there when they begin. What etcd3's stubs ask of a channel, no more."""

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
    """Raises ValueError."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_SECRET_BYTES)
    except OSError as error:
        raise ValueError(f"name_resolve.{what}={path!r} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise ValueError(f"name_resolve.{what}={path!r} is empty")
    return data


def read_secret(path: str, what: str) -> bytes:
    """The same of a file that nobody else may read."""
    data = read_file(path, what)
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"name_resolve.{what}={path!r} may be read by others (mode {mode:04o}); run `chmod 600 {path}`"
        )
    return data
