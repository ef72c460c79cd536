"""One server of three fails in the middle of a broadcast. The two others get the version by another broadcast, within the limit."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_broadcast import LIMIT_S, START_LIMIT_S, V0, Client, Watch, be_server, held, send, sender, tensors_of
from test_broadcast import model_path as model_path

from asyncrl.protocol.versions import WeightVersion
from asyncrl.protocol.weight_updates import BroadcastReply
from asyncrl.weights.update_group import GroupMember
from asyncrl.weights.versions import version_dir, write_version

NAMES = ("first", "second", "third")
SEND_LIMIT_S = 10.0
KILL, FREEZE, HANG, FAIL, HEAL = signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
versions = (WeightVersion(1, number) for number in itertools.count(1))


def be_faulty_server(model_path: Path, pipe: Connection) -> None:
    """The main function of a process: a server that sends its address through the pipe. After HANG it answers requests but receives
    no tensors. After FAIL it answers that none has arrived. HEAL ends both."""
    receive = GroupMember.broadcast

    async def hang(*_: Any) -> None:
        await asyncio.sleep(LIMIT_S)

    async def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    for number, method in ((HANG, hang), (FAIL, fail), (HEAL, receive)):
        signal.signal(number, lambda *_, method=method: setattr(GroupMember, "broadcast", method))
    be_server(model_path, pipe, WeightVersion(1, 99))


@pytest.fixture(scope="module")
def processes(model_path: Path) -> Iterator[dict[str, tuple[BaseProcess, str]]]:
    """Three server processes with version 0, and their addresses, by name."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["asyncrl.generation.worker", "torch", "transformers"])
    pipes = [context.Pipe() for _ in NAMES]
    children = [context.Process(target=be_faulty_server, args=(model_path, theirs), daemon=True) for _, theirs in pipes]
    for child in children:
        child.start()
    try:
        assert all(ours.poll(START_LIMIT_S) for ours, _ in pipes), "a server did not start"
        yield {name: (child, ours.recv()) for name, child, (ours, _) in zip(NAMES, children, pipes, strict=True)}
    finally:
        for child in children:
            child.kill()
            child.join(LIMIT_S)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (FAIL, "first"),
        (HANG, "first"),
        pytest.param(HANG, "second", marks=pytest.mark.release),  # another place in gloo's tree
        pytest.param(HANG, "third", marks=pytest.mark.release),
        pytest.param(FREEZE, "first", marks=pytest.mark.release),
        (FREEZE, "second"),
        pytest.param(FREEZE, "third", marks=pytest.mark.release),
        (KILL, "second"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
async def test_one_of_three_costs_only_itself(
    model_path: Path, processes: dict[str, tuple[BaseProcess, str]], how: signal.Signals, name: str
) -> None:
    """The members of a group wait for each other: they have failed, too. But only the server at fault does not get the version."""
    requests, version, after = Watch(), next(versions), next(versions)
    path = version_dir(model_path.parent, "actor", version)
    if not path.exists():
        write_version(path, tensors_of(version), source_dir=model_path, version=version, fsync=False)
    child = processes[name][0]

    def strike(signal_number: signal.Signals) -> None:
        os.kill(child.pid or 0, signal_number)

    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
        sender(SEND_LIMIT_S, requests.client) as trainer,
    ):
        clients = {name: Client(session, name, url, model_path) for name, (_, url) in processes.items()}
        if version.version == 1:
            for client in clients.values():
                await client.load(V0)
        trainer.hold(held(version))
        requests.when_sending_bucket(3 * 2, lambda: strike(how))
        began = time.monotonic()
        reply = await send(trainer, version, *clients.values(), limit_s=SEND_LIMIT_S)
        took_s = time.monotonic() - began
        try:
            assert set(reply.errors) == {name}
            assert took_s < 0.8 * SEND_LIMIT_S
            others = [client for client in clients.values() if client.name != name]
            sent = [await client.logprobs() for client in others]
            await others[0].load(version)
            assert sent == [await others[0].logprobs()] * 2
        finally:
            if how is not KILL:
                strike(signal.SIGCONT)
                strike(HEAL)
        if how is KILL:
            return
        await clients[name].load(version)
        await clients[name].resume()
        trainer.hold(held(after))
        assert await send(trainer, after, *clients.values(), limit_s=SEND_LIMIT_S) == BroadcastReply()
