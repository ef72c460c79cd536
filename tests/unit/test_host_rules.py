"""The host daemon's rules: which actions follow from desired and observed state, and when its processes must end."""

import pytest

from asyncrl.launch.hosts.rules import Action, Observed, Tether, decide, obeyed
from asyncrl.launch.hosts.watch_cache import WatchCache
from asyncrl.protocol.hosts import DesiredProcess, LauncherRecord
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
        (desired(state="kill"), observed(ended=True), []),  # its end is reported until its desired state is removed
        (desired(), observed(ended=True), []),  # the launcher decides whether it restarts
        (None, observed(), ["kill"]),
        (None, observed(ended=True), ["forget"]),
        (
            desired(incarnation=2),
            observed(incarnation=1),
            ["kill"],
        ),  # the next incarnation starts after this one has ended
        (desired(incarnation=2), observed(incarnation=1, ended=True), ["forget"]),
        (desired(incarnation=1), observed(incarnation=2), []),  # an outdated desired state that arrived late
    ],
)
def test_decisions(goal, process, verbs):
    found = decide({NAME: goal} if goal else {}, {NAME: process} if process else {})
    assert list(found) == [Action(verb, NAME) for verb in verbs]


def test_entries_of_another_launcher_or_for_an_earlier_daemon_are_ignored():
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


def test_a_host_daemon_waits_for_the_first_launcher_until_its_limit():
    rope = tether()
    rope.sees(None, 1)
    rope.unreachable(200, refused=True)
    assert rope.broken(299) == ""
    assert "no launcher has appeared within 300 s" in rope.broken(301)


def test_processes_survive_a_short_outage_but_not_a_dead_launcher():
    rope = tether()
    rope.sees(record(), 1)
    rope.unreachable(10, refused=False)
    assert rope.broken(69) == ""
    assert "could not be reached for 60 s" in rope.broken(71)
    rope.sees(record(), 72)  # the network is back
    assert rope.broken(1000) == ""
    rope.sees(None, 1001)
    assert rope.broken(1005) == ""
    assert rope.broken(1010) == "the launcher is gone"


def test_refused_connections_to_name_resolve_end_the_processes_sooner():
    rope = tether()
    rope.sees(record(), 1)
    rope.unreachable(10, refused=True)
    rope.unreachable(29, refused=True)
    assert rope.broken(29) == ""
    assert "are gone" in rope.broken(31)
    rope.unreachable(32, refused=False)  # a network failure now: the time of refused connections starts again
    assert rope.broken(33) == ""


def test_the_record_of_an_earlier_launcher_is_ignored():
    rope = tether()
    rope.sees(record(ends=True), 0)
    assert not rope.is_over  # that run ended before the host daemon started
    now = record(time_ns=3 * 10**18)
    rope.sees(now, 1)
    rope.sees(record(ends=True), 2)
    assert rope.launcher == now
    assert not rope.is_over
    rope.sees(record(time_ns=3 * 10**18, ends=True), 3)
    assert rope.is_over


def test_the_watch_cache_adopts_a_difference_shown_by_two_reads_in_a_row():
    told = []
    mirror = WatchCache(told.append)
    mirror.observe(WatchEvent("put", "a", "1"))
    mirror.read({"a": "1", "b": "1"})
    assert told == [WatchEvent("put", "a", "1")]
    mirror.observe(WatchEvent("put", "b", "2"))  # newer than the read
    mirror.read({"a": "1", "b": "2"})
    assert len(told) == 2
    mirror.read({"b": "3"})
    mirror.read({"b": "3"})
    assert set(told[2:]) == {WatchEvent("delete", "a"), WatchEvent("put", "b", "3")}
    mirror.read({"b": "3"})
    assert len(told) == 4
