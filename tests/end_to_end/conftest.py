"""Shared fixtures of the end-to-end tests: the examples' models and the synchronous run, each made once per session."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from whole_runs import ROOT, launch_synchronous

from asyncrl.testing.runs import RunHandle


def make_example(name: str, folder: Path, *options: str) -> Path:
    command = [sys.executable, str(ROOT / "examples" / name / "make.py"), "--out", str(folder), *options]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.fixture(scope="session")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model/ and data/ of the sloppy sorter. The warm start has run."""
    return make_example("sloppy_sorter", tmp_path_factory.mktemp("sorter"))


@pytest.fixture(scope="session")
def sorter_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder with a mixture of experts."""
    return make_example("sloppy_sorter", tmp_path_factory.mktemp("experts"), "--architecture", "qwen3_moe")


@pytest.fixture(scope="session")
def hybrid_sorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder with a model whose layers are linear attention and attention by turns."""
    return make_example("sloppy_sorter", tmp_path_factory.mktemp("hybrid"), "--architecture", "qwen3_5_text")


@pytest.fixture(scope="session")
def long_tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with model/ and data/ of the long-tail task."""
    return make_example("long_tail", tmp_path_factory.mktemp("long_tail"))


@pytest.fixture(scope="session")
def synchronous(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunHandle]:
    """A finished run with eta = 0 on two heads and two servers. It is deterministic."""
    with launch_synchronous(sorter, tmp_path_factory.mktemp("synchronous")) as run:
        assert run.wait(600) == 0, run.output()
        yield run
