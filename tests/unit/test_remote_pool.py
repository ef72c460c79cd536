"""The launcher's pool of processes on several hosts: how long it waits for host daemons at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest

from asyncrl.config.schema import ExperimentConfig, NetworkConfig
from asyncrl.launch.hosts.remote_pool import RemoteProcessPool
from asyncrl.protocol.hosts import HostRecord, LauncherRecord
from asyncrl.protocol.names import Names
from tests.support.memory_names import MemoryNameResolver

CUT_OFF, THERE = "10.0.0.2", "10.0.0.1"


@pytest.mark.parametrize(
    ("lost_after_s", "cable_s", "hears"), [(30.0, 20.0, True), (3.0, 12.0, True), (30.0, 31.0, False)]
)
def test_a_host_that_is_cut_off_at_the_end_of_a_run_is_waited_for_until_it_is_lost(
    tmp_path: Path, lost_after_s: float, cable_s: float, hears: bool
) -> None:
    config = ExperimentConfig(
        cluster="hosts", hosts=[THERE, CUT_OFF], network=NetworkConfig(host_lost_after_s=lost_after_s)
    )
    names = Names(config.experiment, config.trial)
    with MemoryNameResolver(str(tmp_path)) as resolver:
        service = MagicMock(resolver=resolver)
        service.watch_checked = lambda key, callback: resolver.watch(key, callback, subtree=True)
        pool = RemoteProcessPool(config, service, tmp_path, own_host=THERE, attempt=1, notice=print, say=print)
        record = HostRecord(
            host=CUT_OFF, incarnation="d", address=CUT_OFF, gpus=[], cores=1, memory_bytes=1 << 34, pid=1
        )
        resolver.add(names.host_daemon(CUT_OFF), msgspec.json.encode(record).decode())

        def cable_is_back(ended: Callable[[], bool], limit_s: float) -> bool:
            """The daemon reads the launcher's record, and ends, if that comes within the limit."""
            assert not ended()
            if limit_s >= cable_s:
                told = msgspec.json.decode(resolver.get(names.launcher()), type=LauncherRecord)
                assert told.ends
                pool._daemons.clear()
            return ended()

        pool._news = MagicMock()
        pool._news.wait_for = cable_is_back
        pool.close()
        assert (not pool._daemons) == hears
