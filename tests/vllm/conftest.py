"""A real vLLM server on the CPU, one for the session, and the weight versions that it serves.

Its environment is ASYNCRL_VLLM_PYTHON, or .venv-vllm of the repository. Without one these tests fail, because nothing else can show
the same.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.config.engines import VLLM_PROGRAM
from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.server_environment import find_program
from asyncrl.generation.server_process import ServerLink, ServerProcess
from asyncrl.generation.vllm import VLLMClient, own_server
from tests.support.weight_store import WeightStore

ROOT = Path(__file__).resolve().parents[2]
MAX_POSITIONS = 4096
START_LIMIT_S = 240.0  # about 15 s on an idle machine; other processes compete with it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))  # the first test starts the server


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of vLLM's environment."""
    python = os.environ.get("ASYNCRL_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
    if find_program(VLLM_PROGRAM, python) is None:
        pytest.fail(
            f"there is no vLLM in {python}: `bash launcher/setup_vllm.sh --cpu` makes it in some minutes (or set "
            "ASYNCRL_VLLM_PYTHON to the interpreter of another one)",
            pytrace=False,
        )
    return python


@pytest.fixture(scope="session")
def vllm_config(vllm_python: str) -> GenerationConfig:
    """Config of the session's server. Tests that start a server of their own change the fields that they need."""
    return GenerationConfig(python=vllm_python, max_running_requests=32, max_queue=200, load_timeout_s=START_LIMIT_S)


@pytest.fixture(scope="session")
def vllm_store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    torch.set_num_threads(1)
    # On a CPU vLLM needs heads of 32 or more, and does not load tied embeddings (test_vllm_bites.py)
    return WeightStore(tmp_path_factory.mktemp("store"), hidden_size=128, tied=False, max_positions=MAX_POSITIONS)


class ServerInThread(ServerLink):
    """A server that outlives event loops, because it starts and stops on a loop of its own. An engine leaves it as it is."""

    def __init__(self, config: GenerationConfig, model_path: Path, log: Path) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server of the tests", daemon=True).start()
        self.process: ServerProcess = own_server(config, str(model_path), tensor=1, seed=1, log=log)
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_LIMIT_S + 30)
        self.url = self.process.url

    async def _start(self) -> None:
        client = VLLMClient("")

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

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.process.close(), self._loop).result(60)


@pytest.fixture(scope="session")
def vllm_server(
    vllm_config: GenerationConfig, vllm_store: WeightStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerInThread]:
    """The session's server. It serves the weights that the previous test loaded."""
    server = ServerInThread(vllm_config, vllm_store.model_path, tmp_path_factory.mktemp("vllm") / "vllm.log")
    yield server
    server.stop()
