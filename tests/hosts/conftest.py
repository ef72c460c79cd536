"""Hosts as network namespaces. Where they cannot be made (no root, no `ip`), these tests are skipped with the reason."""

import pytest
from hosts_run import HostsRun

from tests.support.namespaces import Hosts, NamespacesUnavailable


@pytest.fixture
def hosts(request):
    """Three hosts, node1 to node3, on one switch: hosts[0].run([...]), hosts[1].unplug(), hosts[2].kill(). Or as many
    as a test asks for."""
    try:
        made = Hosts.make(getattr(request, "param", 3))
    except NamespacesUnavailable as error:
        pytest.skip(f"there are no hosts to be had: {error}")
    with made:
        yield made


@pytest.fixture
def run_on_hosts(hosts):
    """run_on_hosts(config, "key=value", ...) starts a run across the three hosts. run_on_hosts(folder) starts one in this folder
    with the commands of docs/hosts.md."""
    started = []

    def start(config, *overrides):
        run = HostsRun.of_the_page(hosts, config) if config.is_dir() else HostsRun.of(hosts, config, *overrides)
        started.append(run)
        return run

    yield start
    for run in started:
        run.close()
