"""Hosts on one machine, for tests. Each has its own network, host name, addresses and process ids. Needs root and `ip`.

with Hosts.make(3) as hosts:
    hosts[0].run(["hostname"])                  # node1; each knows the others by name
    hosts[1].unplug(); hosts[1].plug()          # its network cable
    hosts[2].kill()                             # kills the host: all of its processes at once

The hosts share this machine's file system, memory and cores. They are isolated from all other networks. Every `Hosts` object has
its own network, so concurrent test runs do not interfere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_LIMIT_S = 20.0


class NamespacesUnavailable(RuntimeError):
    """Raised if this user may not create namespaces, or if a tool is missing. The message says which."""


class NetworkHost:
    """One host. Its processes run in the namespaces of an idle process, and end with it."""

    def __init__(self, tag: str, number: int, names: Path) -> None:
        """names: file that becomes the host's /etc/hosts."""
        self.name = f"node{number}"
        self.address = f"10.77.0.{number}"
        self._namespace = f"{tag}-{number}"
        self._cable = f"{tag}v{number}"  # the interface at the switch
        self._names = names
        self._holder: subprocess.Popen[bytes] | None = None

    def open(self, switch: str) -> None:
        _ip("netns", "add", self._namespace)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        _ip("link", "set", self._cable, "master", switch, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", self._namespace, *words)
        self.boot()

    def boot(self) -> None:
        """Start the host, for the first time or after `kill`."""
        ready = (
            f"hostname {self.name} && mount --bind {self._names} /etc/hosts && echo && exec sleep infinity >/dev/null"
        )
        self._holder = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "--"),  # the host ends if the test process is killed
                *("ip", "netns", "exec", self._namespace),
                *("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", ready),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare warns about the signal mask
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            if said.readline() != b"\n":
                raise NamespacesUnavailable(f"the namespaces of {self.name} could not be entered: are you root?")

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs a command on this host. Send signals to its process group, not only to its first process."""
        return ["nsenter", f"--target={self._init()}", "--net", "--uts", "--pid", "--mount", "--", *words]

    def run(
        self, words: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and wait for its end."""
        return subprocess.run(
            self.command(words),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def unplug(self) -> None:
        """Pull the host's network cable: packets are lost, and no peer is notified."""
        _ip("link", "set", self._cable, "down")

    def plug(self) -> None:
        _ip("link", "set", self._cable, "up")

    def kill(self) -> None:
        """Simulate a power cut: kill all processes of the host."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init(), 9)  # the kernel then kills all other processes of the namespace
            self._holder.wait(_LIMIT_S)
            self._holder = None

    def close(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.kill()
        for words in (("link", "del", self._cable), ("netns", "del", self._namespace)):
            with contextlib.suppress(NamespacesUnavailable):
                _ip(*words)

    def _init(self) -> int:
        """Return the id of the first process of the host's pid namespace, as the test process sees it."""
        assert self._holder is not None, f"{self.name} is not up"
        children = f"/proc/{self._holder.pid}/task/{self._holder.pid}/children"
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            with open(children) as file:
                if found := file.read().split():
                    return int(found[0])
            time.sleep(0.01)
        raise ProcessLookupError(f"{self.name} has ended")


class Hosts(list[NetworkHost]):
    """Hosts on one switch."""

    def __init__(self, hosts: Sequence[NetworkHost], switch: str, names: Path | None = None) -> None:
        super().__init__(hosts)
        self._switch, self._names = switch, names

    @classmethod
    def make(cls, count: int) -> Hosts:
        """Start `count` hosts. Raises NamespacesUnavailable if that is not permitted."""
        for tool in ("ip", "nsenter", "setpriv", "unshare"):
            if shutil.which(tool) is None:
                raise NamespacesUnavailable(f"there is no `{tool}`; on Debian: apt-get install iproute2 util-linux")
        tag = f"a{secrets.token_hex(4)}"  # short, because interface names have at most 15 characters
        switch = f"{tag}s"
        names = Path(tempfile.gettempdir(), f"{tag}.hosts")
        hosts = cls([NetworkHost(tag, number + 1, names) for number in range(count)], switch, names)
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
        try:
            names.write_text("\n".join(lines) + "\n", encoding="utf-8")
            _ip("link", "add", switch, "type", "bridge")
            _ip("link", "set", switch, "up")
            for host in hosts:
                host.open(switch)
        except BaseException:
            hosts.close()
            raise
        return hosts

    @property
    def addresses(self) -> list[str]:
        return [host.address for host in self]

    @property
    def names(self) -> list[str]:
        return [host.name for host in self]

    def close(self) -> None:
        for host in self:
            host.close()
        with contextlib.suppress(NamespacesUnavailable):
            _ip("link", "del", self._switch)
        if self._names is not None:
            self._names.unlink(missing_ok=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        raise NamespacesUnavailable(f"`ip {' '.join(words)}`: {done.stderr.strip() or 'failed'}")
