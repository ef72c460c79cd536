"""Config checks for more than one host, and how a machine finds which of the hosts it is."""

import socket
from dataclasses import replace

import pytest

from asyncrl.config.schema import (
    ConfigError,
    DebugConfig,
    ExperimentConfig,
    NetworkConfig,
    PromptSourceConfig,
    RolloutConfig,
    RuntimeConfig,
    TaskConfig,
    WeightsConfig,
)
from asyncrl.launch.experiment import validate
from asyncrl.launch.hosts.addresses import address_of, own_host, refuses

CONFIG = ExperimentConfig(
    model_path="/m",
    prompts=PromptSourceConfig(path="/p.jsonl"),
    rollout=RolloutConfig(tasks={"default": TaskConfig(reward="r:r")}),
)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cluster": "host"}, "cluster='host': did you mean 'hosts'?"),
        ({"cluster": "hosts"}, "name the hosts, including this one"),
        ({"hosts": ["a"]}, "applies to cluster=hosts only"),
        ({"cluster": "hosts", "hosts": ["a", "b", "a"]}, "a is named twice"),
        ({"cluster": "hosts", "hosts": ["a/b"]}, "neither a name nor an address"),
        (
            {"cluster": "hosts", "hosts": ["a"], "debug": DebugConfig(leave_out=["master/0"])},
            "works with cluster=local only",
        ),
        ({"network": NetworkConfig(authenticate="yes")}, "one of on, off"),
        ({"network": NetworkConfig(host_lost_after_s=0)}, "network.host_lost_after_s=0: must be above 0"),
    ],
)
def test_an_invalid_cluster_is_refused_with_a_remedy(changes, told):
    with pytest.raises(ConfigError) as refused:
        validate(replace(CONFIG, **changes))
    assert told in str(refused.value)
    validate(replace(CONFIG, cluster="hosts", hosts=["a", "10.0.0.2"]))


@pytest.mark.parametrize(
    "reachable",
    [{"cluster": "hosts", "hosts": ["a", "b"]}, {"cluster": "slurm"}, {"runtime": RuntimeConfig(host="10.0.0.1")}],
)
def test_broadcast_is_refused_where_unauthenticated_peers_could_join(reachable):
    """The store at which a group of servers meets, and the group's sockets, do not use keys."""
    broadcast = replace(CONFIG, weights=WeightsConfig(transport="broadcast"))
    for refused in (
        replace(broadcast, **reachable),
        replace(broadcast, **reachable, network=NetworkConfig(authenticate="on")),
    ):
        with pytest.raises(
            ConfigError, match=r"weights\.transport='broadcast'.*use disk, or weights\.broadcast_network=private"
        ):
            validate(refused)
    private = WeightsConfig(transport="broadcast", broadcast_network="private")
    validate(replace(broadcast, **reachable, weights=private))
    validate(replace(broadcast, **reachable, network=NetworkConfig(authenticate="off")))
    validate(replace(broadcast, network=NetworkConfig(authenticate="on")))  # on loopback


def test_a_host_finds_itself_among_the_hosts_of_the_run(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "me.example")
    assert own_host(["elsewhere.invalid", "me"]) == "me"
    assert own_host(["10.254.254.254", "127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(ConfigError, match="none of them is this machine"):
        own_host(["10.254.254.254"])
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1, localhost are all this machine"):
        own_host(["127.0.0.1", "localhost"])
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert own_host(["n1", "n3"]) == "n3"


def test_an_address_is_resolved_or_refused():
    assert address_of("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'nowhere\.invalid' cannot be resolved"):
        address_of("nowhere.invalid")


def test_a_refused_connection_is_recognised():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
        assert refuses(endpoint)  # bound, but not listening
        listening.listen()
        assert not refuses(endpoint)
