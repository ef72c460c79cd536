"""Unix sockets of a run on one machine: streams, HTTP and etcd, none on a TCP port."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import zmq
from aiohttp import web

from asyncrl.config.schema import NameResolveConfig
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.http_client import open_session
from asyncrl.runtime.http_server import serve
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.transport import ZmqTransport
from tests.support.etcd_server import EtcdServer
from tests.support.process_wide import sockets_in

LIMIT_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """A socket folder that this process uses."""
    made = unix_sockets.make_folder(tmp_path)
    with sockets_in(made):
        yield made
    unix_sockets.remove_folder(tmp_path)
    assert not Path(made).exists()


def test_the_folder_is_its_users_alone_and_that_of_a_dead_launcher_goes(tmp_path: Path) -> None:
    first = unix_sockets.make_folder(tmp_path)
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o700
    assert len(f"{first}/0123456789ab") < 104
    assert os.readlink(tmp_path / unix_sockets.LINK) == first
    second = unix_sockets.make_folder(tmp_path)  # the first launcher was killed
    assert not Path(first).exists()
    unix_sockets.remove_folder(tmp_path)
    assert not Path(second).exists()


def test_what_is_no_folder_of_ours_is_left(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / unix_sockets.LINK).symlink_to(other)
    unix_sockets.remove_folder(tmp_path)
    assert other.exists()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def copy_of(run_dir: Path) -> Path:
    """`cp -a RUN COPY`."""
    return shutil.copytree(run_dir, run_dir.with_name("copy"), symlinks=True)


@pytest.mark.parametrize("with_weights", [False, True])
def test_the_copy_of_a_run_leaves_the_folder_of_the_original(run_dir: Path, with_weights: bool) -> None:
    made = unix_sockets.make_folder(run_dir, with_weights=with_weights)
    copy = copy_of(run_dir)
    other = unix_sockets.make_folder(copy, with_weights=with_weights)  # the copy is resumed
    assert other != made
    assert os.readlink(copy / unix_sockets.LINK) == other
    assert (copy / "weights").exists() == with_weights
    unix_sockets.remove_folder(copy, other)
    assert not Path(other).exists()
    assert os.path.lexists(run_dir / "weights") == with_weights
    assert Path(made, unix_sockets.OWNER).exists()
    unix_sockets.remove_folder(run_dir, made)
    assert not Path(made).exists()
    assert os.listdir(run_dir) == []


def test_a_copy_in_the_place_of_the_original_leaves_its_folder(run_dir: Path) -> None:
    made = unix_sockets.make_folder(run_dir)
    copy = copy_of(run_dir)
    run_dir.rename(run_dir.with_name("moved"))
    copy.rename(run_dir)
    unix_sockets.remove_folder(run_dir)
    assert Path(made).exists()
    shutil.rmtree(made)


def test_an_old_launcher_leaves_the_folder_of_its_successor(run_dir: Path) -> None:
    first = unix_sockets.make_folder(run_dir, with_weights=True)
    second = unix_sockets.make_folder(run_dir, with_weights=True)
    unix_sockets.remove_folder(run_dir, first)  # the first launcher was frozen, and ends now
    assert (run_dir / "weights").is_dir()
    assert os.readlink(run_dir / unix_sockets.LINK) == second
    unix_sockets.remove_folder(run_dir, second)


def test_a_link_that_became_a_folder_is_named(run_dir: Path) -> None:
    (run_dir / unix_sockets.LINK).mkdir()
    with pytest.raises(OSError, match="is not a link"):
        unix_sockets.make_folder(run_dir)


def test_the_folder_outlives_its_users_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd removes $XDG_RUNTIME_DIR when the user logs out, but the run goes on in tmux."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert unix_sockets.make_folder(tmp_path).startswith("/tmp/asyncrl-")
    unix_sockets.remove_folder(tmp_path)


def test_without_a_place_for_it_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str, dir: str) -> str:
        raise PermissionError(13, "Permission denied", dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(PermissionError, match="/tmp"):
        unix_sockets.make_folder(tmp_path)


async def test_streams(folder: str) -> None:
    transport = ZmqTransport(zmq.Context.instance())
    pull = transport.bind_pull("127.0.0.1", queue_messages=8, max_frame_bytes=100)
    assert pull.address.startswith(f"ipc://{folder}/")
    arrived: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
    pull.listen(lambda frames: arrived.set_result([bytes(frame) for frame in frames]), arrived.set_exception)
    push = transport.connect_push(pull.address, queue_messages=8)
    assert push.send_nowait([b"a", b"bc"])
    assert await asyncio.wait_for(arrived, LIMIT_S) == [b"a", b"bc"]
    push.close()
    pull.close()
    for address in ("ipc:///tmp/a-strangers", f"ipc://{folder}/../x", "mem://x"):
        with pytest.raises(ValueError, match="nor a socket of this run"):
            transport.connect_push(address, queue_messages=8)


async def test_http(folder: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.path} {await request.text()}")

    app = web.Application()
    app.router.add_post("/a", answer)
    ours, others = web.AppRunner(app), web.AppRunner(web.Application())
    url = await serve(ours, "127.0.0.1")
    assert url.startswith("http://")
    assert url.endswith(".unix")
    assert (await serve(others, "127.0.0.1", for_others=True)).startswith("http://127.0.0.1:")
    async with open_session(max_connections=4) as session:
        async with session.post(f"{url}/a", data=b"x") as response:
            assert await response.text() == "/a x"
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.post("http://0123.unix/a")
        assert caught.value.errno == 2
    await ours.cleanup()
    await others.cleanup()


def test_etcd(folder: str, tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd", tmp_path / "etcd.log", socket_dir=folder) as server:
        assert server.endpoint.startswith(f"unix:{folder}/")
        assert [found for found in psutil.Process(server.pid).net_connections("inet")] == []
        with open_name_resolver(NameResolveConfig(endpoints=[server.endpoint])) as resolver:
            resolver.add("a/b", "1")
            server.kill()
            server.start()
            assert resolver.get("a/b") == "1"
            assert resolver.wait("a/b", LIMIT_S) == "1"
