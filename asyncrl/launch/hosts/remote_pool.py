"""The launcher's children on a run of more than one host: host daemons (daemon.py) start them and report on them.

RemoteProcessPool has the interface of ProcessPool, which serves one machine. It publishes the desired state, one key per process.
Each host daemon publishes the observed state of its host in a report. A host is lost when the key of its host daemon disappears
from name resolve, because the lease has expired or the host daemon has ended, or when a new host daemon has replaced it. The
processes of a lost host count as ended. An outage of name resolve, or a network failure shorter than the lease, has no effect,
because sessions restore their keys.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.hosts.placement import Host, Placement, PlacementError, placed
from asyncrl.launch.name_service import NameService
from asyncrl.launch.program import ProcessSpec, config_text, save_config
from asyncrl.launch.rundir import LaunchError, configs_dir, logs_dir
from asyncrl.launch.slurm import own_start
from asyncrl.launch.supervisor.children import Child
from asyncrl.launch.supervisor.pool import NoRoomError, Pool
from asyncrl.launch.worker_main import PARENT_ENV
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.hosts import DesiredProcess, HostRecord, HostReport, LauncherRecord, ObservedProcess
from asyncrl.protocol.names import Names, incarnation
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.names.interface import Lease, NameResolveError, WatchEvent
from asyncrl.runtime.process import python_module

_LEASE_TTL_S = 10.0  # lease of the launcher's record; host daemons end soon after it has expired
_SAY_AFTER_S = 2.0
_SILENT_S = 3.0  # a host that has sent no report for this time is silent; host daemons report twice a second
_GOODBYE_LIMIT_S = 15.0  # how long to wait at least until the host daemons have ended
_STOP_TURN_S = 0.05
_LOST = -9  # return code of a process lost with its host

_State: TypeAlias = Literal["run", "stop", "kill"]


@dataclass(frozen=True)
class _RemotePid:
    """The pid of a process on another host. This machine cannot wait for that process."""

    pid: int

    def wait(self) -> int:
        raise AssertionError(f"process {self.pid} is not on this host")


class RemoteChild(Child):
    """A child process that a host daemon runs."""

    def __init__(
        self,
        spec: ProcessSpec,
        lease: Lease,
        *,
        run_dir: Path,
        incarnation: int,
        host: str,
        host_daemon: str,
        order: Callable[[RemoteChild, _State], None],
        restarts: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        log = logs_dir(run_dir, spec.config.worker.attempt) / f"{spec.file_stem}.log"
        super().__init__(spec, None, log, -1, lease, started=clock.time(), restarts=restarts, host=host, clock=clock)
        self.incarnation = incarnation
        self.host_daemon = host_daemon  # incarnation of the host daemon that starts it
        self._order = order
        self._how = ""
        self._tail = ""
        self._asked = "run"
        self._heard = clock.monotonic()  # time of the last report about it
        self._cpu_s = 0.0

    def progress_count(self) -> int | None:
        """Return the heartbeat counter. While the host is silent, the counter keeps growing, because it is not known whether the
        process stands still."""
        count = super().progress_count()
        silent_s = self.clock.monotonic() - self._heard
        return count + int(silent_s) if count is not None and silent_s > _SILENT_S else count

    def cpu_s(self) -> float:
        return self._cpu_s

    def poll(self) -> bool:
        return self.returncode is not None

    def ask_to_stop(self) -> None:
        if self._asked == "run" and self.returncode is None:
            self._asked = "stop"
            self._order(self, "stop")

    def kill(self, *, froze_s: float = 0.0) -> None:
        self.froze_s = self.froze_s or froze_s
        if self._asked != "kill" and self.returncode is None:
            self._asked = "kill"
            self._order(self, "kill")

    def tail(self) -> str:
        return self._tail or "(nothing)"

    def how_it_ended(self) -> str:
        return f"{self._how}; its log ends with\n\n{self.tail()}"

    def apply(self, report: ObservedProcess) -> None:
        """Apply the host daemon's report about this child. Ignores a report about an earlier process of the same name."""
        if report.incarnation != self.incarnation or self.returncode is not None:
            return
        self._heard = self.clock.monotonic()
        self._cpu_s = report.cpu_s
        if report.pid and self.process is None:
            self.process = _RemotePid(report.pid)
        if report.log:
            self.log = Path(report.log)
        if report.status is not None:
            self.status = report.status
            self.was_running = self.was_running or report.status.state == "running"
        if report.returncode is not None:
            self._how, self._tail = report.how, report.tail
            self.returncode, self.ended = report.returncode, report.ended

    def lose(self, how: str) -> None:
        """Mark the child as ended, because its host is lost. how: what happened."""
        if self.returncode is None:
            self.lost, self._how = how, how
            self.returncode, self.ended = _LOST, self.clock.time()


class RemoteProcessPool(Pool):
    """consumes: reports of hosts, host daemons that appear and disappear. produces: children, up to date; the desired state.

    waits for: in `wait_for_hosts` the daemons of all hosts (network.hosts_limit_s); in `turn` a report; in `stop` the exit of the
    children; all these waits have limits.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        service: NameService,
        run_dir: Path,
        *,
        own_host: str,
        attempt: int,
        notice: Callable[[str], None],
        say: Callable[[str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Publishes the launcher's record. Raises LaunchError if name resolve does not answer.

        config: contains the endpoints of name resolve. own_host: the launcher's host, by its name in the config.
        """
        super().__init__(notice, clock)
        self._config, self._run_dir, self._own_host, self._say = config, run_dir, own_host, say
        self._names = Names(config.experiment, config.trial)
        self._resolver, self._writer = service.resolver, service.writer
        self._record = LauncherRecord(
            incarnation=incarnation("launcher", attempt=attempt, start=1),
            host=own_host,
            run_dir=str(run_dir),
            attempt=attempt,
            start=own_start() if config.cluster == "slurm" else "",
        )
        self._own_daemon: subprocess.Popen[bytes] | None = None
        self._own_daemon_ends = 0
        self._news = threading.Condition()
        self._daemons: dict[str, HostRecord] = {}  # by host, observed
        self._reports: dict[str, HostReport] = {}  # by host, observed and not processed yet
        self._known: dict[str, HostRecord] = {}  # by host, processed
        self._noticed: dict[str, int] = {}  # by host daemon: number of the last notice shown
        self._placement = Placement(
            [],
            own_host,
            allocation_of(config),
            config.hosts,
            splits_tensor_groups=config.network.tensor_ranks_between_hosts,
        )
        self._num_started = 0
        try:
            service.watch_checked(self._names.host_daemons(), self._observe_daemon)
            service.watch_checked(self._names.observed(), self._observe_report)
            self._lease = self._resolver.grant_lease(_LEASE_TTL_S)
            self._put_record(self._record)
        except NameResolveError as error:
            raise LaunchError(f"name resolve at {service.name_resolve.where}: {error}") from error

    # ------------------------------------------------------------------------------------------------------------- the start

    def wait_for_hosts(self, interrupted: Callable[[], bool]) -> bool:
        """Wait for the host daemons of all hosts. Returns False if interrupted. Raises LaunchError, which names the missing hosts,
        at the limit."""
        if self._config.cluster == "hosts":
            self._start_own_daemon()
        limit_s = self._config.network.hosts_limit_s
        began, said = self._clock.monotonic(), False
        while missing := self._missing():
            waited_s = self._clock.monotonic() - began
            if interrupted():
                return False
            if waited_s > limit_s:
                raise LaunchError(
                    f"no host daemon has appeared on {', '.join(missing)} within {limit_s:g} s (network.hosts_limit_s). Start one "
                    "there: asyncrl-launch host CONFIG, with the overrides of this run"
                )
            if waited_s > _SAY_AFTER_S and not said:
                said = True
                self._say(
                    f"waiting up to {limit_s:g} s for the host daemons of {', '.join(missing)}: asyncrl-launch host CONFIG"
                )
            self._restart_own_daemon()
            with self._news:
                self._news.wait(_STOP_TURN_S)
        self._update_hosts()
        return True

    @property
    def devices(self) -> list[str]:
        """The GPUs of all hosts. Callers only use whether there are any."""
        return [gpu for host in self._placement.hosts for gpu in host.gpus]

    def place_all(self, specs: Sequence[ProcessSpec]) -> None:
        """Choose a host for each of these processes. Raises LaunchError with an allocation that would fit."""
        try:
            self._placement.place_all(specs)
        except PlacementError as error:
            raise LaunchError(f"allocation={self._config.allocation} does not fit the hosts: {error}") from error

    # ------------------------------------------------------------------------------------------ as ProcessPool on one machine

    def start(self, spec: ProcessSpec, lease: Lease, *, restarts: int = 0) -> Child:
        """Publish a process as desired and add it to `children`. Raises NoRoomError if no host has room for it."""
        try:
            place = self._placement.place(spec)
        except PlacementError as error:
            raise NoRoomError(f"{spec.name} cannot be started on the remaining hosts: {error}") from error
        self._num_started += 1
        child = RemoteChild(
            placed(spec, place, with_gpus=self._placement.has_gpus),
            lease,
            run_dir=self._run_dir,
            incarnation=self._num_started,
            host=place.host.name,
            host_daemon=self._known[place.host.name].incarnation,
            order=self._order,
            restarts=restarts,
            clock=self._clock,
        )
        self._order(child, "run")
        self.children.append(child)
        return child

    def turn(self, wait_s: float) -> list[Child]:
        """Process reports, and hosts that appeared or disappeared. Returns the children that have ended since the last turn."""
        with self._news:
            self._news.wait_for(lambda: self._reports or self._daemons != self._known, wait_s)
            reports, self._reports = self._reports, {}
        before = {id(child) for child in self.children if child.returncode is None}
        by_name = {child.name: child for child in self.children if isinstance(child, RemoteChild)}
        for host, report in reports.items():
            self._tell(host, report)
            if report.launcher != self._record.incarnation:
                continue
            for entry in report.processes:
                child = by_name.get(entry.name)
                if child is not None and child.host_daemon == report.host_daemon:
                    child.apply(entry)
        self._update_hosts()
        self._restart_own_daemon()
        return [child for child in self.children if id(child) in before and child.returncode is not None]

    def forget(self, child: Child) -> None:
        if child not in self.children:
            return
        self.children.remove(child)
        assert isinstance(child, RemoteChild)
        self._withdraw(child)
        if not any(other.name == child.name for other in self.children):
            self._placement.release(child.name)

    def close(self) -> None:
        """Announce the end of the run to the host daemons, and wait until they have ended.

        A host that is cut off may be back at any time until it is lost, and its daemon learns of the end only from name resolve. So
        the wait takes at most network.host_lost_after_s, or _GOODBYE_LIMIT_S if that is longer.
        """
        with contextlib.suppress(NameResolveError):
            self._put_record(msgspec.structs.replace(self._record, ends=True))
        with self._news:
            limit_s = max(_GOODBYE_LIMIT_S, self._config.network.host_lost_after_s)
            self._news.wait_for(lambda: not self._daemons, limit_s)
        if self._own_daemon is not None:
            try:
                self._own_daemon.wait(_GOODBYE_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._own_daemon.kill()
                self._own_daemon.wait()

    # ------------------------------------------------------------------------------------------------------------- inside

    def _missing(self) -> list[str]:
        with self._news:
            return [host for host in self._config.hosts if host not in self._daemons]

    def _update_hosts(self) -> None:
        """Process the hosts that have appeared, and those that are lost."""
        with self._news:
            daemons = dict(self._daemons)
        for name, before in list(self._known.items()):
            now = daemons.get(name)
            if now is not None and now.incarnation == before.incarnation:
                continue
            del self._known[name]
            how = f"was lost with its host {name}" + (", because its host daemon was restarted" if now else "")
            self._lose(name, before, how)
        # The launcher's host is filled last. Model workers are placed after servers, so they are near it, where the gserver manager
        # reads their weights
        for name in sorted(self._config.hosts, key=lambda host: host == self._own_host):
            if (record := daemons.get(name)) is not None and name not in self._known:
                self._known[name] = record
                self._placement.add(Host(name, record.address, tuple(record.gpus), record.cores, record.memory_bytes))

    def _lose(self, name: str, record: HostRecord, how: str) -> None:
        lost = [
            child
            for child in self.children
            if isinstance(child, RemoteChild) and child.host_daemon == record.incarnation
        ]
        for child in lost:
            child.lose(how)
            self._withdraw(child)
        self._placement.lose(name)
        left = ", ".join(self._known) or "none"
        self._notice(
            f"host {name} is lost, and with it {', '.join(c.name for c in lost) or 'no process'}; remaining hosts: {left}"
        )

    def _tell(self, host: str, report: HostReport) -> None:
        last = self._noticed.get(report.host_daemon, 0)
        for number, text in report.notices:
            if number > last:
                self._notice(f"{host}: {text}")
                self._noticed[report.host_daemon] = number

    def _start_own_daemon(self) -> None:
        """Start the host daemon of the launcher's own host. It dies with the launcher."""
        attempt = self._record.attempt
        config = configs_dir(self._run_dir, attempt) / f"host_daemon_{self._own_host}.yaml"
        save_config(self._config, config)  # the launcher's config, which contains the endpoints of name resolve
        command = python_module("asyncrl.cli.main", "host", str(config), "--host", self._own_host)
        command += ["--address", self._config.runtime.host]
        log = logs_dir(self._run_dir, attempt) / f"host_daemon_{self._own_host}.log"
        with log.open("ab") as output:
            self._own_daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_ENV: str(os.getpid())},
                start_new_session=True,
            )

    def _restart_own_daemon(self) -> None:
        """Restart the host daemon of the launcher's own host if it has ended. Raises LaunchError instead if it has been restarted
        runtime.max_restarts times already."""
        if self._own_daemon is None or self._own_daemon.poll() is None:
            return
        self._own_daemon_ends += 1
        log = logs_dir(self._run_dir, self._record.attempt) / f"host_daemon_{self._own_host}.log"
        if self._own_daemon_ends > self._config.runtime.max_restarts:
            raise LaunchError(f"the host daemon of this host ({self._own_host}) keeps ending; its log: {log}")
        self._notice(f"the host daemon of this host has ended and is restarted; its log: {log}")
        self._start_own_daemon()

    def _order(self, child: RemoteChild, state: _State) -> None:
        """Publish the desired state of a child for its host daemon."""
        spec = child.spec
        desired = DesiredProcess(
            launcher=self._record.incarnation,
            host_daemon=child.host_daemon,
            attempt=spec.config.worker.attempt,
            name=spec.name,
            incarnation=child.incarnation,
            state=state,
            config=config_text(spec.config),
            env=dict(spec.env),
            lease=child.lease.id,
            computes=spec.computes,
        )
        self._writer.put(self._names.desired_process(child.host, child.name), msgspec.json.encode(desired).decode())

    def _withdraw(self, child: RemoteChild) -> None:
        """Delete a child's desired state. Its host daemon then kills the process, if it still runs, and no longer reports it."""
        self._writer.put(self._names.desired_process(child.host, child.name), None)

    def _put_record(self, record: LauncherRecord) -> None:
        value = msgspec.json.encode(record).decode()
        self._resolver.add(self._names.launcher(), value, replace=True, lease=self._lease.id)

    # --------------------------------------------------------------------------------- called by threads of name resolve

    def _observe_daemon(self, event: WatchEvent) -> None:
        host = event.key.rpartition("/")[2]
        if host not in self._config.hosts:
            return  # not a host of this run
        with self._news, contextlib.suppress(*DECODE_ERRORS):
            self._daemons.pop(host, None)
            if event.kind == "put":
                self._daemons[host] = msgspec.json.decode(event.value, type=HostRecord)
            self._news.notify_all()

    def _observe_report(self, event: WatchEvent) -> None:
        if event.kind != "put":
            return
        with self._news, contextlib.suppress(*DECODE_ERRORS):
            self._reports[event.key.rpartition("/")[2]] = msgspec.json.decode(event.value, type=HostReport)
            self._news.notify_all()
