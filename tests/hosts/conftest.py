"""Hosts as network namespaces. Where they cannot be made (no root, no `ip`), these tests are skipped with the reason."""

import sys

import pytest

from asyncrl.config import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.testing.namespaces import Hosts, NamespacesUnavailable
from asyncrl.testing.runs import RunHandle


@pytest.fixture
def hosts():
    """Three hosts, h1 to h3, on one switch: hosts[0].run([...]), hosts[1].unplug(), hosts[2].kill()."""
    try:
        made = Hosts.make(3)
    except NamespacesUnavailable as error:
        pytest.skip(f"there are no hosts to be had: {error}")
    with made:
        yield made


class HostsRun:
    """A launcher on the first host, and an agent on each of the others."""

    def __init__(self, hosts, config, *overrides):
        self.hosts = hosts
        names = ",".join(hosts.addresses)
        self.words = [str(config), "cluster=hosts", f"hosts=[{names}]", *overrides]
        self.launcher = self._start(hosts[0], "run")
        self.agents = {host.name: self._start(host, "agent") for host in hosts[1:]}
        self.run_dir = self.launcher.run_dir

    def _start(self, host, command):
        run_dir = run_directory(load_experiment(self.words[0], self.words[1:]))
        return RunHandle(host.command([sys.executable, "-m", "asyncrl.launch.cli", command, *self.words]), run_dir)

    def start_agent(self, host):
        """Again, on a host that was killed."""
        self.agents[host.name].popen.wait(10)
        self.agents[host.name] = self._start(host, "agent")

    def outputs(self):
        return "\n".join(f"-- {name}\n{agent.output()}" for name, agent in self.agents.items())

    def close(self):
        for handle in (self.launcher, *self.agents.values()):
            handle.close()


@pytest.fixture
def run_on_hosts(hosts):
    """run_on_hosts(config, "key=value", ...) starts a run across the three hosts."""
    started = []

    def start(config, *overrides):
        run = HostsRun(hosts, config, *overrides)
        started.append(run)
        return run

    yield start
    for run in started:
        run.close()
