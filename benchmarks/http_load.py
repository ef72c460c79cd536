"""A load generator for the gserver manager: simulates rollout workers and a master, at the least cost possible in Python.

One thread, one epoll, raw sockets with keep-alive, no HTTP library: a request costs the generator a fraction of its cost to a
server in Python, so the measurement shows the server. It sends the requests of rollout workers (asyncrl/rollout/tickets.py):
allocate_rollout, finish_rollout, a heartbeat every two seconds each, and a master's report for every batch of finished rollouts.

- `closed_loop`: every connection is a rollout worker that sends the next request as soon as it has an answer. Gives requests/s.
- `open_loop`: requests are due at a fixed rate, regardless of the server. Latency counts from the time at which a request was due,
  so a server that stalls is charged for all requests that were due meanwhile.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from asyncrl.protocol.manager import (
    AllocateRequest,
    FinishRequest,
    HeartbeatRequest,
    LedgerView,
    MasterReport,
    RolloutResult,
)
from tests.support.summaries import group

HEARTBEAT_S = 2.0
_LIMIT_S = 30.0  # without an answer for this long the measurement fails
_WAIT_S = 5.0  # how long rollout workers allow the manager to delay an answer
_NUM_PROMPTS = 1 << 40  # never exhausted
_KINDS = ("allocate_rollout", "finish_rollout", "heartbeat", "report")
_encode = msgspec.json.Encoder().encode


class LoadFailed(Exception):
    """The server refused a request, closed a connection or did not answer in time."""


class Connection:
    """One keep-alive connection with at most one request in flight."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._sock = socket.create_connection((parts.hostname, parts.port), timeout=_LIMIT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setblocking(False)
        self.fileno = self._sock.fileno()
        self._received = b""
        self._unsent = b""
        self.kind = ""  # of the request in flight
        self.since = 0.0  # closed loop: time at which the request was sent; open loop: at which it was due
        self._heads = {
            kind: (
                f"POST /{kind} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
                "User-Agent: Python/3.11 aiohttp/3.14\r\nContent-Type: application/octet-stream\r\nContent-Length: "
            ).encode()
            for kind in _KINDS
        }

    def send(self, kind: str, message: msgspec.Struct, since: float) -> None:
        assert not self.kind, "a connection sends one request at a time"
        body = _encode(message)
        data = b"%b%d\r\n\r\n%b" % (self._heads[kind], len(body), body)
        self.kind, self.since = kind, since
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        self._unsent = data[sent:]

    def flush(self) -> None:
        """Send the rest of a request that did not fit into the socket's buffer (a report may be large)."""
        if self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> bytes | None:
        """The body of the answer, or None if it is not complete yet."""
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            return None
        if not data:
            raise LoadFailed(f"the server closed the connection during /{self.kind}")
        self._received += data
        head = self._received.find(b"\r\n\r\n")
        if head < 0:
            return None
        if not self._received.startswith(b"HTTP/1.1 200"):
            raise LoadFailed(f"/{self.kind}: {self._received[:500]!r}")
        start = self._received.find(b"Content-Length: ", 0, head)
        end = self._received.find(b"\r\n", start)
        size = int(self._received[start + 16 : end])
        if len(self._received) < head + 4 + size:
            return None
        body = self._received[head + 4 :]
        self._received = b""
        self.kind = ""
        return body

    def close(self) -> None:
        self._sock.close()


@dataclass
class Load:
    """The measurements. Times are time.monotonic(), which all processes of a machine share."""

    duration_s: float = 0.0
    num_requests: int = 0
    all_s: float = 0.0  # warm-up included
    num_all: int = 0
    num_rollouts: int = 0
    num_refused: int = 0  # allocate requests answered without a ticket
    cpu_share: float = 0.0  # of the generator, in cores
    latencies: list[tuple[float, float]] = field(default_factory=list)  # (due, seconds)
    samples: dict[str, str] = field(default_factory=dict)  # kind of request -> one of its answers


class _Rollouts:
    """The rollout workers' and the master's side of the protocol, without I/O."""

    def __init__(self, batch_size: int, group_size: int, wait_s: float) -> None:
        self._batch_size, self._group_size, self._wait_s = batch_size, group_size, wait_s
        self._stored: deque[str] = deque()
        self._number = 0
        self._unique = f"{time.monotonic_ns():x}"

    def allocate(self, worker: int) -> AllocateRequest:
        self._number += 1
        return AllocateRequest(
            request_id=f"{self._unique:0>20}{self._number:012d}",  # as long as a UUID
            worker=f"rollout_worker/{worker}",
            incarnation=f"rollout_worker/{worker}-12345-0123abcd",
            count=1,
            wait_s=self._wait_s,
        )

    def finish(self, worker: int, ticket_id: str) -> FinishRequest:
        n = self._group_size
        result = RolloutResult(ticket_id=ticket_id, outcome="stored", group=group(*[128] * n))
        return FinishRequest(
            worker=f"rollout_worker/{worker}",
            incarnation=f"rollout_worker/{worker}-12345-0123abcd",
            results=[result],
        )

    def heartbeat(self, worker: int, held: list[str]) -> HeartbeatRequest:
        return HeartbeatRequest(
            worker=f"rollout_worker/{worker}", incarnation=f"rollout_worker/{worker}-12345-0123abcd", held=held
        )

    def stored(self, ticket_id: str) -> None:
        self._stored.append(ticket_id)

    def report(self, *, full: bool = False, also: Sequence[str] = ()) -> MasterReport | None:
        """A report that the oldest stored tickets were consumed, at most a batch. None if there is no full batch, unless `full`."""
        if len(self._stored) < self._batch_size and not full:
            return None
        consumed = [self._stored.popleft() for _ in range(min(self._batch_size, len(self._stored)))]
        return MasterReport(
            attempt=1,
            trained_version=0,
            consumed=[*consumed, *also],
            stored=list(self._stored),
            full=full,
            num_prompts=_NUM_PROMPTS,
            num_epochs=1,
        )


class Generator:
    """Connections of `num_clients` rollout workers and of one master."""

    def __init__(self, url: str, num_clients: int, *, batch_size: int, group_size: int = 8, wait_s: float = _WAIT_S):
        self._rollouts = _Rollouts(batch_size, group_size, wait_s)
        self._master = Connection(url)
        self._clients = [Connection(url) for _ in range(num_clients)]
        self._epoll = select.epoll()
        self._by_fd: dict[int, tuple[int, Connection]] = {}
        for number, connection in enumerate([*self._clients, self._master]):
            self._by_fd[connection.fileno] = (number, connection)
            self._epoll.register(connection.fileno, select.EPOLLIN)
        self._held: list[str] = [""] * num_clients  # closed loop: the ticket of each worker
        self._to_finish: deque[tuple[int, str]] = deque()  # open loop: (worker, ticket)
        self._asked = ""  # kind of the request of the current answer
        self._load = Load()
        self._samples: dict[str, bytes] = {}  # kind -> its latest answer
        self._call_master(self._rollouts.report(full=True))
        # Consume the tickets that an earlier load left: they would count against admission.
        left = msgspec.json.decode(self._samples["report"], type=LedgerView)
        self._call_master(self._rollouts.report(full=True, also=[live.ticket_id for live in left.live]))

    def close(self) -> None:
        for _, connection in self._by_fd.values():
            connection.close()
        self._epoll.close()

    # ------------------------------------------------------------------------------------------------- closed loop

    def closed_loop(self, warm_up_s: float, duration_s: float) -> Load:
        """Every worker sends its next request as soon as it has an answer."""
        now = time.monotonic()
        beat_at = [now + HEARTBEAT_S * (n / len(self._clients)) for n in range(len(self._clients))]
        for number, client in enumerate(self._clients):
            client.send("allocate_rollout", self._rollouts.allocate(number), now)
        self._load = Load()
        counting_from, end = now + warm_up_s, math.inf
        began, cpu = 0.0, 0.0
        while (now := time.monotonic()) < end or not self._load.num_requests:
            if not began and now >= counting_from:
                warm = self._load
                self._load, began, cpu = Load(num_all=warm.num_requests), now, time.process_time()
                end = began + duration_s  # from the actual start: this process may have been suspended
            if now > end + _LIMIT_S:
                raise LoadFailed(f"no request was answered within {now - began:.0f} s")
            next_s = (end if began else counting_from) - now
            for number, client, body in self._answers(next_s if next_s > 0 else 0.1):
                if number == len(self._clients):
                    self._master_idle()
                    continue
                now = time.monotonic()
                self._load.latencies.append((client.since, now - client.since))
                self._continue(number, client, self._asked, body, beat_at, now)
        self._load.duration_s = time.monotonic() - began
        self._load.samples = {kind: body.decode() for kind, body in self._samples.items()}
        self._load.all_s = time.monotonic() - (counting_from - warm_up_s)
        self._load.num_all += self._load.num_requests
        self._load.cpu_share = (time.process_time() - cpu) / self._load.duration_s
        return self._load

    def _continue(
        self, number: int, client: Connection, asked: str, body: bytes, beat_at: list[float], now: float
    ) -> None:
        """Send the next request of a rollout worker: ticket -> result -> next ticket, or a heartbeat if one is due."""
        if asked == "allocate_rollout":
            self._held[number] = _ticket_id(body)
            self._load.num_refused += not self._held[number]
        elif asked == "finish_rollout":
            self._finished(self._held[number])
            self._held[number] = ""
        if now >= beat_at[number]:
            beat_at[number] = now + HEARTBEAT_S
            held = [self._held[number]] if self._held[number] else []
            client.send("heartbeat", self._rollouts.heartbeat(number, held), now)
        elif self._held[number]:
            client.send("finish_rollout", self._rollouts.finish(number, self._held[number]), now)
        else:
            client.send("allocate_rollout", self._rollouts.allocate(number), now)

    # --------------------------------------------------------------------------------------------------- open loop

    def open_loop(self, rate: float, warm_up_s: float, duration_s: float) -> Load:
        """A request every 1/rate seconds, on any free connection: allocate and finish in alternation, and the heartbeats."""
        start = time.monotonic()
        cpu = time.process_time()
        free = deque(range(len(self._clients)))
        num_due = int(rate * (warm_up_s + duration_s))
        num_sent = num_answered = 0
        self._load = Load()
        counting_from, end = start + warm_up_s, start + warm_up_s + duration_s + _LIMIT_S
        beat_at = [start + HEARTBEAT_S * (1 + n / len(self._clients)) for n in range(len(self._clients))]
        while num_answered < num_due:
            now = time.monotonic()
            while num_sent < num_due and free and (due := start + num_sent / rate) <= now:
                self._send_due(free.popleft(), beat_at, now, due)
                num_sent += 1
            wait_s = start + num_sent / rate - time.monotonic() if num_sent < num_due and free else 1.0
            for number, client, body in self._answers(wait_s):
                if number == len(self._clients):
                    self._master_idle()
                    continue
                num_answered += 1
                free.append(number)
                if client.since >= counting_from:
                    self._load.latencies.append((client.since, time.monotonic() - client.since))
                if self._asked == "allocate_rollout":
                    if ticket_id := _ticket_id(body):
                        self._to_finish.append((number, ticket_id))
                    else:
                        self._load.num_refused += 1
            if now > end:
                raise LoadFailed(
                    f"{num_due - num_answered} of {num_due} requests were not answered within their time limit"
                )
        self._load.duration_s = time.monotonic() - start
        self._load.cpu_share = (time.process_time() - cpu) / self._load.duration_s
        return self._load

    def _send_due(self, number: int, beat_at: list[float], now: float, due: float) -> None:
        client = self._clients[number]
        if now >= beat_at[number]:
            beat_at[number] = now + HEARTBEAT_S
            held = [ticket_id for worker, ticket_id in self._to_finish if worker == number]
            client.send("heartbeat", self._rollouts.heartbeat(number, held), due)
        elif len(self._to_finish) > len(self._clients) // 2:
            worker, ticket_id = self._to_finish.popleft()
            client.send("finish_rollout", self._rollouts.finish(worker, ticket_id), due)
            self._finished(ticket_id)
        else:
            client.send("allocate_rollout", self._rollouts.allocate(number), due)

    # ------------------------------------------------------------------------------------------------------ inside

    def _answers(self, wait_s: float) -> Iterator[tuple[int, Connection, bytes]]:
        """Yield (number, connection, body) of each answer within wait_s. `_asked` is the kind of its request."""
        if self._master.unsent:
            self._master.flush()
            wait_s = min(wait_s, 0.001)
        for fd, _ in self._epoll.poll(max(0.0, wait_s)):
            number, connection = self._by_fd[fd]
            self._asked = connection.kind
            body = connection.receive()
            if body is None:
                continue
            self._load.num_requests += 1
            self._samples[self._asked] = body
            yield number, connection, body

    def _finished(self, ticket_id: str) -> None:
        self._load.num_rollouts += 1
        self._rollouts.stored(ticket_id)
        self._master_idle()

    def _master_idle(self) -> None:
        if not self._master.kind and (report := self._rollouts.report()) is not None:
            self._master.send("report", report, time.monotonic())

    def _call_master(self, report: MasterReport | None) -> None:
        """Send a report and wait for its answer. Used only at the start."""
        assert report is not None
        self._master.send("report", report, time.monotonic())
        limit = time.monotonic() + _LIMIT_S
        while self._master.kind:
            if time.monotonic() > limit:
                raise LoadFailed(f"the gserver manager did not answer a report at the start within {_LIMIT_S:g} s")
            for _ in self._answers(1.0):
                pass


def _ticket_id(body: bytes) -> str:
    """The first ticket of an AllocateReply, or "". Decoding the whole reply would cost as much as all other work here."""
    start = body.find(b'"ticket_id":"')
    return body[start + 13 : body.find(b'"', start + 13)].decode() if start >= 0 else ""
