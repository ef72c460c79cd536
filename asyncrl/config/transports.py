"""The transports of weights: everything that code outside a transport's own files needs to know about them (pure).

That code asks for a trait and never compares the name of a transport.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransportTraits:
    """The defaults are the traits of files. Every run writes them: a server that gets a version in no other way loads its files."""

    # The trainer holds each version in memory and offers it before its files are complete, to servers that serve already
    from_memory: bool = False
    forms_groups: bool = (
        False  # trainer and servers form process groups (gloo, NCCL), whose connections do not authenticate
    )


FILES = "disk"
TRANSPORTS = {
    FILES: TransportTraits(),
    "broadcast": TransportTraits(from_memory=True, forms_groups=True),
}


def transport_of(name: str) -> TransportTraits:
    """The traits of a transport. An unknown transport, which another check refuses, has the traits of files."""
    return TRANSPORTS.get(name, TRANSPORTS[FILES])
