"""Who may talk to the processes of a run, once that is checked (network.authenticate).

The launcher makes the run's secrets at its start, in <run>/secrets/, for nobody but its user: one CURVE key pair that receivers
are known by, one that senders are let in with, a bearer token for HTTP. Each process reads them once and has them in effect
for all its sockets (`secure`): a process belongs to one run, and what is forgotten at one place of use is an open door.
Secrets are in no config, command line, environment, log or status; `repr` does not show them.

CURVE alone lets in whoever has made a key for himself. A ZAP handler (Gatekeeper, one a ZeroMQ context) has the list of keys
that are let in; without a handler ZeroMQ lets nobody in.
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
from collections.abc import Iterator
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
CERTIFICATE_FILE, KEY_FILE = "run.crt", "run.key"  # of TLS on TCP
TOKEN_FILE = "token"  # alone, for people: curl -H "Authorization: Bearer $(cat <run>/secrets/token)"
_TOKEN_BYTES = 32
_HANDSHAKE_MS = 10_000  # a stranger that says nothing keeps a connection for so long
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_PARTS = 7  # of a request with CURVE: version, id, domain, address, identity, mechanism, key
_SAY_AGAIN_S = 60.0


class Secrets(msgspec.Struct, frozen=True):
    """Of one launch of a run. Keys are in ZeroMQ's text form (Z85)."""

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
    """What is in effect in a process. serve_tls and ask_tls: both or none."""

    secrets: Secrets
    serve_tls: ssl.SSLContext | None = None
    ask_tls: ssl.SSLContext | None = None
    # For clients that are not ours: they trust only the user's certificate
    serve_others_tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, run_dir: Path, secrets: Secrets, network: NetworkConfig) -> Security:
        """The user's certificate is in effect, else the run's own if it has one. Raises ConfigError where a certificate cannot be
        used."""
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
        ask.check_hostname = False  # only processes of the run, on whatever host, have the key of its certificate
        return cls(secrets, serve, ask)

    @property
    def headers(self) -> dict[str, str]:
        """Of a request to a process of the run."""
        return {"Authorization": f"Bearer {self.secrets.token}"}

    def allows(self, authorization: str) -> bool:
        """Whether a request with this header is one of the run's."""
        scheme, _, token = authorization.partition(" ")
        expected = self.secrets.token.encode()
        return hmac.compare_digest(token.strip().encode(errors="replace"), expected) and scheme.lower() == "bearer"


_current: Security | None = None


def current() -> Security | None:
    """None: nothing is checked, and nothing encrypted."""
    return _current


def secure(security: Security | None) -> None:
    """From now on all sockets and sessions of this process. Call it before the first is made."""
    global _current
    _current = security


@contextlib.contextmanager
def secured(security: Security | None) -> Iterator[None]:
    """The same for a while, for tests."""
    before = _current
    secure(security)
    try:
        yield
    finally:
        secure(before)


# ------------------------------------------------------------------------------------------------------------------- files


def secrets_dir(run_dir: Path) -> Path:
    return run_dir / FOLDER


def write_secrets(run_dir: Path, secrets: Secrets) -> None:
    """For their owner only, in the place of older ones. Each file is whole at any time."""
    folder = secrets_dir(run_dir)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)  # it may have been there
    files = {SECRETS_FILE: msgspec.json.encode(secrets), TOKEN_FILE: secrets.token.encode() + b"\n"}
    if secrets.certificate:
        files |= {CERTIFICATE_FILE: secrets.certificate.encode(), KEY_FILE: secrets.certificate_key.encode()}
    for name, content in files.items():
        write_private(folder / name, content)


def read_secrets(run_dir: Path) -> Secrets:
    """Raises ConfigError where they are not there, cannot be read, or can be read by others."""
    path = secrets_dir(run_dir) / SECRETS_FILE
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{path} has mode {stat.S_IMODE(mode):04o}: others can use it; chmod 600 it, and start the run anew"
                )
            return msgspec.json.decode(file.read(), type=Secrets)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not there, and network.authenticate is on: the launcher makes it, where the run's folder is shared; "
            "else the host daemon brings it"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def remove_secrets(run_dir: Path) -> None:
    """At the end of a launch: nobody is left to let in."""
    folder = secrets_dir(run_dir)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def open_security(run_dir: Path, network: NetworkConfig) -> Security | None:
    """What a process of a run has in effect. Raises ConfigError."""
    return Security.of(run_dir, read_secrets(run_dir), network) if network.authenticate == "on" else None


# ----------------------------------------------------------------------------------------------------------------- streams


def guard_pull(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], secrets: Secrets) -> None:
    """Have a receiving socket, not yet bound, let in this run's senders only."""
    gatekeeper_of(context).let_in(secrets.server_public, secrets.client_public)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, secrets.server_public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, secrets.server_secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, secrets.server_public)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # should nobody answer: nobody is let in
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    bound_connections(socket, context)


def guard_push(socket: zmq.Socket[bytes], secrets: Secrets) -> None:
    """Have a sending socket, not yet connected, show this run's key, and send to holders of the receivers' key only."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, secrets.server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, secrets.client_public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, secrets.client_secret)


class Gatekeeper:
    """ZeroMQ's authentication handler (ZAP, RFC 27) of a context: says whose key is let in where. On a thread, as ZeroMQ asks it
    from its own and no event loop may keep a sender waiting.

    waits for: handshakes.  unblocked by: them; the end of the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._keys: dict[bytes, frozenset[bytes]] = {}  # ZAP domain -> keys that are let in
        self.num_refused = 0
        self._said = -_SAY_AGAIN_S
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        threading.Thread(target=self._answer_all, name="gatekeeper", daemon=True).start()

    def let_in(self, domain: str, public_key: str) -> None:
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
            who = request[3].decode(errors="replace") if len(request) > 3 else "somebody"
            logger.warning("%s is not let in: its key is none of this run's (%d refused so far)", who, self.num_refused)


_gatekeepers: WeakKeyDictionary[zmq.Context[zmq.Socket[bytes]], Gatekeeper] = WeakKeyDictionary()
_making = threading.Lock()


def gatekeeper_of(context: zmq.Context[zmq.Socket[bytes]]) -> Gatekeeper:
    with _making:
        keeper = _gatekeepers.get(context)
        if keeper is None:
            keeper = _gatekeepers[context] = Gatekeeper(context)
        return keeper
