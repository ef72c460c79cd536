"""What a host daemon does with what it sees, and when it lets go."""

import pytest

from asyncrl.launch.hosts.rules import Action, Observed, Tether, decide, obeyed
from asyncrl.launch.hosts.watch_cache import WatchCache
from asyncrl.protocol.messages import DesiredProcess, LauncherRecord
from asyncrl.runtime.names.interface import WatchEvent


def desired(name="rollout_worker/0", incarnation=1, state="run", launcher="l", host_daemon="a"):
    return DesiredProcess(
        launcher=launcher,
        host_daemon=host_daemon,
        attempt=1,
        name=name,
        incarnation=incarnation,
        state=state,
        config="",
        lease=1,
        computes=False,
    )


def observed(incarnation=1, ended=False, asked=False):
    return Observed(incarnation, ended, asked)


NAME = "rollout_worker/0"


@pytest.mark.parametrize(
    ("goal", "process", "verbs"),
    [
        (desired(), None, ["start"]),
        (desired(), observed(), []),
        (desired(state="stop"), observed(), ["stop"]),
        (desired(state="stop"), observed(asked=True), []),
        (desired(state="kill"), observed(asked=True), ["kill"]),
        (desired(state="stop"), None, ["skip"]),
        (desired(state="kill"), observed(ended=True), []),  # its end is told until it has no desired state any more
        (desired(), observed(ended=True), []),  # the launcher decides whether it restarts
        (None, observed(), ["kill"]),
        (None, observed(ended=True), ["forget"]),
        (
            desired(incarnation=2),
            observed(incarnation=1),
            ["kill"],
        ),  # the next incarnation waits for the end of this one
        (desired(incarnation=2), observed(incarnation=1, ended=True), ["forget"]),
        (desired(incarnation=1), observed(incarnation=2), []),  # an older state, late
    ],
)
def test_decisions(goal, process, verbs):
    found = decide({NAME: goal} if goal else {}, {NAME: process} if process else {})
    assert list(found) == [Action(verb, NAME) for verb in verbs]


def test_what_another_launcher_or_an_earlier_daemon_was_told_is_refused():
    published = [
        desired(),
        desired(launcher="old", name="master/0"),
        desired(host_daemon="before", name="model_worker/0"),
    ]
    assert list(obeyed(published, "l", "a")) == [NAME]


def record(ends=False, time_ns=2 * 10**18):
    return LauncherRecord(incarnation=f"launcher.{time_ns}.7.0123abcd", host="h1", run_dir="/r", attempt=1, ends=ends)


def tether():
    return Tether(0.0, cut_off_limit_s=60, wait_s=300)


def test_before_a_launcher_came_a_host_daemon_waits_for_it_and_no_longer_than_it_should():
    rope = tether()
    rope.sees(None, 1)
    rope.unreachable(200, refused=True)
    assert rope.broken(299) == ""
    assert "no launcher has appeared within 300 s" in rope.broken(301)


def test_an_outage_is_outlived_and_a_dead_launcher_is_not():
    rope = tether()
    rope.sees(record(), 1)
    rope.unreachable(10, refused=False)
    assert rope.broken(69) == ""
    assert "could not be reached for 60 s" in rope.broken(71)
    rope.sees(record(), 72)  # the cable is back
    assert rope.broken(1000) == ""
    rope.sees(None, 1001)
    assert rope.broken(1005) == ""
    assert rope.broken(1010) == "the launcher is gone"


def test_where_name_resolve_is_gone_with_the_launcher_the_end_comes_sooner():
    rope = tether()
    rope.sees(record(), 1)
    rope.unreachable(10, refused=True)
    rope.unreachable(29, refused=True)
    assert rope.broken(29) == ""
    assert "are gone" in rope.broken(31)
    rope.unreachable(32, refused=False)  # now it is the network: refused counts from its start
    assert rope.broken(33) == ""


def test_the_word_of_an_earlier_launcher_counts_for_nothing():
    rope = tether()
    rope.sees(record(ends=True), 0)
    assert not rope.is_over  # a run that was over before the host daemon came
    now = record(time_ns=3 * 10**18)
    rope.sees(now, 1)
    rope.sees(record(ends=True), 2)
    assert rope.launcher == now
    assert not rope.is_over
    rope.sees(record(time_ns=3 * 10**18, ends=True), 3)
    assert rope.is_over


def test_a_mirror_believes_what_two_reads_in_a_row_say():
    told = []
    mirror = WatchCache(told.append)
    mirror.observe(WatchEvent("put", "a", "1"))
    mirror.read({"a": "1", "b": "1"})
    assert told == [WatchEvent("put", "a", "1")]
    mirror.observe(WatchEvent("put", "b", "2"))  # the read was older than this
    mirror.read({"a": "1", "b": "2"})
    assert len(told) == 2
    mirror.read({"b": "3"})
    mirror.read({"b": "3"})
    assert set(told[2:]) == {WatchEvent("delete", "a"), WatchEvent("put", "b", "3")}
    mirror.read({"b": "3"})
    assert len(told) == 4
