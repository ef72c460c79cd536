"""A real SGLang server on the CPU, one for the session, and the weight versions that it serves.

Its environment is ASYNCRL_SGLANG_PYTHON, or .venv-sglang of the repository. Without one these tests fail, because nothing else can
show the same. ASYNCRL_SGLANG_URL names a running server. This saves the start while you work on the tests. Tests that need a server
of their own start one all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from real_server import START_LIMIT_S, ServerInThread

from asyncrl.config.engines import SGLANG_PROGRAM
from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.server_environment import find_program
from tests.support.weight_store import WeightStore

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))  # the first test starts the server


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of SGLang's environment."""
    python = os.environ.get("ASYNCRL_SGLANG_PYTHON") or str(ROOT / ".venv-sglang" / "bin" / "python")
    if find_program(SGLANG_PROGRAM, python) is None:
        pytest.fail(
            f"there is no SGLang in {python}: `bash launcher/setup_sglang.sh --cpu` makes it in some minutes (or set "
            "ASYNCRL_SGLANG_PYTHON to the interpreter of another one)",
            pytrace=False,
        )
    return python


@pytest.fixture(scope="session")
def sglang_config(sglang_python: str) -> GenerationConfig:
    """Config of the session's server. Tests that start a server of their own change the fields that they need."""
    return GenerationConfig(python=sglang_python, max_running_requests=32, max_queue=200, load_timeout_s=START_LIMIT_S)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    torch.set_num_threads(1)
    return WeightStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def session_servers(
    sglang_config: GenerationConfig, store: WeightStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ServerInThread]]:
    """A function that returns the session's server. It starts the server at the first call, and again if a test has killed it."""
    log = tmp_path_factory.mktemp("sglang") / "sglang.log"
    started: list[ServerInThread] = []

    def alive() -> ServerInThread:
        if started:
            started[0].revive()
        else:
            started.append(ServerInThread(sglang_config, store.model_path, log))
        return started[0]

    yield alive
    for server in started:
        server.close()


@pytest.fixture
def sglang_url(session_servers: Callable[[], ServerInThread]) -> str:
    """URL of the session's server. It serves the weights that the previous test loaded. A dead server is replaced."""
    return os.environ.get("ASYNCRL_SGLANG_URL") or session_servers().process.url
