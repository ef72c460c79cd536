"""The launcher's side of name resolve: starts a private etcd unless the user names endpoints, grants leases, publishes statuses.

The launcher's loop never waits for name resolve. A thread of name_writer.py publishes statuses and revokes leases.
Another thread (private_etcd.py) restarts a private etcd that ended or froze. After an outage, the workers' own sessions restore
their entries.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from asyncrl.config.schema import ExperimentConfig, NameResolveConfig, authenticates
from asyncrl.launch.hosts.watch_cache import WatchCache
from asyncrl.launch.name_writer import NameWriter
from asyncrl.launch.private_etcd import PrivateEtcd
from asyncrl.launch.rundir import LaunchError
from asyncrl.protocol.names import Names, incarnation
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.background import on_thread
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.etcd.server import EtcdServer, EtcdServerError, EtcdTls
from asyncrl.runtime.names.interface import (
    Lease,
    NameEntryExists,
    NameEntryNotFound,
    NameResolveError,
    NameResolver,
    NameResolveTimeout,
    WatchCallback,
    WatchEvent,
)
from asyncrl.runtime.security import Secrets

_STOP_LIMIT_S = 2.0


class NameService:
    """The launcher's access to name resolve. The launcher's thread uses it, and closes it at the end of the run. Once the
    launcher's loop runs, the calls that block run on other threads (`ask_for_last_checkpoint`, `grant_lease_soon`). A private etcd
    dies with the launcher."""

    def __init__(
        self,
        config: ExperimentConfig,
        name_resolve: NameResolveConfig,
        resolver: NameResolver,
        notice: Callable[[str], None],
        *,
        etcd: PrivateEtcd | None = None,
        owner: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """name_resolve: the config with which processes reach name resolve. resolver: the launcher's session. notice: shows a
        message to the user. etcd: the private etcd; None: the etcd is the user's, and `owner` is this
        launcher's claim of the run's name."""
        self.name_resolve, self.resolver = name_resolve, resolver
        self._config, self._notice, self._etcd, self._owner = config, notice, etcd, owner
        self._names = Names(config.experiment, config.trial)
        self.writer = NameWriter(resolver, clock)

    @classmethod
    def open(
        cls,
        config: ExperimentConfig,
        run_dir: Path,
        log: Path,
        notice: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> NameService:
        """Start a private etcd, or connect to the user's etcd and claim the run's name there. Then delete the keys that earlier
        launches of the run have left. config: with absolute paths. log: log file of a private etcd. Raises LaunchError."""
        name_resolve = config.name_resolve
        etcd: PrivateEtcd | None = None
        names = Names(config.experiment, config.trial)
        with ExitStack() as undo:
            if not name_resolve.endpoints:
                etcd, name_resolve = _start_private_etcd(config, run_dir, log, notice, clock)
                undo.callback(etcd.close, _STOP_LIMIT_S)
            try:
                resolver = open_name_resolver(name_resolve)
                undo.callback(resolver.close)
                owner = ""
                if etcd is None:
                    owner = _claim_name(config, run_dir, resolver, name_resolve)
                    undo.callback(_delete_keys, resolver, names, owner, notice)
                resolver.clear_subtree(names.root)
            except (NameResolveError, ValueError) as error:
                answers = etcd is not None or not isinstance(error, NameResolveTimeout)
                hint = (
                    ""
                    if answers
                    else "; check that an etcd listens there, or leave name_resolve.endpoints out for a private one"
                )
                raise LaunchError(f"name_resolve.endpoints={name_resolve.endpoints}: {error}{hint}") from error
            undo.pop_all()
        return cls(config, name_resolve, resolver, notice, etcd=etcd, owner=owner, clock=clock)

    @property
    def endpoints(self) -> list[str]:
        return self.name_resolve.endpoints

    def grant_lease(self) -> Lease:
        """Return a lease that lives until it is revoked or this service is closed. Raises LaunchError."""
        try:
            return self.resolver.grant_lease(self._config.runtime.lease_ttl_s)
        except NameResolveError as error:
            raise LaunchError(f"name resolve at {self.name_resolve.where}: {error}") from error

    def grant_lease_soon(self) -> Future[Lease]:
        """Call `grant_lease` on a thread, so that the launcher's loop does not wait."""
        return on_thread(self.grant_lease)

    def hand_out(self, secrets: Secrets) -> None:
        """Publish the secrets for hosts that do not share the run's folder. Call it before their daemons find the launcher. Does
        nothing if name resolve is readable without credentials; then the hosts must share the run's folder, which has the secrets.
        Raises LaunchError."""
        if not self.name_resolve.is_guarded:
            return
        try:
            self.resolver.add(self._names.secrets(), msgspec.json.encode(secrets).decode(), replace=True)
        except NameResolveError as error:
            raise LaunchError(f"name resolve at {self.name_resolve.where}: {error}") from error

    def watch_status(self, worker: str, callback: WatchCallback) -> None:
        """Watch the status that a worker publishes itself, because the launcher did not start it. The callback runs on a thread of
        name resolve."""
        self._watch(self._names.status(worker), callback)

    def watch_scaling(self, on_desired: WatchCallback, on_drained: WatchCallback) -> None:
        """Watch the desired number of generation servers, and which have drained. The callbacks run on a thread of name resolve.

        The command that set the number has ended, so the launcher restores the key if the backend loses its data.
        """

        def on_desired_kept(event: WatchEvent) -> None:
            if event.kind == "put":
                self.resolver.adopt(event.key, event.value)
            on_desired(event)

        self._watch(self._names.desired_generation_servers(), on_desired_kept)
        self._watch(self._names.generation_drained(), on_drained, subtree=True)

    def ask_for_last_checkpoint(self, attempt: int) -> None:
        """Ask this attempt's master to write a checkpoint and end. Blocks until name resolve has stored the request; raises
        NameResolveError if it does not."""
        self.resolver.add(self._names.last_checkpoint(), str(attempt), replace=True)

    def watch_stop(self, callback: WatchCallback) -> None:
        """Watch for requests of `asyncrl-launch stop` on another host. The callback runs on a thread of name resolve."""
        self._watch(self._names.stop_request(), callback)

    def watch_checked(self, key: str, callback: WatchCallback) -> None:
        """Watch a subtree, and compare the watch with reads."""
        cache = WatchCache(callback)
        self._watch(key, cache.observe, subtree=True)
        self.writer.compare(key, cache)

    def _watch(self, key: str, callback: WatchCallback, *, subtree: bool = False) -> None:
        try:
            self.resolver.watch(key, callback, subtree=subtree)
        except NameResolveError as error:
            raise LaunchError(f"name resolve at {self.name_resolve.where}: {error}") from error

    def publish(self, statuses: Mapping[int, WorkerStatus]) -> None:
        """Publish the newest statuses. statuses: lease id -> status of the process with that lease. Does not wait."""
        for lease_id, status in statuses.items():
            self.writer.put(self._names.status(status.worker), msgspec.json.encode(status).decode(), lease_id)

    def revoke(self, lease: Lease) -> None:
        """Revoke the lease of a process that has ended. This deletes the keys of the process. Does not wait."""
        self.writer.revoke(lease)

    def turn(self) -> None:
        """Raise LaunchError if there is a private etcd that could not be restarted or has ended too often.

        A thread of PrivateEtcd monitors and restarts it.
        """
        if self._etcd is not None:
            self._etcd.turn()

    def close(self) -> None:
        """Delete the run's keys from the user's etcd, or stop the private one."""
        if self._etcd is None:
            self.writer.close()  # first, because it would write deleted keys again
            _delete_keys(self.resolver, self._names, self._owner, self._notice)
        self.resolver.close()  # unblocks the writer
        self.writer.close()
        if self._etcd is not None:
            self._etcd.close(_STOP_LIMIT_S)


def _start_private_etcd(
    config: ExperimentConfig, run_dir: Path, log: Path, notice: Callable[[str], None], clock: Clock
) -> tuple[PrivateEtcd, NameResolveConfig]:
    """Start a private etcd. Returns it and the config with which processes reach it. The data folder of an earlier launch is
    removed first, so the data belongs to this launch only. (Attempt numbers need no old data: they come from the run's folder.)"""
    _remove(run_dir / "etcd")
    # With a folder of its own for each launch, an old launcher that wakes up cannot remove the data of its successor
    data_dir = run_dir / "etcd" / log.parent.name
    host, socket_dir = config.runtime.host, config.network.socket_dir
    # If it listens on a port, it requires authentication whenever the run does: a client that can write to it decides which
    # addresses the run's processes connect to
    guarded = not socket_dir and authenticates(config)
    try:
        tls = EtcdTls.of_run(run_dir) if guarded else None
        server = EtcdServer(data_dir, log, config.name_resolve.binary, host, tls=tls, socket_dir=socket_dir)
        with ExitStack() as undo:
            undo.callback(server.stop, _STOP_LIMIT_S)
            server.start()
            undo.pop_all()
    except EtcdServerError as error:
        raise LaunchError(str(error)) from error
    name_resolve = replace(config.name_resolve, endpoints=[server.endpoint])
    if tls is not None:
        name_resolve = replace(name_resolve, ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file)
    return PrivateEtcd(server, log, config.runtime.max_restarts, notice, clock), name_resolve


def _claim_name(
    config: ExperimentConfig, run_dir: Path, resolver: NameResolver, name_resolve: NameResolveConfig
) -> str:
    """Claim the run's name in the user's etcd, so that the keys of one experiment and trial belong to one launcher. Returns the
    value of the claim, which is that of this launch alone. Raises LaunchError if another run holds the name."""
    names, ttl_s = Names(config.experiment, config.trial), config.runtime.lease_ttl_s
    lease = resolver.grant_lease(ttl_s)
    folder = f"{socket.gethostname()}:{run_dir}"
    owner = f"{folder}\n{incarnation('launcher')}"
    try:
        resolver.add(names.owner(), owner, lease=lease.id)
    except NameEntryExists:
        try:
            other = resolver.get(names.owner())
        except NameEntryNotFound:
            other = owner
        other = other.partition("\n")[0]
        if other != folder:
            raise LaunchError(
                f"experiment={config.experiment} trial={config.trial}: a run of this name, in {other}, also uses the name resolve "
                f"at {name_resolve.where}; choose another trial=... (if that run was killed, its name is free after {ttl_s:g} s)"
            ) from None
        # The owner is an earlier launcher of this folder. It is dead, because this launcher holds the folder's lock
        resolver.add(names.owner(), owner, replace=True, lease=lease.id)
    return owner


def _delete_keys(resolver: NameResolver, names: Names, owner: str, notice: Callable[[str], None]) -> None:
    """Delete the run's keys. After an outage the name may be that of another launch; then its keys stay."""
    try:
        if resolver.get(names.owner()) != owner:
            return
        resolver.clear_subtree(names.root)
        resolver.delete(names.owner())
    except NameEntryNotFound:
        return  # the lease of the claim has ended, and with it those of the keys
    except NameResolveError as error:
        notice(f"the run's keys could not be deleted; they expire with their leases: {error}")


def _remove(folder: Path) -> None:
    """Remove a folder, if it exists. Raises LaunchError."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise LaunchError(
            f"{folder} is left over from an earlier attempt and cannot be removed ({error.strerror}); delete it, or choose "
            "another trial=..."
        ) from error
