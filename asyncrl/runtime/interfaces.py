"""The network interfaces of this machine, and the variables that name some of them for gloo and NCCL."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import psutil

GLOO, NCCL, TENSORPIPE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def interfaces_here() -> list[str]:
    """The names of this machine's interfaces that have an IP address, in the system's order."""
    found = psutil.net_if_addrs().items()
    return [name for name, addresses in found if any(address.family in _FAMILIES for address in addresses)]


def interface_of(host: str) -> str:
    """Name of the interface with this address, or "" if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return ""


def derived_interfaces(host: str, environment: Mapping[str, str], *, on_gpu: bool) -> dict[str, str]:
    """The variables that make gloo, and on GPUs NCCL, use the interface with this address. Those that the environment sets stay.

    Otherwise gloo takes the interface of the host's name, and NCCL the first one that is not the loopback: on a host with several
    networks possibly one that the other hosts do not reach.
    """
    name = interface_of(host)
    wanted = {GLOO: name} | ({NCCL: f"={name}"} if on_gpu else {})  # "=": NCCL would also take names that begin so
    return {variable: value for variable, value in wanted.items() if name and not environment.get(variable)}


def wrong_interface(variable: str, environment: Mapping[str, str], here: Sequence[str]) -> str:
    """One line about a variable whose value names no usable interface; "" if it can be used. here: as of interfaces_here. Pure.

    gloo and TensorPipe take full names. NCCL takes the beginnings of names, after `=` full names, and after `^` those to leave out;
    a name may have a port (`eth0:1`).
    """
    value = environment.get(variable, "")
    if len(value) < 2:  # neither library reads a shorter value
        return ""
    if variable == NCCL:
        missing = [] if _chosen_by_nccl(value, here) else [value]
    else:
        missing = [name for name in value.split(",") if name not in here]
    if not missing:
        return ""
    there = ", ".join(here) or "none"
    return (
        f"{variable}={value}: this machine has no interface {', '.join(map(repr, missing))} with an IP address; it has {there}. "
        f"Set {variable} to one of them, or unset it"
    )


def _chosen_by_nccl(value: str, here: Sequence[str]) -> list[str]:
    excluded = value.startswith("^")
    names = value.removeprefix("^")
    exact = names.startswith("=")
    named = [name.partition(":")[0] for name in names.removeprefix("=").split(",") if name]
    matches = (lambda one, name: one == name) if exact else str.startswith
    return [one for one in here if any(matches(one, name) for name in named) != excluded]
