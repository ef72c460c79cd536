"""A real vLLM server on the CPU, one for the session, and the weight versions that it serves.

Its environment is ASYNCRL_VLLM_PYTHON, or .venv-vllm of the repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.config.engines import VLLM_PROGRAM
from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.server_process import ServerProcess
from asyncrl.generation.vllm import VLLMClient, own_server
from tests.support.real_servers import ServerInThread, config_with, interpreter, kept_alive, limit_tests
from tests.support.weight_store import WeightStore

MAX_POSITIONS = 8192


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_tests(Path(__file__).parent, items)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return interpreter(VLLM_PROGRAM)


@pytest.fixture(scope="session")
def vllm_config(vllm_python: str) -> GenerationConfig:
    return config_with(vllm_python)


@pytest.fixture(scope="session")
def vllm_store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    torch.set_num_threads(1)
    # On a CPU vLLM needs heads of 32 or more, and does not load tied embeddings (test_vllm_bites.py). A step of two
    # layers takes it about as long as the step's tokens take its front end: a busy machine would delay tests by whole responses
    folder = tmp_path_factory.mktemp("store")
    return WeightStore(folder, hidden_size=128, tied=False, max_positions=MAX_POSITIONS, num_layers=12)


@pytest.fixture(scope="session")
def session_servers(
    vllm_config: GenerationConfig, vllm_store: WeightStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ServerInThread]]:
    """A function that returns the session's server."""
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"

    def make() -> ServerProcess:
        return own_server(vllm_config, str(vllm_store.model_path), tensor=1, seed=1, log=log)

    yield from kept_alive(lambda: ServerInThread(make, VLLMClient))


@pytest.fixture
def vllm_server(session_servers: Callable[[], ServerInThread]) -> ServerInThread:
    """The session's server. It serves the weights that the previous test loaded. A dead server is replaced."""
    return session_servers()
