"""Strangers at the sockets of a run: streams, HTTP endpoints, and the files that contain the secrets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import subprocess
import time
import uuid
from typing import Any

import aiohttp
import psutil
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from asyncrl.config.schema import ConfigError, NameResolveConfig, NetworkConfig, RuntimeConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.hosts.daemon import _LauncherLink
from asyncrl.launch.hosts.rules import Tether
from asyncrl.launch.name_service import NameService
from asyncrl.manager.http import ManagerService
from asyncrl.manager.ledger import Ledger
from asyncrl.manager.routing import ServerTable
from asyncrl.manager.scaling import ServerTarget
from asyncrl.protocol.hosts import HostRecord
from asyncrl.protocol.names import Names
from asyncrl.protocol.trajectories import StoreVerdict
from asyncrl.runtime import doorkeeper, http_server, security
from asyncrl.runtime.certificates import make_certificate
from asyncrl.runtime.channel import ChannelReceiver, ChannelSender
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import listen_http, listen_routes
from asyncrl.runtime.security import Secrets, Security
from asyncrl.runtime.transport import PART_BYTES, ZmqTransport, joined
from asyncrl.streams.push_pull import MetaPuller, MetaPusher
from tests.support.memory_names import MemoryNameResolver
from tests.support.process_wide import secured_by

RUNTIME = RuntimeConfig(resend_after_s=0.2, start_timeout_s=10.0)
LIMIT_S = 60.0
SILENCE_S = 0.5  # a stranger's message would take less than 10 ms if it were let in
TOKEN_HEADER = "Authorization"


@pytest.fixture
def run():
    """The secrets of a run, active in this process."""
    secrets = Secrets.make()
    with secured_by(Security(secrets)):
        yield secrets


# ------------------------------------------------------------------------------------------------------------------ streams


@contextlib.asynccontextmanager
async def receiving(secrets):
    """A receiver of a run, in a context of its own. Yields its socket's port and the messages that it delivers."""
    context = zmq.Context()
    delivered = asyncio.Queue()
    with secured_by(Security(secrets)):
        pull = ZmqTransport(context).bind_pull("127.0.0.1", queue_messages=8, max_frame_bytes=1 << 20)
    pull.listen(lambda frames: delivered.put_nowait(frames[0]), lambda error: delivered.put_nowait(error))
    try:
        yield int(pull.address.rpartition(":")[2]), delivered, security.gatekeeper_of(context)
    finally:
        pull.close()
        await asyncio.to_thread(context.term)


@contextlib.contextmanager
def stranger(port, setup):
    """A connected PUSH socket of another party, with a message on its way."""
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    try:
        setup(push)
        push.setsockopt(zmq.LINGER, 0)
        push.connect(f"tcp://127.0.0.1:{port}")
        push.setsockopt(zmq.SNDTIMEO, 200)
        with contextlib.suppress(zmq.Again):
            push.send(b"a stranger's")
        yield
    finally:
        push.close()
        context.term()


async def until(condition):
    """Poll every 10 ms for a condition that causes no event."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


def with_own_key(secrets):
    """A stranger that CURVE alone would let in: it has a key pair of its own, and the receiver's public key."""

    def setup(push):
        public, secret = zmq.curve_keypair()
        push.curve_serverkey = secrets.server_public.encode()
        push.curve_publickey, push.curve_secretkey = public, secret

    return setup


def with_plain(push):
    push.plain_username, push.plain_password = b"root", b"root"


async def test_only_a_process_of_the_run_reaches_a_receiver():
    run, another = Secrets.make(), Secrets.make()
    async with receiving(run) as (port, delivered, keeper):
        for setup, gets_far in (
            (lambda push: None, False),
            (with_plain, False),
            (with_own_key(run), True),  # reaches the gatekeeper, which refuses it
            (lambda push: security.guard_push(push, another), False),
        ):
            with stranger(port, setup):
                if gets_far:
                    await until(lambda: keeper.num_refused > 0)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(delivered.get(), SILENCE_S)
        with stranger(port, lambda push: security.guard_push(push, run)):  # a peer of the run is let in
            assert await asyncio.wait_for(delivered.get(), LIMIT_S) == b"a stranger's"


async def test_the_keys_of_one_receiver_open_no_other_in_the_same_process():
    """Two runs have receivers in one ZeroMQ context. Each run is an authentication domain of its own."""
    one, other = Secrets.make(), Secrets.make()
    context = zmq.Context()
    delivered = asyncio.Queue()
    pulls = []
    for secrets in (one, other):
        with secured_by(Security(secrets)):
            pulls.append(ZmqTransport(context).bind_pull("127.0.0.1", queue_messages=8, max_frame_bytes=1 << 20))
        pulls[-1].listen(lambda frames: delivered.put_nowait(frames[0]), delivered.put_nowait)
    port = int(pulls[0].address.rpartition(":")[2])

    def of_the_other(push):
        security.guard_push(push, other)
        push.curve_serverkey = one.server_public.encode()

    with stranger(port, of_the_other), pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(delivered.get(), SILENCE_S)
    with stranger(port, lambda push: security.guard_push(push, one)):
        assert await asyncio.wait_for(delivered.get(), LIMIT_S) == b"a stranger's"
    for pull in pulls:
        pull.close()
    await asyncio.to_thread(context.term)


async def test_without_a_gatekeeper_nobody_is_let_in(monkeypatch):
    run = Secrets.make()

    class Nobody:
        num_refused = 0

        def admit(self, domain, key):
            pass

    monkeypatch.setattr(security, "gatekeeper_of", lambda context: Nobody())
    async with receiving(run) as (port, delivered, _):
        with stranger(port, lambda push: security.guard_push(push, run)), pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(delivered.get(), SILENCE_S)


async def test_nothing_is_sent_to_whoever_is_not_the_receiver():
    """A published address may belong to a stranger. A stranger does not have the receivers' secret key."""
    context = zmq.Context()
    false_pull = context.socket(zmq.PULL)
    public, secret = zmq.curve_keypair()
    false_pull.curve_server, false_pull.curve_publickey, false_pull.curve_secretkey = True, public, secret
    port = false_pull.bind_to_random_port("tcp://127.0.0.1")
    false_pull.setsockopt(zmq.RCVTIMEO, int(SILENCE_S * 1000))
    with secured_by(Security(Secrets.make())):
        push = ZmqTransport(context).connect_push(f"tcp://127.0.0.1:{port}", queue_messages=8)
    push.send_nowait([b"a secret"])
    with pytest.raises(zmq.Again):
        await asyncio.to_thread(false_pull.recv)
    push.close()
    false_pull.close(linger=0)
    await asyncio.to_thread(context.term)


async def test_what_goes_over_the_wire_cannot_be_read(run):
    """A proxy between sender and receiver can read the message only if the run has no secrets."""
    for secrets, readable in ((None, True), (run, False)):
        with secured_by(Security(secrets) if secrets else None):
            receiver = ChannelReceiver("r", runtime=RUNTIME)
            endpoint = await receiver.start()
            proxy = Proxy(int(endpoint.address.rpartition(":")[2]))
            port = await proxy.start()
            sender = ChannelSender("s", "r", "i", runtime=RUNTIME)
            await sender.start()
            endpoint = type(endpoint)(f"tcp://127.0.0.1:{port}", endpoint.incarnation, endpoint.max_message_bytes)
            sender.connect(endpoint)
            sending = asyncio.create_task(sender.send(b"what nobody may read", timeout_s=LIMIT_S, what="it"))
            delivery = await asyncio.wait_for(receiver.receive(), LIMIT_S)
            delivery.ack(b"done")
            assert await sending == b"done"
            assert (b"what nobody may read" in proxy.seen) is readable
            await sender.close()
            await receiver.close()
            await proxy.close()


class Proxy:
    """Between a sender and a port. It records all bytes."""

    def __init__(self, to_port):
        self.to_port, self.seen, self.connections = to_port, bytearray(), set()

    async def start(self):
        self.server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]

    async def connected(self, reader, writer):
        self.connections.add(asyncio.current_task())
        there, to_there = await asyncio.open_connection("127.0.0.1", self.to_port)
        await asyncio.gather(self.pump(reader, to_there), self.pump(there, writer))

    async def pump(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.seen.extend(data)
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def close(self):
        """Stop listening. Wait for both ends of each connection to close."""
        self.server.close()
        await asyncio.wait(self.connections, timeout=LIMIT_S)


async def test_bytes_that_are_no_protocol_get_no_answer_but_a_greeting():
    async with receiving(Secrets.make()) as (port, delivered, _):
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, bytes(range(256)) * 300, b"\x00" * 70000):
            with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
                connection.settimeout(SILENCE_S)
                got = b""
                with contextlib.suppress(TimeoutError, ConnectionError):
                    connection.sendall(noise)
                    while data := await asyncio.to_thread(connection.recv, 4096):
                        got += data
                assert len(got) <= 64  # ZeroMQ's greeting: its version and mechanism
        assert delivered.empty()


async def test_the_streams_of_a_run_work_with_its_secrets(run):
    names = Names("e", "t")
    with MemoryNameResolver(uuid.uuid4().hex) as resolver:
        puller = MetaPuller(resolver, names, runtime=RUNTIME)
        await puller.start()
        pusher = MetaPusher(resolver, names, head=0, runtime=RUNTIME, incarnation="i")
        await pusher.start()
        sending = asyncio.create_task(pusher.push_meta(_meta(), timeout_s=LIMIT_S))
        _, acknowledge = await asyncio.wait_for(puller.pull_meta(), LIMIT_S)
        acknowledge(StoreVerdict(verdict="stored"))
        assert (await asyncio.wait_for(sending, LIMIT_S)).verdict == "stored"
        await pusher.close()
        await puller.close()


def _meta():
    from asyncrl.protocol.trajectories import Locator, TrajectoryMeta

    return TrajectoryMeta(
        ticket_id="t",
        locator=Locator(0, 0),
        attempt=1,
        head=0,
        keys=[],
        seqlens=[1],
        response_lengths=[1],
        rewards=[0.0],
        version_start=[0],
        version_end=[0],
        birth_time=0.0,
    )


# --------------------------------------------------------------------------------------------------------------------- HTTP


@contextlib.asynccontextmanager
async def application():
    """An endpoint made as the processes make theirs. Yields its URL."""

    async def read(request):
        return web.Response(body=await request.read())

    async with listen_routes(web.route("*", "/echo", read), host="127.0.0.1") as url:
        yield url


WRONG = [
    {},
    {TOKEN_HEADER: ""},
    {TOKEN_HEADER: "Bearer"},
    {TOKEN_HEADER: "Bearer "},
    {TOKEN_HEADER: f"Bearer {Secrets.make().token}"},
    {TOKEN_HEADER: "Basic cm9vdDpyb290"},
    {TOKEN_HEADER: "Bearer \udcff"},
]


async def test_http_answers_the_run_and_refuses_strangers(run):
    wrong = [*WRONG, {TOKEN_HEADER: run.token}, {TOKEN_HEADER: f"Basic {run.token}"}]
    async with application() as url, aiohttp.ClientSession() as strange:
        for headers in wrong:
            for path in ("/echo", "/nothing"):
                with contextlib.suppress(UnicodeEncodeError):
                    async with strange.post(url + path, data=b"x", headers=headers) as answer:
                        assert answer.status == 401, headers
                        assert b"x\n" not in await answer.read()
        async with open_session(max_connections=1) as session, session.post(f"{url}/echo", data=b"ours") as answer:
            assert (answer.status, await answer.read()) == (200, b"ours")


async def test_without_authentication_nobody_is_asked_for_a_token():
    async with application() as url, aiohttp.ClientSession() as anybody, anybody.get(f"{url}/echo") as answer:
        assert answer.status == 200


async def test_listen_http_refuses_strangers_before_it_calls_the_server(run):
    async def answer(request):
        called.append(request.path)
        return web.Response()

    called: list[str] = []
    async with listen_http(answer, "127.0.0.1", max_body_bytes=100) as url:
        async with aiohttp.ClientSession() as strange, strange.post(f"{url}/echo", data=b"x") as reply:
            assert (reply.status, called) == (401, [])
        async with open_session(max_connections=1) as session, session.get(f"{url}/echo") as reply:
            assert (reply.status, called) == (200, ["/echo"])


async def test_the_manager_refuses_strangers_before_it_reads_them(run):
    target = ServerTarget(MemoryNameResolver(uuid.uuid4().hex), Names("e", "t"), allocated=1, new_id=lambda: "i")
    unused: Any = None
    service = ManagerService(
        Ledger(ServerTable(), batch_size=4, eta=1, nonce="x"), target, unused, SYSTEM_CLOCK, newest_attempt=unused
    )
    async with listen_http(service.answer, "127.0.0.1", max_body_bytes=1_000_000) as url:
        async with aiohttp.ClientSession() as strange:
            for path in ("/metrics", "/health", "/report", "/allocate_rollout", "/scale", "/servers", "/nothing"):
                for headers in ({}, {TOKEN_HEADER: f"Bearer {Secrets.make().token}"}):  # no token, and a forged one
                    async with strange.post(url + path, data=b'{"generation": 2}', headers=headers) as answer:
                        assert answer.status == 401
            assert await target.get() == 1
        async with open_session(max_connections=1) as session, session.get(f"{url}/health") as answer:
            assert answer.status == 200
        body = b'{"generation": 2}'
        async with open_session(max_connections=1) as session, session.post(f"{url}/scale", data=body) as answer:
            assert (answer.status, (await answer.json())["target"]) == (200, 2)


# --------------------------------------------------------------------------------------------------------------------- files


def test_secrets_are_their_owners_only(tmp_path):
    secrets = Secrets.make()
    security.write_secrets(tmp_path, Secrets.make())
    security.write_secrets(tmp_path, secrets)
    folder = security.secrets_dir(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "keys.json": 0o600,
        "token": 0o600,
    }
    assert security.read_secrets(tmp_path) == secrets
    assert (folder / "token").read_text().strip() == secrets.token
    security.remove_secrets(tmp_path, Secrets.make())  # a launch before, which ends late
    assert security.read_secrets(tmp_path) == secrets
    security.remove_secrets(tmp_path, secrets)
    assert not folder.exists()


def test_secrets_that_cannot_be_trusted_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist, but network\.authenticate is on"):
        security.read_secrets(tmp_path)
    security.write_secrets(tmp_path, Secrets.make())
    path = security.secrets_dir(tmp_path) / "keys.json"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640"):
        security.read_secrets(tmp_path)
    path.chmod(0o600)
    path.write_text('{"server_public": 1}')
    with pytest.raises(ConfigError, match="cannot be read"):
        security.read_secrets(tmp_path)


def test_secrets_do_not_show_in_what_is_printed():
    secrets = Secrets.make()
    shown = f"{secrets} {secrets!r} {Security(secrets)!r} {[secrets]}"
    assert not any(value in shown for value in (secrets.token, secrets.server_secret, secrets.client_secret))


def load(tmp_path, *overrides):
    file = tmp_path / "run.yaml"
    file.write_text('{model_path: m, prompts: {path: p}, rollout: {tasks: {default: {reward: "r.py:r"}}}}')
    return load_experiment(file, [f"fileroot={tmp_path}", "cluster=hosts", "hosts=[a,b]", *overrides])


@pytest.mark.parametrize(("access", "handed_out"), [({"user": "me"}, True), ({"cert_file": "c"}, True), ({}, False)])
def test_secrets_travel_through_name_resolve_only_where_not_everybody_reads_it(tmp_path, access, handed_out):
    secrets, there = Secrets.make(), tmp_path / "there"
    config = load(tmp_path)
    with MemoryNameResolver(uuid.uuid4().hex) as resolver:
        service = NameService(config, NameResolveConfig(endpoints=["h:1"], **access), resolver, print)
        service.hand_out(secrets)
        record = HostRecord(host="b", incarnation="i", address="10.0.0.2", gpus=[], cores=1, memory_bytes=1, pid=1)
        tether = Tether(0.0, cut_off_limit_s=1.0, wait_s=1.0)
        link = _LauncherLink(resolver, Names(config.experiment, config.trial), record, config, tether, there)
        try:
            link._take_secrets()
        finally:
            link.close()
    if handed_out:
        assert security.read_secrets(there) == secrets
    else:
        with pytest.raises(ConfigError, match=r"does not exist, but network\.authenticate is on"):
            security.read_secrets(there)


def test_a_process_of_a_run_that_authenticates_does_not_start_without_secrets(tmp_path):
    on, off = NetworkConfig(authenticate="on"), NetworkConfig(authenticate="off")
    assert security.open_security(tmp_path, off) is None
    with pytest.raises(ConfigError, match=r"does not exist, but network\.authenticate is on"):
        security.open_security(tmp_path, on)
    security.write_secrets(tmp_path, Secrets.make())
    assert security.open_security(tmp_path, on) is not None


# ----------------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and a certificate for 127.0.0.1 that it has signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout")
    openssl("req", "-x509", *new_key, "ca.key", "-out", "ca.pem", "-subj", "/CN=run authority", "-days", "2")
    openssl("req", *new_key, "host.key", "-out", "host.csr", "-subj", "/CN=host")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "host.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-out", "host.pem", "-days", "2", "-extfile", "names"),
    )
    return folder


async def test_http_over_tls(certificates, tmp_path):
    network = NetworkConfig(
        authenticate="on",
        tls_cert=str(certificates / "host.pem"),
        tls_key=str(certificates / "host.key"),
        tls_ca=str(certificates / "ca.pem"),
    )
    secrets = Secrets.make()
    with secured_by(Security.of(tmp_path, secrets, network)):
        async with application() as url:
            assert url.startswith("https://127.0.0.1:")
            async with open_session(max_connections=1) as session, session.post(f"{url}/echo", data=b"ours") as answer:
                assert (answer.status, await answer.read()) == (200, b"ours")
            async with aiohttp.ClientSession() as strange:
                with pytest.raises(aiohttp.ClientConnectorCertificateError):
                    await strange.get(f"{url}/echo")
                with pytest.raises(aiohttp.ClientError):
                    await strange.get(url.replace("https", "http") + "/echo")


async def test_a_run_on_tcp_proves_itself_by_its_own_certificate_before_it_is_told_a_secret(tmp_path):
    """A stranger may take over the port of a dead process."""
    ours, strange = tmp_path / "ours", tmp_path / "strange"
    for run_dir in (ours, strange):
        security.write_secrets(run_dir, Secrets.make(*make_certificate(["127.0.0.1"])))
    own, others = (security.open_security(run_dir, NetworkConfig(authenticate="on")) for run_dir in (ours, strange))
    with secured_by(own):
        async with application() as url, open_session(max_connections=1) as session:
            assert url.startswith("https://127.0.0.1:")
            async with session.post(f"{url}/echo", data=b"ours") as answer:
                assert (answer.status, await answer.read()) == (200, b"ours")
            with secured_by(others):
                async with application() as url_of_a_stranger:
                    with pytest.raises(aiohttp.ClientConnectorCertificateError):
                        await session.post(f"{url_of_a_stranger}/echo", data=b"ours")


async def test_connections_that_show_no_key_hold_little_memory():
    """Each connection announces a command of 200 MB within ZeroMQ's handshake, and sends all but its end."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    command = b"\x06" + (200_000_000).to_bytes(8, "big")

    def hold(address):
        stranger = socket.create_connection(address, timeout=LIMIT_S)
        stranger.sendall(greeting)
        with contextlib.suppress(OSError):  # the receiver hangs up
            stranger.sendall(command)
            for _ in range(190):
                stranger.sendall(bytes(1_000_000))
        return stranger

    with secured_by(Security(Secrets.make())):
        pull = ZmqTransport(zmq.Context.instance()).bind_pull(
            "127.0.0.1", queue_messages=8, max_frame_bytes=256_000_000
        )
        host, _, port = pull.address.removeprefix("tcp://").rpartition(":")
        before = psutil.Process().memory_info().rss
        strangers = [await asyncio.to_thread(hold, (host, int(port))) for _ in range(3)]
        assert psutil.Process().memory_info().rss - before < 50_000_000
        for stranger in strangers:
            stranger.close()
        pull.close()


def connect_until_refused(address, most):
    """Open silent connections until the port answers no more."""
    connections = []
    with contextlib.suppress(TimeoutError):
        for _ in range(most):
            connections.append(socket.create_connection(address, timeout=1.0))
    return connections


async def test_a_flood_of_connections_is_not_answered_and_leaves_room_again(monkeypatch):
    monkeypatch.setattr(doorkeeper, "MAX_CONNECTIONS", 8)
    secrets = Secrets.make()
    async with receiving(secrets) as (port, delivered, _):
        with stranger(port, lambda push: security.guard_push(push, secrets)):
            assert await asyncio.wait_for(delivered.get(), LIMIT_S) == b"a stranger's"
            flood = await asyncio.to_thread(connect_until_refused, ("127.0.0.1", port), 500)
            assert 7 <= len(flood) < 500
        for connection in flood:
            connection.close()
        with stranger(port, lambda push: security.guard_push(push, secrets)):
            assert await asyncio.wait_for(delivered.get(), LIMIT_S) == b"a stranger's"


async def test_http_waits_for_few_strangers_and_hangs_up_on_them(run, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_STRANGERS", 8)
    monkeypatch.setattr(http_server, "STRANGER_S", 0.5)
    async with application() as url, open_session(max_connections=1) as session:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        async with session.post(f"{url}/echo", data=b"ours") as answer:
            assert await answer.read() == b"ours"
        strangers = [socket.create_connection(address, timeout=LIMIT_S) for _ in range(20)]
        async with session.post(f"{url}/echo", data=b"ours") as answer:  # on its existing connection
            assert await answer.read() == b"ours"
        async with open_session(max_connections=1) as later, later.post(f"{url}/echo", data=b"later") as answer:
            assert await answer.read() == b"later"
        for stranger in strangers:
            assert await asyncio.to_thread(stranger.recv, 1) == b""
            stranger.close()


async def test_a_stranger_that_hangs_up_leaves_room_at_once(run, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_STRANGERS", 8)
    monkeypatch.setattr(http_server, "STRANGER_S", 10 * LIMIT_S)
    async with application() as url, open_session(max_connections=1) as session:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for stranger in [socket.create_connection(address, timeout=LIMIT_S) for _ in range(20)]:
            stranger.close()
        async with asyncio.timeout(LIMIT_S), session.post(f"{url}/echo", data=b"ours") as answer:
            assert await answer.read() == b"ours"


@pytest.mark.parametrize("sizes", [[10], [10, 0, PART_BYTES], [10, 0, PART_BYTES + 1, 3], [3 * PART_BYTES, 5]])
async def test_encrypted_messages_of_any_size_arrive_as_they_were(sizes):
    sent = [os.urandom(size) for size in sizes]
    with secured_by(Security(Secrets.make())):
        transport = ZmqTransport(zmq.Context.instance())
        pull = transport.bind_pull("127.0.0.1", queue_messages=8, max_frame_bytes=256_000_000)
        arrived = asyncio.get_running_loop().create_future()
        pull.listen(lambda frames: arrived.set_result([bytes(frame) for frame in frames]), arrived.set_exception)
        push = transport.connect_push(pull.address, queue_messages=8)
        assert push.send_nowait(sent)
        assert await asyncio.wait_for(arrived, LIMIT_S) == sent
        push.close()
        pull.close()


@pytest.mark.parametrize("first", [b"1234567", (9).to_bytes(8, "little"), bytes(16), (1 << 60).to_bytes(8, "little")])
def test_parts_that_are_no_message_are_left_to_the_channel(first):
    parts = [first, b"12345678"]
    assert joined(parts) == parts


def test_certificates_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "bad.pem").write_text("no certificate")
    for path in (tmp_path / "bad.pem", tmp_path / "none.pem"):
        with pytest.raises(ConfigError, match=path.name):
            Security.of(tmp_path, Secrets.make(), NetworkConfig(authenticate="on", tls_cert=str(path)))


def test_a_receiver_that_closes_at_once_leaves_its_doorkeeper_without_an_error():
    with zmq.Context() as context, context.socket(zmq.PAIR) as monitor:
        monitor.bind("inproc://monitor")
        events = context.socket(zmq.PAIR)
        events.connect("inproc://monitor")
        closed = 999_999  # no such descriptor
        for event, value in ((zmq.EVENT_LISTENING, closed), (zmq.EVENT_MONITOR_STOPPED, 0)):
            monitor.send_multipart([struct.pack("=hi", event, value), b"tcp://127.0.0.1:1"])
        doorkeeper._watch(events)
