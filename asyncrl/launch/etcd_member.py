"""An agent's server of the run's private etcd: it joins the launcher's when the launcher wants it to, and leaves it in order.

Its data are of this agent only, in <run>/etcd_members/<host>, and go with it. It dies with the agent.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config import ExperimentConfig, NameResolveConfig
from asyncrl.launch.private_etcd import PrivateEtcd
from asyncrl.launch.rundir import LaunchError, logs_dir
from asyncrl.messages import EtcdReport, EtcdWish
from asyncrl.runtime.etcd_access import read_file, read_secret
from asyncrl.runtime.etcd_cluster import EtcdTls
from asyncrl.runtime.etcd_server import EtcdServer, EtcdServerError

MEMBERS_FOLDER = "etcd_members"  # in the run's folder
_JOIN_LIMIT_S = 60.0
_LEAVE_LIMIT_S = 7.0  # etcd lets none go before all have been connected for 5 s
_LOOK_S = 0.5


class EtcdMember:
    """consumes: the launcher's wish. produces: a server, and what is known of it.

    waits for: nothing but in `close`; a thread of the server's own waits for etcd, within limits.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        host: str,
        agent: str,
        address: str,
        run_dir: Path,
        notice: Callable[[str], None],
    ) -> None:
        """config: with the way to name resolve, and the run's certificate where etcd asks for it. agent: its incarnation."""
        self._config, self._host, self._agent, self._address = config, host, agent, address
        self._run_dir, self._notice = run_dir, notice
        self._life: _Life | None = None
        self._failed: EtcdReport | None = None  # of the cluster that it is asked to join

    def turn(self, wish: EtcdWish | None) -> None:
        """wish: of the launcher that is obeyed; None: there is none."""
        wanted = wish.cluster if wish is not None and wish.members.get(self._host) == self._agent else ""
        if self._failed is not None and self._failed.cluster != wanted:
            self._failed = None
        if self._life is not None and self._life.cluster != wanted:
            self._life.leave_soon()
            if not self._life.is_over:
                return
            self._life = None
        if wish is None or not wanted or self._failed is not None:
            return
        if self._life is None:
            try:
                self._life = self._begin(wish)
            except (EtcdServerError, ValueError, OSError) as error:
                self._failed = EtcdReport(cluster=wanted, state="failed", error=str(error))
                self._notice(f"no server of the run's etcd here: {error}")
                return
        self._life.know_others(wish.endpoints)

    def report(self) -> EtcdReport | None:
        return self._failed or (self._life.report() if self._life is not None else None)

    def close(self) -> None:
        """Leave, if there is anything to leave."""
        if self._life is not None:
            self._life.leave_soon()
            self._life.wait(2 * _LEAVE_LIMIT_S)

    def _begin(self, wish: EtcdWish) -> _Life:
        """Raises EtcdServerError, ValueError or OSError."""
        name_resolve = self._config.name_resolve
        data_dir = self._run_dir / MEMBERS_FOLDER / self._host
        if data_dir.exists():
            shutil.rmtree(data_dir)  # of an agent before
        log = logs_dir(self._run_dir, wish.attempt) / f"etcd_{self._host}.log"
        server = EtcdServer(
            data_dir,
            log,
            name_resolve.binary,
            self._address,
            tls=_certificate(name_resolve) if wish.guarded else None,
            join=[wish.endpoints[0]],
        )
        server.choose_ports()
        etcd = PrivateEtcd(server, log, self._config.runtime.max_restarts, self._notice)
        return _Life(wish.cluster, etcd, self._notice)


class _Life:
    """From joining to leaving, on a thread."""

    def __init__(self, cluster: str, etcd: PrivateEtcd, notice: Callable[[str], None]) -> None:
        self.cluster = cluster
        self._etcd, self._notice = etcd, notice
        self._runs = False
        self._error = ""
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd's member", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def report(self) -> EtcdReport:
        server = self._etcd.server
        return EtcdReport(
            cluster=self.cluster,
            state="failed" if self._error else "runs" if self._runs else "joins",
            endpoint=server.endpoint,
            peer_url=server.peer_url,
            error=self._error,
        )

    def know_others(self, endpoints: Sequence[str]) -> None:
        """endpoints: all of the cluster's."""
        server = self._etcd.server
        self._etcd.know_others(server.name, [endpoint for endpoint in endpoints if endpoint != server.endpoint])

    def leave_soon(self) -> None:
        self._leaving.set()

    def wait(self, limit_s: float) -> None:
        self._thread.join(limit_s)

    def _run(self) -> None:
        """Unblocked by: `leave_soon`; an end of the server that cannot be helped; while it joins by that or _JOIN_LIMIT_S only."""
        try:
            self._etcd.start(_JOIN_LIMIT_S)
            self._runs = True
            while not self._leaving.wait(_LOOK_S):
                self._etcd.turn()
        except (EtcdServerError, LaunchError, OSError) as error:
            self._error = str(error)
            if not self._leaving.is_set():
                self._notice(f"no server of the run's etcd here: {error}")
        finally:
            self._etcd.leave(_LEAVE_LIMIT_S)


def _certificate(name_resolve: NameResolveConfig) -> EtcdTls:
    """The run's, which a server shows and asks for. Raises ValueError where it cannot be read on this host."""
    if not name_resolve.cert_file:
        raise ValueError(
            "it needs the run's certificate, which is in the run's folder on the launcher's host (secrets/etcd.crt and .key), and "
            "the two do not share that folder"
        )
    for path, what, read in (
        (name_resolve.ca_file, "ca_file", read_file),
        (name_resolve.cert_file, "cert_file", read_file),
        (name_resolve.key_file, "key_file", read_secret),
    ):
        read(path, what)
    return EtcdTls(name_resolve.cert_file, name_resolve.key_file, name_resolve.ca_file)
