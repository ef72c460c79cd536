"""The host daemon: starts the processes that the launcher desires on this host, supervises them, and leaves no process behind.

The launcher publishes the desired state of the host (names.desired_on). The host daemon starts and ends processes accordingly, and
publishes the observed state (names.observed_on). Each published value is complete: the whole desired state of one process, or the
whole observed state of the host. So if a value is lost in an outage, the next one replaces it. rules.py decides; this file acts.

During an outage of name resolve, processes keep running. When the launcher is gone, or may be gone (rules.Tether), the host daemon
ends all of its processes. When the host daemon itself dies, the parent-death signal and the reaper end them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from asyncrl.config.schema import ExperimentConfig, authenticates
from asyncrl.launch.hosts.addresses import refuses
from asyncrl.launch.hosts.rules import Observed, Tether, decide, obeyed
from asyncrl.launch.hosts.watch_cache import READ_EVERY_S, WatchCache
from asyncrl.launch.program import CONFIG_CLASSES, ProcessSpec, parse_process_config
from asyncrl.launch.rundir import LaunchError, configs_dir, keep_private, logs_dir
from asyncrl.launch.supervisor.children import Child, how_it_ended
from asyncrl.launch.supervisor.process_pool import ProcessPool
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.hosts import DesiredProcess, HostRecord, HostReport, LauncherRecord, ObservedProcess
from asyncrl.protocol.names import Names, incarnation
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.devices import granted_cores, granted_memory, visible_devices
from asyncrl.runtime.disk import raise_open_files
from asyncrl.runtime.names.interface import (
    Lease,
    LeaseNotFound,
    NameEntryNotFound,
    NameResolveError,
    NameResolver,
    WatchEvent,
)
from asyncrl.runtime.process import tail_of
from asyncrl.runtime.security import Secrets, write_secrets

# Set in every process of a host daemon. The value distinguishes the processes if several host daemons share a machine
HOST_DAEMON_ENV = "ASYNCRL_HOST_DAEMON"
_TURN_S = 0.1
_REPORT_S = 0.4  # between two reports that differ
_LOOK_S = 1.0  # between two reads of the launcher's record
_GATHER_S = 0.5  # between the first desired process and the first start, to learn which fork servers are needed
_CLOSE_S = 3.0  # limit for the last report
_MAX_TAIL_CHARS = 4000
_MAX_REPORT_BYTES = 900_000  # name resolve accepts a million
_MAX_NOTICES = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Hosted:
    """A process that the launcher requested on this host."""

    incarnation: int
    child: Child | None  # None: it was never started
    report: ObservedProcess | None = None  # final report; None: it has not ended, or no report was made yet
    asked: bool = False  # it was asked to stop


@dataclass
class StopSignal:
    """The latest signal that told the host daemon to end. After a second one (impatient), the host daemon kills its processes
    instead of waiting for them."""

    number: int | None = None
    impatient: bool = False

    @classmethod
    @contextlib.contextmanager
    def caught(cls) -> Iterator[StopSignal]:
        stop = cls()
        previous = {number: signal.signal(number, stop._on_signal) for number in _SIGNALS}
        try:
            yield stop
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.impatient = self.number is not None
        self.number = number


class HostDaemon:
    """consumes: the launcher's record and the desired state. produces: processes, and their observed state.

    waits for: its processes' pipes, at most _TURN_S each turn. Another thread (_LauncherLink) waits for name resolve.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        resolver: NameResolver,
        *,
        host: str,
        address: str,
        run_dir: Path,
        stop: StopSignal,
        say: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Registers the host. Raises LaunchError if name resolve does not answer.

        host: its name in the config. run_dir: the run's folder on this host, which may be shared with other hosts.
        """
        raise_open_files()
        keep_private(run_dir, config.runtime.group)
        self.incarnation = incarnation(f"host_daemon-{host}")
        self._config = config
        self._run_dir = run_dir
        self._say, self._clock = say, clock
        self._stop = stop
        self._hosted: dict[str, _Hosted] = {}
        self._pool: ProcessPool | None = None
        self._first_desired_at: float | None = None
        self._notices: deque[tuple[int, str]] = deque(maxlen=_MAX_NOTICES)
        self._num_notices = 0
        self._launcher = ""  # incarnation of the launcher that this daemon obeys; "": none has appeared
        os.environ[HOST_DAEMON_ENV] = self.incarnation
        network = config.network
        tether = Tether(clock.monotonic(), cut_off_limit_s=network.cut_off_limit_s, wait_s=network.hosts_limit_s)
        record = HostRecord(
            host=host,
            incarnation=self.incarnation,
            address=address,
            gpus=visible_devices(),
            cores=granted_cores(),
            memory_bytes=granted_memory() or psutil.virtual_memory().total,
            pid=os.getpid(),
        )
        self._link = _LauncherLink(
            resolver, Names(config.experiment, config.trial), record, config, tether, run_dir, clock
        )

    def run(self) -> int:
        """Serve until the run is over (returns 0) or a signal comes (returns 128 + N). Raises LaunchError if the launcher is gone,
        may be gone, or has not appeared (rules.Tether)."""
        try:
            while True:
                self._turn()
                if self._stop.number is not None:
                    return 128 + self._stop.number
                if self._link.is_over():
                    return 0
                if broken := self._link.broken():
                    raise LaunchError(f"{broken}; {self._what_ends()}")
        # The last report tells the launcher the reason. Without it the launcher would only see that the host is lost
        except LaunchError as error:
            self._notice(str(error))
            raise
        finally:
            self._end_all()
            self._link.close()

    def _turn(self) -> None:
        """One step: read the processes' statuses, move towards the desired state, report."""
        if self._pool is None:
            self._clock.sleep(_TURN_S)
        else:
            self._pool.turn(_TURN_S)
        launcher, desired = self._link.desired()
        if launcher and launcher != self._launcher:
            self._launcher = launcher
            self._say("a launcher has appeared")
        if launcher:
            self._move_towards(obeyed(desired, launcher, self.incarnation))
        self._link.report(self._report())

    def _move_towards(self, desired: Mapping[str, DesiredProcess]) -> None:
        observed = {
            name: Observed(
                hosted.incarnation, hosted.child is None or hosted.child.returncode is not None, hosted.asked
            )
            for name, hosted in self._hosted.items()
        }
        for action in list(decide(desired, observed)):
            name = action.name
            if action.verb == "start":
                self._start(desired)
                return  # _start handles all missing processes; the next turn does the other actions
            if action.verb == "skip":
                how = "was told to stop before it was started"
                report = ObservedProcess(
                    name=name, incarnation=desired[name].incarnation, returncode=0, ended=self._clock.time(), how=how
                )
                self._hosted[name] = _Hosted(desired[name].incarnation, None, report)
                continue
            hosted = self._hosted[name]
            if action.verb == "forget":
                if hosted.child is not None and self._pool is not None:
                    self._pool.forget(hosted.child)
                del self._hosted[name]
            elif hosted.child is not None:
                if action.verb == "stop" and hosted.child.process is not None:
                    hosted.asked = True
                    hosted.child.ask_to_stop()
                elif action.verb == "kill":
                    hosted.child.kill()

    def _start(self, desired: Mapping[str, DesiredProcess]) -> None:
        """Start the missing processes. The first start waits _GATHER_S, so that the pool creates fork servers for all of them."""
        missing = [goal for name, goal in desired.items() if name not in self._hosted and goal.state == "run"]
        now = self._clock.monotonic()
        self._first_desired_at = now if self._first_desired_at is None else self._first_desired_at
        if self._pool is None and now - self._first_desired_at < _GATHER_S:
            return
        specs: dict[str, ProcessSpec] = {}
        for goal in missing:
            try:
                specs[goal.name] = self._spec_of(goal)
            except ValueError as error:
                self._could_not(goal, f"could not be started: {error}")
        if not specs:
            return
        pool = self._pool = self._pool or self._make_pool(list(specs.values()))
        for name, spec in specs.items():
            goal = desired[name]
            self._make_folders(goal.attempt)
            try:
                child = pool.start(spec, self._link.lease_of(goal))
            except (LaunchError, OSError) as error:
                self._could_not(goal, f"could not be started: {error}")
                continue
            self._hosted[name] = _Hosted(goal.incarnation, child)

    def _make_pool(self, specs: Sequence[ProcessSpec]) -> ProcessPool:
        for spec in specs:
            self._make_folders(spec.config.worker.attempt)
        return ProcessPool(
            specs,
            self._run_dir,
            fork=self._config.runtime.fork_server,
            # Of the launcher's config: it has resolved `auto`, which this host's has not
            start_limit_s=max(spec.config.worker.runtime.start_limit_s for spec in specs),
            notice=self._notice,
            marker=f"{HOST_DAEMON_ENV}={self.incarnation}",
            clock=self._clock,
        )

    def _spec_of(self, goal: DesiredProcess) -> ProcessSpec:
        """Return the spec of a desired process. Raises ValueError if its config is invalid, or belongs to another process, attempt
        or run."""
        config = parse_process_config(goal.config)
        worker = config.worker
        if (worker.name, worker.attempt) != (goal.name, goal.attempt):
            raise ValueError(f"its config belongs to {worker.name}, attempt {worker.attempt}")
        if (worker.experiment, worker.trial) != (self._config.experiment, self._config.trial):
            raise ValueError(f"its config belongs to another run: {worker.experiment}/{worker.trial}")
        assert isinstance(config, CONFIG_CLASSES[worker.kind])
        return ProcessSpec(goal.name, worker.kind, config, goal.computes, goal.env)

    def _make_folders(self, attempt: int) -> None:
        """Create the attempt's folders. If the run's folder is not shared, no other process creates them."""
        for folder in (logs_dir(self._run_dir, attempt), configs_dir(self._run_dir, attempt)):
            folder.mkdir(parents=True, exist_ok=True)

    def _could_not(self, goal: DesiredProcess, how: str) -> None:
        report = ObservedProcess(
            name=goal.name, incarnation=goal.incarnation, returncode=1, ended=self._clock.time(), how=how
        )
        self._hosted[goal.name] = _Hosted(goal.incarnation, None, report)

    def _report(self) -> HostReport:
        processes: list[ObservedProcess] = []
        for name, hosted in self._hosted.items():
            child = hosted.child
            if hosted.report is None and child is not None and child.returncode is not None:
                hosted.report = _last_report(name, hosted.incarnation, child)
            if hosted.report is not None:
                processes.append(hosted.report)
            elif child is not None:
                processes.append(_live_report(name, hosted.incarnation, child))
        return HostReport(
            host_daemon=self.incarnation, launcher=self._launcher, processes=processes, notices=list(self._notices)
        )

    def _notice(self, text: str) -> None:
        self._num_notices += 1
        self._notices.append((self._num_notices, text))
        self._say(text)

    def _what_ends(self) -> str:
        names = [
            name
            for name, hosted in self._hosted.items()
            if hosted.child is not None and hosted.child.returncode is None
        ]
        return f"ending its processes on this host ({len(names)})" if names else "it has no processes on this host"

    def _end_all(self) -> None:
        if self._pool is None:
            return
        try:
            self._pool.stop(self._config.runtime.stop_timeout_s, lambda: self._stop.impatient)
            self._link.report(self._report())
        finally:
            self._pool.close()


def _live_report(name: str, incarnation: int, child: Child) -> ObservedProcess:
    pid = child.process.pid if child.process is not None else 0
    cpu_s = float(int(child.cpu_s()))
    return ObservedProcess(
        name=name, incarnation=incarnation, pid=pid, log=str(child.log), status=child.status, cpu_s=cpu_s
    )


def _last_report(name: str, incarnation: int, child: Child) -> ObservedProcess:
    """Return the final report of a process that has ended. It includes the end of the log, which may exist on this host only."""
    assert child.returncode is not None
    assert child.process is not None
    how = how_it_ended(child.returncode, child.log).split("; its log ends with", 1)[0]
    return ObservedProcess(
        name=name,
        incarnation=incarnation,
        pid=child.process.pid,
        log=str(child.log),
        status=child.status,
        returncode=child.returncode,
        ended=child.ended,
        how=how,
        tail=tail_of(child.log)[-_MAX_TAIL_CHARS:],
    )


class _LauncherLink:
    """The host daemon's connection to name resolve. It runs on its own thread and on those of the watch.

    consumes: the newest report. produces: the desired state, the launcher's record. waits for: name resolve; all calls have
    limits. unblocked by: its answers; `close`.
    """

    def __init__(
        self,
        resolver: NameResolver,
        names: Names,
        record: HostRecord,
        config: ExperimentConfig,
        tether: Tether,
        run_dir: Path,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Registers the host, and starts to watch the desired state. Raises LaunchError if name resolve does not answer."""
        self._run_dir, self._clock = run_dir, clock
        self._resolver, self._names, self._record, self._config = resolver, names, record, config
        self._tether = tether
        self._lock = threading.Lock()
        self._desired: dict[str, DesiredProcess] = {}  # by key
        self._cache = WatchCache(self._observe)
        self._newest: HostReport | None = None
        self._closing = threading.Event()
        try:
            self._lease = resolver.grant_lease(config.network.host_lost_after_s)
            resolver.watch(names.desired_on(record.host), self._cache.observe, subtree=True)
            value = msgspec.json.encode(record).decode()
            resolver.add(names.host_daemon(record.host), value, replace=True, lease=self._lease.id)
        except NameResolveError as error:
            raise LaunchError(f"the host daemon of {record.host} cannot register: {error}") from error
        self._thread = threading.Thread(target=self._run, name="link to the launcher", daemon=True)
        self._thread.start()

    def desired(self) -> tuple[str, list[DesiredProcess]]:
        """Return the launcher's incarnation ("": none has appeared), and all published desired processes of this host."""
        with self._lock:
            launcher = self._tether.launcher
            return launcher.incarnation if launcher else "", list(self._desired.values())

    def is_over(self) -> bool:
        with self._lock:
            return self._tether.is_over

    def broken(self) -> str:
        with self._lock:
            return self._tether.broken(self._clock.monotonic())

    def report(self, report: HostReport) -> None:
        with self._lock:
            self._newest = report

    def lease_of(self, goal: DesiredProcess) -> Lease:
        """Return the lease of a desired process. The launcher owns the lease; no process on this host refreshes or revokes it."""
        return Lease(self._resolver, goal.lease, self._config.runtime.lease_ttl_s)

    def close(self) -> None:
        """Send the last report, then revoke the host's lease. This deletes the host's keys."""
        self._closing.set()
        self._thread.join(_CLOSE_S)
        with contextlib.suppress(NameResolveError):
            self._lease.revoke()

    def _observe(self, event: WatchEvent) -> None:
        with self._lock, contextlib.suppress(*DECODE_ERRORS):
            self._desired.pop(event.key, None)
            if event.kind == "put":
                self._desired[event.key] = msgspec.json.decode(event.value, type=DesiredProcess)

    def _run(self) -> None:
        sent: HostReport | None = None
        met = ""  # this host has the secrets of the launcher with this incarnation
        next_look = next_read = 0.0
        while True:
            closing = self._closing.wait(_REPORT_S)
            with self._lock:
                newest = self._newest
            try:
                if newest is not None and newest != sent:
                    self._send(newest)
                    sent = newest
                if self._clock.monotonic() >= next_look:
                    next_look = self._clock.monotonic() + _LOOK_S
                    record = self._read_launcher()
                    if record is not None and record.incarnation != met:
                        self._take_secrets()
                        met = record.incarnation
                    with self._lock:
                        self._tether.sees(record, self._clock.monotonic())
                if self._clock.monotonic() >= next_read:
                    next_read = self._clock.monotonic() + READ_EVERY_S
                    self._cache.read(self._resolver.get_subtree(self._names.desired_on(self._record.host)))
            except NameResolveError:
                refused = self._is_refused()
                with self._lock:
                    self._tether.unreachable(self._clock.monotonic(), refused=refused)
            if closing:
                return

    def _send(self, report: HostReport) -> None:
        value = msgspec.json.encode(report)
        if len(value) > _MAX_REPORT_BYTES:
            value = msgspec.json.encode(_shortened(report))
        # The lease may be lost in an outage; the session restores it
        with contextlib.suppress(LeaseNotFound):
            key = self._names.observed_on(self._record.host)
            self._resolver.add(key, value.decode(), replace=True, lease=self._lease.id)

    def _take_secrets(self) -> None:
        """Copy the launcher's secrets from name resolve to this host's run folder, where the launcher's processes read them. If
        name resolve has no secrets, the run's folder is shared and has them already."""
        if not authenticates(self._config):
            return
        with contextlib.suppress(NameEntryNotFound, *DECODE_ERRORS):
            secrets = msgspec.json.decode(self._resolver.get(self._names.secrets()), type=Secrets)
            write_secrets(self._run_dir, secrets)

    def _read_launcher(self) -> LauncherRecord | None:
        try:
            return msgspec.json.decode(self._resolver.get(self._names.launcher()), type=LauncherRecord)
        except (NameEntryNotFound, *DECODE_ERRORS):
            return None

    def _is_refused(self) -> bool:
        """Whether the host of every endpoint of name resolve refuses the connection, so nothing listens there."""
        endpoints = self._config.name_resolve.endpoints
        return bool(endpoints) and all(refuses(endpoint) for endpoint in endpoints)


def _shortened(report: HostReport) -> HostReport:
    """Return a shorter version of a report that is too large for name resolve: without waits and queues, and with only the end of
    errors and logs. The processes' logs contain these in full."""

    def short(child: ObservedProcess) -> ObservedProcess:
        status = child.status
        if status is not None:
            status = msgspec.structs.replace(status, waits=[], queues={}, error=status.error[-500:])
        return msgspec.structs.replace(child, status=status, tail=child.tail[-500:])

    return msgspec.structs.replace(report, processes=[short(child) for child in report.processes])
