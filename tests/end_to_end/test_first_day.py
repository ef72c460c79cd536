"""The first day on GPUs, in its quick form, without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from whole_runs import ROOT

from asyncrl.testing.runs import make_tiny_run

pytestmark = [pytest.mark.release, pytest.mark.timeout(400)]

# In the model worker: no group for a broadcast can be joined. The function itself adds an unused array
_NO_GROUPS = """\
import asyncrl.weights.update_group
from asyncrl.dataflow.mfc import mfc

def refuse(*_):
    raise RuntimeError("planted")

asyncrl.weights.update_group._open = refuse

@mfc(input_keys=["packed_input_ids"], output_keys=["unused"])
def plant(engine, sample, train):
    return sample.derive({"unused": sample.data["packed_input_ids"]})
"""


@pytest.fixture
def first_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("first_day", ROOT / "launcher" / "first_day.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "first_day", module)
    spec.loader.exec_module(module)
    return module


def test_a_run_that_ends_well_without_its_broadcast_or_its_gpus_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_day: ModuleType
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config, code = make_tiny_run(tmp_path / "task"), tmp_path / "groups.py"
    code.write_text(_NO_GROUPS)
    run = next(run for run in first_day.RUNS if run.name == "broadcast")
    given = [*run.overrides, "train.max_steps=2", f"fileroot={tmp_path}", "experiment=run", "trial=broadcast"]
    measured, why = first_day.measure(run, config, given, tmp_path, [])
    assert (why, measured["step_s"] > 0) == ("", True)
    run_dir = tmp_path / "run" / "broadcast"
    assert first_day.shortfalls(run_dir, broadcast=True, on_gpu=True) == [
        "generation_server_0 used no GPU",
        "model_worker_0 computes the attention of actor: "
        "rectangles (the device is cpu, not a GPU with FlashAttention) in 1 of 1 layers",
        "model_worker_0 used no GPU",
    ]
    planted = [*given, f"train.mfcs=[{code}:plant]", "train.extra_train_keys=[unused]"]
    measured, why = first_day.measure(run, config, planted, tmp_path, [])
    assert measured == {}
    assert why.startswith("failed: no weights were broadcast; weights came from disk: ")
    assert "planted" in why


def test_the_first_day_runs_to_its_end_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCRL_SGLANG_PYTHON", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, str(ROOT / "launcher" / "first_day.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    names = ["disjoint", "shared devices", "sglang", "tensor ranks", "context ranks"]
    assert [row[0] for row in rows] == [*names, "experts", "experts and context ranks", "broadcast"]
    for name, *cells in rows:
        assert cells[::2] == ["not planned"] * 4, name
        if name == "sglang":
            assert all(cell.startswith("not measured") for cell in cells[1::2])
        else:
            step_s, tokens_per_s, mfu, memory = cells[1::2]
            assert 0 < float(step_s.removesuffix(" s")) < 60
            assert float(tokens_per_s.replace(",", "")) > 0
            assert (mfu, memory) == ("not measured", "not measured")
