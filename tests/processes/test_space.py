"""Too little space: for etcd's data during a run, and for open files in a working process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from asyncrl.config.schema import ExperimentConfig, NameResolveConfig, NetworkConfig
from asyncrl.launch.name_service import NameService
from asyncrl.launch.rundir import LaunchError, read_record
from asyncrl.protocol.names import Names
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run
from tests.support.live_runs import told_by

LIMIT_S = 100.0  # for one wait, on a busy machine

pytestmark = pytest.mark.timeout(300)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.05)


def fill(disk: Path) -> None:
    with (disk / "filling").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass


def test_a_disk_that_fills_up_under_etcd(mount: Callable[[str], Path]) -> None:
    """The launcher removes etcd's data, which frees space, and all sessions put their entries again. If that is not enough, the run
    ends."""
    disk = mount("size=200m")
    notices: list[str] = []
    service = NameService.open(
        ExperimentConfig(experiment="e", trial="t", network=NetworkConfig(authenticate="off")),
        disk,
        disk / "etcd.log",
        notices.append,
    )
    try:
        lease = service.grant_lease()
        name = Names("e", "t").gserver_manager()
        with open_name_resolver(NameResolveConfig(endpoints=service.endpoints)) as worker:
            worker.add(name, "http://here", lease=lease.id)
            assert service._etcd is not None
            server = service._etcd._server

            def tear_its_data() -> None:
                """Leave data on which etcd cannot start, as failed writes do. They take as much space as the data of a new etcd.
                etcd is frozen, so that it does not die too early."""
                wait_until(lambda: any(server.data_dir.rglob("*.tmp")), "etcd has reserved space for its next log")
                os.kill(server.pid, signal.SIGSTOP)
                with next(server.data_dir.rglob("db")).open("r+b") as file:
                    file.write(b"torn" * 4096)

            tear_its_data()
            fill(disk)
            os.kill(server.pid, signal.SIGKILL)

            def runs_again() -> bool:
                service.turn()
                return "etcd runs again" in notices

            wait_until(runs_again, f"etcd runs again: {notices}")
            assert any("it is started without" in notice for notice in notices)
            assert worker.wait(name, LIMIT_S) == "http://here"

            (disk / "filling").unlink()
            tear_its_data()  # with undamaged data etcd could start without free space
            fill(disk)
            told = r"etcd ended and could not be started again: .*The disk is full"
            with ExitStack() as held:  # files that are open keep their space after they are removed
                for file in server.data_dir.rglob("*"):
                    if file.is_file():
                        held.enter_context(file.open("rb"))
                os.kill(server.pid, signal.SIGKILL)
                with pytest.raises(LaunchError, match=f"(?s){told}"):
                    wait_until(lambda: bool(service.turn()), "the end is told")
    finally:
        service.close()


def no_more_files(process: psutil.Process) -> None:
    """Open files stay open, and no further file can be opened."""
    _, highest = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, highest))


def test_processes_that_have_too_few_open_files(tmp_path: Path) -> None:
    """The manager lets new clients wait. A rollout worker that cannot ask for tokens ends the run with the reason."""
    config = make_tiny_run(tmp_path / "tiny")
    with launch(config, f"fileroot={tmp_path}", "train.num_epochs=1000", "train.max_steps=0") as run:
        step = run.wait_for_step(1, LIMIT_S)["step"]
        record = read_record(run.run_dir)
        assert record is not None
        with open_name_resolver(NameResolveConfig(endpoints=record.endpoints)) as resolver:
            url = resolver.get(Names(record.experiment, record.trial).gserver_manager())
        manager, log = run.worker("gserver_manager/0"), run.run_dir / "logs" / "attempt_1" / "gserver_manager_0.log"
        limits = manager.rlimit(psutil.RLIMIT_NOFILE)

        no_more_files(manager)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(told_by, run, f"{url}/metrics")
            wait_until(lambda: "Too many open files" in log.read_text(), "the manager says so")
            time.sleep(3.0)  # it retries every second, and logs this once
            assert not asked.done()
            manager.rlimit(psutil.RLIMIT_NOFILE, limits)
            assert "asyncrl_manager_live" in asked.result(LIMIT_S)
        (told,) = [line for line in log.read_text().splitlines() if line.endswith("trying again")]
        assert "Too many open files: the soft limit is 3, sockets and pipes included" in told
        run.wait_for_step(step + 3, LIMIT_S)

        no_more_files(run.worker("rollout_worker/0"))
        run.worker("generation_server/0").kill()  # the next one has another address
        assert run.wait(LIMIT_S) == 1
        assert "failed: rollout_worker/0 failed" in run.output()
        assert "Too many open files: the soft limit is 3, sockets and pipes included" in run.output()
        assert "set rollout.max_concurrent_per_worker=... lower" in run.output()
        assert "Traceback" not in run.output()
    assert_nothing_left(run.run_dir)
