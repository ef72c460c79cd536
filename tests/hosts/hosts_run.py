"""A run across hosts: a launcher on the first host, and a host daemon on each of the others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.testing.runs import RunHandle
from tests import pages
from tests.support.namespaces import Hosts, NetworkHost

PAGE = pages.ROOT / "docs" / "hosts.md"


def launch(host, *words, limit_s=60):
    return host.run([sys.executable, "-m", "asyncrl.cli.main", *map(str, words)], limit_s=limit_s)


def status_of(run, host):
    """Workers by name, from `status` as run on this host. Empty if `status` fails."""
    done = launch(host, "status", run.run_dir, "--json")
    if done.returncode != 0:
        print(f"status on {host.name}: exit code {done.returncode}: {done.stderr}")  # pytest shows it if the test fails
        return {}
    return {worker["worker"]: worker for worker in json.loads(done.stdout)["workers"]}


class HostsRun:
    """A run that starts at construction. command: maps "run" or "host" to the words of the user's asyncrl-launch command."""

    def __init__(self, hosts: Hosts, run_dir: Path, command: Callable[[str], list[str]]) -> None:
        self.hosts, self.run_dir, self._command = hosts, run_dir, command
        self.launcher = self._start(hosts[0], "run")
        self.daemons = {host.name: self._start(host, "host") for host in hosts[1:]}

    @classmethod
    def of(cls, hosts: Hosts, config: Path, *overrides: str) -> HostsRun:
        words = [str(config), "cluster=hosts", f"hosts=[{','.join(hosts.addresses)}]", *overrides]
        run_dir = run_directory(load_experiment(words[0], words[1:]))
        return cls(hosts, run_dir, lambda command: [sys.executable, "-m", "asyncrl.cli.main", command, *words])

    @classmethod
    def of_the_page(cls, hosts: Hosts, folder: Path) -> HostsRun:
        """Start the run with the page's commands, in this folder, each on the hosts named in its comment."""
        on = {command: re.findall(r"node\d", line_of(command).partition("#")[2]) for command in ("run", "host")}
        assert [on["run"], on["host"]] == [hosts.names[:1], hosts.names[1:]]
        return cls(hosts, folder / "runs" / "mine" / "t0", lambda command: pages.as_written(line_of(command), folder))

    def _start(self, host: NetworkHost, command: str) -> RunHandle:
        return RunHandle(host.command(self._command(command)), self.run_dir)

    def start_daemon(self, host: NetworkHost) -> None:
        """Restart the host daemon on a host that was killed."""
        self.daemons[host.name].popen.wait(10)
        self.daemons[host.name] = self._start(host, "host")

    def outputs(self) -> str:
        return "\n".join(f"-- {name}\n{daemon.output()}" for name, daemon in self.daemons.items())

    def close(self) -> None:
        for handle in (self.launcher, *self.daemons.values()):
            handle.close()


def line_of(command: str) -> str:
    """The page's line with this command."""
    return pages.line_of(PAGE, f"asyncrl-launch {command}")
