"""Unusable run folders, ports and name services, and the remains of earlier attempts and releases."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from name_sessions import LIMIT_S, patient

from asyncrl.cli.commands.common import goes_on
from asyncrl.config.schema import ExperimentConfig, NameResolveConfig, NetworkConfig
from asyncrl.launch.name_service import NameService
from asyncrl.launch.rundir import (
    RUN_FORMAT,
    LaunchError,
    RunLock,
    RunRecord,
    begin_attempt,
    is_running,
    next_attempt,
    read_record,
    write_record,
)
from asyncrl.protocol.hosts import LauncherRecord
from asyncrl.protocol.names import Names
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.etcd.server import EtcdServerError
from tests.support.etcd_server import EtcdServer

RECORD = RunRecord(pid=4, attempt=1, experiment="e", trial="t", endpoints=["h:1"], started=3.0)

OTHER = Names("another", "run")


UNCHECKED = NetworkConfig(authenticate="off")  # no launcher has made secrets


@contextmanager
def name_service(run_dir: Path, *endpoints: str) -> Iterator[NameService]:
    """Open the name service as the launcher does. `endpoints` belong to no etcd and never answer."""
    name_resolve = NameResolveConfig(endpoints=list(endpoints), timeout_s=0.5 if endpoints else LIMIT_S)
    config = ExperimentConfig(experiment="e", trial="t", name_resolve=name_resolve, network=UNCHECKED)
    run_dir.mkdir(parents=True, exist_ok=True)
    service = NameService.open(config, run_dir, run_dir / "etcd.log", lambda text: None)
    try:
        yield service
    finally:
        service.close()


# ------------------------------------------------------------------------------------------------- etcd's data and its ports


def leave_data_of_another_run(data: Path) -> None:
    with (
        EtcdServer(data, data.with_name("old.log")) as server,
        open_name_resolver(patient(NameResolveConfig(endpoints=[server.endpoint]))) as resolver,
    ):
        resolver.add(OTHER.model_version("actor"), "a0007-v00000009")


def leave_junk(data: Path) -> None:
    for folder, name in (("snap", "db"), ("wal", "0000000000000000-0000000000000000.wal")):
        (data / "member" / folder).mkdir(parents=True)
        (data / "member" / folder / name).write_bytes(b"junk" * 1000)


@pytest.mark.parametrize("leave", [leave_data_of_another_run, leave_junk])
def test_data_of_an_etcd_before_is_not_read(tmp_path: Path, leave: Callable[[Path], None]) -> None:
    leave(tmp_path / "run" / "etcd")
    with (
        name_service(tmp_path / "run") as service,
        open_name_resolver(patient(NameResolveConfig(endpoints=service.endpoints))) as resolver,
    ):
        assert resolver.get_subtree(OTHER.root) == {}


def test_what_is_in_the_place_of_etcds_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "etcd").write_text("")
    with (
        pytest.raises(
            LaunchError,
            match=rf"{tmp_path}/etcd is left over from an earlier attempt and cannot be removed \(.*\); delete it",
        ),
        name_service(tmp_path),
    ):
        pass


def test_a_run_of_another_host_goes_on_until_the_key_of_its_launcher_is_gone(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "data", tmp_path / "log") as server:
        name_resolve = patient(NameResolveConfig(endpoints=[server.endpoint]))
        record = msgspec.structs.replace(RECORD, host="another", name_resolve=name_resolve)
        assert not goes_on(tmp_path, record)
        with open_name_resolver(name_resolve) as launcher:
            launcher.add(Names("e", "t").launcher(), "x", lease=launcher.grant_lease(30).id)
            assert goes_on(tmp_path, record)
        assert not goes_on(tmp_path, record)
        with open_name_resolver(name_resolve) as launcher:
            copy = tmp_path / "copy"
            copy.mkdir()
            leader = LauncherRecord(incarnation="i", host="another", run_dir=str(tmp_path), attempt=1)
            value = msgspec.json.encode(leader).decode()
            launcher.add(Names("e", "t").launcher(), value, lease=launcher.grant_lease(30).id)
            assert goes_on(tmp_path, record)
            assert not goes_on(copy, record)  # otherwise `stop` of a copy would stop the original
    assert not goes_on(tmp_path, record)  # the etcd that the record names has ended


def test_a_launcher_that_ends_late_leaves_the_keys_of_the_next(tmp_path: Path) -> None:
    """It was frozen until the lease of its claim had ended, and another launch took the name."""
    names = Names("e", "t")
    with EtcdServer(tmp_path / "data", tmp_path / "log") as server:
        name_resolve = patient(NameResolveConfig(endpoints=[server.endpoint]))
        config = ExperimentConfig(experiment="e", trial="t", name_resolve=name_resolve)
        first = NameService.open(config, tmp_path, tmp_path / "log", print)
        with open_name_resolver(name_resolve) as other:
            other.delete(names.owner())
            second = NameService.open(config, tmp_path, tmp_path / "log", print)
            second.resolver.add(names.gserver_manager(), "http://here")
            first.close()
            assert other.get(names.gserver_manager()) == "http://here"
            second.close()
            assert other.get_subtree("asyncrl") == {}


class NoEtcd(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


def test_an_endpoint_that_is_something_else(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), NoEtcd)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"127.0.0.1:{server.server_address[1]}"
    told = (
        rf"name_resolve\.endpoints=\['{endpoint}'\]: etcd did not answer .* check that an etcd listens there, or leave"
    )
    try:
        with pytest.raises(LaunchError, match=told), name_service(tmp_path, endpoint):
            pass
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_endpoint_that_takes_connections_and_says_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            pytest.raises(LaunchError, match=rf"\['{endpoint}'\]: etcd did not answer .* within 0\.5 s"),
            name_service(tmp_path, endpoint),
        ):
            pass


def test_etcd_on_a_disk_too_small_for_it_says_so(small_disk: Path) -> None:
    with pytest.raises(EtcdServerError, match="no space left on device"):
        EtcdServer(small_disk / "data", small_disk / "log").start()


# ------------------------------------------------------------------------------------------------------------- the run's folder


def test_a_folder_on_a_read_only_disk(read_only: Path) -> None:
    with pytest.raises(
        LaunchError, match=rf"folder {read_only}/e cannot be written: .*Read-only file system.*; set fileroot="
    ):
        RunLock(read_only / "e").acquire()


def test_a_folder_on_a_full_disk(small_disk: Path) -> None:
    with (small_disk / "filling").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096 and os.statvfs(small_disk).f_bfree > 0:
            pass
    lock = RunLock(small_disk)
    with pytest.raises(
        LaunchError, match=r"could not be written: No space left on device; 0 B of 8\.4 MB .* set fileroot="
    ):
        lock.acquire()
    assert not is_running(small_disk)
    (small_disk / "filling").unlink()
    lock.acquire()
    lock.release()


# ----------------------------------------------------------------------------------------------------------------------- remains


@pytest.mark.parametrize(
    "left", ["logs/attempt_7", "configs/attempt_7", "weights/actor/a0007-v00000003", "weights/ref/a0007-v00000000"]
)
def test_an_attempt_comes_after_all_that_left_something(tmp_path: Path, left: str) -> None:
    """A new attempt gets a higher number than each attempt that left a folder, even if a user has deleted the logs. Thus no version
    is written twice, and no two attempts share a journal's lines."""
    (tmp_path / left).mkdir(parents=True)
    (tmp_path / "summary.json").write_text("{}")
    assert next_attempt(tmp_path) == 8
    assert begin_attempt(tmp_path) == 8
    assert (tmp_path / "logs" / "attempt_7" / "summary.json").is_file()
    assert not (tmp_path / "summary.json").exists()


def test_a_run_of_another_release_is_not_mixed_with_ours(tmp_path: Path) -> None:
    newer = msgspec.to_builtins(RECORD) | {"format": RUN_FORMAT + 1, "release": "9.0", "endpoints": {"new": "kind"}}
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(newer))
    with pytest.raises(
        LaunchError, match=rf"was written by asyncrl 9\.0 in format {RUN_FORMAT + 1}; .* use that release"
    ):
        read_record(tmp_path)
    with pytest.raises(LaunchError, match=rf"use that release.* choose another trial=\.\.\., or move {tmp_path} away"):
        begin_attempt(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]  # unchanged


@pytest.mark.parametrize("content", [b"", b'{"pid": 1', b"\xff\xfe", b"[]", b'{"pid": "four"}'])
def test_a_broken_record_is_named_and_nothing_begins_over_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(LaunchError, match=r"run\.json cannot be read: .* choose another trial=\.\.\., or move"):
        begin_attempt(tmp_path)


def test_a_record_from_before_formats_were_counted_is_ours(tmp_path: Path) -> None:
    old = {key: value for key, value in msgspec.to_builtins(RECORD).items() if key not in {"format", "release"}}
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(old))
    record = read_record(tmp_path)
    assert record is not None
    assert record.pid == 4
    write_record(tmp_path, RECORD)
    assert msgspec.json.decode((tmp_path / "run.json").read_bytes())["format"] == RUN_FORMAT
