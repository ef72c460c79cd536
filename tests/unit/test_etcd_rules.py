"""On which hosts a private etcd has servers."""

import pytest

from asyncrl.config import NetworkConfig
from asyncrl.launch.etcd_rules import alone_after_s, grows, members


@pytest.mark.parametrize(
    ("there", "before", "unfit", "chosen"),
    [
        (["a"], [], [], []),
        (["a", "b"], [], [], []),  # of two servers each is needed: worse than one
        (["a", "b", "c"], [], [], ["b", "c"]),
        (["a", "b", "c", "d"], [], [], ["b", "c"]),
        (["a", "b", "c", "d"], ["c", "d"], [], ["c", "d"]),  # who has one keeps it
        (["a", "b", "d", "e"], ["c", "d"], [], ["d", "b"]),  # c is lost, another takes its place
        (["a", "c"], ["b", "c"], [], []),  # b is lost, and nobody can
        (["a", "b", "c"], ["b"], ["c"], []),
        (["a", "b", "c", "d"], ["b", "c"], ["c"], ["b", "d"]),
        (["b", "c", "d"], [], [], ["b", "c"]),  # the launcher's own agent is being started again
    ],
)
def test_two_beside_the_launchers_or_none(there, before, unfit, chosen):
    assert members("a", there, before, unfit) == chosen


def test_a_cluster_of_three_hosts_has_them():
    assert grows("hosts", ["a", "b", "c"])
    assert grows("slurm", ["a", "b", "c", "d"])
    assert not grows("hosts", ["a", "b"])
    assert not grows("local", ["a", "b", "c"])


def test_alone_only_when_those_who_were_cut_off_have_ended_and_before_those_end_who_were_not():
    network = NetworkConfig()
    assert network.host_lost_after_s + 8 < alone_after_s(network) < network.cut_off_limit_s
