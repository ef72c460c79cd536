"""Local launcher: starts the processes of a run on this machine, watches over them, and leaves nothing behind.

One thread, one loop, which waits for nothing but its processes' pipes. It holds the workers' leases in name resolve (a lease
lives as long as its process), reads their status from pipes and publishes it, notices a death by the child's exit and a freeze by a
progress counter that stands still, starts again whom it can (supervision.py decides), and ends everything by the first cause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from asyncrl.config.schema import ExperimentConfig, authenticates, has_unix_sockets, resolve_auto
from asyncrl.launch.children import Child, first_cause, first_failed, short_end
from asyncrl.launch.crew import KILL_LIMIT_S, Crew
from asyncrl.launch.external_process import ExternalProcess
from asyncrl.launch.hang_report import HangReport
from asyncrl.launch.hosts import address_of, own_host
from asyncrl.launch.name_service import NameService
from asyncrl.launch.program import (
    ProcessSpec,
    plan,
    run_directory,
    save_config,
    server_spec,
    total_steps,
    with_absolute_paths,
    with_name_resolve,
    worlds_of_run,
    writes_checkpoints,
)
from asyncrl.launch.recovery import going_on, starting_point
from asyncrl.launch.remote import RemoteCrew
from asyncrl.launch.restarts import Restarts
from asyncrl.launch.rundir import (
    EXPERIMENT_FILE,
    LaunchError,
    RunLock,
    RunRecord,
    begin_attempt,
    configs_dir,
    keep_private,
    link_logs,
    logs_dir,
    write_record,
)
from asyncrl.launch.scaling import KIND as SERVER_KIND
from asyncrl.launch.scaling import Scaling, make_scaling
from asyncrl.launch.supervision import (
    BUSY_LIMITS,
    EVERYTHING,
    GANG,
    GANG_KINDS,
    WINDOW_S,
    End,
    EndRun,
    FreezeWatch,
    Supervision,
    Trouble,
)
from asyncrl.protocol.messages import WorkerStatus
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.certificates import CertificateError, make_certificate
from asyncrl.runtime.devices import visible_devices
from asyncrl.runtime.disk import explain, nearly_full, raise_open_files
from asyncrl.runtime.names.interface import Lease, WatchEvent
from asyncrl.runtime.security import Secrets, remove_secrets, write_secrets
from asyncrl.runtime.stacks import SUFFIX, answer_requests
from asyncrl.runtime.trace import merge, trace_dir
from asyncrl.weights.checkpoints import Checkpoint, list_checkpoints, newest

T = TypeVar("T")

_TURN_S = 0.1
_PUBLISH_STATUS_S = 1.0
_LAST_WORDS_S = 1.0  # after the first failure: how long the others may report errors of their own
_ASK_SHARE = 0.6  # of runtime.stop_timeout_s: how long processes may take to stop when asked; then they are killed
_TAKE_OVER_S = 90.0  # a launcher before this one, whose node Slurm has given up, may need that long to end
_SAME_SIGNAL_S = 1.0  # signals so near to each other are one
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class View(Protocol):
    """Who shows a person what goes on."""

    def turn(self, statuses: Sequence[WorkerStatus]) -> None:
        """Called every turn with the newest status of every process that has not ended."""

    def notice(self, text: str) -> None:
        """Something that a person should know at once. May be called from other threads."""

    def say(self, text: str) -> None:
        """Something that is good to know, and nothing to worry about."""


@dataclass
class _Renewal:
    """The way to the next attempt: its processes are killed; then the newest checkpoint is looked for; then they are started."""

    unit: str  # GANG or EVERYTHING
    how: str  # it came to that
    due: float
    since: float = field(default_factory=time.monotonic)
    found: Future[Checkpoint | None] | None = None  # the checkpoint to go on from

    def concerns(self, child: Child) -> bool:
        return self.unit == EVERYTHING or child.spec.kind in GANG_KINDS


@dataclass
class _Return:
    """A unit on its way back within its attempt: what is left of it is killed, then all of it is started again."""

    names: tuple[str, ...]
    how: str  # it came to that
    due: float
    count: int  # of its restarts, this one included
    since: float = field(default_factory=time.monotonic)


class LocalLauncher:
    """Runs one launch: an attempt, and those that follow where the training side is started again."""

    def __init__(self, config: ExperimentConfig, num_prompts: int, view: View) -> None:
        self.config = config
        self.run_dir = run_directory(config)
        self._num_prompts = num_prompts
        self._view = view
        self._devices = visible_devices()
        runtime = config.runtime
        apart = [[f"model_worker/{worker}" for worker in world] for world in worlds_of_run(config).apart]
        self._supervision = Supervision(
            runtime.max_restarts, mode=config.mode, by_hand=config.debug.leave_out, apart=apart
        )
        self._freezes = FreezeWatch(runtime.frozen_after_s, runtime.start_timeout_s)
        self._told_busy: set[int] = set()
        self._hang_report = HangReport(self.run_dir, runtime.watchdog_after_s, view.notice)
        self._external: list[ExternalProcess] = []  # processes that somebody else starts
        self._own_host = ""  # on a run of more than one host: which of them this is
        self._crew: Crew | RemoteCrew | None = None
        self._name_service: NameService | None = None
        self._restarts: Restarts | None = None
        self._scaling: Scaling | None = None  # None: the run has no servers of its own
        self._renewal: _Renewal | None = None
        self._returning: dict[str, _Return] = {}  # by unit
        self._num_starts = 0  # of processes, in this launch
        self._lives: dict[str, int] = {}  # by process: how often its world was started again in this attempt
        self._failing: dict[str, float] = {}  # by unit of several: since when one of it is seen to have failed
        self._lock: RunLock | None = None
        self._stop_signal: int | None = None
        self._told_to_stop = 0.0
        self._impatient = False
        self._next_publish = 0.0
        self._attempt = self._first_attempt = 0
        self._specs: dict[str, ProcessSpec] = {}  # of the newest attempt
        self._started = time.time()

    def run(self) -> int:
        """Start everything, wait for the master to be done, stop everything. Returns the exit code.

        0: the run is complete; 128 + N: ended by signal N. Raises LaunchError with the first cause of a failure.
        """
        raise_open_files()
        keep_private(self.run_dir, self.config.runtime.group)
        with _signals(self._on_signal):
            lock = RunLock(self.run_dir)
            queued_again = self.config.cluster == "slurm" and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
            lock.acquire(take_over_s=_TAKE_OVER_S if queued_again else 0.0)
            self._lock = lock
            try:
                self._start()
                return self._watch_over()
            except LaunchError as error:
                if (lost := lock.lost()) and lost not in str(error):
                    raise LaunchError(lost) from error
                if hint := nearly_full(self.run_dir):
                    raise LaunchError(f"{error}\n\n{hint}") from error
                raise
            except OSError as error:  # of the launcher's own files and processes; workers report theirs
                if lost := lock.lost():
                    raise LaunchError(lost) from error
                explained = explain(Path(error.filename or self.run_dir), error)
                raise LaunchError(f"the launcher failed: {explained or error}") from error
            finally:
                self._stop_everything()
                self._merge_timelines()
                unix_sockets.remove_folder(self.run_dir)
                lock.release()

    def _watch_over(self) -> int:
        """Turn until the master is done, the run has failed or a signal comes."""
        if self._stop_signal is not None:
            return 128 + self._stop_signal
        assert self._crew is not None
        assert self._restarts is not None
        while True:
            self._turn()
            if self._stop_signal is not None:
                return self._leave(self._stop_signal)
            if any(child.spec.kind == "master" and child.is_done for child in self._crew.children):
                return 0
            if any(process.spec.kind == "master" and process.is_done for process in self._external):
                return 0
            self._scale()
            self._kill_frozen()
            self._see_to_ends()
            self._bring_back()
            self._renew()
            self._restarts.turn()

    # ----------------------------------------------------------------------------------------------------------- the start

    def _start(self) -> None:
        looking = _on_thread(lambda: starting_point(self.config, self.run_dir, self._view.notice, self._view.say))
        while not looking.done():  # it reads whole checkpoints
            if self._stop_signal is not None:
                return
            time.sleep(_TURN_S / 10)
        checkpoint = looking.result()
        self._attempt = self._first_attempt = begin_attempt(self.run_dir)
        with contextlib.suppress(OSError):
            answer_requests(logs_dir(self.run_dir, self._attempt) / f"launcher{SUFFIX}", "launcher")
        asked = self.config
        self._write_config(asked)
        save_config(with_absolute_paths(self.config), configs_dir(self.run_dir, self._attempt) / EXPERIMENT_FILE)
        self.config = going_on(self.config, checkpoint, self._num_prompts)
        if has_unix_sockets(self.config):
            try:
                folder = unix_sockets.make_folder(self.run_dir)
            except OSError as error:
                raise LaunchError(f"network.sockets=unix: {error}; set TMPDIR, or network.sockets=tcp") from error
            self.config = replace(self.config, network=replace(self.config.network, socket_dir=folder))
        by_hand, runtime = self.config.debug.leave_out, self.config.runtime
        if self.config.cluster != "local":
            self._own_host = own_host(self.config.hosts)
            address = address_of(self._own_host, towards=self.config.hosts)
            self.config = replace(self.config, runtime=replace(runtime, host=address))
        else:
            self._plan(checkpoint)
            self._crew = Crew(
                [spec for spec in self._specs.values() if spec.name not in by_hand],
                self.run_dir,
                fork=runtime.fork_server,
                start_limit_s=runtime.start_timeout_s,
                notice=self._view.notice,
                socket_dir=self.config.network.socket_dir,
            )
        secrets = self._make_secrets()
        etcd_log = logs_dir(self.run_dir, self._attempt) / "etcd.log"
        service = NameService(self.config, self.run_dir, etcd_log, self._view.notice)
        self._name_service = service
        service.open()
        self._restarts = Restarts(
            start=self._start_again_now, grant_lease_soon=service.grant_lease_soon, revoke=service.revoke
        )
        self.config = with_name_resolve(self.config, service.name_resolve)
        self._write_record()
        if secrets is not None and self._own_host:
            service.hand_out(secrets)
        if self._crew is None:
            if not self._open_remote_crew(service):
                return
            self._write_config(asked)  # the GPUs are those of the hosts
        self._plan(checkpoint)
        if isinstance(self._crew, RemoteCrew):
            self._crew.place_all(list(self._specs.values()))
        assert self._crew is not None
        crew = self._crew
        for spec in self._specs.values():
            if self._stop_signal is not None:
                return
            if spec.name in by_hand:
                process = ExternalProcess(spec, self.run_dir, wait_s=self.config.debug.wait_s, notice=self._view.notice)
                service.watch_status(spec.name, process.observe)
                self._external.append(process)
                continue
            self._crew.start(self._numbered(spec), service.grant_lease())
        self._scaling = make_scaling(
            self.config,
            spec_of=self._server_spec,
            start=lambda spec, lease: crew.ask(self._numbered(spec), lease),
            service=service,
            notice=self._view.notice,
        )

    def _make_secrets(self) -> Secrets | None:
        """Those of this launch, in the run's folder. None: nothing is checked. Raises LaunchError."""
        config = self.config
        if not authenticates(config):
            self._view.notice(
                "network.authenticate=off: a client that reaches this run's ports can change what it does"
            )
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

    def _open_remote_crew(self, service: NameService) -> bool:
        """Have the agents of all hosts come. False where the run was stopped meanwhile."""
        self._crew = crew = RemoteCrew(
            self.config,
            service,
            self.run_dir,
            own_host=self._own_host,
            attempt=self._attempt,
            notice=self._view.notice,
            say=self._view.say,
        )
        service.watch_stop(self._on_stop_wish)
        if not crew.open(lambda: self._stop_signal is not None):
            return False
        self._devices = crew.devices
        return True

    def _plan(self, checkpoint: Checkpoint | None) -> None:
        """What the processes of the newest attempt are. checkpoint: what it goes on from; None: it begins anew."""
        planned = plan(
            self.config,
            attempt=self._attempt,
            num_prompts=self._num_prompts,
            devices=self._devices,
            resume=str(checkpoint.path) if checkpoint else "",
        )
        self._specs = {spec.name: spec for spec in planned}

    def _write_config(self, asked: ExperimentConfig) -> None:
        """What the user asked for, to be read, with the values of `auto` on the devices that are known."""
        resolved = resolve_auto(asked, on_gpu=bool(self._devices))
        save_config(resolved, self.run_dir / "config.yaml", redacted=True)

    def _server_spec(self, index: int) -> ProcessSpec:
        """Any generation server's, those included that the allocation does not have."""
        return server_spec(
            index, self.config, attempt=self._attempt, num_prompts=self._num_prompts, devices=self._devices
        )

    def _write_record(self) -> None:
        record = RunRecord(
            pid=os.getpid(),
            attempt=self._attempt,
            experiment=self.config.experiment,
            trial=self.config.trial,
            endpoints=self.config.name_resolve.endpoints,
            name_resolve=self.config.name_resolve,
            started=self._started,
            on_stop_s=self.config.checkpoint.on_stop_s,
            total_steps=total_steps(self.config, self._num_prompts),
            host=socket.gethostname() if self._own_host else "",
        )
        write_record(self.run_dir, record)

    # ------------------------------------------------------------------------------------------------------------ each turn

    def _turn(self) -> None:
        """Take in statuses and ends, and show them. Waits for a pipe, at most _TURN_S; unblocked by statuses and deaths."""
        assert self._name_service is not None
        assert self._crew is not None
        assert self._restarts is not None
        for child in self._crew.turn(_TURN_S):
            self._name_service.revoke(child.lease)
        for child in self._crew.children:
            if child.could_run:
                self._supervision.runs(child.name)
        self._name_service.turn()
        for process in self._external:
            process.turn()
        by_hand = [process.visible_status() for process in self._external]
        coming = self._restarts.statuses()
        shown = {child.lease.id: self._shown(child) for child in self._crew.alive}
        statuses = [*shown.values(), *by_hand, *coming.values()]
        self._view.turn(statuses)
        self._hang_report.turn(statuses, self._attempt)
        if time.monotonic() >= self._next_publish:
            self._next_publish = time.monotonic() + _PUBLISH_STATUS_S
            self._give_way()
            if self._lock is not None and (lost := self._lock.lost()):
                raise LaunchError(lost)
            self._name_service.publish(shown | coming)

    def _shown(self, child: Child) -> WorkerStatus:
        runtime = self.config.runtime
        status = child.visible_status(runtime.start_timeout_s if runtime.frozen_after_s else None)
        return self._scaling.shown(child, status) if self._scaling is not None else status

    def _kill_frozen(self) -> None:
        """A process that does not move is as good as dead, and its peers wait for it. A busy one is waited for."""
        assert self._crew is not None
        alive = {  # by lease: on several hosts processes may have one number
            child.lease.id: child for child in self._crew.alive if child.process is not None and not child.is_done
        }
        counts = {key: child.progress_count() for key, child in alive.items()}
        cpu_s = {key: child.cpu_s() for key, child in alive.items()}
        frozen = self._freezes.turn(time.monotonic(), counts, cpu_s)
        busy = self._freezes.busy
        for key in busy.keys() - self._told_busy:
            limit_s = BUSY_LIMITS * self.config.runtime.frozen_after_s
            self._view.notice(
                f"{alive[key].name} is busy: its event loop has not turned for {busy[key]:.0f} s, in which it computed. It is "
                f"killed after {limit_s:.0f} s. Its log names what occupies the loop ({alive[key].log}), and "
                "`asyncrl-launch status --stacks` shows it"
            )
        self._told_busy = set(busy)
        for key, still_s in frozen.items():
            child = alive[key]
            if not child.froze_s and not child.in_trouble:
                child.froze_s = still_s
                self._view.notice(f"{child.name} has not moved for {still_s:.0f} s, and is killed; see {child.log}")
            child.kill()

    def _scale(self) -> None:
        """Generation servers join and leave, as `asyncrl-launch scale` wishes."""
        assert self._crew is not None
        assert self._restarts is not None
        if self._scaling is None or (self._renewal is not None and self._renewal.unit == EVERYTHING):
            return
        for name in self._restarts.names():
            if not self._is_wanted(name):
                self._restarts.cancel(name)
        elsewhere = [*self._restarts.names(), *(process.name for process in self._external)]
        joined, gone = self._scaling.turn(self._crew.children, elsewhere)
        for child in gone:
            self._crew.forget(child)
        for child in joined:
            self._crew.take_in(child)

    def _is_wanted(self, name: str) -> bool:
        return self._scaling is None or not name.startswith(f"{SERVER_KIND}/") or self._scaling.wants(name)

    # ------------------------------------------------------------------------------------------------------- ends and starts

    def _see_to_ends(self) -> None:
        """Who failed or ended too early is started again, or the run ends: LaunchError."""
        troubled = self._in_trouble()
        if not self._may_go_on(troubled):
            self._hear_last_words()  # one may have been killed, which is noticed later than the errors of its peers
            troubled = self._in_trouble()
            if not self._may_go_on(troubled):
                raise LaunchError(self._first_cause())
        units: dict[str, list[Child]] = {}
        for child in troubled:
            units.setdefault(self._supervision.unit_of(child.name), []).append(child)
        self._failing = {unit: since for unit, since in self._failing.items() if unit in units}
        for unit in sorted(units, key=lambda unit: unit != GANG):  # which takes others with it
            failed = [child for child in units[unit] if child in self._in_trouble()]  # still
            if not failed:
                continue
            child = failed[0]
            if unit != child.name:
                if self._have_spoken(unit, failed):
                    self._see_to(first_failed(failed), failed)
            elif child.returncode is not None:
                self._see_to(child, [child])
            elif time.time() - (child.failure_time or 0.0) > self.config.runtime.stop_timeout_s:
                child.kill()  # it has said that it failed, and does not end

    def _may_go_on(self, troubled: Sequence[Child]) -> bool:
        return self._supervision.outlives_all(
            Trouble(child.name, child.is_fatal, child.was_struck) for child in troubled
        )

    def _in_trouble(self) -> list[Child]:
        """Those of whom something depends."""
        assert self._crew is not None
        return [
            child
            for child in self._crew.children
            if child.in_trouble
            and not (self._renewal is not None and self._renewal.concerns(child))
            and not any(child.name in returning.names for returning in self._returning.values())
            and not (self._scaling is not None and self._scaling.outlives(child))
        ]

    def _have_spoken(self, unit: str, failed: Sequence[Child]) -> bool:
        """Whether it is known who of a unit was the first: others may fail because of that one, and be quicker to say so."""
        now = time.monotonic()
        since = self._failing.setdefault(unit, now)
        if any(child.was_killed for child in failed):
            return True
        owed = first_failed(failed).waits_for_words_of
        limit_s = _LAST_WORDS_S
        if owed and owed not in {child.name for child in failed}:
            limit_s = max(limit_s, self.config.runtime.stop_timeout_s)
        return now - since > limit_s

    def _see_to(self, child: Child, failed: Sequence[Child]) -> None:
        """Have started again what must be because of this child, or raise LaunchError. failed: it, and those with it."""
        assert self._crew is not None
        assert self._restarts is not None
        self._failing.pop(self._supervision.unit_of(child.name), None)
        how = short_end(child).splitlines()[0]
        struck = any(one.was_struck for one in failed)  # then the others may only have said so earlier
        end = End(child.name, how, first_cause(failed), child.could_run, child.is_fatal, struck)
        decision = self._supervision.decide(end, time.time(), time.monotonic())
        if isinstance(decision, EndRun):
            raise LaunchError(self._told(decision.cause, decision.tried))
        limit, pause_s = self._supervision.limit, decision.pause_s
        when = f"in {pause_s:g} s" if pause_s else "at once"
        again = f"started again {when} ({decision.number} of {limit}); see {child.log}"
        if decision.unit not in (GANG, EVERYTHING):
            members, count = self._supervision.members(child.name), self._supervision.count(child.name)
            self._returning[decision.unit] = _Return(members, how, time.monotonic() + pause_s, count)
            who = "it is" if decision.unit == child.name else f"its world ({decision.unit}) is"
            self._view.notice(f"{child.name} {how}; {who} {again}")
            return
        self._returning.clear()
        if decision.unit == GANG:
            for name in self._restarts.names():
                if name.partition("/")[0] in GANG_KINDS:
                    self._restarts.cancel(name)
            names = ", ".join(spec.name for spec in self._specs.values() if spec.kind in GANG_KINDS)
            self._view.notice(f"{child.name} {how}; {GANG} ({names}) is {again}")
        else:
            for name in self._restarts.names():
                self._restarts.cancel(name)
            self._view.notice(
                f"{child.name} {how}, after {limit} restarts within {WINDOW_S / 60:.0f} minutes; everything is started again "
                f"{when}, once; see {child.log}"
            )
        self._renewal = _Renewal(decision.unit, f"{child.name} {how}", time.monotonic() + pause_s)

    def _bring_back(self) -> None:
        """Units that are started again within their attempt, one step further. Nobody of one lives when it begins anew."""
        assert self._crew is not None
        assert self._restarts is not None
        for unit, returning in list(self._returning.items()):
            members = [child for child in self._crew.children if child.name in returning.names]
            if not self._are_gone(members, returning):
                continue
            del self._returning[unit]
            pause_s = max(0.0, returning.due - time.monotonic())
            for name in returning.names:
                self._lives[name] = self._lives.get(name, 0) + 1
                self._restarts.expect(
                    name, returning.how, attempt=self._attempt, count=returning.count, pause_s=pause_s
                )

    def _renew(self) -> None:
        """The next attempt, one step further. Nobody of the one before lives when it begins."""
        renewal = self._renewal
        if renewal is None:
            return
        assert self._crew is not None
        if not self._are_gone([child for child in self._crew.children if renewal.concerns(child)], renewal):
            return
        if renewal.found is None:
            renewal.found = _on_thread(lambda: newest(self.run_dir, self._view.notice))
        if renewal.found.done() and time.monotonic() >= renewal.due:
            self._renewal = None
            self._begin_next_attempt(renewal, renewal.found.result())

    def _are_gone(self, members: Sequence[Child], after: _Renewal | _Return) -> bool:
        """Whether none of them lives; then they are forgotten, else killed."""
        assert self._crew is not None
        if alive := [child for child in members if child.returncode is None]:
            for child in alive:
                child.kill()
            if time.monotonic() - after.since > KILL_LIMIT_S:
                names = ", ".join(child.name for child in alive)
                raise LaunchError(f"{after.how}; {names} cannot be started again: killed, and still not gone")
            return False
        for child in members:
            self._crew.forget(child)
        return True

    def _begin_next_attempt(self, renewal: _Renewal, checkpoint: Checkpoint | None) -> None:
        assert self._restarts is not None
        before, self._attempt = self._attempt, begin_attempt(self.run_dir, after=self._attempt)
        self._lives.clear()
        self._plan(checkpoint)
        again = [
            spec
            for spec in self._specs.values()
            if (renewal.unit == EVERYTHING or spec.kind in GANG_KINDS) and self._is_wanted(spec.name)
        ]
        link_logs(self.run_dir, self._attempt, before=before, anew=[spec.file_stem for spec in again])
        self._write_record()
        for process in self._external:
            process.renew(self._specs[process.name])
        for spec in again:
            count = self._supervision.count(spec.name)
            self._restarts.expect(spec.name, renewal.how, attempt=self._attempt, count=count)
        start = f"goes on from step {checkpoint.step}" if checkpoint else "begins anew: there is no checkpoint yet"
        self._view.notice(f"{GANG} {start}, as attempt {self._attempt}")

    def _start_again_now(self, name: str, lease: Lease, count: int) -> None:
        assert self._crew is not None
        kind, _, index = name.partition("/")
        spec = self._specs[name] if kind != SERVER_KIND else self._server_spec(int(index))
        if kind == "model_worker":
            worker = replace(spec.config.worker, life=self._lives.get(name, 0))
            spec = replace(spec, config=replace(spec.config, worker=worker))
        self._crew.start(self._numbered(spec), lease).restarts = count

    def _numbered(self, spec: ProcessSpec) -> ProcessSpec:
        """For its next start: which of two processes of a name is the later one is told by this number, by no clock."""
        self._num_starts += 1
        worker = replace(spec.config.worker, start=self._num_starts)
        return replace(spec, config=replace(spec.config, worker=worker))

    # ------------------------------------------------------------------------------------------------------------- the end

    def _hear_last_words(self) -> None:
        """Others may fail because of the first, and be quicker to say so: listen to all for a moment."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline and self._stop_signal is None:
            self._turn()

    def _first_cause(self) -> str:
        """Of a run that cannot go on."""
        failed = self._in_trouble()
        first = first_failed(failed)
        end = End(first.name, "", first_cause(failed), first.could_run, fatal=True)
        decision = self._supervision.decide(end, time.time(), time.monotonic())
        assert isinstance(decision, EndRun)
        return self._told(decision.cause, decision.tried)

    def _told(self, cause: str, tried: Sequence[str]) -> str:
        """How a run has failed: the first cause, what was tried, and what helps."""
        text = cause
        if tried:
            text += "\n\nWithin the last hour (runtime.max_restarts):" + "".join(f"\n  {line}" for line in tried)
        if list_checkpoints(self.run_dir):
            text += f"\n\nTo go on from the newest checkpoint: asyncrl-launch resume {self.run_dir}"
        return text

    def _leave(self, number: int) -> int:
        """Told to stop by a signal: first a checkpoint, if the run writes them and one can be had. Returns the exit code.

        Waits for: the master to have written it; bounded by checkpoint.on_stop_s. Unblocked by: that, a failure, another signal.
        """
        assert self._crew is not None
        assert self._name_service is not None
        limit_s, service, attempt = self.config.checkpoint.on_stop_s, self._name_service, self._attempt
        masters = [child for child in self._crew.alive if child.spec.kind == "master" and child.was_running]
        if self._impatient or not masters or not limit_s or self._renewal or not writes_checkpoints(self.config):
            return 128 + number
        self._view.say(
            f"told to stop ({signal.Signals(number).name}): the train step ends and a checkpoint is written first, within "
            f"{limit_s:g} s (checkpoint.on_stop_s); again, and all ends at once"
        )
        asked = _on_thread(lambda: service.ask_for_last_checkpoint(attempt))
        deadline = time.monotonic() + limit_s
        while not self._impatient and time.monotonic() < deadline:
            self._turn()
            if masters[0].is_done:
                return 0
            failed = any(child.in_trouble for child in self._crew.children if child.spec.kind in GANG_KINDS)
            if failed or (asked.done() and asked.exception() is not None):
                break
        if there := list_checkpoints(self.run_dir):  # the schedule may have had this step's written just before
            self._view.say(
                f"checkpoint of step {there[-1][1]} is the newest; asyncrl-launch resume {self.run_dir} goes on from it"
            )
        return 128 + number

    def _give_way(self) -> None:
        """A batch system that has lost sight of this host starts the run elsewhere: then this launcher is of no more use."""
        if self._lock is not None and self._lock.is_challenged() and not self._impatient:
            self._view.notice("another launcher has been started in this one's place; this one ends")
            self._stop_signal, self._impatient = self._stop_signal or signal.SIGTERM, True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_signal is None:
            self._stop_signal, self._told_to_stop = number, now
        elif now - self._told_to_stop > _SAME_SIGNAL_S:  # a batch system tells us, and the script that started us
            self._impatient = True

    def _on_stop_wish(self, event: WatchEvent) -> None:
        """`asyncrl-launch stop` on another host; called by a thread of name resolve."""
        if event.kind == "put":
            if self._stop_signal is None:
                self._view.notice(f"stopped from {event.value}")
            self._on_signal(signal.SIGTERM, None)

    def _stop_everything(self) -> None:
        """Ask, then kill. Nothing of the run is alive afterwards."""
        try:
            for process in self._external:
                process.ask_to_stop()
            if self._crew is not None:
                self._crew.stop(self.config.runtime.stop_timeout_s * _ASK_SHARE, lambda: self._impatient)
            self._wait_for_external()
            if isinstance(self._crew, RemoteCrew):  # by name resolve its agents are told
                self._crew.close()
            if self._name_service is not None:
                self._name_service.close()
        finally:
            if isinstance(self._crew, Crew):
                self._crew.close()
            remove_secrets(self.run_dir)

    def _wait_for_external(self) -> None:
        """Before their name resolve is taken away: they would find it emptied, and restore what was theirs.

        Waits for: their ends. Unblocked by: those, runtime.stop_timeout_s, impatience.
        """
        deadline = time.monotonic() + self.config.runtime.stop_timeout_s
        while left := [process.name for process in self._external if not process.is_gone]:
            if self._impatient or time.monotonic() > deadline:
                self._view.notice(f"{', '.join(left)}, which you started, still runs")
                return
            time.sleep(_TURN_S / 2)

    def _merge_timelines(self) -> None:
        """With trace=true: what the processes recorded, a file an attempt. A failure here must not hide how the run ended."""
        for attempt in range(self._first_attempt, self._attempt + 1) if self.config.trace else ():
            folder = trace_dir(self.run_dir, attempt)
            out = folder.with_suffix(".json")
            try:
                if folder.is_dir():
                    merge(folder, out)
            except OSError as error:
                self._view.notice(f"no timeline: {out} cannot be written: {error}")


def _on_thread(function: Callable[[], T]) -> Future[T]:
    """For what may take long: the launcher's loop goes on meanwhile."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="launcher's helper", daemon=True).start()
    return result


@contextlib.contextmanager
def _signals(handler: signal._HANDLER) -> Iterator[None]:
    """Handle those that ask to stop; but not a hangup that is ignored, as under nohup."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide how children ended
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, old in previous.items():
        if number != signal.SIGHUP or old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
