"""The hosts of the devices that an allocation names (pure).

The numbers count the GPUs of all hosts, in the order of `hosts`: with two hosts of eight GPUs, `@8-15` is the second host. Without
GPUs a number stands for a part of a host's memory and cores, and every host has an equal share of the numbers, in the same order.

consumes: hosts that appear and are lost. produces: the place of each device.

A device keeps its place as long as its host is there. The devices of a lost host move to another one together, if it has as many
GPUs that no device has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Device(NamedTuple):
    """The place of a device."""

    host: str
    gpu: str  # "": the host has no GPUs


class NamedDevices:
    """The places of devices 0 to count - 1."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._places: dict[int, Device] = {}
        self._lost: list[list[int]] = []  # for each lost host, its devices that have no place now

    def lose(self, host: str) -> None:
        """The host is lost, and with it its devices."""
        here = [number for number, device in self._places.items() if device.host == host]
        for number in here:
            del self._places[number]
        if here:
            self._lost.append(here)

    def gpus_of(self, host: str) -> set[str]:
        """The GPUs of this host that are devices."""
        return {device.gpu for device in self._places.values() if device.host == host}

    def places(self, hosts: Mapping[str, Sequence[str]]) -> Mapping[int, Device]:
        """Return the places of all devices that have one. hosts: the GPUs of each host that is there, in the order of `hosts`."""
        if not self._places and not self._lost:
            self._count_all(hosts)
        self._lost = [numbers for numbers in self._lost if not self._move(numbers, hosts)]
        return self._places

    def _count_all(self, hosts: Mapping[str, Sequence[str]]) -> None:
        every = [Device(host, gpu) for host, gpus in hosts.items() for gpu in gpus]
        if not every and hosts:
            names = list(hosts)
            every = [Device(names[number * len(names) // self._count], "") for number in range(self._count)]
        self._places = dict(zip(range(self._count), every, strict=False))

    def _move(self, numbers: Sequence[int], hosts: Mapping[str, Sequence[str]]) -> bool:
        """Give the devices of a lost host places on another one. Returns False if none has room."""
        if not any(hosts.values()):
            if hosts:
                least = min(hosts, key=lambda host: sum(device.host == host for device in self._places.values()))
                self._places |= dict.fromkeys(numbers, Device(least, ""))
            return bool(hosts)
        for host, gpus in hosts.items():
            taken = self.gpus_of(host)
            free = [gpu for gpu in gpus if gpu not in taken]
            if len(free) >= len(numbers):
                self._places |= {number: Device(host, gpu) for number, gpu in zip(numbers, free, strict=False)}
                return True
        return False
