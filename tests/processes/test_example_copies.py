"""Each example is complete: copied elsewhere, its files import nothing from another example."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# One process imports the modules of all copies, because importing torch takes most of the time. It forgets the modules of each
# folder, because those of other folders have the same names.
IMPORT_ALL = """
import importlib, pathlib, sys
for folder in sorted(pathlib.Path().glob("*/copy")):
    sys.path.insert(0, str(folder.absolute()))
    names = [file.stem for file in folder.glob("*.py")]
    for name in names:
        module = importlib.import_module(name)
        assert pathlib.Path(module.__file__).parent == folder.absolute(), module
        print(f"{folder.parent.name}/{name}")
    del sys.path[0]
    for name in names:
        del sys.modules[name]
"""


@pytest.mark.release
def test_copies_import_nothing_of_one_another(tmp_path: Path) -> None:
    for package in ("reasoning_gym", "openai", "math_verify", "verifiers"):
        pytest.importorskip(package)
    files = sorted(EXAMPLES.glob("*/*.py"))
    for file in files:
        folder = tmp_path / file.parent.name / "copy"  # no copy has another example beside it
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder)
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == [f"{file.parent.name}/{file.stem}" for file in files]
