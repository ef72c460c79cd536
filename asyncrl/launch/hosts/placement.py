"""Which host each process of a run goes to (pure).

consumes: process specs, hosts with their resources. produces: a place for each, or PlacementError, which says what would fit.

GPUs first: a generation server has as many as tensor ranks, all on one host; model workers fill one host after another in the order
of their ranks, so that neighbours are near. Without GPUs what computes goes where most cores are free, likewise. What computes
nothing is where the launcher is; rollout workers are spread, as rewards and agents need cores. Cores may be short (processes
are then slower), GPUs and memory may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from asyncrl.launch.program import ProcessSpec, num_devices

# At least so much: what its imports take. The rest depends on the model, and is the user's to know
_COMPUTING_BYTES = 1_000_000_000
_LIGHT_BYTES = 150_000_000
_SERVER, _TRAINER, _ROLLOUT = "generation_server", "model_worker", "rollout_worker"
_ORDER = (_SERVER, _TRAINER)  # then the others, in the order of the plan


class PlacementError(ValueError):
    """The hosts are too small or too few; says what would fit."""


@dataclass(frozen=True)
class Host:
    """A host and what it has."""

    name: str
    address: str
    gpus: tuple[str, ...] = ()
    cores: int = 1
    memory_bytes: int = 0  # 0: not known


@dataclass(frozen=True)
class Place:
    """Where a process is."""

    host: Host
    gpus: tuple[str, ...] = ()


class Placement:
    """The place of each process. No process is on a lost host; those that were there may be placed again, on another."""

    def __init__(self, hosts: Iterable[Host], first: str) -> None:
        """first: name of the host for what computes nothing: the launcher's own."""
        self._hosts = {host.name: host for host in hosts}
        self._first = first
        self._places: dict[str, Place] = {}
        self._needs: dict[str, tuple[int, int]] = {}  # cores and bytes of those placed

    @property
    def has_gpus(self) -> bool:
        return any(host.gpus for host in self._hosts.values())

    @property
    def hosts(self) -> Sequence[Host]:
        return list(self._hosts.values())

    def place_of(self, name: str) -> Place | None:
        return self._places.get(name)

    def add(self, host: Host) -> None:
        """A host that has come, or come back."""
        self._hosts[host.name] = host

    def lose(self, host: str) -> None:
        """Nothing runs there any more."""
        self._hosts.pop(host, None)
        for name in [name for name, place in self._places.items() if place.host.name == host]:
            self.release(name)

    def release(self, name: str) -> None:
        """A process that does not matter any more."""
        self._places.pop(name, None)
        self._needs.pop(name, None)

    def place_all(self, specs: Sequence[ProcessSpec]) -> dict[str, Place]:
        """All of these. Raises PlacementError, which names what would fit."""
        try:
            for spec in _in_order(specs):
                self.place(spec)
        except PlacementError as error:
            raise PlacementError(f"{error}; {self._what_fits(specs)}") from None
        return {spec.name: self._places[spec.name] for spec in specs}

    def place(self, spec: ProcessSpec) -> Place:
        """One process: where it was, if that is still there; else where it fits best."""
        if spec.name in self._places:
            return self._places[spec.name]
        gpus = num_devices(spec) if self.has_gpus else 0
        memory = _COMPUTING_BYTES if spec.computes else _LIGHT_BYTES
        if not self._hosts:
            raise PlacementError(f"{spec.name} has no place: no host is left")
        fitting = [
            host
            for host in self._hosts.values()
            if len(self._free_gpus(host)) >= gpus
            and (not host.memory_bytes or self._used(host)[1] + memory <= host.memory_bytes)
        ]
        if not fitting:
            raise PlacementError(self._why_not(spec, gpus, memory))
        place = self._choose(spec, fitting, gpus)
        self._places[spec.name] = place
        self._needs[spec.name] = (1 if spec.computes or spec.kind == _ROLLOUT else 0, memory)
        return place

    def _choose(self, spec: ProcessSpec, fitting: Sequence[Host], gpus: int) -> Place:
        if gpus:
            host = fitting[0]  # the first with room: hosts are filled one after another
            return Place(host, tuple(self._free_gpus(host)[:gpus]))
        if not spec.computes and spec.kind != _ROLLOUT:
            return Place(next((host for host in fitting if host.name == self._first), fitting[0]))
        before = self._neighbour(spec)
        if before is not None and before in fitting and self._free_cores(before) > 0:
            return Place(before)
        return Place(max(fitting, key=lambda host: (self._free_cores(host) / max(host.cores, 1), host.cores)))

    def _neighbour(self, spec: ProcessSpec) -> Host | None:
        """Where the model worker of the rank before is."""
        if spec.kind != _TRAINER:
            return None
        place = self._places.get(f"{_TRAINER}/{spec.config.worker.index - 1}")
        return place.host if place else None

    def _free_gpus(self, host: Host) -> list[str]:
        taken = {gpu for place in self._places.values() if place.host.name == host.name for gpu in place.gpus}
        return [gpu for gpu in host.gpus if gpu not in taken]

    def _free_cores(self, host: Host | None) -> int:
        return host.cores - self._used(host)[0] if host else 0

    def _used(self, host: Host) -> tuple[int, int]:
        """Cores and bytes."""
        needs = [self._needs[name] for name, place in self._places.items() if place.host.name == host.name]
        return sum(cores for cores, _ in needs), sum(memory for _, memory in needs)

    def _why_not(self, spec: ProcessSpec, gpus: int, memory: int) -> str:
        free = ", ".join(
            f"{host.name}: {len(self._free_gpus(host))} of {len(host.gpus)}" for host in self._hosts.values()
        )
        if gpus and not any(len(self._free_gpus(host)) >= gpus for host in self._hosts.values()):
            many = f"{gpus} GPUs on one host" if gpus > 1 else "a GPU"
            return f"{spec.name} needs {many}; free are {free}"
        room = ", ".join(
            f"{host.name}: {(host.memory_bytes - self._used(host)[1]) / 1e9:.1f} GB" for host in self._hosts.values()
        )
        return f"{spec.name} needs {memory / 1e9:.2g} GB of memory at least; left are {room}"

    def _what_fits(self, specs: Sequence[ProcessSpec]) -> str:
        """The most generation servers that fit beside the rest."""
        servers = [spec for spec in specs if spec.kind == _SERVER]
        others = [spec for spec in specs if spec.kind != _SERVER]
        for count in range(len(servers) - 1, 0, -1):
            attempt = Placement(self._hosts.values(), self._first)
            try:
                for spec in _in_order([*servers[:count], *others]):
                    attempt.place(spec)
            except PlacementError:
                continue
            return f"{count} generation servers would fit instead of {len(servers)}; or give more hosts"
        needs = Counter({spec.kind: 0 for spec in specs if spec.computes})
        for spec in specs:
            needs[spec.kind] += num_devices(spec)
        wanted = ", ".join(f"{kind}s {count}" for kind, count in needs.items() if count)
        there = sum(len(host.gpus) for host in self._hosts.values())
        unit = "GPUs" if self.has_gpus else "processes that compute"
        return (
            f"in all they want {wanted} {unit} and the hosts have {there}: use a smaller allocation, or give more hosts"
        )


def placed(spec: ProcessSpec, place: Place, *, with_gpus: bool) -> ProcessSpec:
    """The spec as its host is to start it: its sockets bind that host's address, and it sees its own GPUs only."""
    worker = spec.config.worker
    here = replace(worker, runtime=replace(worker.runtime, host=place.host.address))
    env = {name: value for name, value in spec.env.items() if name != "CUDA_VISIBLE_DEVICES"}
    if with_gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    return replace(spec, config=replace(spec.config, worker=here), env=env)


def _in_order(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Those that are hardest to place first: servers of many GPUs, then model workers by rank."""
    ranked = {kind: number for number, kind in enumerate(_ORDER)}
    return sorted(specs, key=lambda spec: (ranked.get(spec.kind, len(ranked)), -num_devices(spec)))
