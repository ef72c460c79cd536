"""Read the name resolve entries of a live run, and freeze processes while clients wait for them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec
import psutil

from asyncrl.launch.rundir import read_record
from asyncrl.protocol.names import Names
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.testing.runs import RunHandle, journal
from tests.support.process_wide import sockets_in

AT_WORK_S = 1.0  # a client that has waited this long after the freeze has sent its request, and no answer is on its way
LOOK_S = 5.0  # time limit for observing such a wait
NEWER_LIMIT_S = 400.0


def told_by(run: RunHandle, url: str) -> str:
    """The answer of an HTTP endpoint of this run, which must use Unix sockets, to a client with the run's token."""
    return ask(run, "GET", url)[1]


def ask(run: RunHandle, method: str, url: str, body: str = "", *, token: str = "") -> tuple[int, str]:
    """Status and answer of an HTTP endpoint of this run, which must use Unix sockets. token: "" stands for the run's own."""
    parts, token = urlsplit(url), token or (run.run_dir / "secrets" / "token").read_text().strip()
    with sockets_in(os.readlink(run.run_dir / unix_sockets.LINK)):
        connection = unix_sockets.Connection(unix_sockets.path_of(parts.hostname or ""), timeout_s=30.0)
    with contextlib.closing(connection):
        connection.request(method, parts.path, body or None, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def entry(run: RunHandle, key: Callable[[Names], str]) -> str:
    """Wait for a name resolve entry and return its value. This may take long on a busy machine."""
    record = read_record(run.run_dir)
    assert record is not None
    with open_name_resolver(replace(record.names_at, timeout_s=60.0)) as resolver:
        return resolver.get(key(Names(record.experiment, record.trial)))


def newest_version(run: RunHandle, server: int) -> str:
    """The version of the weights with which the server sampled last."""
    lines = journal(run.run_dir, f"generation_server_{server}")
    return str(lines[-1]["version"]) if lines else ""


def serves_newer(run: RunHandle, server: int, than: str) -> None:
    run.wait_until(
        lambda: newest_version(run, server) > than,
        f"generation_server/{server} served newer weights than {than}",
        NEWER_LIMIT_S,
    )


def freeze_at_work(run: RunHandle, victims: Callable[[], Iterable[psutil.Process]]) -> tuple[list[psutil.Process], str]:
    """Freeze server 0, or the engine process that it owns, while clients wait for it. Return the frozen processes and the
    server's newest version at that time.

    The server may be idle (in an update, or because all admitted work is done). The processes are then resumed, and frozen again
    once the server has served a newer version.
    """
    deadline = time.monotonic() + NEWER_LIMIT_S
    while True:
        frozen = list(victims())
        for process in frozen:
            process.suspend()
        before, since, until = newest_version(run, 0), time.time(), time.monotonic() + LOOK_S
        while time.monotonic() < until:
            if _is_waited_for(run, "generation_server/0", since):
                return frozen, before
            time.sleep(0.1)
        resume(frozen)
        assert time.monotonic() < deadline, f"no client waited for generation_server/0:\n{run.output()}"
        serves_newer(run, 0, before)


def resume(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def _is_waited_for(run: RunHandle, server: str, since: float) -> bool:
    """Whether a response has waited at the server for AT_WORK_S, in a status made at least AT_WORK_S after `since`."""
    told = entry(run, lambda names: names.status("rollout_worker/0"))
    status = msgspec.json.decode(told, type=WorkerStatus)
    waited = max((wait.since_s for wait in status.waits if wait.on == server), default=0.0)
    return waited >= AT_WORK_S and status.time >= since + AT_WORK_S
