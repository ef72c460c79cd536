"""What the end-to-end tests share: the examples' models, made once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_example(name: str, folder: Path) -> Path:
    subprocess.run([sys.executable, str(ROOT / "examples" / name / "make.py"), "--out", str(folder)], check=True, timeout=300)
    return folder


@pytest.fixture(scope="session")
def sorter(tmp_path_factory) -> Path:
    """Folder with model/ and data/ of the sloppy sorter, warm start and all."""
    return make_example("sloppy_sorter", tmp_path_factory.mktemp("sorter"))


@pytest.fixture(scope="session")
def long_tail(tmp_path_factory) -> Path:
    """Folder with model/ and data/ of the long-tail task."""
    return make_example("long_tail", tmp_path_factory.mktemp("long_tail"))
