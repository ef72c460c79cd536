"""Authentication and encryption between the processes of a run (network.authenticate).

The launcher creates the run's secrets at its start, in <run>/secrets/, readable only by its user. They are a CURVE key
pair that identifies receivers, a CURVE key pair that admits senders, and a bearer token for HTTP. Each process reads
the secrets once and applies them to all its sockets (`secure`), except streams on Unix sockets, which need no secrets
(unix_sockets.py). This is process-wide because a process belongs to one run, and because one forgotten socket would be
an open door. Secrets never appear in a config, command line, environment, log or status; `repr` hides them.

CURVE alone admits any client that has made a key of its own. A ZAP handler (Gatekeeper, one per ZeroMQ context) holds
the list of admitted keys; without a handler ZeroMQ would admit no client.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets as random_secrets
import ssl
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import zmq
from zmq.utils import z85

from asyncrl.config.schema import ConfigError, NetworkConfig
from asyncrl.runtime.disk import write_private
from asyncrl.runtime.doorkeeper import bound_connections

logger = logging.getLogger(__name__)

FOLDER = "secrets"  # in the run's folder
SECRETS_FILE = "keys.json"
CERTIFICATE_FILE, KEY_FILE = "run.crt", "run.key"  # for TLS on TCP
TOKEN_FILE = "token"  # a file of its own, for people: curl -H "Authorization: Bearer $(cat <run>/secrets/token)"
_TOKEN_BYTES = 32
_HANDSHAKE_MS = 10_000  # limit for a silent stranger's connection
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_PARTS = 7  # number of parts of a request with CURVE: version, id, domain, address, identity, mechanism, key
_SAY_AGAIN_S = 60.0


class Secrets(msgspec.Struct, frozen=True):
    """The secrets of one launch of a run. Keys are in ZeroMQ's text form (Z85)."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    token: str
    certificate: str = ""  # PEM; "": HTTP is not encrypted
    certificate_key: str = ""

    def __repr__(self) -> str:
        return "Secrets(***)"

    @classmethod
    def make(cls, certificate: str = "", certificate_key: str = "") -> Secrets:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        token = random_secrets.token_urlsafe(_TOKEN_BYTES)
        return cls(
            server_public.decode(),
            server_secret.decode(),
            client_public.decode(),
            client_secret.decode(),
            token,
            certificate,
            certificate_key,
        )


@dataclass(frozen=True)
class Security:
    """The security settings in effect in a process. serve_tls and ask_tls: both set or both None."""

    secrets: Secrets
    serve_tls: ssl.SSLContext | None = None
    ask_tls: ssl.SSLContext | None = None
    # For clients outside asyncrl, which trust only the user's certificate
    serve_others_tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, run_dir: Path, secrets: Secrets, network: NetworkConfig) -> Security:
        """Use the user's certificate, otherwise the run's own certificate if it has one. Raises ConfigError if a
        certificate is unusable.
        """
        if network.tls_cert:
            files = (network.tls_cert, network.tls_key, network.tls_ca)
        elif secrets.certificate:
            own = str(secrets_dir(run_dir) / CERTIFICATE_FILE)
            files = (own, str(secrets_dir(run_dir) / KEY_FILE), own)
        else:
            return cls(secrets)
        certificate, key, authority = files
        try:
            serve = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            serve.load_cert_chain(certificate, key or None)
            ask = ssl.create_default_context(cafile=authority or None)
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(path for path in files if path)
            raise ConfigError(f"network.tls_cert, tls_key, tls_ca: {named} cannot be used: {error}") from error
        if network.tls_cert:
            return cls(secrets, serve, ask, serve)
        ask.check_hostname = False  # only this run's processes hold the certificate's key, on any host
        return cls(secrets, serve, ask)

    @property
    def headers(self) -> dict[str, str]:
        """Headers for a request to a process of the run."""
        return {"Authorization": f"Bearer {self.secrets.token}"}

    def allows(self, authorization: str) -> bool:
        """Return whether a request with this Authorization header comes from a process of the run."""
        scheme, _, token = authorization.partition(" ")
        expected = self.secrets.token.encode()
        return hmac.compare_digest(token.strip().encode(errors="replace"), expected) and scheme.lower() == "bearer"


_current: Security | None = None


def current() -> Security | None:
    """Return the settings in effect; None: connections are neither authenticated nor encrypted."""
    return _current


def secure(security: Security | None) -> None:
    """Apply the settings to all further sockets and sessions of this process. Call it before the first is created."""
    global _current
    _current = security


# ------------------------------------------------------------------------------------------------------------------- files


def secrets_dir(run_dir: Path) -> Path:
    return run_dir / FOLDER


def write_secrets(run_dir: Path, secrets: Secrets) -> None:
    """Write the secrets, readable only by their owner, and replace older ones. Each file is replaced atomically."""
    folder = secrets_dir(run_dir)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)  # it may have existed with another mode
    files = {SECRETS_FILE: msgspec.json.encode(secrets), TOKEN_FILE: secrets.token.encode() + b"\n"}
    if secrets.certificate:
        files |= {CERTIFICATE_FILE: secrets.certificate.encode(), KEY_FILE: secrets.certificate_key.encode()}
    for name, content in files.items():
        write_private(folder / name, content)


def read_secrets(run_dir: Path) -> Secrets:
    """Read the secrets. Raises ConfigError if they are missing, unreadable, or accessible to other users."""
    path = secrets_dir(run_dir) / SECRETS_FILE
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{path} has mode {stat.S_IMODE(mode):04o}: other users can access it; chmod 600 it and start the run again"
                )
            return msgspec.json.decode(file.read(), type=Secrets)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist, but network.authenticate is on: the launcher writes it if the run's folder is shared; "
            "otherwise the host daemon does"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def remove_secrets(run_dir: Path, secrets: Secrets) -> None:
    """Remove the secrets of a launch at its end, when no process needs them any more. Those of a later launch stay."""
    folder = secrets_dir(run_dir)
    with contextlib.suppress(OSError, ConfigError):
        if read_secrets(run_dir) != secrets:
            return
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def open_security(run_dir: Path, network: NetworkConfig) -> Security | None:
    """Return the security settings for a process of a run. Raises ConfigError."""
    return Security.of(run_dir, read_secrets(run_dir), network) if network.authenticate == "on" else None


# ----------------------------------------------------------------------------------------------------------------- streams


def guard_pull(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], secrets: Secrets) -> None:
    """Make a receiving socket, not yet bound, admit only this run's senders."""
    gatekeeper_of(context).admit(secrets.server_public, secrets.client_public)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, secrets.server_public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, secrets.server_secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, secrets.server_public)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # if no handler answers, ZeroMQ admits no client
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    bound_connections(socket, context)


def guard_push(socket: zmq.Socket[bytes], secrets: Secrets) -> None:
    """Make a sending socket, not yet connected, present this run's key, and send only to holders of the receivers' key."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, secrets.server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, secrets.client_public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, secrets.client_secret)


class Gatekeeper:
    """ZeroMQ's authentication handler (ZAP, RFC 27) of a context: decides which keys each domain admits. It runs on a
    thread, because ZeroMQ asks from its own thread and a busy event loop must not delay a sender.

    waits for: handshakes.  unblocked by: a handshake; the end of the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._keys: dict[bytes, frozenset[bytes]] = {}  # ZAP domain -> admitted keys
        self.num_refused = 0
        self._said = -_SAY_AGAIN_S
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        threading.Thread(target=self._answer_all, name="gatekeeper", daemon=True).start()

    def admit(self, domain: str, public_key: str) -> None:
        keys = self._keys.get(domain.encode(), frozenset())
        self._keys[domain.encode()] = keys | {z85.decode(public_key)}

    def _answer_all(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        separator = frames.index(b"") + 1
        request = frames[separator:]
        number = request[1] if len(request) > 1 else b""
        if self._knows(request):
            said = [b"200", b"OK", b"asyncrl", b""]
        else:
            said = [b"400", b"unknown key", b"", b""]
            self._note_refused(request)
        return [*frames[:separator], b"1.0", number, *said]

    def _knows(self, request: list[bytes]) -> bool:
        return (
            len(request) == _ZAP_PARTS
            and request[0] == b"1.0"
            and request[5] == b"CURVE"
            and request[6] in self._keys.get(request[2], ())
        )

    def _note_refused(self, request: list[bytes]) -> None:
        self.num_refused += 1
        now = time.monotonic()
        if now - self._said >= _SAY_AGAIN_S:
            self._said = now
            who = request[3].decode(errors="replace") if len(request) > 3 else "a client"
            logger.warning("refused %s: its key does not belong to this run (%d refused so far)", who, self.num_refused)


_gatekeepers: WeakKeyDictionary[zmq.Context[zmq.Socket[bytes]], Gatekeeper] = WeakKeyDictionary()
_making = threading.Lock()


def gatekeeper_of(context: zmq.Context[zmq.Socket[bytes]]) -> Gatekeeper:
    with _making:
        keeper = _gatekeepers.get(context)
        if keeper is None:
            keeper = _gatekeepers[context] = Gatekeeper(context)
        return keeper
