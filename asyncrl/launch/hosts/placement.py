"""Chooses the host of each process of a run (pure).

consumes: process specs, hosts with their resources. produces: a place for each process, or PlacementError with what would fit.

- With GPUs: a generation server gets one GPU per tensor parallel rank, all on one host. Model workers fill one host after another
  in the order of their ranks, so that neighbouring ranks are close. The tensor ranks of a model are on one host, unless
  network.tensor_ranks_between_hosts allows otherwise.
- Without GPUs: a computing process goes to the host with the largest share of free cores. A model worker stays on the host of the
  previous rank as long as a core is free there.
- If the allocation names devices, computing processes go where their devices are (devices.py). Processes with the same device
  share it.
- Processes that do not compute run on the launcher's host, if its memory suffices. Rollout workers are placed like computing
  processes, because rewards and agents need cores.
- Cores may be oversubscribed, which makes processes slower. GPUs and memory may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from asyncrl.config.processes import ModelWorkerConfig
from asyncrl.dataflow.topology import Allocation, ModelPlacement
from asyncrl.launch.hosts.devices import NamedDevices
from asyncrl.launch.program import ProcessSpec, named_devices, num_devices, on_gpus

# Lower bounds, for the imports only. The model's memory comes on top; the user must allow for it
_COMPUTING_BYTES = 1_000_000_000
_LIGHT_BYTES = 150_000_000
_SERVER, _TRAINER, _ROLLOUT = "generation_server", "model_worker", "rollout_worker"
_ORDER = (_SERVER, _TRAINER)  # kinds placed first, in this order; then the others, in the order of the plan


class PlacementError(ValueError):
    """The hosts are too small or too few. The message says what a process needs. If `place_all` raises it, the message also says
    what would fit."""


@dataclass(frozen=True)
class Host:
    """A host and its resources."""

    name: str
    address: str
    gpus: tuple[str, ...] = ()
    cores: int = 1
    memory_bytes: int = 0  # 0: unknown


@dataclass(frozen=True)
class Place:
    """The host of a process, and its GPUs there."""

    host: Host
    gpus: tuple[str, ...] = ()


class Placement:
    """The place of each process. No process has a place on a host that is lost: `place` then finds places for its processes on
    other hosts."""

    def __init__(
        self,
        hosts: Iterable[Host],
        first: str,
        allocation: Allocation | None = None,
        counted: Sequence[str] = (),
        *,
        splits_tensor_groups: bool = False,
    ) -> None:
        """hosts: in the order in which they are filled. first: name of the launcher's own host, on which processes that do not
        compute are placed. allocation: it may name devices, which are counted over the hosts in the order `counted`.
        splits_tensor_groups: tensor ranks may be on several hosts."""
        self._splits_tensor_groups = splits_tensor_groups
        self._hosts = {host.name: host for host in hosts}
        self._first, self._counted = first, counted
        self._allocation = allocation if allocation is not None and allocation.generation_devices is not None else None
        self._devices = NamedDevices(self._allocation.num_devices if self._allocation is not None else 0)
        self._places: dict[str, Place] = {}
        self._needs: dict[str, tuple[int, int]] = {}  # by placed process: cores, bytes

    @property
    def has_gpus(self) -> bool:
        return any(host.gpus for host in self._hosts.values())

    @property
    def hosts(self) -> Sequence[Host]:
        return list(self._hosts.values())

    def place_of(self, name: str) -> Place | None:
        return self._places.get(name)

    def add(self, host: Host) -> None:
        """Add a host that has appeared, for the first time or again."""
        self._hosts[host.name] = host

    def lose(self, host: str) -> None:
        """Remove a lost host and release its processes."""
        self._hosts.pop(host, None)
        self._devices.lose(host)
        for name in [name for name, place in self._places.items() if place.host.name == host]:
            self.release(name)

    def release(self, name: str) -> None:
        """Release the place of a process that is no longer needed."""
        self._places.pop(name, None)
        self._needs.pop(name, None)

    def place_all(self, specs: Sequence[ProcessSpec]) -> dict[str, Place]:
        """Place all of these processes. Raises PlacementError with what would fit."""
        try:
            for spec in _in_order(specs):
                self.place(spec)
        except PlacementError as error:
            if self._allocation is not None:
                raise
            raise PlacementError(f"{error}; {self._what_fits(specs)}") from None
        return {spec.name: self._places[spec.name] for spec in specs}

    def place(self, spec: ProcessSpec) -> Place:
        """Place one process: at its present place, if it has one; otherwise where it fits best. Raises PlacementError."""
        if spec.name in self._places:
            return self._places[spec.name]
        gpus = num_devices(spec) if self.has_gpus else 0
        memory = _memory_of(spec)
        if not self._hosts:
            raise PlacementError(f"{spec.name} cannot be placed: no host is left")
        named = self._named_place(spec)
        group = self._tensor_group(spec) if gpus else [spec.name]
        placed_at = {self._places[name].host.name for name in group if name in self._places}
        # The first of a group goes to a host with room for all of it, unless the allocation says where each of them is
        room = gpus if placed_at else gpus * len(group)
        near = [
            host
            for host in ([named.host] if named is not None else self._hosts.values())
            if (not placed_at or host.name in placed_at) and (named is not None or len(self._free_gpus(host)) >= room)
        ]
        if not near and len(group) > 1:
            raise PlacementError(self._why_split(spec, group, named))
        fitting = [host for host in near if not host.memory_bytes or self._used(host)[1] + memory <= host.memory_bytes]
        if not fitting:
            raise PlacementError(self._why_not(spec, 0 if named is not None else gpus, memory))
        place = named or self._choose(spec, fitting, gpus)
        self._places[spec.name] = place
        self._needs[spec.name] = (1 if spec.computes or spec.kind == _ROLLOUT else 0, memory)
        return place

    def _choose(self, spec: ProcessSpec, fitting: Sequence[Host], gpus: int) -> Place:
        if gpus:
            host = fitting[0]  # the first host with room, so hosts are filled one after another
            return Place(host, tuple(self._free_gpus(host)[:gpus]))
        if not spec.computes and spec.kind != _ROLLOUT:
            return Place(next((host for host in fitting if host.name == self._first), fitting[0]))
        before = self._neighbour(spec)
        if before is not None and before in fitting and self._free_cores(before) > 0:
            return Place(before)
        return Place(max(fitting, key=lambda host: (self._free_cores(host) / max(host.cores, 1), host.cores)))

    def _named_place(self, spec: ProcessSpec) -> Place | None:
        """Return the place of the devices that the allocation names for the process; None: it names none. Raises PlacementError."""
        numbers = named_devices(spec, self._allocation) if self._allocation is not None else range(0)
        if not numbers:
            return None
        here = {name: self._hosts[name].gpus for name in self._counted if name in self._hosts}
        places = self._devices.places(here)
        missing = [number for number in numbers if number not in places]
        what = f"device {numbers[0]}" if len(numbers) == 1 else f"devices {numbers[0]} to {numbers[-1]}"
        if missing:
            gpus = ", ".join(f"{name}: {len(names)}" for name, names in here.items())
            raise PlacementError(f"{spec.name} needs {what}, counted over all hosts from 0; GPUs: {gpus}")
        names = dict.fromkeys(places[number].host for number in numbers)
        if len(names) > 1:
            raise PlacementError(f"{spec.name} needs {what} on one host, and they are on {' and '.join(names)}")
        gpus_here = tuple(places[number].gpu for number in numbers if places[number].gpu)
        return Place(self._hosts[next(iter(names))], gpus_here)

    def _tensor_group(self, spec: ProcessSpec) -> list[str]:
        """Return the processes that must be on one host with this one: those of all its tensor groups, and of theirs."""
        config = spec.config
        if self._splits_tensor_groups or not isinstance(config, ModelWorkerConfig):
            return [spec.name]
        groups = [set(group) for model in config.models for group in ModelPlacement.of(model).tensor_groups]
        found = {config.worker.index}
        while grown := set().union(*(group for group in groups if group & found)) - found:
            found |= grown
        return [f"{_TRAINER}/{worker}" for worker in sorted(found)]

    def _why_split(self, spec: ProcessSpec, group: Sequence[str], named: Place | None) -> str:
        free = ", ".join(f"{host.name}: {len(self._free_gpus(host))}" for host in self._hosts.values())
        where = f"the allocation puts {spec.name} on {named.host.name}" if named is not None else f"free GPUs: {free}"
        return (
            f"{spec.name} is one of {len(group)} tensor ranks ({group[0]} to {group[-1]}), which must be on one host, because they "
            f"exchange data in every layer; {where}. Use a smaller m, or allow it by network.tensor_ranks_between_hosts=true"
        )

    def _neighbour(self, spec: ProcessSpec) -> Host | None:
        """Return the host of the model worker before this one, if that one is placed. None for other processes."""
        if spec.kind != _TRAINER:
            return None
        place = self._places.get(f"{_TRAINER}/{spec.config.worker.index - 1}")
        return place.host if place else None

    def _free_gpus(self, host: Host) -> list[str]:
        taken = {gpu for place in self._places.values() if place.host.name == host.name for gpu in place.gpus}
        taken |= self._devices.gpus_of(host.name)
        return [gpu for gpu in host.gpus if gpu not in taken]

    def _free_cores(self, host: Host | None) -> int:
        return host.cores - self._used(host)[0] if host else 0

    def _used(self, host: Host) -> tuple[int, int]:
        """Return the cores and bytes in use on a host."""
        needs = [self._needs[name] for name, place in self._places.items() if place.host.name == host.name]
        return sum(cores for cores, _ in needs), sum(memory for _, memory in needs)

    def _why_not(self, spec: ProcessSpec, gpus: int, memory: int) -> str:
        free = ", ".join(
            f"{host.name}: {len(self._free_gpus(host))} of {len(host.gpus)}" for host in self._hosts.values()
        )
        if gpus and not any(len(self._free_gpus(host)) >= gpus for host in self._hosts.values()):
            many = f"{gpus} GPUs on one host" if gpus > 1 else "a GPU"
            return f"{spec.name} needs {many}; free GPUs: {free}"
        room = ", ".join(
            f"{host.name}: {(host.memory_bytes - self._used(host)[1]) / 1e9:.1f} GB" for host in self._hosts.values()
        )
        return f"{spec.name} needs at least {memory / 1e9:.2g} GB of memory; free memory: {room}"

    def _what_fits(self, specs: Sequence[ProcessSpec]) -> str:
        """Return a text with a remedy: the largest number of generation servers that fits beside the other processes. If not even
        one fits, the text compares what the run needs with what the hosts have."""
        servers = [spec for spec in specs if spec.kind == _SERVER]
        others = [spec for spec in specs if spec.kind != _SERVER]
        for count in range(len(servers) - 1, 0, -1):
            attempt = Placement(self._hosts.values(), self._first, splits_tensor_groups=self._splits_tensor_groups)
            try:
                for spec in _in_order([*servers[:count], *others]):
                    attempt.place(spec)
            except PlacementError:
                continue
            return f"use {count} generation servers, which would fit, instead of {len(servers)}; or use more hosts"
        remedy = "use a smaller allocation, or more hosts"
        if not self.has_gpus:  # then only memory can be missing
            least = sum(map(_memory_of, specs)) / 1e9
            total = sum(host.memory_bytes for host in self._hosts.values()) / 1e9
            return f"in total the run needs at least {least:.3g} GB of memory and the hosts have {total:.3g}: {remedy}"
        needs = Counter({spec.kind: 0 for spec in specs if spec.computes})
        for spec in specs:
            needs[spec.kind] += num_devices(spec)
        wanted = ", ".join(f"{kind}s {count}" for kind, count in needs.items() if count)
        there = sum(len(host.gpus) for host in self._hosts.values())
        return f"in total the run needs {wanted} GPUs and the hosts have {there}: {remedy}"


def _memory_of(spec: ProcessSpec) -> int:
    """Return a lower bound of the memory of a process in bytes."""
    return _COMPUTING_BYTES if spec.computes else _LIGHT_BYTES


def placed(spec: ProcessSpec, place: Place, *, with_gpus: bool) -> ProcessSpec:
    """Return the spec for its host: the process binds sockets to the host's address, and sees only its own GPUs."""
    worker = spec.config.worker
    here = replace(worker, runtime=replace(worker.runtime, host=place.host.address))
    env = {name: value for name, value in spec.env.items() if name != "CUDA_VISIBLE_DEVICES"}
    moved = replace(spec, config=replace(spec.config, worker=here), env=env)
    return on_gpus(moved, place.gpus) if with_gpus else moved


def _in_order(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Sort processes, the hardest to place first: servers with many GPUs, then model workers by rank, then the others."""
    ranked = {kind: number for number, kind in enumerate(_ORDER)}
    return sorted(specs, key=lambda spec: (ranked.get(spec.kind, len(ranked)), -num_devices(spec)))
