"""Health probes and weight updates of generation servers over HTTP. routing.py and update_plan.py make the decisions.

consumes: published versions, announced servers (from the worker's watches), the servers' answers.
produces: states and versions in the ServerTable; `news` after each change.
waits for: each server independently, within a limit. The HTTP side (http.py) waits for no server.
unblocked by: the server's answer, its limit, or a newer publication.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from asyncrl.config.schema import SLOW_BYTES_PER_S
from asyncrl.config.transports import FILES, transport_of
from asyncrl.manager import intervals
from asyncrl.manager.files import FilesInManager
from asyncrl.manager.manager_side import (
    FAILURES,
    ManagerSide,
    Means,
    MismatchError,
    OfferError,
    RefusedError,
    ServerCalls,
    UpdateError,
)
from asyncrl.manager.routing import Server, ServerState, ServerTable
from asyncrl.manager.transports import KINDS
from asyncrl.manager.update_plan import GivenUp, Sleep, Update, UpdatePlan
from asyncrl.protocol.errors import ErrorClass, RunEndedError, classify
from asyncrl.protocol.fence import Fence
from asyncrl.protocol.generation import ModelInfo
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.services import Services
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import Manifest, verify_version

_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 10.0
_IDLE_S = 5.0
_DAMAGED_AFTER = 4  # a version that fails verification for verify_limit_s / _DAMAGED_AFTER counts as damaged
_PROBES_AT_ONCE = 16
_VERIFY_NICENESS = 5
_FETCH_SLACK_S = 1.0  # additional time that a fetch may take, compared with the fastest host's
# Consecutive mismatches of every live server after which the run ends: the weights or the servers must be wrong
_MAX_MISMATCHES = 3


def _lower_priority() -> None:
    """Lower the priority of the checksum thread, so that answers come first on a busy machine. Linux has niceness per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _VERIFY_NICENESS)


def _by_cause(reasons: Mapping[str, str]) -> list[str]:
    """reasons: by server. Return a text for each reason, after the servers that share it."""
    causes: dict[str, list[str]] = {}
    for server, reason in sorted(reasons.items()):
        causes.setdefault(reason, []).append(server)
    return [f"{', '.join(servers)}: {reason}" for reason, servers in causes.items()]


def _no_server_loads(given_up: GivenUp) -> str:
    """Return the text about a version that every live server has given up."""
    return (
        f"no generation server can load the weights {given_up.version}, so the run ends. "
        f"{'; '.join(_by_cause(given_up.reasons))}. The logs of these servers have "
        "the whole error. If tensors do not fit, trainer and servers need the same model: set model_path to one that both support, "
        "or choose another engine in the allocation"
    )


class Fleet:
    """Runs three loops: `verify_loop` (newest publication), `update_loop` (waves), `probe_loop` (health)."""

    def __init__(
        self,
        table: ServerTable,
        plan: UpdatePlan,
        services: Services,
        *,
        session: aiohttp.ClientSession,
        path_of: Callable[[WeightVersion], Path],
        verify: Callable[[Path, WeightVersion], Manifest] = verify_version,
        probe_every_s: float,
        probe_limit_s: float,
        verify_limit_s: float,
        interrupt: str = "abort",
        transport: str = FILES,
        transfer_limit_s: float = 30.0,
        replace_limit_s: float = 0.0,
        files_url: str = "",
        shares_devices: bool = False,
    ) -> None:
        """transport: of versions in the trainer's memory (weights.transport). transfer_limit_s: limit of one transfer from there.
        replace_limit_s: time for the trainer to replace the version in `damaged`.
        files_url: URL prefix from which servers that do not see the run's folder fetch versions; "": all servers see the folder."""
        self.table = table
        self.plan = plan
        self.counters: Counter[tuple[str, str]] = Counter()
        self.update_seconds: defaultdict[str, float] = defaultdict(float)  # by server: seconds in successful updates
        self.calls, self._path_of, self._verify = ServerCalls(session), path_of, verify
        means = Means(self.calls, path_of, files_url, transfer_limit_s, self.counters, services.logger)
        self._files, self._from_memory = FilesInManager(means), KINDS[transport](means)
        self._probe_every_s = probe_every_s
        self._probe_limit_s = probe_limit_s
        self._verify_limit_s = verify_limit_s
        self._replace_limit_s = replace_limit_s
        # The newest publication, once it has failed verification for a quarter of verify_limit_s
        self.damaged: WeightVersion | None = None
        self._logger, self._trace, self._clock = services.logger, services.trace, services.clock
        self._pause_body = msgspec.json.encode({"mode": interrupt})
        self._files_url, self._shares_devices = files_url, shares_devices
        # Not servers that sleep, that get most versions from memory, or that must fetch: how long that may take is known only after
        # the manager has read the manifest
        self._verify_at_servers = not (files_url or shares_devices or transport_of(transport).from_memory)
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify_weights", initializer=_lower_priority)
        self._published = Fence[WeightVersion | None](None)
        self._failing: tuple[WeightVersion, float] | None = None  # the publication that fails its check, and since when
        self._publication = asyncio.Event()
        self._wake = asyncio.Event()
        self.news = asyncio.Event()  # set after each change of the servers' states; its reader clears it
        self._updates: set[asyncio.Task[None]] = set()
        self._probes: dict[tuple[str, int], asyncio.Task[None]] = {}  # at most one at a time for each incarnation
        self._mismatches: Counter[str] = Counter()  # by server: consecutive mismatches
        self._refusals: dict[str, str] = {}  # by server: why it has refused the last version that it was to load
        self._fatal: RunEndedError | None = None
        self._refusing_probes: set[str] = set()  # servers whose last health probe was refused for a permanent reason

    async def close(self) -> None:
        tasks = [*self._updates, *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._verifier.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------------------- events

    @property
    def attempt(self) -> int:
        """The newest attempt with published or held weights."""
        published = self._published.newest
        return max(self.table.attempt, published.attempt if published is not None else 0)

    def publish(self, text: str) -> None:
        """The key `model_version` has this new value. A value that is malformed or older than the known version is logged and
        ignored."""
        try:
            version = WeightVersion.parse(text)
        except ValueError as error:
            self._logger.error("model_version ignored: %s", error)
            return
        if self.table.attempts.is_over(version.attempt) or self._published.is_over(version):
            self._logger.warning("model_version %s ignored: it is older than %s", version, self._published.newest)
            return
        if version == self.damaged:
            self._logger.info("weights %s were written again", version)
            self.damaged = self._failing = None
        self._published.adopt(version)
        self._publication.set()

    def hold(self, text: str) -> None:
        """The key `weights_held` has this new value: the trainer has this version in memory.

        No file needs verification: the trainer knows which version it holds, and servers check the data that they get.
        """
        try:
            version = WeightVersion.parse(text)
        except ValueError as error:
            self._logger.error("weights_held ignored: %s", error)
            return
        if self.plan.hold(version):
            self.changed()

    def trainer_at(self, url: str) -> None:
        """Set the URL at which the trainer accepts requests for versions in its memory."""
        self._from_memory.trainer_at(url)

    def announce(self, name: str, url: str) -> None:
        """A server was announced in name resolve."""
        self._logger.info("%s is at %s", name, url)
        known = self.table.servers.get(name)
        incarnation, now = known.incarnation if known is not None else None, self._clock.monotonic()
        self.table.announce(name, url, now)
        if self.table.servers[name].incarnation != incarnation:  # a new process, or one that counted as dead
            self.plan.silent(name)
        self.plan.answers(name, now)
        self.changed()

    def withdraw(self, name: str) -> None:
        """A server's announcement is gone."""
        self._logger.warning("%s has left name resolve: its process has ended", name)
        self.table.withdraw(name)
        self.plan.silent(name)
        self._refusals.pop(name, None)
        self.changed()

    def changed(self) -> None:
        """The states of servers in the table have changed."""
        self._wake.set()
        self.news.set()

    def take_turn(self, turn: str, version: WeightVersion) -> None:
        """Shared devices: turn is `training` or `generation`, from the master's report. version: the one that training has
        reached."""
        if self._shares_devices and self.plan.take_turn(training=turn == "training", version=version):
            self.changed()

    @property
    def devices_free(self) -> bool:
        """It is training's turn, and no server holds a shared device."""
        return self.table.training and self.table.devices_free

    def refusals(self) -> list[str]:
        """The servers that serve nothing because they have refused a version, with the cause."""
        return [f"out of service: {text}" for text in _by_cause(self._refusals)]

    def all_refuse_probes(self) -> bool:
        """Whether every listed server has answered its last health probe with a permanent error, such as that of a wrong key."""
        listed = [server for server in self.table.servers.values() if server.listed]
        return bool(listed) and self._refusing_probes.issuperset(server.name for server in listed)

    # -------------------------------------------------------------------------------------------------------- loops

    async def verify_loop(self) -> None:
        """Verify the files of the newest publication against their manifest before any server loads them. Servers that see the
        files verify them at the same time. Retry with backoff.

        A network file system may show a version late. A version that fails for a quarter of verify_limit_s is `damaged`: the
        master has it written again, or a newer version replaces it. The run ends if neither happens within the limits.
        """
        pause_s = _FIRST_RETRY_S
        while True:
            await self._publication.wait()  # the loop waits here until there is a publication to verify
            self._publication.clear()
            version = self._published.newest
            assert version is not None
            if self._failing is None and self._verify_at_servers:
                self._begin_fetches(version, self.plan.limit_s)
            try:
                with self._trace.overlapping(f"verify {version}", kind="weights"):
                    check = partial(self._verify, self._path_of(version), version)
                    manifest = await asyncio.get_running_loop().run_in_executor(self._verifier, check)
            except (WeightsError, OSError) as error:
                self.counters["refused_manifest", ""] += 1
                self._logger.error("weights %s are not served: %s", version, error)
                if self._failing is None or self._failing[0] != version:
                    self._failing = version, self._clock.monotonic()
                if classify(error) is ErrorClass.PERMANENT:
                    raise RunEndedError(
                        f"weights {version} cannot be served: {error}. The gserver manager must be able to read the run's folder"
                    ) from error
                self._judge_damage(version, self._clock.monotonic() - self._failing[1], error)
                with contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._publication.wait()
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
                self._publication.set()
                continue
            if self.damaged is not None:
                how = "whole again" if self.damaged == version else f"replaced by {version}"
                self._logger.warning("weights %s, which were damaged on disk, are %s", self.damaged, how)
            if self._failing is not None:
                self.plan.replaced()
            pause_s, self._failing, self.damaged = _FIRST_RETRY_S, None, None
            await self._fetch_everywhere(version, manifest.num_bytes)
            if self.plan.publish(version, manifest.num_bytes):
                self.changed()

    def _judge_damage(self, version: WeightVersion, broken_s: float, error: Exception) -> None:
        """The version has failed verification for broken_s seconds. Report it as damaged after a quarter of verify_limit_s. Raise
        RunEndedError, which ends the run, after verify_limit_s plus replace_limit_s."""
        if broken_s > self._verify_limit_s + self._replace_limit_s:
            raise RunEndedError(
                f"weights {version} cannot be served: {error}; verification has failed for {broken_s:.0f} s (limits: "
                "manager.update_timeout_s, then train.call_timeout_s for the trainer to replace it). Check the disk, and that "
                "all processes see the same files; then start again"
            ) from error
        if self.damaged != version and broken_s > self._verify_limit_s / _DAMAGED_AFTER:
            self._logger.error("weights %s are damaged on disk; the trainer is asked to replace them", version)
            self.damaged = version
            self.changed()

    async def _fetch_everywhere(self, version: WeightVersion, num_bytes: int) -> None:
        """Have the servers' hosts fetch a version while the servers still serve the previous one.

        The wait for slow hosts is bounded: once the first host has the version, the others get as much time again plus
        _FETCH_SLACK_S. A slower host continues fetching, and its update fetches the version if needed.
        """
        if not self._files_url:
            return
        began = self._clock.monotonic()
        limit_s = self._verify_limit_s / 2 + num_bytes / SLOW_BYTES_PER_S
        tasks = self._begin_fetches(version, limit_s)
        deadline = began + limit_s
        while tasks:
            wait_s = max(0.0, deadline - self._clock.monotonic())
            done, tasks = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._logger.warning("%d servers have not fetched %s yet; the others continue", len(tasks), version)
                return
            if any(not task.cancelled() and task.exception() is None for task in done):
                now = self._clock.monotonic()
                deadline = min(deadline, now + (now - began) + _FETCH_SLACK_S)

    def _begin_fetches(self, version: WeightVersion, limit_s: float) -> set[asyncio.Task[None]]:
        """Have every live server verify a version, unless it has the version or gets it from memory. The server first fetches it,
        unless it sees the files. A failure is only logged: the server's update repeats both."""
        servers = [server for server in self.table.servers.values() if self.plan.needs_files(server, version)]
        alive = [server for server in servers if server.listed and server.state is not ServerState.DEAD]
        tasks = {asyncio.create_task(self._fetch(server.url, version, limit_s), name="fetch") for server in alive}
        self._updates |= tasks
        for task in tasks:
            task.add_done_callback(self._fetched)
        return tasks

    async def _fetch(self, url: str, version: WeightVersion, limit_s: float) -> None:
        async with asyncio.timeout(limit_s + _FETCH_SLACK_S):  # the server keeps limit_s itself, unless it hangs
            await self._files.fetch(url, version, limit_s)

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._updates.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._logger.warning("fetching or verifying weights ahead failed: %s", error or repr(error))

    async def update_loop(self) -> None:
        """Begin the updates that the plan lists as due, each in its own task. Raises RunEndedError once every live server has given
        up the newest version, or has had _MAX_MISMATCHES consecutive mismatches."""
        while True:
            if self._fatal is not None:
                raise self._fatal
            now = self._clock.monotonic()
            for sleep in self.plan.sleepers(now):
                self._in_background(self._sleep(sleep), f"sleep of {sleep.server}")
            updates = self.plan.due(now)
            for from_memory, side in ((True, self._from_memory), (False, self._files)):
                together = [update for update in updates if update.from_memory is from_memory]
                side.begin(together)
                for update in together:
                    self._in_background(self._update(update, side), f"update {update.server}")
            next_s = self.plan.next_change(now)
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(_IDLE_S if next_s is None else next_s - now):
                    await self._wake.wait()
            self._wake.clear()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def probe_loop(self) -> None:
        """Probe every listed server that is not updating, each independently of the others. With many servers, a round probes only
        a part of the healthy ones: those probed longest ago."""
        asked: dict[str, float] = {}
        while True:
            servers = self.table.servers
            due = [name for name in servers if servers[name].listed and servers[name].state is not ServerState.UPDATING]
            well = [name for name in due if servers[name].state is ServerState.HEALTHY]
            every_s = intervals.probe_s(self._probe_every_s, len(due), self.table.dead_after_s)
            later = set(well).difference(intervals.in_turn(well, asked, self._probe_every_s / every_s))
            turn = [name for name in due if name not in later]
            parts = [turn[at : at + _PROBES_AT_ONCE] for at in range(0, len(turn), _PROBES_AT_ONCE)] or [[]]
            for part in parts:  # a single burst of all probes would delay the answers to rollout workers
                for name in part:
                    asked[name] = self._clock.monotonic()
                    self._begin_probe(servers[name])
                await asyncio.sleep(self._probe_every_s / len(parts))

    def _begin_probe(self, server: Server) -> None:
        key = server.name, server.incarnation
        if key not in self._probes and server.listed and server.state is not ServerState.UPDATING:
            self._probes[key] = asyncio.create_task(self._probe(server), name=f"health probe of {server.name}")
            self._probes[key].add_done_callback(partial(self._probed, key))

    def _probed(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        del self._probes[key]

    # ------------------------------------------------------------------------------------------------- one server

    async def _probe(self, server: Server) -> None:
        """Probe one server. If a healthy server does not answer within probe_limit_s, it becomes suspect. If it answers later than
        that, it is healthy again, but counts as slow."""
        before = (server.state, server.incarnation, server.slow)
        incarnation, num_updates, began = server.incarnation, server.num_updates, self._clock.monotonic()
        give_up = began + self.table.dead_after_s
        if server.state is ServerState.HEALTHY:  # the probe may start late; detect a dead server on time
            give_up = min(give_up, server.last_answer + self._probe_every_s + self.table.dead_after_s)
        asking = asyncio.ensure_future(self._ask(server))
        try:
            await asyncio.wait({asking}, timeout=self._probe_limit_s)
            if not asking.done() and server.incarnation == incarnation:
                self.table.silent(server.name, f"no answer for {self._probe_limit_s:g} s", self._clock.monotonic())
                self.plan.silent(server.name)
                self.changed()
            async with asyncio.timeout(max(0.0, give_up - self._clock.monotonic())):
                info = await asking
        except FAILURES as error:
            if classify(error) is ErrorClass.PERMANENT:
                self._refusing_probes.add(server.name)
            else:
                self._refusing_probes.discard(server.name)
            if server.incarnation == incarnation:
                self.table.silent(server.name, f"health probe failed: {error!r}", self._clock.monotonic())
                self.plan.silent(server.name)
        else:
            self._refusing_probes.discard(server.name)
            now = self._clock.monotonic()
            if server.incarnation == incarnation and server.num_updates == num_updates and server.listed:
                self.table.answered(server.name, info.weight_version, now, paused=info.paused, took_s=now - began)
                if self.plan.answers(server.name, now):
                    self._wake.set()
        finally:
            asking.cancel()
        if before != (server.state, server.incarnation, server.slow):
            self.changed()

    async def _ask(self, server: Server) -> ModelInfo:
        info = await self.calls.get(f"{server.url}/get_model_info", ModelInfo)
        if server.state is not ServerState.STALE:  # a stale server is paused, so /health may not answer
            await self.calls.request("GET", f"{server.url}/health")
        return info

    async def _update(self, update: Update, side: ManagerSide) -> None:
        """Pause a server, have it load a version, check that it then reports this version, resume it. After a failure the server
        stays out of service until a load succeeds, because its weights are unknown."""
        began = self._clock.monotonic()
        shown = self._trace.overlapping(f"update {update.server}", kind="update", version=str(update.version))
        try:
            with contextlib.ExitStack() as after, shown:
                after.callback(side.end, update)
                async with asyncio.timeout(update.limit_s):
                    served = await self._found(update) if update.is_new else None
                if served is not None:
                    update = replace(update, version=served)
                else:
                    async with asyncio.timeout(update.limit_s):
                        await self._load(update, side)
        except FAILURES as error:
            self._failed(update, error)
        else:
            now = self._clock.monotonic()
            if self.plan.succeeded(update, now):
                self.counters["succeeded" if served is None else "found", update.server] += 1
                self._mismatches.pop(update.server, None)
                self._refusals.pop(update.server, None)
                self.update_seconds[update.server] += now - began
                self._logger.info("%s serves %s (%.2f s)", update.server, update.version, now - began)
                if self.table.awaits_companions(now):
                    asyncio.get_running_loop().call_later(self.table.companions_wait_s(now), self.changed)
        self.changed()

    def _failed(self, update: Update, error: Exception) -> None:
        slow = isinstance(error, asyncio.TimeoutError)
        why = f"took longer than {update.limit_s:g} s" if slow else str(error) or repr(error)
        # While the files are damaged, the trainer replaces them: verify_loop bounds that
        damaged = isinstance(error, RefusedError) and self._failing is not None
        error_class = ErrorClass.PASSING if damaged else classify(error)
        reason = f"loading {update.version} failed: {why}"
        if isinstance(error, (RefusedError, MismatchError)) and not damaged:
            self._refusals[update.server] = reason
        pause_s = self.plan.failed(update, reason, self._clock.monotonic(), error_class)
        self.counters["failed", update.server] += 1
        if isinstance(error, MismatchError):
            self._count_mismatch(update, error)
        if isinstance(error, RefusedError) and self._published.is_current(update.version):
            self._publication.set()  # verify the version again
        level = logging.DEBUG if isinstance(error, OfferError) else logging.WARNING
        then = "it serves nothing until a newer version" if pause_s is None else f"retrying in {pause_s:.1f} s"
        self._logger.log(
            level, "%s did not load %s: %s (%s); %s", update.server, update.version, why, error_class, then
        )
        if self._fatal is None and self._failing is None and (given_up := self.plan.given_up()) is not None:
            self._fatal = RunEndedError(_no_server_loads(given_up))

    async def _sleep(self, sleep: Sleep) -> None:
        """Have a server interrupt its requests and release the devices that it shares with training. Repeated after a failure."""
        try:
            async with asyncio.timeout(self.plan.limit_s):
                await self.calls.post(f"{sleep.url}/release_memory_occupation", b"{}")
        except FAILURES as error:
            pause_s = self.plan.sleepless(sleep, self._clock.monotonic())
            self._logger.warning("%s did not sleep: %r; retrying in %.1f s", sleep.server, error, pause_s)
        else:
            self.plan.slept(sleep, self._clock.monotonic())
            self._logger.info("%s sleeps: it has released its devices", sleep.server)
        self.changed()

    def _count_mismatch(self, update: Update, error: MismatchError) -> None:
        self.counters["mismatched", update.server] += 1
        self._mismatches[update.server] += 1
        away = (ServerState.DEAD, ServerState.DRAINING)
        alive = [server.name for server in self.table.servers.values() if server.state not in away]
        if alive and all(self._mismatches[name] >= _MAX_MISMATCHES for name in alive):
            self._fatal = RunEndedError(
                f"no server computes with weights {update.version} as the trainer does, after {_MAX_MISMATCHES} loads each; "
                f"{update.server} reports: {error}. If only precision differs, raise weights.verify_tolerance"
            )

    async def _found(self, update: Update) -> WeightVersion | None:
        """Return the version that a new server serves already, because the previous manager had it load that version.

        Returns None if the server must load: it serves an older version or another attempt's, or it is paused because the
        previous manager died during its update.
        """
        info = await self.calls.get(f"{update.url}/get_model_info", ModelInfo)
        try:
            serves = WeightVersion.parse(info.weight_version)
        except ValueError:
            return None
        sound = serves.attempt == update.version.attempt and serves >= update.version and not info.paused
        return serves if sound else None

    async def _load(self, update: Update, side: ManagerSide) -> None:
        url, version = update.url, str(update.version)
        # Servers that share devices with the trainer see its files, unless they fetch weights
        if self._files_url or not self._shares_devices:
            await side.prepare(update)
        if self._shares_devices:
            await self.calls.post(f"{url}/resume_memory_occupation", b"{}")
        await self.calls.post(f"{url}/pause_generation", self._pause_body)
        await side.load(update)
        info = await self.calls.get(f"{url}/get_model_info", ModelInfo)
        if info.weight_version != version:
            raise UpdateError(f"echoes {info.weight_version!r} instead of {version!r}")
        await self.calls.post(f"{url}/continue_generation", b"{}")
