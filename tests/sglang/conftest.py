"""A real SGLang server on the CPU, one for the session, and the weight versions that it serves.

Its environment is ASYNCRL_SGLANG_PYTHON, or .venv-sglang of the repository. ASYNCRL_SGLANG_URL names a running server, which saves
the start while you work on the tests. Tests that need a server of their own start one all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.config.engines import SGLANG_PROGRAM
from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.server_process import ServerProcess
from asyncrl.generation.sglang_http import SGLangClient
from asyncrl.generation.sglang_process import own_server
from tests.support.real_servers import ServerInThread, config_with, interpreter, kept_alive, limit_tests
from tests.support.weight_store import WeightStore


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_tests(Path(__file__).parent, items)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    return interpreter(SGLANG_PROGRAM)


@pytest.fixture(scope="session")
def sglang_config(sglang_python: str) -> GenerationConfig:
    return config_with(sglang_python)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    torch.set_num_threads(1)
    return WeightStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def session_servers(
    sglang_config: GenerationConfig, store: WeightStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ServerInThread]]:
    """A function that returns the session's server."""
    log = tmp_path_factory.mktemp("sglang") / "sglang.log"

    def make() -> ServerProcess:
        return own_server(sglang_config, str(store.model_path), tensor=1, seed=1, log=log)

    yield from kept_alive(lambda: ServerInThread(make, SGLangClient))


@pytest.fixture
def sglang_url(session_servers: Callable[[], ServerInThread]) -> str:
    """URL of the session's server. It serves the weights that the previous test loaded. A dead server is replaced."""
    return os.environ.get("ASYNCRL_SGLANG_URL") or session_servers().process.url
