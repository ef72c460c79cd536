"""The launcher: starts the processes of a run, supervises them, and leaves no process behind.

    LocalLauncher  opens the resources of a run in order, and closes them in the reverse order
    Launch         runs one loop on one thread. The loop waits only for the pipes of the run's processes (on several hosts: for
                   reports of host daemons)

In name resolve, the launcher holds the leases of the processes that it starts; a lease lives as long as its process. It reads the
workers' statuses (from pipes, or from the reports of host daemons) and publishes them. It carries out the decisions of supervisor/:
it kills and restarts processes, or ends the run with the first cause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec

from asyncrl.config.resolve import Facts, resolve, total_steps, with_absolute_paths
from asyncrl.config.schema import ExperimentConfig, authenticates, has_unix_sockets
from asyncrl.dataflow.phases import phase_after
from asyncrl.dataflow.topology import allocation_of
from asyncrl.launch.checks.gpus import too_few_gpus
from asyncrl.launch.checks.model_files import bytes_of_models
from asyncrl.launch.hosts.addresses import address_of, own_host
from asyncrl.launch.hosts.remote_pool import RemoteProcessPool
from asyncrl.launch.inputs import Inputs, changes, read_inputs, save_inputs
from asyncrl.launch.name_service import NameService
from asyncrl.launch.program import (
    ProcessSpec,
    groups_that_restart_alone,
    plan,
    run_directory,
    save_config,
    server_spec,
    writes_checkpoints,
)
from asyncrl.launch.recovery import resumed_of, starting_point
from asyncrl.launch.redact import redact_urls
from asyncrl.launch.rundir import (
    EXPERIMENT_FILE,
    SUMMARY_FILE,
    LaunchError,
    RunLock,
    RunRecord,
    begin_attempt,
    configs_dir,
    keep_private,
    link_logs,
    logs_dir,
    read_record,
    write_record,
)
from asyncrl.launch.scaling import KIND as SERVER_KIND
from asyncrl.launch.scaling import make_scaling
from asyncrl.launch.standstill import StandstillReport
from asyncrl.launch.supervisor.children import Child
from asyncrl.launch.supervisor.external_process import ExternalProcesses
from asyncrl.launch.supervisor.policy import TRAINER_GROUP, TRAINER_KINDS, EndRun, FreezeWatch, Supervision
from asyncrl.launch.supervisor.process_pool import ProcessPool
from asyncrl.launch.supervisor.restarts import Restarts
from asyncrl.launch.supervisor.state_machine import (
    BeginAttempt,
    Cancel,
    Decision,
    Forget,
    Kill,
    LookForCheckpoint,
    Notice,
    StartLater,
    Supervisor,
)
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.background import on_thread
from asyncrl.runtime.certificates import CertificateError, make_certificate
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.devices import visible_devices
from asyncrl.runtime.disk import explain, nearly_full, raise_open_files
from asyncrl.runtime.names.interface import Lease, WatchEvent
from asyncrl.runtime.security import Secrets, remove_secrets, write_secrets
from asyncrl.runtime.stacks import SUFFIX, answer_requests
from asyncrl.runtime.trace import merge, trace_dir
from asyncrl.weights.checkpoints import Checkpoint, list_checkpoints, newest

_TURN_S = 0.1
_PUBLISH_STATUS_S = 1.0
_LOOK_LIMIT_S = 60.0  # for a look at the user's files, before a process starts again without it
_ASK_SHARE = 0.6  # share of runtime.stop_timeout_s in which processes may stop by themselves; then they are killed

# How long to wait for an earlier launcher to end when Slurm has given up that launcher's node and has requeued the job
_TAKE_OVER_S = 90.0
_SAME_SIGNAL_S = 1.0  # signals this close together count as one
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class View(Protocol):
    """Shows the progress of a run to the user."""

    def turn(self, statuses: Sequence[WorkerStatus]) -> None:
        """Called at each turn of the launcher's loop. statuses: the newest one of every process that runs or is to start
        (again)."""

    def notice(self, text: str) -> None:
        """Show an important message. May be called from other threads."""

    def say(self, text: str) -> None:
        """Show a message that reports normal operation."""


class StopRequest:
    """Whether the run was told to stop: by a signal, from another host, or by a launcher that replaces this one."""

    def __init__(self, view: View, clock: Clock) -> None:
        self.signal: int | None = None  # the first one
        self.impatient = False  # kill all processes at once: a second stop came, or another launcher replaces this one
        self._view, self._clock = view, clock
        self._since = 0.0

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
        elif now - self._since > _SAME_SIGNAL_S:  # one stop may arrive twice, from the batch system and from its script
            self.impatient = True

    def on_request(self, event: WatchEvent) -> None:
        """Handle `asyncrl-launch stop` on another host. Called by a thread of name resolve."""
        if event.kind == "put":
            if self.signal is None:
                self._view.notice(f"stopped from {event.value}")
            self.on_signal(signal.SIGTERM, None)

    def end_if_challenged(self, lock: RunLock) -> None:
        """If another launcher challenges the lock, stop at once: the batch system has lost contact with this host and has started
        the run elsewhere."""
        if lock.is_challenged() and not self.impatient:
            self._view.notice("another launcher was started to replace this one, so this one ends")
            self.signal, self.impatient = self.signal or signal.SIGTERM, True


@dataclass(frozen=True)
class Plans:
    """Computes the process specs of any attempt of a run."""

    config: ExperimentConfig
    num_prompts: int
    devices: Sequence[str]

    def of(self, attempt: int, checkpoint: Checkpoint | None) -> dict[str, ProcessSpec]:
        """Return the specs of an attempt, by name. checkpoint: the attempt resumes from it; None: it starts anew."""
        resume = str(checkpoint.path) if checkpoint else ""
        specs = plan(self.config, attempt=attempt, num_prompts=self.num_prompts, devices=self.devices, resume=resume)
        return {spec.name: spec for spec in specs}

    def server(self, index: int, attempt: int) -> ProcessSpec:
        """Return the spec of any generation server, including those beyond the allocation."""
        return server_spec(index, self.config, attempt=attempt, num_prompts=self.num_prompts, devices=self.devices)


class LocalLauncher:
    """Runs one launch. It has one attempt for each phase of the allocation (dataflow/phases.py), and one more each time that the
    trainer group restarts, alone or with everything else."""

    def __init__(self, config: ExperimentConfig, num_prompts: int, view: View, clock: Clock = SYSTEM_CLOCK) -> None:
        self.config = config
        self.run_dir = run_directory(config)
        self._num_prompts = num_prompts
        self._view, self._clock = view, clock
        self._stop = StopRequest(view, clock)
        self._started = clock.time()
        self._inputs: Inputs | None = None  # the user's files, as they were when the launch began

    def run(self) -> int:
        """Start everything, wait for the master to be done, stop everything. Returns the exit code.

        0: the run is complete; 128 + N: ended by signal N. Raises LaunchError with the first cause of a failure.
        """
        raise_open_files()
        keep_private(self.run_dir, self.config.runtime.group)
        lock = RunLock(self.run_dir, self._clock)
        with _signals(self._stop.on_signal), ExitStack() as closing:
            queued_again = self.config.cluster == "slurm" and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
            lock.acquire(take_over_s=_TAKE_OVER_S if queued_again else 0.0)
            closing.callback(lock.release)
            closing.enter_context(self._failure_recorded())
            with self._explained(lock):
                self._inputs = read_inputs(self.config)
                found = self._starting_point()
            while self._stop.signal is None:
                phase = phase_after(self.config, found.step if found else 0)
                code = self._run_phase(phase, found, lock)
                if code or not allocation_of(phase).until or (self.run_dir / SUMMARY_FILE).exists():
                    return code
                found = newest(self.run_dir, self._view.notice)
                self._view.say(f"the next phase of the allocation begins after step {found.step if found else 0}")
            return 128 + self._stop.signal

    def _starting_point(self) -> Checkpoint | None:
        """Return the checkpoint to resume from. None: there is none, or the run was told to stop meanwhile."""
        config, run_dir, view = self.config, self.run_dir, self._view
        looking = on_thread(lambda: starting_point(config, run_dir, view.notice, view.say))
        while not looking.done():  # the search takes long, because it reads whole checkpoints
            if self._stop.signal is not None:
                return None
            self._clock.sleep(_TURN_S / 10)
        return looking.result()

    def _run_phase(self, phase: ExperimentConfig, found: Checkpoint | None, lock: RunLock) -> int:
        """Start the processes of a phase, and stop them at its end. Returns the exit code; 0: the phase or the run is complete."""
        with ExitStack() as closing:
            last = closing.enter_context(ExitStack())
            traces = closing.enter_context(ExitStack())
            with self._explained(lock):
                launch = self._open(phase, found, lock, closing, traces, last)
                if launch is not None:
                    launch.start_processes()
                if launch is None or self._stop.signal is not None:
                    return 128 + (self._stop.signal or 0)
                return launch.watch_over()

    @contextlib.contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        """Write a LaunchError that leaves the `with` block into this launch's record, for `status`. A launch that fails before it
        has a record leaves the record of the launch before it as it is."""
        try:
            yield
        except LaunchError as error:
            with contextlib.suppress(LaunchError, OSError):  # the folder may be lost, or the disk full
                record = read_record(self.run_dir)
                if record is not None and (record.pid, record.started) == (os.getpid(), self._started):
                    failure = redact_urls(str(error))
                    write_record(self.run_dir, msgspec.structs.replace(record, failure=failure))
            raise

    @contextlib.contextmanager
    def _explained(self, lock: RunLock) -> Iterator[None]:
        """Add the likely cause to an error that leaves the `with` block: a lost lock or a full disk."""
        try:
            yield
        except LaunchError as error:
            if (lost := lock.lost()) and lost not in str(error):
                raise LaunchError(lost) from error
            if hint := nearly_full(self.run_dir):
                raise LaunchError(f"{error}\n\n{hint}") from error
            raise
        except OSError as error:  # an error of the launcher itself; workers report their own errors
            if lost := lock.lost():
                raise LaunchError(lost) from error
            explained = explain(Path(error.filename or self.run_dir), error)
            raise LaunchError(f"the launcher failed: {explained or error}") from error

    def _open(
        self,
        asked: ExperimentConfig,
        checkpoint: Checkpoint | None,
        lock: RunLock,
        closing: ExitStack,
        traces: ExitStack,
        last: ExitStack,
    ) -> Launch | None:
        """Open everything that the processes need. Returns None if the run was told to stop meanwhile.

        asked: the user's config in this phase. checkpoint: the one to resume from. closing: a stack that closes what is opened
        here. traces: a stack for the last work of the phase, merging the timelines. It runs after everything that is opened here
        has been closed. last: a stack for the removal of secrets and sockets, after everything else.
        """
        view, run_dir = self._view, self.run_dir
        attempt = begin_attempt(run_dir)
        with contextlib.suppress(OSError):
            answer_requests(logs_dir(run_dir, attempt) / f"launcher{SUFFIX}", "launcher")
        devices: Sequence[str] = visible_devices()
        if asked.cluster == "local" and (remedy := too_few_gpus(asked, len(devices))):
            raise LaunchError(f"allocation={asked.allocation}: this machine has {len(devices)} GPUs: {remedy}")
        facts = Facts(
            num_prompts=self._num_prompts,
            model_bytes=bytes_of_models(asked),
            resumed=resumed_of(checkpoint) if checkpoint else None,
        )
        self._write_config(facts, devices)
        save_config(with_absolute_paths(self.config), configs_dir(run_dir, attempt) / EXPERIMENT_FILE)
        inputs = self._inputs
        assert inputs is not None, "`run` has read them"
        save_inputs(inputs, configs_dir(run_dir, attempt))
        placed = replace(facts, socket_dir=self._make_socket_dir(asked, last))
        runtime, host = asked.runtime, ""

        def stop_before_closing(pool: ProcessPool | RemoteProcessPool) -> None:
            closing.callback(external.wait_until_gone, runtime.stop_timeout_s, self._is_impatient)
            closing.callback(pool.stop, runtime.stop_timeout_s * _ASK_SHARE, self._is_impatient)

        external = ExternalProcesses(run_dir, wait_s=asked.debug.wait_s, notice=view.notice, clock=self._clock)
        if asked.cluster != "local":
            host = own_host(asked.hosts)
            placed = replace(placed, host=address_of(host, towards=asked.hosts))
        config = resolve(asked, placed)
        naming = ExitStack()  # closes name resolve after the processes have ended
        if host:
            closing.enter_context(naming)
        else:  # open the pool before name resolve: its fork servers import while the rest is opened
            specs = Plans(config, self._num_prompts, devices).of(attempt, checkpoint).values()
            pool: ProcessPool | RemoteProcessPool = self._make_pool(config, list(specs))
            closing.callback(pool.close)
            closing.enter_context(naming)
            stop_before_closing(pool)
        secrets = self._make_secrets(config)
        if secrets is not None:
            last.callback(remove_secrets, run_dir, secrets)
        etcd_log = logs_dir(run_dir, attempt) / "etcd.log"
        service = NameService.open(config, run_dir, etcd_log, view.notice, self._clock)
        naming.callback(service.close)
        config = resolve(asked, replace(placed, name_resolve=service.name_resolve))
        record = _record_of(config, attempt, self._num_prompts, self._started, host=host)
        write_record(run_dir, record)
        if host:
            if secrets is not None:
                service.hand_out(secrets)
            pool = self._make_remote_pool(config, service, host, attempt)
            closing.callback(pool.close)
            stop_before_closing(pool)
            service.watch_stop(self._stop.on_request)
            if not pool.wait_for_hosts(lambda: self._stop.signal is not None):
                return None
            devices = pool.devices
            self._write_config(facts, devices)  # again, because now the GPUs of all hosts are known
        plans = Plans(config, self._num_prompts, devices)
        specs_by_name = plans.of(attempt, checkpoint)
        if isinstance(pool, RemoteProcessPool):
            pool.place_all(list(specs_by_name.values()))
        closing.callback(external.ask_to_stop)
        launch = Launch(
            plans,
            specs_by_name,
            pool,
            external,
            service,
            record,
            lock,
            self._stop,
            self._view,
            self._clock,
            changed_inputs=lambda: changes(inputs, read_inputs(self.config)),
        )
        traces.callback(launch.merge_timelines)
        return launch

    def _make_pool(self, config: ExperimentConfig, specs: Sequence[ProcessSpec]) -> ProcessPool:
        return ProcessPool(
            [spec for spec in specs if spec.name not in config.debug.leave_out],
            self.run_dir,
            fork=config.runtime.fork_server,
            start_limit_s=config.runtime.start_limit_s,
            notice=self._view.notice,
            socket_dir=config.network.socket_dir,
            clock=self._clock,
        )

    def _make_remote_pool(
        self, config: ExperimentConfig, service: NameService, host: str, attempt: int
    ) -> RemoteProcessPool:
        return RemoteProcessPool(
            config,
            service,
            self.run_dir,
            own_host=host,
            attempt=attempt,
            notice=self._view.notice,
            say=self._view.say,
            clock=self._clock,
        )

    def _is_impatient(self) -> bool:
        return self._stop.impatient

    def _make_socket_dir(self, config: ExperimentConfig, last: ExitStack) -> str:
        """Make the folder of the Unix sockets. Returns "" if the run uses TCP. last: a stack for the folder's removal."""
        if not has_unix_sockets(config):
            unix_sockets.remove_folder(self.run_dir)  # of an earlier launcher that died
            return ""
        try:
            shared = bool(allocation_of(config).shared_workers)
            folder = unix_sockets.make_folder(self.run_dir, with_weights=shared)
        except OSError as error:
            raise LaunchError(f"network.sockets=unix: {error}; or set TMPDIR, or network.sockets=tcp") from error
        last.callback(unix_sockets.remove_folder, self.run_dir, folder)
        return folder

    def _write_config(self, facts: Facts, devices: Sequence[str]) -> None:
        """Write config.yaml for people to read: the user's config, resolved for the known devices."""
        resolved = resolve(self.config, replace(facts, on_gpu=bool(devices)))
        save_config(resolved, self.run_dir / "config.yaml", redacted=True)

    def _make_secrets(self, config: ExperimentConfig) -> Secrets | None:
        """Create this launch's secrets and write them to the run's folder. None: authentication is off. Raises LaunchError."""
        if not authenticates(config):
            self._view.notice("network.authenticate=off: any client that reaches this run's ports can control the run")
            return None
        certificate = key = ""
        if not has_unix_sockets(config) and not (config.network.tls_cert and config.name_resolve.endpoints):
            try:
                certificate, key = make_certificate([config.runtime.host])
            except CertificateError as error:
                raise LaunchError(str(error)) from error
        secrets = Secrets.make(certificate, key)
        write_secrets(self.run_dir, secrets)
        return secrets


class Launch:
    """Starts and supervises the processes of a run, after its name resolve and its process pool have been opened.

    consumes: statuses and exits of processes, the supervisor's decisions. produces: processes; their statuses in the view and in
    name resolve. waits for: a pipe of a process (on several hosts: a report of a host daemon), at most _TURN_S each turn. unblocked
    by: a status or the exit of a process.
    """

    def __init__(
        self,
        plans: Plans,
        specs: Mapping[str, ProcessSpec],
        pool: ProcessPool | RemoteProcessPool,
        external: ExternalProcesses,
        service: NameService,
        record: RunRecord,
        lock: RunLock,
        stop: StopRequest,
        view: View,
        clock: Clock,
        *,
        changed_inputs: Callable[[], list[str]],
    ) -> None:
        """specs: those of the first attempt, by name. record: this launch's record in the run's folder. changed_inputs: returns how
        the user's files differ from when the launch began."""
        config = plans.config
        runtime = config.runtime
        self._plans, self._specs, self._record = plans, specs, record
        self._pool, self._external, self._service = pool, external, service
        self._lock, self._stop, self._view, self._clock = lock, stop, view, clock
        self._config, self._run_dir = config, run_directory(config)
        self._attempt = self._first_attempt = record.attempt
        self._num_starts = 0  # process starts in this launch
        self._next_publish = 0.0
        self._changed_inputs = changed_inputs
        self._look: tuple[Future[list[str]], float] | None = None  # at the user's files, and when it began
        self._looked_for: set[object] = set()  # processes, before their start and after it
        self._search: Future[Checkpoint | None] | None = None  # for the checkpoint that the next attempt resumes from
        policy = Supervision(
            runtime.max_restarts,
            mode=config.mode,
            by_hand=config.debug.leave_out,
            groups=groups_that_restart_alone(config),
        )
        self._restarts = Restarts(
            start=self._start_again, grant_lease_soon=service.grant_lease_soon, revoke=service.revoke, clock=clock
        )
        self._scaling = make_scaling(  # None: the run starts no servers
            config,
            spec_of=lambda index: plans.server(index, self._attempt),
            start=lambda spec, lease: pool.start(self._numbered(spec), lease),
            service=service,
            notice=view.notice,
            clock=clock,
        )
        self._supervisor = Supervisor(
            policy,
            FreezeWatch(runtime.frozen_after_s, runtime.start_limit_s),
            frozen_after_s=runtime.frozen_after_s,
            stop_timeout_s=runtime.stop_timeout_s,
            trainer_group=lambda: ", ".join(spec.name for spec in self._specs.values() if spec.kind in TRAINER_KINDS),
            leaves=lambda child: self._scaling is not None and self._scaling.outlives(child),
        )
        self._standstill = StandstillReport(self._run_dir, runtime.watchdog_after_s, view.notice, clock)

    def start_processes(self) -> None:
        """Start the processes of the first attempt in order, until the run is told to stop."""
        for spec in self._specs.values():
            if self._stop.signal is not None:
                return
            if spec.name in self._config.debug.leave_out:
                self._service.watch_status(spec.name, self._external.expect(spec).observe)
            else:
                self._pool.start(self._numbered(spec), self._service.grant_lease())

    def watch_over(self) -> int:
        """Repeat the turn until the master is done or a signal arrives. Returns the exit code. Raises LaunchError if the run
        fails."""
        while True:
            self._turn()
            # While the supervisor listens for error reports after a failure, only the first cause matters: signals, the master's
            # end and scaling are not handled
            if not self._supervisor.is_listening:
                if self._stop.signal is not None:
                    return self._leave(self._stop.signal)
                if self._external.master_is_done or any(
                    child.spec.kind == "master" and child.is_done for child in self._pool.children
                ):
                    return 0
                self._scale()
            self._supervise()
            if not self._supervisor.is_listening:
                changed = self._look_at_inputs()
                if changed:
                    return self._end_for(changed)
                if changed is not None:
                    self._restarts.turn()

    def merge_timelines(self) -> None:
        """With trace=true, merge the processes' recordings into one file per attempt. A failure here must not hide the result of
        the run."""
        for attempt in range(self._first_attempt, self._attempt + 1) if self._config.trace else ():
            folder = trace_dir(self._run_dir, attempt)
            out = folder.with_suffix(".json")
            try:
                if folder.is_dir():
                    merge(folder, out)
            except OSError as error:
                self._view.notice(f"no timeline: {out} cannot be written: {error}")

    # ------------------------------------------------------------------------------------------------------------ each turn

    def _turn(self) -> None:
        """Read the statuses and exits of processes, and show and publish the statuses."""
        for child in self._pool.turn(_TURN_S):
            self._service.revoke(child.lease)
        for child in self._pool.children:
            if child.could_run:
                self._supervisor.policy.runs(child.name)
        self._service.turn()
        self._external.turn()
        coming = self._restarts.statuses()
        shown = {child.lease.id: self._shown(child) for child in self._pool.alive}
        statuses = [*shown.values(), *self._external.visible_statuses(), *coming.values()]
        self._view.turn(statuses)
        self._standstill.turn(statuses, self._attempt)
        if (now := self._clock.monotonic()) >= self._next_publish:
            self._next_publish = now + _PUBLISH_STATUS_S
            self._stop.end_if_challenged(self._lock)
            if lost := self._lock.lost():
                raise LaunchError(lost)
            self._service.publish(shown | coming)

    def _shown(self, child: Child) -> WorkerStatus:
        runtime = self._config.runtime
        status = child.visible_status(runtime.start_limit_s if runtime.frozen_after_s else None)
        return self._scaling.shown(child, status) if self._scaling is not None else status

    def _scale(self) -> None:
        """Let generation servers join and leave, as requested by `asyncrl-launch scale`."""
        if self._scaling is None or self._supervisor.starts_everything:
            return
        for name in self._restarts.names():
            if not self._is_wanted(name):
                self._restarts.cancel(name)
        for child in self._scaling.turn(self._pool.children, [*self._restarts.names(), *self._external.names]):
            self._pool.forget(child)

    def _is_wanted(self, name: str) -> bool:
        return self._scaling is None or not name.startswith(f"{SERVER_KIND}/") or self._scaling.includes(name)

    def _look_at_inputs(self) -> list[str] | None:
        """Return how the user's files have changed since the launch began; None: a look at them has not ended.

        A process reads these files while it starts. A look begins before a process starts again, and after each process has
        completed its start. So no process goes on with content that other processes do not have.

        Waits for: the disk, at most _LOOK_LIMIT_S. Unblocked by: the end of the look.
        """
        if self._look is not None:
            look, since = self._look
            if not look.done() and self._clock.monotonic() - since < _LOOK_LIMIT_S:
                return None
            self._look = None
            # If a file system does not answer, the process that reads the file from it reports that
            if look.done() and not isinstance(look.exception(), OSError) and (changed := look.result()):
                return changed
        due = {*self._restarts.names(), *(child.lease.id for child in self._pool.children if child.could_run)}
        self._looked_for &= due
        if due == self._looked_for:
            return []
        self._looked_for = due
        self._look = on_thread(self._changed_inputs), self._clock.monotonic()
        return None

    # ------------------------------------------------------------------------------------------------------------ decisions

    def _supervise(self) -> None:
        """Carry out the supervisor's decisions. Raises LaunchError if the run fails."""
        if self._search is not None and self._search.done():
            self._supervisor.checkpoint_found()
        now, wall_time = self._clock.monotonic(), self._clock.time()
        hurried = self._stop.signal is not None
        for decision in self._supervisor.turn(self._pool.children, now=now, wall_time=wall_time, hurried=hurried):
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Notice):
            self._view.notice(decision.text)
        elif isinstance(decision, Kill):
            decision.child.kill(froze_s=decision.froze_s)
        elif isinstance(decision, Forget):
            self._pool.forget(decision.child)
        elif isinstance(decision, Cancel):
            for name in filter(decision.concerns, self._restarts.names()):
                self._restarts.cancel(name)
        elif isinstance(decision, StartLater):
            self._restarts.expect(
                decision.name, decision.how, attempt=self._attempt, count=decision.count, pause_s=decision.pause_s
            )
        elif isinstance(decision, LookForCheckpoint):
            self._search = on_thread(lambda: newest(self._run_dir, self._view.notice))
        elif isinstance(decision, BeginAttempt):
            self._begin_attempt(decision)
        else:
            raise LaunchError(self._failure_report(decision))

    def _begin_attempt(self, decision: BeginAttempt) -> None:
        checkpoint = self._search.result() if self._search is not None else None
        before, self._attempt, self._search = self._attempt, begin_attempt(self._run_dir, after=self._attempt), None
        self._specs = self._plans.of(self._attempt, checkpoint)
        again = [spec for spec in self._specs.values() if decision.concerns(spec.kind) and self._is_wanted(spec.name)]
        link_logs(self._run_dir, self._attempt, before=before, anew=[spec.file_stem for spec in again])
        began = self._clock.time()
        self._record = msgspec.structs.replace(self._record, attempt=self._attempt, attempt_started=began)
        write_record(self._run_dir, self._record)
        self._external.renew(self._specs)
        for spec in again:
            count = self._supervisor.policy.count(spec.name)
            self._restarts.expect(spec.name, decision.how, attempt=self._attempt, count=count)
        start = (
            f"resumes from step {checkpoint.step}" if checkpoint else "starts anew, because there is no checkpoint yet"
        )
        unit = TRAINER_GROUP if decision.unit == TRAINER_GROUP else "the run"
        self._view.notice(f"{unit} {start}, as attempt {self._attempt}")

    def _start_again(self, name: str, lease: Lease, count: int) -> None:
        """Restart a process. Called when its delay is over and its lease is granted."""
        kind, _, index = name.partition("/")
        spec = self._specs[name] if kind != SERVER_KIND else self._plans.server(int(index), self._attempt)
        if kind == "model_worker":
            worker = replace(spec.config.worker, group_incarnation=self._supervisor.group_incarnation_of(name))
            spec = replace(spec, config=replace(spec.config, worker=worker))
        self._pool.start(self._numbered(spec), lease, restarts=count)

    def _numbered(self, spec: ProcessSpec) -> ProcessSpec:
        """Number a spec for its next start. The number, not a clock, tells which of two processes of one name is the later one."""
        self._num_starts += 1
        worker = replace(spec.config.worker, start=self._num_starts)
        return replace(spec, config=replace(spec.config, worker=worker))

    # ------------------------------------------------------------------------------------------------------------- the end

    def _failure_report(self, end: EndRun) -> str:
        """Return the report of a failed run: the first cause, the restarts that were tried, and the remedy."""
        text = end.cause
        if end.tried:
            text += "\n\nWithin the last hour (runtime.max_restarts):" + "".join(f"\n  {line}" for line in end.tried)
        if list_checkpoints(self._run_dir):
            text += f"\n\nTo go on from the newest checkpoint: asyncrl-launch resume {self._run_dir}"
        return text

    def _leave(self, number: int) -> int:
        """Stop after a signal. Returns the exit code: 128 + number, or 0 if the run became complete meanwhile."""
        return 0 if self._completes(f"told to stop ({signal.Signals(number).name})") else 128 + number

    def _end_for(self, changed: Sequence[str]) -> int:
        """End the run because the user's files have changed. Returns 0 if the run became complete meanwhile; otherwise raises
        LaunchError."""
        text = "files that the run reads have changed since it began"
        if self._completes(text):
            return 0
        files = "".join(f"\n  {line}" for line in changed)
        cause = (
            f"{text}, and a process that starts would read them as they are now:{files}\n\nPut them back as they were. `resume` "
            "names those that still differ"
        )
        raise LaunchError(self._failure_report(EndRun(cause, ())))

    def _completes(self, why: str) -> bool:
        """Before the run ends, let the master write a checkpoint, if the run writes checkpoints and can write one now. Returns
        whether the run became complete meanwhile.

        Waits for: the master's checkpoint, at most checkpoint.on_stop_s. Unblocked by: the checkpoint, a failure, another signal.
        """
        limit_s, attempt = self._config.checkpoint.on_stop_s, self._attempt
        masters = [child for child in self._pool.alive if child.spec.kind == "master" and child.was_running]
        is_possible = masters and limit_s and not self._supervisor.begins_attempt and writes_checkpoints(self._config)
        if self._stop.impatient or not is_possible:
            return False
        self._view.say(
            f"{why}: finishing the train step and writing a checkpoint first, within "
            f"{limit_s:g} s (checkpoint.on_stop_s); a second signal kills all processes at once"
        )
        asked = on_thread(lambda: self._service.ask_for_last_checkpoint(attempt))
        deadline = self._clock.monotonic() + limit_s
        while not self._stop.impatient and self._clock.monotonic() < deadline:
            self._turn()
            if masters[0].is_done:
                return True
            failed = any(child.in_trouble for child in self._pool.children if child.spec.kind in TRAINER_KINDS)
            if failed or (asked.done() and asked.exception() is not None):
                break
        # Even if the master could not write one now, there may be a checkpoint that was written on schedule
        if there := list_checkpoints(self._run_dir):
            self._view.say(
                f"checkpoint of step {there[-1][1]} is the newest; asyncrl-launch resume {self._run_dir} resumes from it"
            )
        return False


def _record_of(config: ExperimentConfig, attempt: int, num_prompts: int, started: float, *, host: str) -> RunRecord:
    return RunRecord(
        pid=os.getpid(),
        attempt=attempt,
        experiment=config.experiment,
        trial=config.trial,
        endpoints=config.name_resolve.endpoints,
        name_resolve=config.name_resolve,
        started=started,
        on_stop_s=config.checkpoint.on_stop_s,
        total_steps=total_steps(config, num_prompts),
        host=socket.gethostname() if host else "",
    )


@contextlib.contextmanager
def _signals(handler: signal._HANDLER) -> Iterator[None]:
    """Handle the signals that ask to stop. A SIGHUP that is ignored, as under nohup, stays ignored."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the exit codes of children would be lost
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, old in previous.items():
        if number != signal.SIGHUP or old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
