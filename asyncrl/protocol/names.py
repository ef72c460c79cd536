"""Every name-resolve key, in one place.

A key is `/`-separated; a subtree is everything below a `/`. `root(run)` is the prefix of all keys of one run. Clearing
it removes all keys of that run and no key of another run: boundaries are slashes, so `t1` is not a prefix of `t10`.
"""

from __future__ import annotations

import os
import re
import uuid

PREFIX = "asyncrl"
ACTOR = "actor"  # the role that is trained, and whose weights the generation servers serve
MASTER_META = "master_meta"  # the stream on which heads report their stored trajectories to the master
_INCARNATION = re.compile(r"\.(\d{19,20})\.\d+\.[0-9a-f]{8}")
_STARTS_PER_ATTEMPT = 10**9  # more than a launcher ever starts
_PART = re.compile(r"[^/\x00-\x1f]+")


def _check(part: str, what: str) -> str:
    if not _PART.fullmatch(part) or part in {".", ".."}:
        raise ValueError(
            f"{what} {part!r} cannot be part of a key; use a non-empty name without '/' or control characters"
        )
    return part


def incarnation(name: str, *, attempt: int = 0, start: int = 0, unique: str = "") -> str:
    """Identify one process among those of its name. The order of two incarnations comes from counters, not from clocks.

    attempt: of the run. start: number of this start within its launcher; 0: unknown, then `is_earlier` returns False.
    unique: text that no other incarnation has; default: this process's pid and eight random hex digits.
    """
    order = attempt * _STARTS_PER_ATTEMPT + start if start else 0
    return f"{name}.{order:019d}.{unique or f'{os.getpid()}.{uuid.uuid4().hex[:8]}'}"


def is_earlier(incarnation: str, other: str) -> bool:
    """Return whether an incarnation began before another one of the same name; False if their order is unknown."""
    if incarnation == other:  # the common case: the process is the one already known
        return False
    one, two = _INCARNATION.search(incarnation), _INCARNATION.search(other)
    return one is not None and two is not None and 0 < int(one[1]) < int(two[1])


def root(experiment: str, trial: str) -> str:
    """Root of all keys of one run."""
    return f"{PREFIX}/{_check(experiment, 'experiment name')}/{_check(trial, 'trial name')}"


class Names:
    """Keys of one run: `Names("sorter", "t0").model_version("actor")` and so on."""

    def __init__(self, experiment: str, trial: str) -> None:
        self.root = root(experiment, trial)
        self._hosts = f"{PREFIX}-hosts{self.root.removeprefix(PREFIX)}"

    def owner(self) -> str:
        """The owner of this run's name, if runs share an etcd: the launcher's host and folder. The key is `root` itself,
        above all other keys of the run.
        """
        return self.root

    def model_version(self, role: str) -> str:
        """Newest published weight version of a role: the string form of a WeightVersion."""
        return f"{self.root}/model_version/{role}"

    def weights_held(self, role: str) -> str:
        """The newest weight version that the trainer holds in memory for sending over the network. It may reach the
        disk later.
        """
        return f"{self.root}/weights_held/{role}"

    def weight_files(self, role: str) -> str:
        """URL below which the gserver manager serves a role's weight versions to hosts without the run's folder."""
        return f"{self.root}/weight_files/{role}"

    def weight_sender(self, role: str) -> str:
        """URL of the model worker that sends a role's weights over the network."""
        return f"{self.root}/weight_sender/{role}"

    def held_weights(self, worker: int, attempt: int) -> str:
        """URL at which a model worker serves its share of the weights in memory to the worker that sends them."""
        return f"{self.root}/held_weights/{worker}/{attempt}"

    def experiment_status(self) -> str:
        """RUNNING or COMPLETE, written by the master. The key disappears with the master."""
        return f"{self.root}/experiment_status"

    def last_checkpoint(self) -> str:
        """The attempt whose master must write a checkpoint and exit, because the run is stopping. Written by the launcher."""
        return f"{self.root}/last_checkpoint"

    def generation_servers(self) -> str:
        """Subtree: one entry per generation server."""
        return f"{self.root}/generation_server"

    def generation_server(self, index: int) -> str:
        """URL of a generation server, published after its socket is bound."""
        return f"{self.generation_servers()}/{index}"

    def desired_generation_servers(self) -> str:
        """The desired number of generation servers (a DesiredServers, JSON); missing: the number in the allocation.

        Written by `asyncrl-launch scale`. The launcher reads it and starts and stops servers; the gserver manager reads
        it too.
        """
        return f"{self.root}/desired_generation_servers"

    def generation_drained(self) -> str:
        """Subtree: one entry per generation server that leaves the run and has drained, written by the gserver manager."""
        return f"{self.root}/generation_drained"

    def generation_server_drained(self, index: int) -> str:
        """The `id` of the DesiredServers under which a server has drained."""
        return f"{self.generation_drained()}/{index}"

    def gserver_manager(self) -> str:
        """URL of the gserver manager."""
        return f"{self.root}/gserver_manager"

    def gserver_manager_began(self) -> str:
        """Written once by the first gserver manager. A later manager that finds this key waits until the rollout workers
        have reported the tickets that they hold.
        """
        return f"{self.root}/gserver_manager_began"

    def stream(self, stream_name: str) -> str:
        """Address of a channel's receiving socket (`puller0`, `master_meta`, `request_reply/3`, ...)."""
        return f"{self.root}/stream/{stream_name}"

    def process_group(self, role: str, attempt: int, group_incarnation: int = 0) -> str:
        """host:port of the torch.distributed store of a role's mesh, for one attempt and one incarnation of its worker group."""
        return f"{self.root}/process_group/{role}/{attempt}" + (f".{group_incarnation}" if group_incarnation else "")

    def devices_free(self, attempt: int) -> str:
        """Written by the master of an attempt when the generation servers have released the devices that they share. The model
        workers load their models after that.
        """
        return f"{self.root}/devices_free/{attempt}"

    def held_data(self, worker: int, attempt: int, group_incarnation: int) -> str:
        """URL at which a model worker serves the contents of its data store. Each incarnation of its worker group has
        its own key.
        """
        return f"{self.root}/held_data/{worker}/{attempt}.{group_incarnation}"

    def statuses(self) -> str:
        """Subtree: one WorkerStatus per worker."""
        return f"{self.root}/status"

    def status(self, worker: str) -> str:
        """Newest WorkerStatus (JSON) of a worker such as `rollout_worker/1`."""
        return f"{self.statuses()}/{worker}"

    def launcher(self) -> str:
        """The launcher that leads the run (a LauncherRecord), under its lease. Read by the host daemons."""
        return f"{self.root}/launcher"

    def secrets(self) -> str:
        """The run's secrets (runtime/security.py), for hosts without the run's folder. Written only to an etcd with
        restricted read access.
        """
        return f"{self.root}/secrets"

    def stop_request(self) -> str:
        """The host on which `asyncrl-launch stop` asked the run to stop. Read by the launcher."""
        return f"{self.root}/stop_request"

    def profile_request(self) -> str:
        """A ProfileRequest (JSON). Written by `asyncrl-launch profile`, read by the master."""
        return f"{self.root}/profile_request"

    def profile_answer(self) -> str:
        """The master's newest ProfileAnswer (JSON)."""
        return f"{self.root}/profile_answer"

    def desired_on(self, host: str) -> str:
        """Subtree: one DesiredProcess (JSON) for each process that the launcher wants on a host. Read by its host daemon."""
        return f"{self.root}/desired/{_check(host, 'host')}"

    def desired_process(self, host: str, worker: str) -> str:
        return f"{self.desired_on(host)}/{worker}"

    def host_daemons(self) -> str:
        """Subtree: one HostRecord (JSON) per host, under its daemon's lease. It lies outside the run's keys: host
        daemons may start first.
        """
        return f"{self._hosts}/daemons"

    def host_daemon(self, host: str) -> str:
        return f"{self.host_daemons()}/{_check(host, 'host')}"

    def observed(self) -> str:
        """Subtree: one HostReport (JSON) per host, under its daemon's lease: the processes that run there."""
        return f"{self._hosts}/observed"

    def observed_on(self, host: str) -> str:
        return f"{self.observed()}/{_check(host, 'host')}"
