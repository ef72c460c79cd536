"""Who is in an etcd cluster, and how a server joins one that runs.

A server joins as a learner, which has no vote until it knows all that the others know: so a cluster of one never waits for a second
server that does not come. Asked over etcd's JSON gateway, because etcd3's stubs are older than learners.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_ASK_LIMIT_S = 3.0  # one endpoint
_CHANGE_LIMIT_S = 10.0  # of a change, which may have to be asked for again
_RETRY_S = 0.2
_MAX_REPLY_BYTES = 1_000_000


class EtcdClusterError(RuntimeError):
    """The cluster did not do what it was asked."""


@dataclass(frozen=True)
class EtcdTls:
    """Who may talk to a server: clients and other members that show a certificate signed by the authority. It shows its own."""

    cert_file: str
    key_file: str
    ca_file: str

    def context(self) -> ssl.SSLContext:
        """Of a client that has the same certificate."""
        context = ssl.create_default_context(cafile=self.ca_file)
        context.load_cert_chain(self.cert_file, self.key_file)
        return context


@dataclass(frozen=True)
class Member:
    id: int
    name: str  # "" until it has started
    peer_urls: list[str]
    is_learner: bool


def open_connection(host: str, port: int, tls: EtcdTls | None, limit_s: float) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(host, port, timeout=limit_s)
    return http.client.HTTPSConnection(host, port, timeout=limit_s, context=tls.context())


class EtcdCluster:
    """The members of a cluster, asked in turn."""

    def __init__(self, endpoints: Sequence[str], tls: EtcdTls | None = None) -> None:
        self._endpoints = list(endpoints)
        self._tls = tls

    def members(self, limit_s: float = _ASK_LIMIT_S) -> list[Member]:
        return self._until(limit_s, lambda: _members_of(self._ask("list", {})))

    def add_learner(self, name: str, peer_url: str, limit_s: float) -> tuple[int, str]:
        """Take in a server that is to start without data: its id, and what it is to be told of the cluster. What is left of an
        earlier life of it goes."""

        def add() -> tuple[int, str]:
            for member in _members_of(self._ask("list", {})):
                if peer_url in member.peer_urls or member.name == name:
                    self._ask("remove", {"ID": str(member.id)})
            reply = self._ask("add", {"peerURLs": [peer_url], "isLearner": True})
            peers = [
                f"{name if peer_url in member.peer_urls else member.name or f'not-started-{member.id}'}={url}"
                for member in _members_of(reply)
                for url in member.peer_urls
            ]
            return int(reply["member"]["ID"]), ",".join(peers)

        return self._until(limit_s, add)

    def promote(self, member_id: int) -> bool:
        """Give a learner its vote. False: it is not ready, or the cluster is not."""
        try:
            self._ask("promote", {"ID": str(member_id)})
        except EtcdClusterError as error:
            return "is not a learner" in str(error) or "already promoted" in str(error)
        return True

    def remove(self, member_id: int, limit_s: float = _CHANGE_LIMIT_S) -> None:
        """One that is gone for good, or is to go. One that is not there is no error."""

        def remove() -> None:
            try:
                self._ask("remove", {"ID": str(member_id)})
            except EtcdClusterError as error:
                if "member not found" not in str(error):
                    raise

        self._until(limit_s, remove)

    def remove_peer(self, peer_url: str, limit_s: float = _CHANGE_LIMIT_S) -> None:
        """The same of one that is known by where it listens for the others; it may never have started."""
        for member in self.members(limit_s):
            if peer_url in member.peer_urls:
                self.remove(member.id, limit_s)

    def _until(self, limit_s: float, function: Callable[[], T]) -> T:
        """Again until the limit: a cluster refuses to change while it elects a leader or takes in another, and one that is asked
        while the change before is not quite over may never answer (seen on a busy machine; raft drops what comes then)."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return function()
            except EtcdClusterError:
                if time.monotonic() + _RETRY_S > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """The first endpoint that answers, be it with a refusal."""
        failures = []
        for endpoint in self._endpoints:
            host, _, port = endpoint.rpartition(":")
            connection = open_connection(host, int(port), self._tls, _ASK_LIMIT_S)
            try:
                connection.request("POST", f"/v3/cluster/member/{what}", body=json.dumps(body))
                response = connection.getresponse()
                reply = json.loads(response.read(_MAX_REPLY_BYTES))
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"{endpoint}: {error}")
                continue
            finally:
                connection.close()
            if response.status == 200 and isinstance(reply, dict):
                return reply
            failures.append(f"{endpoint}: {reply.get('message', reply) if isinstance(reply, dict) else reply}")
            if "etcdserver: " in failures[-1]:  # the cluster's word, which another member would only repeat
                break
        raise EtcdClusterError(f"etcd's cluster does not {what} a member ({'; '.join(failures)})")


def _members_of(reply: dict[str, Any]) -> list[Member]:
    return [
        Member(
            int(member["ID"]), member.get("name", ""), member.get("peerURLs", []), bool(member.get("isLearner", False))
        )
        for member in reply.get("members", [])
    ]


def is_new(data_dir: Path) -> bool:
    """Whether a server that starts here has no part in a cluster yet."""
    return not (data_dir / "member").exists()
