"""The worker base: lifecycle, named waits, and reports of errors. In one process, with the memory name resolve."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import ConfigError, NameResolveConfig, RuntimeConfig
from asyncrl.protocol.errors import RunEndedError
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime import board as board_module
from asyncrl.runtime.board import WaitTimeoutError
from asyncrl.runtime.disk import StorageError
from asyncrl.runtime.names.interface import NameResolveTimeout
from asyncrl.runtime.system import STATUS_FD_ENV
from asyncrl.runtime.worker import Worker
from tests.support.memory_names import memory_system, open_names

MEMORY = NameResolveConfig(endpoints=["memory://"])


def make_info(**runtime):
    return WorkerInfo(
        kind="rollout_worker",
        index=1,
        count=2,
        experiment="e",
        trial="t",
        attempt=1,
        run_dir="/nowhere",
        seed=1,
        name_resolve=MEMORY,
        runtime=RuntimeConfig(**runtime),
    )


class Recorder(Worker):
    """Records its states. `work` is called in run."""

    def __init__(self, work, status_interval_s=0.5, **runtime):
        super().__init__(make_info(**runtime), memory_system(status_interval_s=status_interval_s))
        self.stations = []
        self._work = work

    async def run(self, directory, opened):
        self.directory = directory
        self.stations.append(("open", self.board.state))
        opened.callback(lambda: self.stations.append(("close", self.board.state)))
        self.began()
        self.stations.append(("run", self.board.state))
        await self._work(self)


async def test_states_of_a_worker_from_its_start_to_done():
    async def nothing(worker):
        pass

    worker = Recorder(nothing)
    await worker.main()
    assert worker.stations == [("open", "starting"), ("run", "running"), ("close", "stopping")]
    assert worker.board.state == "done"


async def test_stopping_cancels_run_and_closes():
    async def forever(worker):
        worker.stopping.set()
        await asyncio.Event().wait()

    worker = Recorder(forever)
    await worker.main()
    assert worker.stations[-1] == ("close", "stopping")
    assert worker.board.state == "stopped"  # its work was not done


async def test_an_error_in_run_is_reported_with_its_traceback():
    async def fail(worker):
        raise ZeroDivisionError("the first cause")

    worker = Recorder(fail)
    with pytest.raises(ZeroDivisionError):
        await worker.main()
    assert worker.board.state == "error"
    assert "the first cause" in worker.board.error
    assert "Traceback" in worker.board.error
    assert not worker.board.fatal


@pytest.mark.parametrize("error", [ConfigError("a field"), StorageError("no room"), RunEndedError("too many rejected")])
async def test_an_error_that_would_recur_in_a_new_process_is_fatal(error):
    async def fail(worker):
        raise error

    worker = Recorder(fail)
    with pytest.raises(type(error)):
        await worker.main()
    assert worker.board.snapshot().fatal


async def test_a_background_task_that_fails_ends_the_worker():
    async def background():
        raise OSError("from the background")

    async def forever(worker):
        worker.tasks.spawn(background(), "background")
        await asyncio.Event().wait()

    with pytest.raises(OSError, match="from the background"):
        await Recorder(forever).main()


async def test_a_bounded_wait_is_named_in_the_status_and_in_its_error():
    seen = []

    async def wait(worker):
        async def look():
            seen.extend(worker.board.snapshot().waits)
            await asyncio.Event().wait()

        await worker.board.bounded(look(), what="a batch", on="head 0", limit_s=0.01)

    with pytest.raises(WaitTimeoutError, match=r"waited 0.01 s for a batch from head 0"):
        await Recorder(wait).main()
    assert [(w.what, w.on, w.limit_s) for w in seen] == [("a batch", "head 0", 0.01)]


async def test_a_wait_ends_at_the_limit_that_it_shows():
    """The wait has already lasted 184.99 s: its limit of 180 s, and nearly all of the 5 s in which the call may end itself."""
    seen = []

    async def wait(worker):
        async with worker.board.waiting("a verdict", on="head 0", limit_s=180.0, waited_s=184.99):
            seen.extend(worker.board.snapshot().waits)
            await asyncio.Event().wait()

    worker = Recorder(wait)
    with pytest.raises(WaitTimeoutError, match=r"waited 180 s for a verdict from head 0"):
        await worker.main()
    assert [wait.limit_s for wait in seen] == [180.0]
    assert not worker.board.snapshot().waits


async def test_a_wait_raises_the_error_of_a_call_that_ends_itself():
    async def wait(worker):
        async with worker.board.waiting("a verdict", on="head 0", limit_s=0.01):
            await asyncio.sleep(0.02)
            raise TimeoutError("head 0 answered 3 of 4 frames")

    with pytest.raises(TimeoutError, match="3 of 4 frames"):
        await Recorder(wait).main()


async def test_a_wait_without_a_limit_shows_no_limit(caplog, monkeypatch):
    monkeypatch.setattr(board_module, "LONG_WAIT_S", 0.0)
    seen = []

    async def wait(worker):
        with worker.board.showing("room", on="rollouts"):
            await asyncio.sleep(0.01)
            seen.extend(worker.board.snapshot().waits)

    await Recorder(wait).main()
    assert [wait.limit_s for wait in seen] == [None]
    assert "waiting for room from rollouts for 0 s (no limit)" in caplog.text


async def test_a_timeout_of_the_awaited_call_is_raised_unchanged():
    async def wait(worker):
        async def give_up():
            raise NameResolveTimeout("etcd did not answer within 5 s")

        await worker.board.bounded(give_up(), what="a key", on="etcd", limit_s=100.0)

    with pytest.raises(NameResolveTimeout, match="etcd did not answer within 5 s"):
        await Recorder(wait).main()


async def test_publishing_is_retried_during_an_outage():
    failures = [NameResolveTimeout("etcd did not answer"), NameResolveTimeout("etcd did not answer")]

    async def publish(worker):
        add = worker.directory.resolver.add

        def flaky(*args, **kwargs):
            if failures:
                raise failures.pop()
            add(*args, **kwargs)

        worker.directory.resolver.add = flaky
        await worker.directory.publish(worker.names.gserver_manager(), "http://here")
        assert worker.directory.resolver.get(worker.names.gserver_manager()) == "http://here"

    await Recorder(publish).main()
    assert failures == []


async def test_waiting_for_a_key_that_is_never_published_has_a_limit():
    async def wait(worker):
        await worker.directory.wait_for_key(worker.names.gserver_manager(), "the manager's address")

    with pytest.raises(WaitTimeoutError, match="the manager's address from asyncrl/e/t/gserver_manager"):
        await Recorder(wait, start_timeout_s=0.05).main()


async def test_published_keys_are_removed_when_the_worker_ends():
    async def publish(worker):
        await worker.directory.publish(worker.names.generation_server(0), "http://here")
        assert await worker.directory.wait_for_key(worker.names.generation_server(0), "server") == "http://here"
        async for event in worker.directory.watch(worker.names.generation_servers(), subtree=True):
            assert (event.kind, event.value) == ("put", "http://here")
            break

    worker = Recorder(publish)
    await worker.main()
    with open_names(MEMORY) as resolver:
        assert resolver.get_subtree(worker.names.generation_servers()) == {}


async def test_the_last_status_in_the_pipe_is_the_error(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setenv(STATUS_FD_ENV, str(writer))

    async def fail(worker):
        raise ValueError("for the launcher")

    with pytest.raises(ValueError, match="for the launcher"):
        await Recorder(fail).main()
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        last = msgspec.json.decode(pipe.read().splitlines()[-1], type=WorkerStatus)
    assert (last.worker, last.state) == ("rollout_worker/1", "error")
    assert "for the launcher" in last.error


async def test_a_change_of_state_is_reported_at_once(monkeypatch):
    """Otherwise a run that is stopped right after its start would not know that its master runs, and would write no checkpoint."""
    reader, writer = os.pipe()
    monkeypatch.setenv(STATUS_FD_ENV, str(writer))
    loop = asyncio.get_running_loop()
    told = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), os.fdopen(reader, "rb"))

    async def heard(worker):
        state = ""
        while state != "running":
            line = await asyncio.wait_for(told.readline(), 30)
            state = msgspec.json.decode(line, type=WorkerStatus).state

    await Recorder(heard, status_interval_s=3600.0).main()
    os.close(writer)


LATE_SIGNAL = """
import asyncio, os, signal, sys
from tests.unit.test_worker import Recorder
from asyncrl.runtime.worker import run_worker

async def nothing(worker):
    await asyncio.to_thread(int)  # its thread still exists when the worker is done

code = run_worker(Recorder(nothing))
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
"""


def test_a_stop_signal_after_the_end_of_the_worker_does_not_kill_it():
    """The launcher may send the signal before it has read that the process is done. The process must still end without an error."""
    done = subprocess.run(
        [sys.executable, "-c", LATE_SIGNAL], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
