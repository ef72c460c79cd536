"""The scanner of tests/hosts, tried on servers that answer and servers that do not."""

import asyncio
import contextlib

import zmq
from aiohttp import web

from asyncrl.runtime import security
from asyncrl.runtime.certificates import make_certificate
from asyncrl.runtime.http_server import listen_routes
from asyncrl.runtime.names.etcd.server import EtcdTls
from asyncrl.runtime.security import Secrets, Security
from asyncrl.runtime.transport import ZmqTransport
from asyncrl.weights.update_group import serve_store
from tests.support import scanner
from tests.support.etcd_server import EtcdServer
from tests.support.process_wide import secured_by
from tests.support.scanner import scan

PATIENT_S = 10.0  # for an answer that must come, from a slow server


def test_an_etcd_gives_strangers_nothing_where_it_asks_for_a_certificate(tmp_path, monkeypatch):
    security.write_secrets(tmp_path, Secrets.make(*make_certificate(["127.0.0.1"])))
    with EtcdServer(tmp_path / "one", tmp_path / "log", tls=EtcdTls.of_run(tmp_path)) as guarded:
        assert scan([guarded.endpoint]) == {guarded.endpoint: []}
    monkeypatch.setattr(scanner, "LIMIT_S", PATIENT_S)
    with EtcdServer(tmp_path / "two", tmp_path / "log", extra_args=["--enable-grpc-gateway"]) as unguarded:
        assert "HTTP /v3/kv/range: 200" in scan([unguarded.endpoint])[unguarded.endpoint]


async def healthy(request):
    return web.Response()


async def test_what_a_run_serves_is_found_only_where_it_does_not_authenticate(monkeypatch):
    monkeypatch.setattr(scanner, "HANDSHAKE_S", PATIENT_S)
    context = zmq.Context()
    found = {}
    for secured in (None, Security(Secrets.make())):
        with secured_by(secured):
            serving = listen_routes(web.get("/health", healthy), host="127.0.0.1")
            url = await serving.__aenter__()
            pull = ZmqTransport(context).bind_pull("127.0.0.1", queue_messages=8, max_frame_bytes=1 << 20)
            at_http, at_zmq = url.rpartition("/")[2], pull.address.rpartition("/")[2]
            with monkeypatch.context() as patch:
                patch.setattr(scanner, "LIMIT_S", PATIENT_S)
                found[secured is not None] = list((await asyncio.to_thread(scan, [at_http])).values())
            found[secured is not None] += (await asyncio.to_thread(scan, [at_zmq])).values()
            pull.close()
            await serving.__aexit__(None, None, None)
    await asyncio.to_thread(context.term)
    assert found[True] == [[], []]
    assert found[False] == [["HTTP /health: 200"], ["ZeroMQ NULL: let in"]]


async def test_an_answer_is_found_behind_many_connections_closed_without_a_word(monkeypatch):
    monkeypatch.setattr(scanner, "LIMIT_S", PATIENT_S)

    async def one_answer(reader, writer):
        with contextlib.suppress(OSError):
            if (await reader.read(1 << 16)).startswith(b"GET /v1/loads "):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(one_answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await asyncio.to_thread(scan, [address]) == {address: ["HTTP /v1/loads: 200"]}
    server.close()


def test_a_store_of_torch_is_found(monkeypatch):
    monkeypatch.setattr(scanner, "STORE_S", PATIENT_S)
    store, address = serve_store("127.0.0.1", 10.0)
    (answers,) = scan([address]).values()
    assert any("TCPStore" in answer for answer in answers)
    del store
