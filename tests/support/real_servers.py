"""A real server of another program (SGLang, vLLM) for the tests of a session: its interpreter, its start, and its link."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.engines import ServerProgram
from asyncrl.config.schema import GenerationConfig
from asyncrl.generation import server_engine
from asyncrl.generation.engine import EngineFailed, EngineRequest
from asyncrl.generation.server_client import ServerClient, ServerError
from asyncrl.generation.server_engine import ServerEngine
from asyncrl.generation.server_environment import find_program
from asyncrl.generation.server_process import ServerLink, ServerProcess
from asyncrl.protocol.generation import SamplingParams
from tests.support.server_load import within
from tests.support.weight_store import V0, WeightStore

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 240.0  # about 15 s on an idle machine; other processes compete with it


def limit_tests(folder: Path, items: Iterable[pytest.Item]) -> None:
    """Give the tests of this folder a limit that has room for the start of a server."""
    for item in items:
        if folder in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


def interpreter(program: ServerProgram) -> str:
    """The interpreter of a program's environment: ASYNCRL_<PROGRAM>_PYTHON, or that of .venv-<program> in the repository.

    Without the program the test fails, because nothing else can show the same.
    """
    variable = f"ASYNCRL_{program.package.upper()}_PYTHON"
    python = os.environ.get(variable) or str(ROOT / f".venv-{program.package}" / "bin" / "python")
    if find_program(program, python) is None:
        pytest.fail(
            f"there is no {program.name} in {python}: `bash {program.script} --cpu` makes it in some minutes (or set {variable} to "
            "the interpreter of another one)",
            pytrace=False,
        )
    return python


def config_with(python: str) -> GenerationConfig:
    """Config of the session's server. Tests that start a server of their own change the fields that they need."""
    return GenerationConfig(python=python, max_running_requests=32, max_queue=200, load_timeout_s=START_LIMIT_S)


class ServerInThread(ServerLink):
    """A server that outlives event loops, because it starts and stops on a loop of its own. An engine leaves it as it is."""

    def __init__(self, make: Callable[[], ServerProcess], client: Callable[[str], ServerClient]) -> None:
        """Start the server. make: makes its process; client: makes a client of a URL."""
        self._make, self._client = make, client
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server of the tests", daemon=True).start()
        self._begin()

    def _begin(self) -> None:
        self.process = self._make()
        self._run(self._start(), START_LIMIT_S + 30)
        self.url = self.process.url

    def _run(self, work: Any, limit_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

    async def _start(self) -> None:
        client = self._client("")

        async def is_ready(url: str) -> bool:
            await client.connect(url)
            try:
                await client.served_version(limit_s=5.0)
            except ServerError:
                return False
            return True

        try:
            await self.process.start(is_ready, START_LIMIT_S)
        finally:
            await client.close()

    async def start(self, is_ready: Callable[[str], object], limit_s: float) -> None:
        assert await is_ready(self.url)  # type: ignore[misc]

    def how_it_ended(self) -> str | None:
        return self.process.how_it_ended()

    def log_text(self) -> str:
        return self.process.log_text()

    def revive(self) -> None:
        """Start another server if a test has killed this one."""
        if self.process.how_it_ended() is not None:
            self.stop()
            self._begin()

    def stop(self) -> None:
        self._run(self.process.close(), 60)


def kept_alive(make: Callable[[], ServerInThread]) -> Iterator[Callable[[], ServerInThread]]:
    """For a session's fixture: a function that returns the server. It starts the server at the first call, and again if a test has
    killed it."""
    started: list[ServerInThread] = []

    def alive() -> ServerInThread:
        if started:
            started[0].revive()
        else:
            started.append(make())
        return started[0]

    yield alive
    for server in started:
        server.stop()


async def fails_when_it_stands_still(
    engine: ServerEngine[Any], server: ServerProcess, store: WeightStore, patch: pytest.MonkeyPatch
) -> None:
    """Freeze the server of an engine that has not started: its request fails, and the engine with it."""
    await engine.start()
    processes = [psutil.Process(server.pid)]
    processes += processes[0].children(recursive=True)
    try:
        await engine.load_weights(store.path(V0), V0)
        waiting = engine.submit(EngineRequest("long", [1, 2, 3], SamplingParams(max_new_tokens=900, ignore_eos=True)))
        patch.setattr(server_engine, "ASK_LIMIT_S", 0.5)  # limit for one health query
        patch.setattr(server_engine, "_SILENT_LIMIT_S", 1.0)
        for process in processes:
            process.suspend()
        with pytest.raises(EngineFailed, match="has not answered for"):
            await within(waiting)
        assert engine.failure is not None
        assert engine.stats().version == ""
    finally:
        for process in processes:
            process.resume()
        await engine.close()
