"""The launcher's side of a private etcd with servers on other hosts: it says where they are to be, and takes out whoever is lost.

One server is started with the launcher; when the agents of three hosts and more are there, two of them are asked for one more
each (etcd_member.py). They say where theirs will listen before it does, so that nobody waits until it has joined, and processes are
given all three endpoints. A server that never comes holds up nobody: it has no vote before it knows all. etcd_rules.py decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from asyncrl.launch.etcd_rules import NUM_SERVERS, members
from asyncrl.launch.private_etcd import PrivateEtcd
from asyncrl.messages import AgentRecord, EtcdReport, EtcdWish, HostReport
from asyncrl.runtime.etcd_cluster import EtcdClusterError

_ASK_LIMIT_S = 5.0
_TAKE_OUT_LIMIT_S = 120.0  # past it the others are a majority all the same, or etcd begins anew
_RETRY_S = 1.0


class EtcdGroup:
    """consumes: hosts' reports, agents that come and go. produces: the wish (EtcdWish); a cluster without servers that are lost.

    waits for: nothing; a thread for each server that is lost asks etcd to take it out, within limits.
    """

    def __init__(
        self,
        etcd: PrivateEtcd,
        *,
        launcher: str,
        own_host: str,
        attempt: int,
        put: Callable[[EtcdWish], None],
        say: Callable[[str], None],
    ) -> None:
        """launcher: its incarnation. put: have the wish published."""
        self._etcd, self._put, self._say = etcd, put, say
        self._launcher, self._own_host, self._attempt = launcher, own_host, attempt
        self._reports: dict[str, EtcdReport] = {}  # by incarnation of the agent
        self._wish: EtcdWish | None = None
        self._going: set[str] = set()  # peer URLs of those that are being taken out
        self._said: list[str] = []  # hosts
        self._closed = threading.Event()

    @property
    def is_settled(self) -> bool:
        """Whether everybody who was asked has said where its server will be, or that it will not."""
        return self._wish is not None and all(agent in self._reports for agent in self._wish.members.values())

    @property
    def endpoints(self) -> list[str]:
        """All that are known, the launcher's own first."""
        return self._wish.endpoints if self._wish is not None else [self._etcd.server.endpoint]

    def hear(self, report: HostReport) -> None:
        """What an agent of ours says."""
        if report.etcd is not None and report.etcd.cluster == self._etcd.server.name:
            self._reports[report.agent] = report.etcd

    def turn(self, agents: Mapping[str, AgentRecord]) -> None:
        """agents: those that are there, by host."""
        server = self._etcd.server
        cluster = server.name
        before = dict(self._wish.members) if self._wish is not None and self._wish.cluster == cluster else {}
        self._reports = {agent: report for agent, report in self._reports.items() if report.cluster == cluster}
        unfit = {
            host
            for host, agent in agents.items()
            if (report := self._reports.get(agent.incarnation)) is not None and report.state == "failed"
        }
        there = {agent.incarnation for agent in agents.values()}
        for agent in set(before.values()) - there:
            if (lost := self._reports.pop(agent, None)) is not None and lost.peer_url:
                self._take_out_soon(cluster, lost.peer_url)
        chosen = {host: agents[host].incarnation for host in members(self._own_host, sorted(agents), before, unfit)}
        if self._going:  # one after the other: of two that leave at once a majority would be missed
            chosen = {host: agent for host, agent in before.items() if agent in there}
        reports = {host: self._reports[agent] for host, agent in chosen.items() if agent in self._reports}
        endpoints = [report.endpoint for report in reports.values()]
        self._etcd.know_others(cluster, endpoints)
        wish = EtcdWish(
            launcher=self._launcher,
            attempt=self._attempt,
            cluster=cluster,
            guarded=server.guarded,
            members=chosen,
            endpoints=[server.endpoint, *endpoints],
        )
        if wish != self._wish:
            self._wish = wish
            self._put(wish)
        self._tell([host for host, report in reports.items() if report.state == "runs"])

    def close(self) -> None:
        self._closed.set()

    def _tell(self, running: list[str]) -> None:
        """When all are there, and when the launcher's is alone again."""
        if running == self._said or len(running) not in (0, NUM_SERVERS - 1):
            return
        self._said = running
        also = f" and {', '.join(running)}: any one of these hosts may be lost" if running else " only"
        self._say(f"etcd runs on {self._own_host}{also}")

    def _take_out_soon(self, cluster: str, peer_url: str) -> None:
        def take_out() -> None:
            deadline = time.monotonic() + _TAKE_OUT_LIMIT_S
            try:
                while time.monotonic() < deadline and self._etcd.server.name == cluster:
                    try:
                        return self._etcd.server.take_out(peer_url, _ASK_LIMIT_S)
                    except EtcdClusterError:  # it elects a leader, or has no majority
                        if self._closed.wait(_RETRY_S):
                            return
            finally:
                self._going.discard(peer_url)

        self._going.add(peer_url)
        threading.Thread(target=take_out, name="take out an etcd server", daemon=True).start()
