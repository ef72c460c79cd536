"""A socket scanner without credentials: connects to listening sockets, tries the possible protocols, and prints the answers.

    python -m tests.support.scanner 10.77.0.1:4711 10.77.0.1:4712
    {"10.77.0.1:4711": [], "10.77.0.1:4712": ["HTTP /health: 200"]}
    python -m tests.support.scanner       lists the listening sockets of the host it runs on, with their processes

It knows no secret, only the addresses of the sockets (`listening` finds them). It can run on another host or in another network
namespace. An empty list means that the port revealed nothing: it refused, closed the connection, or did not answer. A greeting that
names only the protocol and mechanism (ZeroMQ's) does not count as an answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import struct
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

LIMIT_S = 1.0  # per request
HANDSHAKE_S = 1.0  # limit of a ZeroMQ handshake; a refused one ends earlier
STORE_S = 1.0  # per request to a socket that may be a TCPStore of torch
_SILENCE_S = 0.3  # an answer counts as complete when no data has come for this time
_AT_ONCE = 32
_REFUSALS = (400, 401, 403, 404, 405, 408, 411, 413, 415, 426, 431, 501, 505)
_PATHS = (
    *(
        ("GET", path)
        for path in ("/", "/health", "/metrics", "/v1/models", "/v1/loads", "/get_model_version", "/servers")
    ),
    *(("GET", path) for path in ("/get_model_info", "/server_info", "/health_generate", "/version", "/weights")),
    *(
        ("POST", path)
        for path in ("/generate", "/allocate_rollout", "/report", "/scale", "/broadcast_weights", "/abort_request")
    ),
    *(("POST", path) for path in ("/update_weights_from_disk", "/init_weights_update_group", "/v1/chat/completions")),
    ("POST", "/v3/kv/range"),  # etcd
)
_BODIES = {"/v3/kv/range": b'{"key":"AA==","range_end":"AA=="}'}
_ZMTP_SIGNATURE = b"\xff\x00\x00\x00\x00\x00\x00\x00"
_ZMTP_GREETING_BYTES = 64
_LET_IN = zmq.EVENT_HANDSHAKE_SUCCEEDED
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
# torch's TCPStore: a client hello (a magic number), then the requests "number of keys" and "ping"
_TCP_STORE_HELLO = b"\x00" + struct.pack("<I", 0x3C85F7CE)
_TCP_STORE_QUESTIONS = {"number of keys": b"\x0a", "ping": b"\x0d" + struct.pack("<I", 7)}


@dataclass(frozen=True)
class Listener:
    """A listening socket."""

    process: str  # the end of its command line
    pid: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def listening(processes: Iterable[psutil.Process]) -> Iterator[Listener]:
    """All TCP sockets that these processes listen on."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            shown = " ".join(process.cmdline())[-80:]
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield Listener(shown, process.pid, connection.laddr.ip, connection.laddr.port)


def scan(addresses: Iterable[str]) -> dict[str, list[str]]:
    """The answers of each address to an unauthenticated client."""
    addresses = list(addresses)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(addresses, pool.map(answers_of, addresses), strict=True))


def answers_of(address: str) -> list[str]:
    host, _, port_text = address.rpartition(":")
    host, port = host.strip("[]"), int(port_text)
    if not _accepts(host, port):
        return []
    return [*_http_answers(host, port), *_store_answers(host, port), *_zmq_answers(host, port), *_told(host, port)]


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=LIMIT_S):
            return True
    except OSError:
        return False


def _http_answers(host: str, port: int) -> Iterator[str]:
    """Try HTTP, and HTTPS without verifying the certificate."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    for kind in ("HTTP", "HTTPS"):
        for method, path in _PATHS:
            connection = (
                http.client.HTTPConnection(host, port, timeout=LIMIT_S)
                if kind == "HTTP"
                else http.client.HTTPSConnection(host, port, timeout=LIMIT_S, context=tls)
            )
            try:
                body = _BODIES.get(path, b"{}") if method == "POST" else None
                connection.request(method, path, body=body, headers={"Content-Type": "application/json"})
                status = connection.getresponse().status
                if status not in _REFUSALS:
                    yield f"{kind} {path}: {status}"
            except http.client.RemoteDisconnected:
                continue  # closed without an answer; another request may be answered
            except http.client.BadStatusLine as error:
                line = str(error.args[0]) if error.args else ""
                if line.strip("'\" \r\n") and not line.encode("latin-1").startswith(b"\xff"):
                    yield f"something for {path}: {line!r}"
                break  # not an HTTP server
            except (OSError, http.client.HTTPException):
                break  # no answer within the limit: not an HTTP server either
            finally:
                connection.close()


def _store_answers(host: str, port: int) -> Iterator[str]:
    for what, question in _TCP_STORE_QUESTIONS.items():
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=STORE_S) as connection:
            connection.sendall(_TCP_STORE_HELLO + question)
            answer = connection.recv(64)
            if answer and not answer.startswith((b"\xff", b"HTTP/")):
                yield f"torch's TCPStore, {what}: {answer!r}"


def _zmq_answers(host: str, port: int) -> Iterator[str]:
    """Try ZeroMQ without a key, with a user name, and with our own key and a guessed server key."""
    for name in ("NULL", "PLAIN", "CURVE"):
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.LINGER, 0)
        if name == "PLAIN":
            push.plain_username, push.plain_password = b"root", b"root"
        elif name == "CURVE":
            push.curve_publickey, push.curve_secretkey = zmq.curve_keypair()
            push.curve_serverkey = zmq.curve_keypair()[0]
        monitor = push.get_monitor_socket(_LET_IN | _REFUSED)
        push.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        if monitor.poll(int(HANDSHAKE_S * 1000)) and recv_monitor_message(monitor)["event"] == _LET_IN:
            yield f"ZeroMQ {name}: let in"
        push.disable_monitor()
        monitor.close(linger=0)
        push.close()
        context.term()


def _told(host: str, port: int) -> Iterator[str]:
    """Answers to a connection without data, and to data that belongs to no protocol."""
    for noise in (b"", b"\x00" * 64, b"hello\r\n\r\n"):
        got = b""
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=LIMIT_S) as connection:
            connection.settimeout(_SILENCE_S)
            connection.sendall(noise)
            while len(got) <= 1024 and (data := connection.recv(1024)):
                got += data
        is_greeting = got.startswith(_ZMTP_SIGNATURE) and len(got) <= _ZMTP_GREETING_BYTES
        is_refusal = got.startswith(
            tuple(f"HTTP/1.{minor} {status}".encode() for minor in (0, 1) for status in _REFUSALS)
        )
        if got and not is_greeting and not is_refusal:
            yield f"to {noise[:8]!r}: {got[:80]!r}"


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(scan(sys.argv[1:])))
    else:
        print(json.dumps([asdict(listener) for listener in listening(psutil.process_iter())]))
